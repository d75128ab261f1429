"""Build a federation from a description of its data: `DataConfig`, `Split` and `build_federation`.

A plan says what each client is to receive (`plan`, `shifts`), the pool is divided (`_partition`),
and the samples of every client are transformed and laid out (`assemble_federation`). All random
draws come from the run's seed.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt, MinLen
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie._util.mappings import number_items
from coterie._util.settings import Configurable, NonNegativeInt, PositiveInt
from coterie.data._partition import (
    SampleRequest,
    allocate_samples,
    apportion_total,
    group_rows,
    order_by_class,
)
from coterie.data.datasets import call_dataset_function, load_dataset
from coterie.data.drift import drift_to_table, join_phases, plan_phases
from coterie.data.federation import PADDING, TRAIN, VALIDATION, Federation, TestSet, Truth
from coterie.data.plan import Client, Clients, SampleRecipe, Shift, apply_shift
from coterie.data.preparation import FittedPreparation
from coterie.data.rows import ClientRows, StoredRows
from coterie.data.shifts import Domain, Natural, parse_shift, shift_to_table
from coterie.data.source import Constants, Samples, Source
from coterie.data.transforms import Transform, add_noise
from coterie.errors import ConfigError, DataError, require
from coterie.rng import EVERYONE, Rng

_MAX_PADDING = 32 << 20  # bytes of padding, as much as the block of clients in training takes

Fraction = Annotated[float, Ge(0), Lt(1)]
Normalize = Literal["half", "standard", "none"]

NUM_CLIENTS = 20
"""The number of clients when neither settings nor natural groups determine it."""


@dataclass(frozen=True)
class DataConfig(Configurable):
    """The `[data]` table of a study.

    Args:
        dataset: a name, or a list of names for domain shift; "table", "folder", or the import path
            of a function that returns a `Source`, a pair of inputs and targets, or a `Federation`.
        num_clients: number of clients; 20, or one for each natural group, when not given.
        train: training samples of each client; everything there is, shared evenly, when not given.
        validation: validation samples of each client.
        shift: tables with `kind` (of your own: its import path) and the fields of that kind (or
            `Shift` objects), applied in order; kept as tables with every field.
        drift: tables of changes that begin in a round, each with `kind` ("move": clients move to
            the next planted cluster; or that of a shift that keeps the samples, with its fields)
            and the fields of `data.drift.Drift`: `at`, `lasts`, `over`, `share`, `clients`.
        normalize: of images: "half" (mean and deviation 0.5), "standard" (the dataset's own; the
            first one's when there are several) or "none" (only scaled to [0, 1]). A list has one
            for each dataset, in training and in test; where they differ, images are held
            normalized, as float16.
        test: "cluster": one test set for each planted cluster, transformed like it; "client": one
            for each client, as also where the dataset has no test set; "own": the test samples that
            the dataset says are the client's, by the column of its clients or of the shift
            "natural", as also where test samples were given with their clients.
        test_samples: samples of each client's test set; with "cluster" and "own", the largest size
            of a test set.
        test_source: with "client": "train" holds out samples of the client's own, so that they are
            distributed like its training data; "test" takes them from the dataset's test set, in
            exactly the client's own class shares (largest remainder). Where a class of the test set
            runs out, its samples serve a second client.
        validation_fraction: part of the samples that are not for testing, when `validation` is not
            given.
        test_fraction: part of a client's samples, when `test_samples` is not given and `test` is
            "client".
        folds: cut each client's samples into so many folds and test on one of them, by the run's
            seed: seeds 0 to `folds` - 1 are the folds of one division, the next ones those of
            another. In each `folds` seeds every sample is tested exactly once. Where a target is
            one class, each fold has every class in the client's share, up to one sample, and so
            have training and validation samples.
        fixed_seed: draw the data from this seed in every run; from the run's own seed when not
            given.
        label: the column with the classes; found when not given.
        download: whether the Hugging Face Hub may be asked for a dataset that is not on disk.
        options: further settings of a dataset; "synthetic-regression" has `dim`, `noise`, `test`,
            `low` and `high`, "table" and "folder" have `path` and what `from_table` and
            `from_folder` take, and a function of yours has its arguments.
    """

    dataset: str | Annotated[Sequence[str], MinLen(1)]
    num_clients: PositiveInt | None = None
    train: PositiveInt | None = None
    validation: NonNegativeInt | None = None
    shift: Sequence[Mapping[str, Any] | Shift] = ()
    drift: Annotated[Sequence[Mapping[str, Any]], MinLen(1)] | None = None
    normalize: Normalize | Annotated[Sequence[Normalize], MinLen(1)] = "half"
    test: Literal["cluster", "client", "own"] = "cluster"
    test_samples: PositiveInt | None = None
    test_source: Literal["train", "test"] = "train"
    validation_fraction: Fraction = 0.2
    test_fraction: Fraction = 0.2
    folds: Annotated[int, Ge(2)] | None = None
    fixed_seed: NonNegativeInt | None = None
    label: str | None = None
    download: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Parse the shifts; numbers of validation and test samples need a number for training."""
        # As tables with every field: studies are stored and compared as tables.
        kept = []
        for number, one in enumerate(self.shift):
            kept.append(shift_to_table(one, f"shift[{number}]"))
        object.__setattr__(self, "shift", tuple(kept))
        if self.drift is not None:
            changes = [drift_to_table(one, f"drift[{n}]") for n, one in enumerate(self.drift)]
            object.__setattr__(self, "drift", tuple(changes))
        if self.validation is not None and self.train is None:
            raise ConfigError(
                f"validation is {self.validation} but train is not given; give both, or "
                "validation_fraction"
            )
        if self.test_samples is not None and self.train is None and self._holds_out_tests:
            raise ConfigError(
                f"test_samples is {self.test_samples} but train is not given; give both, or "
                "test_fraction"
            )
        if self.folds is not None:
            for name in ("train", "test_samples", "fixed_seed"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"folds is {self.folds} and {name} is {getattr(self, name)}; leave out "
                        f"{name}: all samples are "
                        "used, and a run's seed says which are tested"
                    )
            require(
                self.test_source == "train", "test_source", self.test_source, "'train' with folds"
            )

    @property
    def _holds_out_tests(self) -> bool:
        """Whether clients hold out some of their own samples for testing."""
        return self.folds is not None or (self.test == "client" and self.test_source == "train")

    def data_seed_and_fold(self, seed: int) -> tuple[int, int]:
        """Return the seed of a run's data, and the fold that it tests (0 without folds).

        Args:
            seed: the run's.

        Example:
            >>> DataConfig("digits", folds=5).data_seed_and_fold(7)
            (1, 2)
        """
        if self.folds is not None:
            # Seeds in turn test each fold of one division; the next ones divide the samples again.
            return divmod(seed, self.folds)
        return (seed if self.fixed_seed is None else self.fixed_seed), 0

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The datasets."""
        return (self.dataset,) if isinstance(self.dataset, str) else tuple(self.dataset)

    def build_shifts(self) -> tuple[Shift, ...]:
        """Build the shifts; the ones that choose a client's pool come first."""
        shifts = []
        for number, table in enumerate(self.shift):
            if isinstance(table, Mapping):
                shifts.append(parse_shift(table, f"shift[{number}]"))
        kinds = [shift.kind for shift in shifts]
        if len(self.dataset_names) > 1 and "domain" not in kinds:
            shifts.append(parse_shift({"kind": "domain"}))
        # The sort is stable, so the other shifts keep the order given.
        return tuple(sorted(shifts, key=lambda shift: not shift.chooses_pool))

    def split_shares(self) -> tuple[int | None, tuple[float, float, float]]:
        """Return a client's number of samples (None: all there are), and each split's share."""
        if self.train is None:
            # The validation fraction is of what is not for testing.
            held_out = self.test_fraction if self.folds is None else 1 / self.folds
            test = held_out if self._holds_out_tests else 0.0
            return None, (
                (1 - test) * (1 - self.validation_fraction),
                (1 - test) * self.validation_fraction,
                test,
            )
        validation = self.validation
        if validation is None:
            kept = 1 - self.validation_fraction
            # validation / (train + validation) is the fraction.
            validation = round(self.train * self.validation_fraction / kept)
        rest = self.train + validation
        test = 0
        if self._holds_out_tests:
            kept = 1 - self.test_fraction
            # test / (train + validation + test) is the fraction.
            test = self.test_samples or round(rest * self.test_fraction / kept)
        total = rest + test
        return total, (self.train / total, validation / total, test / total)


@dataclass(frozen=True)
class Split(Configurable):
    """How the `from_` functions divide samples; the fields mean the same as in `[data]`.

    Args:
        shift: distribution shifts to add: tables with `kind` and the fields of that kind, or
            `Shift` objects, applied in order.
        train: training samples of each client; all by default.
        validation: validation samples of each client; needs `train`.
        validation_fraction: share of the samples that are not for testing, when `validation` is not
            given.
        test_samples: test samples of each client, which needs `train`; of a given test set, the
            largest number that is used.
        test_fraction: share of a client's samples held out for testing, when `test_samples` is not
            given and there is no test set.
        folds: cut each client's samples into so many folds; `seed` chooses the one to test on.
        seed: seed of the division among clients and of the splits of each client.

    Example:
        >>> Split(train=40, validation=10).test_fraction
        0.2
    """

    shift: Sequence[Mapping[str, Any] | Shift] = ()
    train: PositiveInt | None = None
    validation: NonNegativeInt | None = None
    validation_fraction: Fraction = 0.2
    test_samples: PositiveInt | None = None
    test_fraction: Fraction = 0.2
    folds: Annotated[int, Ge(2)] | None = None
    seed: NonNegativeInt = 0


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
    seed, fold = data.data_seed_and_fold(seed)
    rng = Rng(seed)
    if isinstance(data.dataset, str) and ":" in data.dataset:
        made = call_dataset_function(data.dataset, data.options, seed)
        if isinstance(made, Federation):
            # Its clients, splits and test sets exist already, so that there is nothing to build.
            return _use_unchanged(made, data)
        return build_from_sources(data, (made,), rng, fold)
    total, _ = data.split_shares()
    # Only synthetic data are made to this size: 200 samples a client when none is given.
    pool = (data.num_clients or NUM_CLIENTS) * (total or 200)
    load = partial(
        load_dataset,
        data_dir=data_dir,
        label=data.label,
        download=data.download,
        rng=rng,
        samples=pool,
        options=data.options,
    )
    sources = tuple(map(load, data.dataset_names))
    return build_from_sources(data, sources, rng, fold)


def _use_unchanged(made: Federation, data: DataConfig) -> Federation:
    """Check a federation that a function returned, which settings of `[data]` do not change."""
    # These three do not change a finished federation; any other setting would be ignored silently.
    plain_one = DataConfig(dataset=data.dataset, options=data.options, fixed_seed=data.fixed_seed)
    for item in fields(DataConfig):
        if getattr(data, item.name) != getattr(plain_one, item.name):
            raise ConfigError(
                f"data.{item.name} is set, but {data.dataset_names[0]!r} returned a federation, "
                "which is used as it is; return a "
                f"coterie.Source to have it divided here, or leave out {item.name}"
            )
    return made.validate()


def build_from_sources(
    data: DataConfig,
    sources: Sequence[Source],
    rng: Rng,
    fold: int = 0,
    ids: Sequence[int] | None = None,
) -> Federation:
    """Build a federation from datasets that are read already.

    Args:
        data: what to build; its `dataset` is not used.
        sources: the datasets.
        rng: the streams to draw from.
        fold: which one is tested, where `data` asks for folds; see `DataConfig.data_seed_and_fold`.
        ids: of the clients, where they are some of a larger population: each is split as it would
            be there.
    """
    # All are compared with the first: they share one array of inputs, and one of targets.
    first = sources[0]
    for other in sources[1:]:
        if other.input_description != first.input_description or bool(other.classes) != bool(
            first.classes
        ):
            raise DataError(
                f"{first.name} has {first.input_description}, {other.name} has "
                f"{other.input_description}; several datasets must be alike"
            )
    for other in sources[1:]:
        if (
            other.train.y.shape[1:] != first.train.y.shape[1:]
            or other.preparation != first.preparation
        ):
            raise DataError(
                f"{first.name} and {other.name} have other targets or columns; make them alike"
            )
        # Labels are numbers: in another order one number would mean two classes.
        names = first.class_names, other.class_names
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            raise DataError(
                f"{first.name} and {other.name} have the same classes in another order: "
                f"{', '.join(names[0][:10])}, and {', '.join(names[1][:10])}; number them alike"
            )
    # Data that divide their rows themselves leave nothing for these settings to divide.
    given = any(source.validation for source in sources)
    for name in ("folds", "train", "validation"):
        if given and getattr(data, name) is not None:
            raise ConfigError(
                f"{name} is {getattr(data, name)}, and {first.name} says which rows are for "
                f"training, validation and testing; leave out {name} or split_column"
            )
    has_tests = any(len(source.test) for source in sources)
    # Test samples that name their clients are not shared by the others of a cluster.
    if data.test == "cluster" and first.has_client_tests:
        data = replace(data, test="own")
    if data.folds is not None and data.test != "client" and len(first.test):
        raise ConfigError(
            f"folds is {data.folds}, and {first.name} has a test set of its own; test = 'client' "
            "leaves that unused"
        )
    if data.folds is not None or (data.test == "cluster" and not has_tests):
        # There is no test set to share, or folds take the tests from the training data.
        data = replace(data, test="client")
    clients = _plan_clients(data, sources, rng)
    if data.test == "own" and not has_tests:
        raise ConfigError(
            f"test is 'own', and {first.name} has no test samples; test = 'client' holds some out"
        )
    tests_of = {"cluster": None, "own": "own", "client": data.test_source}
    plan = plan_phases(data.drift or (), clients, sources, rng)
    assemble = partial(
        assemble_federation,
        sources=sources,
        rng=rng,
        # The samples of all phases lie in one table: they have one type.
        form=SampleLayout.choose_layout(sources, plan.all_clients, data.normalize),
        own_tests=tests_of[data.test],
        test_samples=data.test_samples,
        test_fraction=data.test_fraction,
        fold=None if data.folds is None else (fold, data.folds),
        ids=ids,
    )
    built = [assemble(phase.clients) for phase in plan.phases]
    if len(built) == 1:
        return built[0]
    # Where clients fill and scale inputs by their own rows, each has a test set of its own.
    shares_tests = tests_of[data.test] is None and not built[0].fitted
    return join_phases(plan, built, shares_tests=shares_tests)


def _plan_clients(data: DataConfig, sources: Sequence[Source], rng: Rng) -> Clients:
    """Apply the shifts to a plan in which all clients are alike."""
    shifts = data.build_shifts()
    own = sources[0].clients
    if own and not any(shift.chooses_pool and not isinstance(shift, Domain) for shift in shifts):
        cluster = "cluster" if "cluster" in sources[0].train.columns else None
        # A dataset that says whose each sample is has natural clients, unless a shift chooses
        # pools.
        shifts = (Natural(own, cluster), *shifts)
    number = data.num_clients
    if number is None:
        # Each value of the column is a client: as many as there are.
        natural = [shift for shift in shifts if isinstance(shift, Natural)]
        number = len(np.unique(natural[0].group_values(sources))) if natural else NUM_CLIENTS
        if not number:
            raise DataError(
                f"{sources[0].name} has 0 samples and no client; every client needs data"
            )
    samples, shares = data.split_shares()
    # One object for all of them: shifts replace clients and change none.
    clients: Clients = (Client(samples, shares),) * number
    settled = False
    for place, shift in enumerate(shifts):
        if not settled and not shift.chooses_pool:
            # Shifts that choose pools come first: from here on every client knows its pool.
            clients, settled = _settle_sizes(clients, sources), True

        # A default binds the purpose of this shift: the loop goes on to the next one.
        def client_stream(
            client: int, purpose: str = f"data.shift.{place}.{shift.kind}"
        ) -> np.random.Generator:
            return rng.generator(purpose, client)

        clients = apply_shift(shift, clients, sources, client_stream)
    return _settle_sizes(clients, sources)


def _settle_sizes(clients: Clients, sources: Sequence[Source]) -> Clients:
    """Give clients without a size an even share of their dataset, the same for all."""
    if all(client.samples is not None for client in clients):
        return clients
    users = np.bincount([client.recipe.source for client in clients], minlength=len(sources))
    shares = []
    for source, count in zip(sources, users.tolist(), strict=True):
        if count:
            shares.append(len(source.train) // count)
    # The smallest pool share, so that all clients are equally large.
    each = min(shares)
    if each < 1:
        total = sum(len(source.train) for source in sources)
        raise DataError(
            f"{len(clients)} clients; the pool has {total:,} samples: lower num_clients"
        )
    return tuple(replace(client, samples=client.samples or each) for client in clients)


Rows = Int[np.ndarray, "_"]
"""Places in a dataset; each list of them has a length of its own."""

Cut = tuple[int, int, int]
"""Numbers of training, validation and test samples of a client."""


def assemble_federation(
    clients: Clients,
    sources: Sequence[Source],
    rng: Rng,
    form: "SampleLayout",
    own_tests: Literal["train", "test", "own"] | None = None,
    test_samples: int | None = None,
    test_fraction: float | int = 0.2,
    fold: tuple[int, int] | None = None,
    ids: Sequence[int] | None = None,
) -> Federation:
    """Draw the samples of every client and make the federation.

    Args:
        clients: what each client is to receive.
        sources: the datasets.
        rng: the streams to draw from.
        form: how samples are laid out.
        own_tests: None: a test set for each kind of client; "train": each client's own held-out
            samples; "test": for each client, samples of the dataset's test set in the client's
            class shares; "own": for each client, the test samples that name it.
        test_samples: size of a client's test set, or the largest size of a shared one.
        test_fraction: size of a client's test set as a part of its samples, when `test_samples` is
            not given.
        fold: (number, of how many): each client's held-out samples are this fold of all its
            samples.
        ids: of the clients, from whose streams their splits are drawn; from 0 when not given.

    Raises:
        DataError: when the data do not suffice.
    """
    numbers = range(len(clients)) if ids is None else ids
    drawn = _draw_rows(clients, sources, rng, numbers)
    if fold is not None:
        drawn, cuts = _arrange_folds(clients, sources, drawn, *fold)
    elif any(source.validation for source in sources):
        drawn, cuts = _arrange_given(clients, sources, drawn)
    else:
        cuts = [client.split_sizes() for client in clients]
    # A client's samples in order: training, validation, test.
    training, kept = [], []
    for own, (train, validation, _) in zip(drawn, cuts, strict=True):
        training.append(own[:train])
        kept.append(own[: train + validation])
    fitted = _fit_preparations(clients, sources, training)
    maker = _TestSetMaker(clients, sources, form, rng, fitted)
    if own_tests is None:
        tests, test_of = maker.make_shared(test_samples)
    elif own_tests == "train":
        tests, test_of = maker.make_held_out(drawn, cuts)
    elif own_tests == "own":
        tests, test_of = maker.make_own(test_samples, numbers)
    else:
        tests, test_of = maker.make_matching(drawn, test_samples, test_fraction)
    # Rows are padded to the largest client.
    width, first = max(map(len, kept)), sources[0].train
    y = torch.zeros((len(clients), width, *first.y.shape[1:]), dtype=first.y.dtype)
    split_of = np.full((len(clients), width), PADDING)
    plain = len(sources) == 1 and not fitted and all(map(form.keeps_samples, clients))
    # Samples of one table whose type stays can be read from it whenever they are needed.
    reads = len(sources) == 1 and not fitted and form.keeps_type
    reads = reads and (isinstance(first.x, StoredRows) or _is_padding_large(first.x, kept))
    # Rows that are read later take no memory here.
    x = torch.zeros((len(clients), 0 if reads else width, *form.features), dtype=form.dtype)

    def make_stream(purpose: str, row: int) -> Callable[[], np.random.Generator]:
        return lambda: rng.generator(purpose, row)

    # `numbers_of` numbers the samples of all datasets in turn.
    numbers_of = np.full((len(clients), width), -1)
    starts = np.cumsum([0, *(len(source.train) for source in sources)])
    for row, (client, own, (train, _, _)) in enumerate(zip(clients, kept, cuts, strict=True)):
        samples = sources[client.recipe.source].train
        if not plain:
            if not reads:
                own_x = form.make_inputs(
                    samples, own, client.recipe, make_stream("data.noise", row)
                )
                x[row, : len(own)] = fitted[row](own_x) if fitted else own_x
            y[row, : len(own)] = form.make_targets(
                samples, own, client.recipe, make_stream("data.targets", row)
            )
        numbers_of[row, : len(own)] = own + starts[client.recipe.source]
        split_of[row, : len(own)] = VALIDATION
        split_of[row, :train] = TRAIN
    if plain:
        # Samples that stay as they are, and of one dataset, are copied at once.
        used = torch.from_numpy(split_of >= 0)
        rows = torch.from_numpy(np.concatenate(kept))
        y[used] = first.y[rows]
        if not reads:
            x[used] = first.x[rows]
    recipes = [client.recipe for client in clients]
    inputs = form.read_when_needed(first, numbers_of, recipes) if reads else x
    # Labels of several datasets may follow one another; the largest end is the number of classes.
    classes = [client.recipe.offset + sources[client.recipe.source].classes for client in clients]
    # Other inputs are normalized already, or not at all.
    mean, std = form.constants[0] if form.dtype == torch.uint8 else ((), ())
    # Clients without noise at each access have 0, and a federation without any has None, which its
    # fingerprint keeps apart from zeros.
    noise = torch.tensor([client.noise_per_access for client in clients], dtype=torch.float64)
    names = tuple(client.name for client in clients)
    # Clients have names all together, or they are numbers.
    if not all(names):
        names = ()
    return Federation(
        x=inputs,
        y=y,
        split=torch.from_numpy(split_of),
        tests=tests,
        test_of=test_of,
        ids=torch.arange(len(clients)),
        population=len(clients),
        classes=max(classes),
        mean=mean,
        std=std,
        origin=torch.from_numpy(numbers_of),
        truth=_build_truth(clients, form),
        name=" + ".join(source.name for source in sources),
        class_names=_join_class_names(clients, sources),
        noise=noise if noise.any() else None,
        client_names=names,
        feature_names=_shared_value(sources, "feature_names"),
        parts=sources[0].parts,
        fitted=tuple(fitted),
        table=_shared_value(sources, "table"),
        targets=_shared_value(sources, "targets"),
        notes=_shared_value(sources, "notes"),
    ).validate()


def _is_padding_large(x: Tensor, kept: Sequence[Rows]) -> bool:
    """Return whether padded rows would take much more memory than the samples in them."""
    sizes = list(map(len, kept))
    padded, used = len(sizes) * max(sizes), sum(sizes)
    return padded > 2 * used and (padded - used) * x[:1].nbytes > _MAX_PADDING


def _shared_value(sources: Sequence[Source], name: str) -> tuple[Any, ...]:
    """Return a field of the datasets; empty where they differ in it."""
    values = {getattr(source, name) for source in sources}
    return values.pop() if len(values) == 1 else ()


def _fit_preparations(
    clients: Clients, sources: Sequence[Source], train: Sequence[Rows]
) -> list[FittedPreparation]:
    """Fit each client's preparation on its training rows; empty where sources have none."""
    preparation = sources[0].preparation
    if preparation is None:
        return []
    found, without = [], []
    for place, (client, own) in enumerate(zip(clients, train, strict=True)):
        # Training rows alone: validation and test rows must not decide what models see.
        x = sources[client.recipe.source].train.x[torch.from_numpy(own)]
        found.append(preparation.fit(x))
        if found[-1].empty:
            without.append(place)
    if without:
        first = without[0]
        warnings.warn(
            f"{len(without)} of {len(clients)} clients have columns without any value in their "
            f"training rows (first: {_describe_client(clients[first], first)}, column "
            f"{found[first].empty[0]!r}); what is empty there becomes 0, and any value too where "
            "columns are scaled",
            stacklevel=2,
        )
    return found


def _draw_rows(
    clients: Clients, sources: Sequence[Source], rng: Rng, ids: Sequence[int]
) -> list[Rows]:
    """Return the rows of its dataset's pool that each client gets, shuffled."""
    requests = []
    for c in clients:
        requests.append(SampleRequest(c.num_samples, c.recipe.labels, c.mixture, c.counts, c.reuse))
    drawn = _allocate_pools(
        clients, requests, [source.train for source in sources], "data.pool", sources, rng, ids
    )
    # Each client has its own stream: its split is the same when it is built alone.
    return [rng.generator("data.split", ids[row]).permutation(own) for row, own in enumerate(drawn)]


def _arrange_given(
    clients: Clients, sources: Sequence[Source], drawn: Sequence[Rows]
) -> tuple[list[Rows], list[Cut]]:
    """Order each client's samples as the data say: training, then validation; and the sizes.

    Raises:
        DataError: when a client has no training samples.
    """
    arranged, cuts = [], []
    for row, (client, own) in enumerate(zip(clients, drawn, strict=True)):
        source = sources[client.recipe.source]
        chosen = source.train.columns[source.validation].numpy()[own] == 1
        if chosen.all():
            raise DataError(
                f"{_describe_client(client, row)} has no training samples; give it one at least, "
                "or leave it out"
            )
        arranged.append(np.concatenate([own[~chosen], own[chosen]]))
        cuts.append((int((~chosen).sum()), int(chosen.sum()), 0))
    return arranged, cuts


def _arrange_folds(
    clients: Clients, sources: Sequence[Source], drawn: Sequence[Rows], number: int, folds: int
) -> tuple[list[Rows], list[Cut]]:
    """Order each client's samples as training, validation, tested fold; return the sizes too.

    Samples are dealt to the folds class by class, so that folds differ by one sample at most in
    each class and in total.

    Raises:
        DataError: when a client has fewer samples than folds.
    """
    arranged, cuts = [], []
    for row, (client, own) in enumerate(zip(clients, drawn, strict=True)):
        who = _describe_client(client, row)
        # With fewer samples some fold would test nothing, and that seed measure no such client.
        if len(own) < folds:
            raise DataError(
                f"{who} has {len(own)} samples; expected {folds} at least, one for each of the "
                "folds"
            )
        source = sources[client.recipe.source]
        if source.classes:
            # A stable sort keeps the random order within each class.
            own = own[np.argsort(source.train.y.numpy()[own], kind="stable")]
        # Sorted by class, every folds-th sample: a fold has each class in the client's share.
        test = own[number::folds]
        rest = np.delete(own, np.s_[number::folds])
        kept, share, _ = client.shares
        # The shares are of all samples; the tested fold is already taken out.
        validation = max(1, round(len(rest) * share / (kept + share))) if share else 0
        if validation >= len(rest):
            raise DataError(
                f"{who} has {len(own)} samples, which leaves none for training: lower "
                "validation_fraction"
            )
        # Evenly over what is left, so that validation has the same shares.
        chosen = ((np.arange(validation) + 0.5) * len(rest) / max(1, validation)).astype(np.int64)
        arranged.append(np.concatenate([np.delete(rest, chosen), rest[chosen], test]))
        cuts.append((len(rest) - validation, validation, len(test)))
    return arranged, cuts


def _describe_client(client: Client, row: int) -> str:
    """Return a client as messages name it."""
    return f"client {client.name!r}" if client.name else f"client {row}"


def _allocate_pools(
    clients: Clients,
    requests: Sequence[SampleRequest],
    pools: Sequence[Samples],
    purpose: str,
    sources: Sequence[Source],
    rng: Rng,
    ids: Sequence[int],
) -> list[Rows]:
    """Divide every pool (a dataset, or a natural group of it) between its clients."""
    # Clients of a whole dataset divide it in one draw from a common stream. A natural group is
    # drawn from the stream of its client, so that a machine with this client alone draws the same.
    users: dict[tuple[int, tuple[str, int] | None], list[int]] = {}
    for row, client in enumerate(clients):
        users.setdefault((client.recipe.source, client.group), []).append(row)
    out: list[Rows] = [np.zeros(0, np.int64)] * len(clients)
    members: dict[tuple[int, str], dict[int, Rows]] = {}
    all_labels = []
    for source, pool in zip(sources, pools, strict=True):
        # Without classes all samples are of one.
        all_labels.append(pool.y.numpy() if source.classes else np.zeros(len(pool), np.int64))
    for (source, group), rows in users.items():
        pool, labels = pools[source], all_labels[source]
        own = clients[rows[0]].rows
        # A partition says the rows themselves; its group is no column to look them up in.
        if group is not None and own:
            place, stream = np.array(own), rng.generator(purpose, ids[rows[0]])
        elif group is None:
            place, stream = np.arange(len(pool)), rng.generator(f"{purpose}.{source}", EVERYONE)
        else:
            column = (source, group[0])
            if column not in members:
                # Once for each column: a search for each client would read the column as often.
                members[column] = group_rows(pool.columns[group[0]].numpy())
            place = members[column].get(group[1], np.zeros(0, np.int64))
            stream = rng.generator(purpose, ids[rows[0]])
        asked = [requests[row] for row in rows]
        # One client takes all there is: nothing is divided, and the order is that of a division.
        if asked == [SampleRequest(len(place))]:
            out[rows[0]] = place[order_by_class(labels[place], stream)]
            continue
        try:
            parts = allocate_samples(asked, labels[place], stream)
        except DataError as error:
            # The error of a common pool speaks of all its clients, that of a group of one.
            if group is None:
                raise
            raise DataError(f"{_describe_client(clients[rows[0]], rows[0])}: {error}") from None
        for row, part in zip(rows, parts, strict=True):
            out[row] = place[part]
    return out


@dataclass(frozen=True)
class SampleLayout:
    """How samples are laid out in the federation."""

    dtype: torch.dtype
    features: tuple[int, ...]
    constants: tuple[Constants, ...]
    keeps_type: bool = True

    @staticmethod
    def choose_layout(
        sources: Sequence[Source], clients: Clients, normalize: str | Sequence[str]
    ) -> "SampleLayout":
        """Choose the layout: the type of the datasets, or float16 for images normalized here.

        Images are normalized here where their noise is fixed, or where datasets have different
        constants.
        """
        x = sources[0].train.x
        if isinstance(normalize, str):
            constants: list[Constants] = [sources[0].channel_constants(normalize)] * len(sources)
        elif len(normalize) == len(sources):
            constants = []
            for source, own in zip(sources, normalize, strict=True):
                constants.append(source.channel_constants(own))
        else:
            raise ConfigError(
                f"normalize has {len(normalize)} entries for {len(sources)} datasets; give one for "
                "each, or one word "
                "for all"
            )
        disturbed = any(client.recipe.has_fixed_noise for client in clients)
        apart = any(one != constants[0] for one in constants)
        # float16 takes half the memory of float32; its rounding is below a tenth of a gray level.
        dtype = torch.float16 if x.dtype == torch.uint8 and (disturbed or apart) else x.dtype
        if sources[0].preparation is not None:
            # As preparations return inputs: the source holds float64, with NaN where an entry is
            # empty.
            dtype = torch.int32 if sources[0].preparation.whole else torch.float32
        return SampleLayout(dtype, tuple(x.shape[1:]), tuple(constants), dtype == x.dtype)

    def keeps_samples(self, client: Client) -> bool:
        """Whether the samples of a client are those of its dataset, as they are."""
        recipe = client.recipe
        changed = recipe.transforms or recipe.relabel or recipe.targets or recipe.offset
        return not changed and self.keeps_type

    def make_inputs(
        self,
        samples: Samples,
        rows: Int[np.ndarray, " samples"],
        recipe: SampleRecipe,
        make_generator: Callable[[], np.random.Generator],
    ) -> Shaped[Tensor, "samples *features"]:
        """Return the transformed inputs of some samples."""
        x = samples.x[torch.from_numpy(rows)]
        x = _Transforms(recipe.transforms)(x)
        # Images stay bytes and are normalized batch by batch, unless the layout says float16.
        if x.dtype == self.dtype or x.dtype != torch.uint8:
            return x
        x = x.float() / 255
        mean, std = self.constants[recipe.source]
        if mean:
            # One constant a channel, for all places of it.
            shape = (-1, *[1] * (x.ndim - 2))
            x = (x - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)
        if recipe.has_fixed_noise:
            x = add_noise(x, recipe.noise, make_generator())
        return x.to(self.dtype)

    def read_when_needed(
        self, samples: Samples, rows: Int[np.ndarray, "*samples"], recipes: Sequence[SampleRecipe]
    ) -> ClientRows:
        """Return the inputs that `make_inputs` makes, of which none is read now.

        Args:
            samples: the table.
            rows: of the table; -1 for padding.
            recipes: the changes of each entry of the first axis.
        """
        changes = [_Transforms(recipe.transforms) for recipe in recipes]
        distinct = dict.fromkeys(changes)
        # -1 stands for no change.
        distinct.pop(_Transforms(()), None)
        change_of = None
        if distinct:
            number_of = number_items(distinct)
            number = [number_of.get(change, -1) for change in changes]
            shape = (-1, *[1] * (rows.ndim - 1))
            change_of = torch.tensor(number).reshape(shape).expand(rows.shape)
        return ClientRows(samples.x, torch.from_numpy(rows), tuple(distinct), change_of)

    def make_targets(
        self,
        samples: Samples,
        rows: Int[np.ndarray, " samples"],
        recipe: SampleRecipe,
        make_generator: Callable[[], np.random.Generator],
    ) -> Shaped[Tensor, "samples *make_targets"]:
        """Return the targets of some samples: exchanged, offset, or made from the inputs."""
        chosen = torch.from_numpy(rows)
        if recipe.targets is not None:
            # Summed in float64 and rounded once.
            clean = samples.x[chosen].double() @ torch.tensor(
                recipe.targets.theta, dtype=torch.float64
            )
            drawn = make_generator().standard_normal(len(rows))
            noise = recipe.targets.noise * torch.from_numpy(drawn)
            return (clean + noise).to(samples.y.dtype)
        y = samples.y[chosen]
        if recipe.relabel is not None:
            # Swaps are of the dataset's labels: the offset comes last.
            y = torch.tensor(recipe.relabel)[y]
        return y + recipe.offset if recipe.offset else y


@dataclass(frozen=True)
class _Transforms:
    """Transforms one after another."""

    transforms: tuple[Transform, ...]

    def __call__(self, x: Shaped[Tensor, "samples *features"]) -> Tensor:
        for transform in self.transforms:
            x = _apply_transform(transform, x)
        return x


def _apply_transform(
    transform: Transform, x: Shaped[Tensor, "samples *features"]
) -> Shaped[Tensor, "samples *features"]:
    """Apply a transform and check that it keeps what inputs are."""
    found = transform(x)
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        said = f"{found!r:.60}"
        if isinstance(found, Tensor):
            said = f"{found.dtype} of shape {tuple(found.shape)}"
        raise DataError(
            f"the transform {transform!r} returned {said}; expected {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    return found


@dataclass(frozen=True)
class _TestSetMaker:
    """Makes test sets: shared ones, or one for each client."""

    clients: Clients
    sources: Sequence[Source]
    form: SampleLayout
    rng: Rng
    fitted: Sequence[FittedPreparation]

    def make_shared(self, limit: int | None) -> tuple[tuple[TestSet, ...], Int[Tensor, " clients"]]:
        """Make one test set for each kind of client, transformed and restricted like its data.

        Where clients fill and scale inputs by their own rows, the test set of one is not that of
        another.
        """
        if self.fitted:
            own = []
            for row, client in enumerate(self.clients):
                samples = self.sources[client.recipe.source].test
                rows = self._select_rows(client.recipe, limit)
                name = self._client_name(row)
                own.append(self._make_test_set(samples, rows, client.recipe, name, row))
            return tuple(own), torch.arange(len(own))
        # Equal recipes share a test set; sets are in the order of clusters.
        names_of: dict[SampleRecipe, set[str]] = {}
        for client in sorted(self.clients, key=lambda client: client.cluster_places):
            names_of.setdefault(client.recipe, set()).add(client.cluster_name)
        sets = []
        for place, (recipe, names) in enumerate(names_of.items()):
            # Several clusters may have equal recipes: their set has no name of one.
            name = names.pop() if len(names) == 1 else "all clients"
            rows = self._select_rows(recipe, limit)
            if not len(rows):
                source = self.sources[recipe.source].name
                raise DataError(
                    f'{source} has no test samples for "{name}"; hold some out: test = "client"'
                )
            sets.append(
                self._make_test_set(self.sources[recipe.source].test, rows, recipe, name, place)
            )
        place_of = number_items(names_of)
        return tuple(sets), torch.tensor([place_of[client.recipe] for client in self.clients])

    def make_held_out(
        self, drawn: Sequence[Rows], cuts: Sequence[Cut]
    ) -> tuple[tuple[TestSet, ...], Int[Tensor, " clients"]]:
        """Make each client's test set of the last part of its own samples."""
        sets = []
        for row, (client, own, (train, validation, test)) in enumerate(
            zip(self.clients, drawn, cuts, strict=True)
        ):
            if not test:
                raise DataError(
                    "no samples are held out for testing; raise test_samples or test_fraction"
                )
            samples = self.sources[client.recipe.source].train
            sets.append(
                self._make_test_set(
                    samples, own[train + validation :], client.recipe, self._client_name(row), row
                )
            )
        return tuple(sets), torch.arange(len(sets))

    def make_own(
        self, limit: int | None, ids: Sequence[int]
    ) -> tuple[tuple[TestSet, ...], Int[Tensor, " clients"]]:
        """Make each client's test set of the test samples that name it.

        Raises:
            ConfigError: when the test samples name other clients, or none.
            DataError: when a client has no test samples.
        """
        # Filled once for each column, and not searched for each client.
        rows_by_group: dict[tuple[int, str], dict[int, Rows]] = {}
        sets = []
        for row, client in enumerate(self.clients):
            source = self.sources[client.recipe.source]
            column = None if client.group is None else client.group[0]
            if client.group is None or column not in source.test.columns:
                raise ConfigError(
                    f"the test samples of {source.name} do not say whose they are by "
                    f"{column or 'a column of clients'!r}, which makes the clients; leave out what "
                    "divides the samples otherwise, or give test samples without clients"
                )
            key = (client.recipe.source, client.group[0])
            if key not in rows_by_group:
                rows_by_group[key] = group_rows(source.test.columns[client.group[0]].numpy())
            own = rows_by_group[key].get(client.group[1], np.zeros(0, np.int64))
            if limit is not None:
                # The client's own stream: a smaller test set is a part of a larger one.
                own = self.rng.generator("data.test.own", ids[row]).permutation(own)
            own = self._select_rows(client.recipe, limit, own)
            name = self._client_name(row)
            if not len(own):
                raise DataError(
                    f"{_describe_client(client, row)} has no test samples; give it one at least, "
                    "or leave it out"
                )
            sets.append(self._make_test_set(source.test, own, client.recipe, name, row))
        return tuple(sets), torch.arange(len(sets))

    def make_matching(
        self, drawn: Sequence[Rows], size: int | None, fraction: float | int
    ) -> tuple[tuple[TestSet, ...], Int[Tensor, " clients"]]:
        """Divide the test set between clients, in each client's own class shares.

        The shares are exact, by largest remainder: a draw from them would run out of the classes
        that many clients have, and give the last clients classes that they never train on. Where a
        class of the test set runs out, its samples serve a second client.

        Raises:
            DataError: when a client alone needs more samples of a class than there are.
        """
        requests = []
        for row, (client, own) in enumerate(zip(self.clients, drawn, strict=True)):
            source = self.sources[client.recipe.source]
            # test / (own + test) is the fraction.
            wanted = size or max(1, round(len(own) * fraction / (1 - fraction)))
            if not source.classes:
                # A regression has no shares to keep; any test samples will do.
                requests.append(SampleRequest(wanted, client.recipe.labels))
                continue
            trained = np.bincount(source.train.y.numpy()[own], minlength=source.classes)
            counts = apportion_total(wanted, trained.astype(float))
            present = np.bincount(source.test.y.numpy(), minlength=source.classes)
            short = np.flatnonzero(counts > present)
            if len(short):
                first = int(short[0])
                raise DataError(
                    f"{self._client_name(row)} is to be tested on {counts[first]:,} samples of "
                    f"class {first}, its share of {wanted:,}; the test set has {present[first]:,}: "
                    "lower test_samples or test_fraction"
                )
            requests.append(SampleRequest(wanted, counts=tuple(counts.tolist()), reuse=True))
        pools = [source.test for source in self.sources]
        # A partition says nothing of the test set, so such clients draw from all of it.
        whole = []
        for client in self.clients:
            whole.append(replace(client, group=None) if client.rows else client)
        parts = _allocate_pools(
            tuple(whole),
            requests,
            pools,
            "data.test.pool",
            self.sources,
            self.rng,
            range(len(whole)),
        )
        sets = []
        for row, (client, rows) in enumerate(zip(self.clients, parts, strict=True)):
            samples, name = pools[client.recipe.source], self._client_name(row)
            sets.append(self._make_test_set(samples, rows, client.recipe, name, row))
        return tuple(sets), torch.arange(len(sets))

    def _select_rows(
        self, recipe: SampleRecipe, limit: int | None, order: Rows | None = None
    ) -> Rows:
        """Return the rows of a test set that fit a recipe, in ascending order.

        Args:
            recipe: of the samples.
            limit: the largest number of rows; the first in `order` are taken.
            order: the rows to choose from; all, in a random order, when not given.
        """
        test = self.sources[recipe.source].test
        if order is None:
            # One random order for all limits: a smaller test set is a part of a larger one.
            order = self.rng.generator(f"data.test.order.{recipe.source}").permutation(len(test))
        keep = np.ones(len(order), dtype=bool)
        if recipe.labels is not None:
            keep &= np.isin(test.y.numpy()[order], recipe.labels)
        # A test set without that column serves every cluster.
        if recipe.where is not None and recipe.where[0] in test.columns:
            keep &= test.columns[recipe.where[0]].numpy()[order] == recipe.where[1]
        order = order[keep]
        if recipe.mixture is not None:
            order = _take_in_shares(order, test.y.numpy()[order], np.array(recipe.mixture), limit)
        return np.sort(order[:limit])

    def _client_name(self, row: int) -> str:
        return self.clients[row].name or f"client {row}"

    def _make_test_set(
        self, samples: Samples, rows: Rows, recipe: SampleRecipe, name: str, place: int
    ) -> TestSet:
        # What a client fills and scales by its own rows must be in memory; other rows stay on disk.
        if isinstance(samples.x, StoredRows) and self.form.keeps_type and not self.fitted:
            x = self.form.read_when_needed(samples, rows, [recipe] * len(rows))
        else:
            x = self.form.make_inputs(
                samples, rows, recipe, lambda: self.rng.generator("data.test.noise", place)
            )
            x = self.fitted[place](x) if self.fitted else x
        y = self.form.make_targets(
            samples, rows, recipe, lambda: self.rng.generator("data.test.targets", place)
        )
        # Noise that is fixed is in the inputs already.
        return TestSet(x, y, name, recipe.noise if recipe.redrawn else 0.0)


def _take_in_shares(
    rows: Rows, labels: Rows, shares: Float[np.ndarray, " classes"], limit: int | None
) -> Rows:
    """Return as many rows as there are in the given class shares."""
    present = np.bincount(labels, minlength=len(shares))
    # The largest size at which no class runs out.
    most = int((present[shares > 0] / shares[shares > 0]).min())
    # Rounding may ask for one sample more than a class has.
    wanted = np.minimum(apportion_total(min(most, limit or most), shares), present)
    parts = []
    for label, size in enumerate(wanted):
        parts.append(rows[labels == label][:size])
    return np.concatenate(parts)


def _build_truth(clients: Clients, form: SampleLayout) -> Truth | None:
    """Return the planted truth; None for natural groups whose clusters are not known."""
    if any(client.group is not None and not client.planted for client in clients):
        return None
    # Clusters of several shifts combine: each combination that occurs is one planted cluster.
    names: dict[tuple[int, ...], str] = {}
    for client in clients:
        names[client.cluster_places] = client.cluster_name
    names = dict(sorted(names.items()))
    number_of = number_items(names)
    cluster, shift = [], []
    for client in clients:
        cluster.append(number_of[client.cluster_places])
        text = client.describe_changes()
        # Such images are stored normalized: the fingerprint of the data must have the constants.
        if form.dtype == torch.float16:
            mean, std = form.constants[client.recipe.source]
            text += f"; normalized with {mean} and {std}"
        shift.append(text)
    return Truth(torch.tensor(cluster), tuple(names.values()), tuple(shift))


def _join_class_names(clients: Clients, sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the class names, of several datasets one after another; empty when unknown."""
    if all(client.recipe.offset == 0 for client in clients):
        return _shared_value(sources, "class_names")
    names: list[str] = []
    for source in sources:
        # Names of some datasets only would be taken for those of others.
        if len(source.class_names) != source.classes:
            return ()
        names += source.class_names
    return tuple(names)
