"""From a description of the data to a federation: `DataConfig` and `build_federation`, and one's own data.

A plan says what each client is to receive (`plan`, `shifts`), the pool is cut (`partition`), and the samples of every
client are laid out once, transformed (`assemble`). What a run draws comes from its seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie._util.tables import parse, settle
from coterie.data._assemble import assemble
from coterie.data.datasets import Source, load
from coterie.data.federation import Federation
from coterie.data.plan import Client, Clients, Shift
from coterie.data.shifts import Natural, read_shift, write_shift
from coterie.errors import ConfigError, DataError, require
from coterie.rng import Rng

NUM_CLIENTS = 20
"""How many clients there are when neither the settings nor natural groups say it."""


@dataclass(frozen=True)
class DataConfig:
    """The `[data]` table of a study.

    Args:
        dataset: a name, or a list of names for domain shift.
        num_clients: number of clients; 20, or one for each natural group, when not given.
        train: training samples of each client; everything there is, shared evenly, when not given.
        validation: validation samples of each client.
        shift: tables with `kind` and the fields of that kind (or `Shift` objects), applied in order; kept as tables
            with every field.
        normalise: of images: "half" (mean and deviation 0.5), "standard" (the dataset's own; the first one's when
            there are several) or "none" (only scaled to [0, 1]).
        test: "cluster": one test set for each planted cluster, transformed like it; "client": one for each client.
        test_samples: samples of each client's test set; with "cluster", the largest size of a test set.
        test_source: with "client": "train" holds out samples of the client's own, so that they are distributed like
            its training data; "test" draws from the dataset's test set, in the client's own class shares.
        validation_fraction: part of the samples that are not for testing, when `validation` is not given.
        test_fraction: part of a client's samples, when `test_samples` is not given and `test` is "client".
        fixed_seed: draw the data from this seed in every run; from the run's own seed when not given.
        label: the column with the classes; found when not given.
        download: whether the Hugging Face Hub may be asked for a dataset that is not on disk.
        options: further settings of a dataset; "synthetic-regression" has `dim`, `noise`, `test`, `low` and `high`.
    """

    dataset: str | Sequence[str]
    num_clients: int | None = None
    train: int | None = None
    validation: int | None = None
    shift: Sequence[Mapping[str, Any] | Shift] = ()
    normalise: Literal["half", "standard", "none"] = "half"
    test: Literal["cluster", "client"] = "cluster"
    test_samples: int | None = None
    test_source: Literal["train", "test"] = "train"
    validation_fraction: float | int = 0.2
    test_fraction: float | int = 0.2
    fixed_seed: int | None = None
    label: str | None = None
    download: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle(self)
        tables = [write_shift(one) if isinstance(one, Shift) else one for one in self.shift]
        resolved = (write_shift(read_shift(table, f"shift[{i}]")) for i, table in enumerate(tables))
        object.__setattr__(self, "shift", tuple(resolved))
        require(len(self.names) > 0, "dataset", self.dataset, "a name or a list of names")
        for name, low in {"num_clients": 1, "train": 1, "validation": 0, "test_samples": 1, "fixed_seed": 0}.items():
            value = getattr(self, name)
            require(value is None or value >= low, name, value, f"at least {low}")
        for name in ("validation_fraction", "test_fraction"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "a share from 0 to below 1")
        if self.validation is not None and self.train is None:
            raise ConfigError(
                f"validation is {self.validation} but train is not given; give both, or validation_fraction"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets."""
        return (self.dataset,) if isinstance(self.dataset, str) else tuple(self.dataset)

    def shifts(self) -> tuple[Shift, ...]:
        """Return the shifts, those that choose a client's pool first."""
        shifts = [read_shift(table) for table in self.shift if isinstance(table, Mapping)]
        kinds = [shift.kind for shift in shifts]
        if len(self.names) > 1 and "domain" not in kinds:
            shifts.append(read_shift({"kind": "domain"}))
        return tuple(sorted(shifts, key=lambda shift: not shift.chooses_pool))

    def shares(self) -> tuple[int | None, tuple[float, float, float]]:
        """Return how many samples a client has in all (None: what there is), and the part of each split."""
        own_test = self.test == "client" and self.test_source == "train"
        if self.train is None:
            test = self.test_fraction if own_test else 0.0
            return None, ((1 - test) * (1 - self.validation_fraction), (1 - test) * self.validation_fraction, test)
        kept = 1 - self.validation_fraction
        validation = (
            self.validation if self.validation is not None else round(self.train * self.validation_fraction / kept)
        )
        rest = self.train + validation
        test = (self.test_samples or round(rest * self.test_fraction / (1 - self.test_fraction))) if own_test else 0
        total = rest + test
        return total, (self.train / total, validation / total, test / total)

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str = "data") -> "DataConfig":
        """Make the settings from a table of a study file.

        Raises:
            ConfigError: on an unknown key or a value that does not fit.
        """
        return parse(DataConfig, table, where)


