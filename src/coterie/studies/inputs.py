"""The data and the model of a study's runs: those of its settings, or those given from Python."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coterie.data.build import build_federation
from coterie.data.federation import Federation, TestSet
from coterie.data.rows import read_inputs
from coterie.errors import ConfigError
from coterie.models.layout import ModelSource
from coterie.studies.definition import OWN, StudyConfig

FederationSource = Federation | Callable[[int], Federation]


@dataclass
class StudyInputs:
    """Makes the data and the model of a study's runs.

    Args:
        study: the study.
        data_dir: where datasets are on disk; COTERIE_DATA when None.
        federation: the data, or a function from seed to data; those of the study when None.
        model: the model; that of the study when None.
    """

    study: StudyConfig
    data_dir: str | Path | None = None
    federation: FederationSource | None = None
    model: ModelSource | None = None
    # The last federation by its settings and seed, shared with those of `select_study`.
    _last: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last federation out: a worker process makes its own, or gets it with a job."""
        return {**self.__dict__, "_last": {}}

    def select_study(self, study: StudyConfig) -> "StudyInputs":
        """Return the inputs of another study of the same plan."""
        found = copy.copy(self)
        found.study, found._last = study, self._last
        return found

    def make_federation(self, seed: int) -> Federation:
        """Return the federation of a seed. The last one is stored, since jobs come seed by seed.

        Raises:
            ConfigError: when the data must be given from Python.
        """
        if isinstance(self.federation, Federation):
            return self.federation
        # At most one federation is stored: several may not fit into memory.
        # A pair: given data are the same at all points of a plan, others as the settings say.
        key = None if self.federation is not None else self.study.data, seed
        if self._last.get("key") != key:
            # Before another is made, so that two are in memory at no time.
            self._last.clear()
            if self.federation is not None:
                found = self.federation(seed)
            elif self.study.data.dataset == OWN:
                raise ConfigError(
                    "this study has data of your own; give them from Python, as federation=..., or "
                    "name them by import path in the study file"
                )
            else:
                found = build_federation(self.study.data, seed, self.data_dir)
            self._last.update(key=key, federation=found)
        return self._last["federation"]

    @property
    def model_source(self) -> ModelSource:
        """The model of the clients.

        Raises:
            ConfigError: when the model must be given from Python.
        """
        if self.model is not None:
            return self.model
        if self.study.model.kind == OWN:
            raise ConfigError(
                "this study has a module of your own; give it from Python, as model=..., or name "
                "it by import path in the study file"
            )
        return self.study.model.named_model

    def without_tests(self) -> "TrialData":
        """Return the data of each seed without their test sets, for trials of tuning."""
        return TrialData(self)

    def without_data(self) -> "StudyInputs":
        """Return the inputs for a worker on another machine: each of its jobs carries its data."""
        return replace(self, federation=None, data_dir=None)


@dataclass(frozen=True)
class TrialData:
    """The federation of a seed without its test sets: no choice can have seen them.

    Args:
        inputs: of the study that is tuned.
    """

    inputs: StudyInputs

    def __call__(self, seed: int) -> Federation:
        """Return a federation whose test sets hold one sample of zeros each.

        Raises:
            ConfigError: when a client has no validation data to choose by.
        """
        federation = self.inputs.make_federation(seed)
        without = (federation.count_samples("validation") == 0).nonzero().flatten().tolist()
        if without:
            raise ConfigError(
                "tuning needs validation data of every client, and "
                f"{federation.client_name(without[0])} has none; give "
                "data.validation, or validation= where the federation is made"
            )
        x, y = read_inputs(federation.x[0, :1]), federation.y[0, :1]
        tests = []
        for test in federation.tests:
            tests.append(TestSet(torch.zeros_like(x), torch.zeros_like(y), test.name))
        return replace(federation, tests=tuple(tests))
