"""The plan of a federation: the data each client is to receive, before any sample is drawn.

Shifts are functions from plan to plan. They do not touch samples, so they compose; the clusters
they plant are recorded in the plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from coterie._util.settings import Configurable
from coterie.data.source import Source
from coterie.data.transforms import Transform
from coterie.errors import RETURN_HINT, ConfigError, DataError, require

Streams = Callable[[int], np.random.Generator]
"""The random stream of one client (or of `rng.EVERYONE`) for one shift."""

Assign = Literal["blocks", "interleaved", "shuffled"]


@dataclass(frozen=True)
class LinearTargets:
    """Targets made from the inputs: y = <x, theta> + noise.

    Args:
        theta: one coefficient for each feature.
        noise: standard deviation of the noise.
    """

    theta: tuple[float, ...]
    noise: float


@dataclass(frozen=True)
class SampleRecipe:
    """How the samples of a client, and those of its test set, are made.

    Args:
        source: index of the dataset.
        offset: added to every label, so that the classes of several datasets stay distinct.
        labels: the client's classes; None for all. Labels are the dataset's, before `relabel` and
            any offset.
        relabel: the new label of each label; None to keep them.
        transforms: applied to the images, in this order.
        noise: standard deviation of the noise added after normalization.
        redrawn: whether that noise is drawn again at every access, or once, when the federation is
            made.
        targets: makes the targets, instead of the dataset's.
        where: (column, value) that test samples must have.
        mixture: share of each class in the test set; None for all its samples.
    """

    source: int = 0
    offset: int = 0
    labels: tuple[int, ...] | None = None
    relabel: tuple[int, ...] | None = None
    transforms: tuple[Transform, ...] = ()
    noise: float = 0.0
    redrawn: bool = False
    targets: LinearTargets | None = None
    where: tuple[str, int] | None = None
    mixture: tuple[float, ...] | None = None

    @property
    def has_fixed_noise(self) -> bool:
        """Whether noise is drawn once, so that inputs are held with it."""
        return self.noise > 0 and not self.redrawn


@dataclass(frozen=True)
class Client:
    """The data that one client is to receive.

    Args:
        samples: number of samples from its pool; None for an even share of the pool.
        shares: shares for training, validation and testing; they add to 1.
        recipe: how its samples are made.
        group: (column, value): it gets samples of this natural group only.
        rows: with a group that is no column of the data: the places of its samples in the pool.
        mixture: the share of each class it should have; None for the pool's.
        counts: the exact number of each class, instead of a mixture.
        reuse: with `counts`: other clients may get the same samples.
        planted: number and name of its cluster in each shift that plants clusters.
        notes: descriptions of other changes.
        name: its name; empty for its number.
    """

    samples: int | None
    shares: tuple[float, float, float]
    recipe: SampleRecipe = SampleRecipe()
    group: tuple[str, int] | None = None
    rows: tuple[int, ...] = ()
    mixture: tuple[float, ...] | None = None
    counts: tuple[int, ...] | None = None
    reuse: bool = False
    planted: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    name: str = ""

    @property
    def num_samples(self) -> int:
        """The number of samples, once it is decided."""
        assert self.samples is not None, "sizes are settled before the shifts that need them"
        return self.samples

    def _round_share(self, share: float) -> int:
        return max(1, round(self.num_samples * share)) if share > 0 else 0

    def split_sizes(self) -> tuple[int, int, int]:
        """Return the numbers of training, validation and test samples, at least 1 for each share.

        Raises:
            DataError: when there are too few samples for that.
        """
        # A share that was asked for is never empty, however small the client is.
        _, validation, test = map(self._round_share, self.shares)
        # Training gets what rounding leaves.
        train = self.num_samples - validation - test
        if train < 1:
            who = f"client {self.name!r}" if self.name else "a client"
            raise DataError(
                f"{who} has {self.num_samples} samples, which leaves none for training after "
                f"{validation} for validation "
                f"and {test} for testing: give it more samples, leave it out, or ask for less "
                "validation or testing"
            )
        return train, validation, test

    def plant_cluster(self, place: int, name: str, **recipe: object) -> "Client":
        """Return this client as a member of a cluster, with changes to its recipe."""
        return replace(
            self, recipe=replace(self.recipe, **recipe), planted=(*self.planted, (place, name))
        )  # type: ignore[arg-type]

    def add_note(self, *words: str) -> "Client":
        """Return this client with notes."""
        return replace(self, notes=(*self.notes, *words))

    @property
    def noise_per_access(self) -> float:
        """Standard deviation of the noise that is drawn again at every access."""
        return self.recipe.noise if self.recipe.redrawn else 0.0

    @property
    def cluster_places(self) -> tuple[int, ...]:
        """The number of its cluster in each shift that plants clusters."""
        return tuple(place for place, _ in self.planted)

    @property
    def cluster_name(self) -> str:
        """The name of its cluster."""
        return name_cluster(self.planted)

    def describe_changes(self) -> str:
        """Describe the changes to this client's data."""
        return "; ".join([name for _, name in self.planted] + list(self.notes)) or "none"