def build_federation(data: DataConfig, seed: int, data_dir: str | Path | None = None) -> Federation:
    """Build the federation of one run.

    Args:
        data: what to build.
        seed: the run's seed; `data.fixed_seed` comes before it.
        data_dir: where folders of datasets are; the environment's `COTERIE_DATA` when not given.

    Raises:
        ConfigError: when the settings do not fit each other or the dataset.
        DataError: when data are missing, damaged or too few; it says what to lower.
    """
    rng = Rng(seed if data.fixed_seed is None else data.fixed_seed)
    total, _ = data.shares()
    pool = (data.num_clients or NUM_CLIENTS) * (total or 200)
    sources = tuple(
        load(
            name,
            data_dir=data_dir,
            label=data.label,
            download=data.download,
            rng=rng,
            samples=pool,
            options=data.options,
        )
        for name in data.names
    )
    return build_from_sources(data, sources, rng)


def build_from_sources(data: DataConfig, sources: Sequence[Source], rng: Rng) -> Federation:
    """Build a federation from datasets that are read already.

    Args:
        data: what to build; its `dataset` is not used.
        sources: the datasets.
        rng: the streams to draw from.
    """
    first = sources[0]
    for other in sources[1:]:
        if other.form != first.form or bool(other.classes) != bool(first.classes):
            raise DataError(
                f"{first.name} has {first.form}, {other.name} has {other.form}; several datasets must be alike"
            )
    clients = _plan(data, sources, rng)
    own_tests = None if data.test == "cluster" else data.test_source
    return assemble(clients, sources, rng, data.normalise, own_tests, data.test_samples, data.test_fraction)


def _plan(data: DataConfig, sources: Sequence[Source], rng: Rng) -> Clients:
    """Apply the shifts to a plan in which all clients are alike."""
    shifts = data.shifts()
    number = data.num_clients
    if number is None:
        natural = [shift for shift in shifts if isinstance(shift, Natural)]
        number = len(np.unique(natural[0].values(sources))) if natural else NUM_CLIENTS
    samples, shares = data.shares()
    clients: Clients = (Client(samples, shares),) * number
    settled = False
    for place, shift in enumerate(shifts):
        if not settled and not shift.chooses_pool:
            clients, settled = _settle_sizes(clients, sources), True

        def streams(client: int, purpose: str = f"data.shift.{place}.{shift.kind}") -> np.random.Generator:
            return rng.generator(purpose, client)

        clients = shift.apply(clients, sources, streams)
    return _settle_sizes(clients, sources)


def _settle_sizes(clients: Clients, sources: Sequence[Source]) -> Clients:
    """Give clients without a size an even share of their dataset; all get the same."""
    if all(client.samples is not None for client in clients):
        return clients
    users = np.bincount([client.recipe.source for client in clients], minlength=len(sources))
    each = min(len(source.train) // n for source, n in zip(sources, users.tolist(), strict=True) if n)
    if each < 1:
        total = sum(len(source.train) for source in sources)
        raise DataError(f"{len(clients)} clients; the pool has {total:,} samples: lower num_clients")
    return tuple(replace(client, samples=client.samples or each) for client in clients)
