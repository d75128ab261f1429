"""The planted clusters of a run by round: they change where the data change over the rounds."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

MOST_CLUSTERS = 50
"""Planted clusters that results and pages have one by one; of more, their mean alone."""


@dataclass(frozen=True)
class PlantedPhases:
    """The planted cluster of each client in each phase.

    Args:
        firsts: the first round of each phase, ascending from 0.
        clusters: of each member of the population; -1 when unknown.

    Example:
        >>> moved = PlantedPhases(np.array([0, 5]), np.array([[0, 0, 1], [0, 1, 1]]))
        >>> moved.find(np.array([4, 5]), np.array([1, 1])).tolist()
        [0, 1]
    """

    firsts: Int[np.ndarray, " phases"]
    clusters: Int[np.ndarray, "phases population"]

    @property
    def last_change(self) -> int:
        """The first round of the last phase."""
        return int(self.firsts[-1])

    def select(self, round: int) -> Int[np.ndarray, " population"]:
        """Return the clusters of all members in a round."""
        return self.clusters[self._find_phases(np.array([round]))[0]]

    def find(
        self, rounds: Int[np.ndarray, " rows"], clients: Int[np.ndarray, " rows"]
    ) -> Int[np.ndarray, " rows"]:
        """Return the cluster of a client in a round, for pairs of both."""
        return self.clusters[self._find_phases(rounds), clients]

    def _find_phases(self, rounds: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        # A warm-up, round -1, has the data of the first phase.
        return np.searchsorted(self.firsts, np.maximum(rounds, 0), side="right") - 1