Clients = tuple[Client, ...]


def name_cluster(planted: Sequence[tuple[int, str]]) -> str:
    """Return the name of a cluster from number and name in each shift; see `Client.planted`."""
    return " + ".join(name for _, name in planted) or "all clients"


@dataclass(frozen=True)
class Shift(Configurable, ABC):
    """One way in which clients differ."""

    kind: ClassVar[str]
    chooses_pool: ClassVar[bool] = False
    """Whether it decides where a client's samples come from; such kinds are applied first."""

    @abstractmethod
    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Return the changed plan.

        Args:
            clients: the plan so far.
            sources: the datasets.
            streams: random streams, for everyone or for one client.
        """


def apply_shift(
    shift: Shift, clients: Clients, sources: Sequence[Source], streams: Streams
) -> Clients:
    """Apply a shift and check what it returned.

    Raises:
        ConfigError: when that is no plan for as many clients.
    """
    name = getattr(shift, "kind", type(shift).__name__)
    found = shift.apply(clients, sources, streams)
    if found is None:
        raise ConfigError(f"{name}: apply returned None; expected the clients{RETURN_HINT}")
    are_clients = isinstance(found, tuple | list)
    if not are_clients or not all(isinstance(client, Client) for client in found):
        raise ConfigError(f"{name}: apply returned {found!r:.60}; expected a tuple of clients")
    if len(found) != len(clients):
        raise ConfigError(
            f"{name}: apply returned {len(found)} clients; expected the {len(clients)} that it was "
            "given"
        )
    transforms = {}
    for client in found:
        for one in client.recipe.transforms:
            # One of each type stands for all: a plan may have thousands of clients.
            transforms[type(one)] = one
    for transform in transforms.values():
        # Recipes are compared and hashed to find the clients that share a test set.
        if not callable(transform) or type(transform).__hash__ is None:
            raise ConfigError(
                f"{name}: its transform {transform!r:.60} cannot be called or hashed; expected a "
                "frozen dataclass with "
                "__call__(self, x)"
            )
    return tuple(found)


def assign_clusters(
    clusters: int,
    num_clients: int,
    sizes: Sequence[int] | None,
    assign: Assign,
    generator: np.random.Generator,
) -> list[int]:
    """Assign every client to a cluster.

    Args:
        clusters: number of clusters.
        num_clients: number of clients.
        sizes: clients of each cluster; None for as even as possible.
        assign: "blocks" (the first clients are in the first cluster), "interleaved" (in turn, so
            that two shifts that plant clusters cross), or "shuffled".
        generator: used by "shuffled" only.

    Raises:
        ConfigError: when the sizes do not fit.
    """
    if sizes is None:
        require(
            clusters <= num_clients,
            "num_clients",
            num_clients,
            f"at least one for each of the {clusters} clusters",
        )
        sizes = list(map(int, spread_evenly(num_clients, clusters, 0)))
    require(
        len(sizes) == clusters,
        "sizes",
        tuple(sizes),
        f"one size for each of the {clusters} clusters",
    )
    require(min(sizes) >= 0, "sizes", tuple(sizes), "numbers that are not negative")
    if sum(sizes) != num_clients:
        raise ConfigError(
            f"sizes {tuple(sizes)} add to {sum(sizes)}; expected the number of clients, "
            f"{num_clients}"
        )
    # The cluster of each client in blocks, and its place within the cluster.
    blocks, turns = [], []
    for place, size in enumerate(sizes):
        blocks += [place] * size
        turns += range(size)
    # The sizes stay as they are: only who is in which cluster is drawn.
    if assign == "shuffled":
        return [blocks[row] for row in generator.permutation(num_clients)]
    if assign == "interleaved":
        # The first client of each cluster, then the second of each, ...
        return [place for _, place in sorted(zip(turns, blocks, strict=True))]
    return blocks


def spread_evenly(size: int, slots: int, start: int) -> np.ndarray:
    """Spread samples evenly over slots; the remainder goes to the slots from `start`, cyclically.

    Example:
        >>> spread_evenly(5, slots=3, start=2).tolist()
        [2, 1, 2]
    """
    out = np.full(slots, size // slots, dtype=np.int64)
    out[(start + np.arange(size % slots)) % slots] += 1
    return out
