"""node.toml, the settings of one node, and its own data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from coterie._util.files import resolve_path
from coterie._util.importing import import_function
from coterie._util.mappings import drop_empty
from coterie._util.settings import (
    Configurable,
    NonNegativeFloat,
    NonNegativeInt,
    Share,
    parse_settings,
)
from coterie._util.toml import load_toml
from coterie.data import datasets, hub
from coterie.data.arrays import from_arrays
from coterie.data.build import DataConfig, Split, build_federation, build_from_sources
from coterie.data.federation import Federation
from coterie.errors import ConfigError, DataError, require
from coterie.methods.base import Method
from coterie.net.node import Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.processfile import ProcessFile
from coterie.net.proxy import check_proxy
from coterie.net.wire import CHUNK
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.studies import config
from coterie.studies.config import StudyConfig


@dataclass(frozen=True)
class DataSource(Configurable):
    """The source of a node's own data: exactly one of the first six.

    Args:
        dataset: "table", "folder", or the import path of a function, as in the [data] of a study.
        study: "own rows" of the study's own [data], for demonstrations and tests.
        federation: a file that `Federation.save` wrote, with this node's rows.
        arrays: an .npz file with x and y, and x_test and y_test if there is a test set.
        folder: a dataset in the Hugging Face layout on disk.
        function: "package.module:name", a function without arguments that returns a federation with
            this node's rows, (x, y), or ((x, y), (x_test, y_test)).
        label: the label column of `folder`, when there are several.
        classes: number of classes, the same on every node; 0 for regression. Needed with arrays,
            folder, (x, y).
        options: what a study has in [data.options]; paths are relative to the file. Classes and
            categories that are text must be given, so that they mean the same on every node:
            `class_names`, `categories`, or for a table a `schema`. Nodes that read their tables
            otherwise than most do not take part.
        validation: share of the samples for validation; of the untested ones, with `folds`.
        test: share of the samples for testing, when there is no test set.
        folds: of `dataset`: test on one of so many folds, by the run's seed, instead of a share;
            see [data] of a study.
        data_dir: the folder of the study's datasets.
    """

    dataset: str = ""
    study: str = ""
    federation: str = ""
    arrays: str = ""
    folder: str = ""
    function: str = ""
    label: str = ""
    classes: NonNegativeInt | None = None
    validation: Share = 0.2
    test: Share = 0.2
    folds: Annotated[int, Ge(2)] | None = None
    data_dir: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings(Configurable):
    """Network settings of a node; they may differ between nodes.

    Args:
        deadline: seconds a round waits for peers; 0 for three times what the others usually take
            and two trainings, at least half a minute.
        slow: seconds that a member may be silent before it counts as slow, unless most are so slow
            or it says that it has not reached the round; a slow one is left out for 4, 16, 64, ...
            rounds. 0 to wait for everybody until the deadline.
        server_wait: seconds to keep asking a server that does not answer; then the node ends with exit
            status 5.
        redraws: how often the peers of a round are drawn again when some are missing.
        half: send models in half precision.
        chunk: bytes in a chunk, 1024 to 262144; fewer below 1 Mbit/s.
        start: seconds to wait at the start for members that do not answer; "unlimited" to wait for
            all of them.
        min_peers: other members that must be there at the start and in every round: with fewer a
            node waits, whatever `start` is, and trains nothing. 0 to go on alone.
        quorum_wait: seconds to wait for them in a run that has begun; then the node ends with exit
            status 5. "unlimited" to wait as long as it takes.
        linger: seconds to stay at the end for members that took part, are not done and make no
            progress, also while they are away; new clients that have not joined yet are among them;
            "unlimited" to wait for them as long as it takes.
        lease: seconds without a sign of life after which a member counts as down; 10 over long
            distances, 3 in one building.
        proxy: the HTTP proxy by which other machines are dialed, as "http://host:port";
            "environment" for that of https_proxy and no_proxy, which may have a user and a
            password; "" to dial them directly.
    """

    deadline: NonNegativeFloat = 0.0
    slow: NonNegativeFloat = 3.0
    server_wait: NonNegativeFloat = 600.0
    redraws: NonNegativeInt = 5
    half: bool = False
    chunk: Annotated[int, Ge(1024), Le(CHUNK)] = CHUNK
    start: NonNegativeFloat | Literal["unlimited"] = 60.0
    min_peers: NonNegativeInt = 1
    quorum_wait: NonNegativeFloat | Literal["unlimited"] = 3600.0
    linger: NonNegativeFloat | Literal["unlimited"] = 120.0
    # A second at least: half of it is the shortest interval of pings that servers allow.
    lease: Annotated[float, Ge(1)] = 10.0
    proxy: str = ""

    def check(self) -> None:
        """A proxy is one that can be used."""
        check_proxy(self.proxy)

    @property
    def terms(self) -> Terms:
        """The settings of the exchange."""
        return Terms(**{f.name: getattr(self, f.name) for f in fields(Terms)})

    @property
    def patience(self) -> Patience:
        """The settings of the node."""
        return Patience(
            min_peers=self.min_peers,
            start=_to_seconds(self.start),
            quorum_wait=_to_seconds(self.quorum_wait),
            linger=_to_seconds(self.linger),
        )


def _to_seconds(setting: float | Literal["unlimited"]) -> float:
    return math.inf if setting == "unlimited" else setting


@dataclass(frozen=True)
class NodeFile(ProcessFile):
    """The content of node.toml. Paths are relative to the file.

    Args:
        study: the study file that all members have, with one method and one seed, or the two below.
        method: label of the study's method to run, when it has several.
        seed: one of the study's seeds, when it has several.
        role: "peer", or "server" on the member that the roster names.
        runs: the folder in which the run's folder is created.
        data: the source of this node's own data.
        network: deadlines and options.
    """

    study: str = "study.toml"
    method: str = ""
    seed: NonNegativeInt | None = None
    role: Literal["peer", "server"] = "peer"
    runs: str = "runs"
    data: DataSource = field(default_factory=DataSource)
    network: NetworkSettings = field(default_factory=NetworkSettings)

    def select_run(self) -> tuple[StudyConfig, str, int]:
        """Return the study, and the label and seed of this node's run."""
        return select_run(config.load_study(self.resolve_path(self.study)), self.method, self.seed)


def select_run(
    study: StudyConfig, method: str = "", seed: int | None = None
) -> tuple[StudyConfig, str, int]:
    """Return one run of a study as a study.

    Raises:
        ConfigError: when the study has several methods or seeds and none is chosen.
    """
    labels = [entry.label for entry in study.methods]
    if not method and len(labels) > 1:
        raise ConfigError(
            f"the study has the methods {', '.join(labels)}; say which: method = {labels[0]!r}"
        )
    if method and method not in labels:
        raise ConfigError(f"the study has no method {method!r}; its methods: {', '.join(labels)}")
    if seed is None and len(study.seeds) > 1:
        raise ConfigError(
            f"the study has the seeds {list(study.seeds)}; say which: seed = {study.seeds[0]}"
        )
    label, number = method or labels[0], study.seeds[0] if seed is None else seed
    return study.select_run(label, number), label, number


def make_run_spec(study: StudyConfig) -> RunSpec:
    """Return the part of a run that is equal on all nodes, from a study of one run."""
    entry = study.scale_method(study.methods[0].label)
    settings = between_machines(entry.method, entry.settings)
    return RunSpec(
        entry.method,
        settings,
        study.model.named_model,
        str(study.model.named_model),
        study.seeds[0],
    )


_UNBOUNDED = 1e9  # times the median number of samples


def between_machines(method: Method, settings: Settings) -> Settings:
    """Return a node's settings: peers and servers check what they receive, unless set not to.

    A simulation with these settings gives the results of the nodes.
    """
    if settings.secure_terms is not None:  # a server that sees a sum has nothing to judge
        return settings
    # Unset means on between machines, where the method has anything to judge. A server bounds no
    # number of samples then: an honest site may have many times those of the others.
    judging = replace(settings, acceptance={"samples": _UNBOUNDED} if method.server else True)
    judges = method.server or judging.acceptance_rules_for(method) is not None
    if settings.acceptance is None and judges:
        return judging
    return settings


def take_tables(
    table: dict[str, Any], kinds: Mapping[str, type[Any]], path: Path
) -> dict[str, Any]:
    """Take the tables [NAME] out of a file's content, and return the settings in them.

    Args:
        table: the content; it loses them.
        kinds: the settings of each name.
        path: of the file, for messages.

    Raises:
        ConfigError: with what was found, what was expected and what to do.
    """
    parts = {}
    for name, kind in kinds.items():
        part = table.pop(name, {})
        require(isinstance(part, Mapping), f"{path}: {name}", part, f"a table: [{name}]")
        parts[name] = parse_settings(kind, part, f"{path}: {name}")
    return parts


def load(path: Path) -> NodeFile:
    """Read node.toml.

    Raises:
        ConfigError: with what was found, what was expected and what to do.
    """
    table = load_toml(path)
    parts = take_tables(table, {"data": DataSource, "network": NetworkSettings}, path)
    return parse_settings(NodeFile, {**table, **parts}, str(path), folder=resolve_path(path).parent)


# ---------------------------------------------------------------- data


def load_own_rows(
    file: NodeFile, study: StudyConfig, clients: tuple[int, ...], population: int
) -> Federation:
    """Return this node's own data, as rows of the population.

    Args:
        file: node.toml.
        study: the study of one run.
        clients: ids of the clients hosted here.
        population: number of clients in all.

    Raises:
        ConfigError: when not exactly one source is given.
        DataError: when the data cannot be used.
    """
    source = file.data
    every = ("dataset", "study", "federation", "arrays", "folder", "function")
    kinds = {kind: getattr(source, kind) for kind in every}
    given = drop_empty(kinds)
    if len(given) != 1:
        raise ConfigError(
            f"[data] gives {', '.join(given) or 'nothing'}; expected exactly one of "
            f"{', '.join(kinds)}"
        )
    if source.folds is not None and not source.dataset:
        raise ConfigError(
            "data.folds is given without data.dataset; only a table, a folder or a function has "
            "folds here"
        )
    if source.study:
        require(source.study == "own rows", "data.study", source.study, "'own rows'")
        place = file.resolve_path(source.data_dir) if source.data_dir else None
        # The seed draws the whole federation, as in a simulation; this node keeps its rows.
        return build_federation(study.data, study.seeds[0], place).host(list(clients))
    if source.federation:
        return _place_rows(
            Federation.load(file.resolve_path(source.federation)), clients, population
        )
    if source.dataset:
        return _place_rows(_build_dataset(file, study.seeds[0], clients), clients, population)
    if source.function:
        made = _call_function(source.function)
        if isinstance(made, Federation):
            return _place_rows(made, clients, population)
        # Two pairs are samples and test set; else the two are x and y of all samples.
        pair, test = (
            made if all(isinstance(one, tuple) and len(one) == 2 for one in made) else (made, None)
        )
    elif source.arrays:
        pair, test = _load_arrays(file.resolve_path(source.arrays))
    else:
        read = hub.load_folder(file.resolve_path(source.folder), source.label or None)
        pair, test = (
            (read.train.x, read.train.y),
            (read.test.x, read.test.y) if len(read.test) else None,
        )
    # Not counted in the data: a class that this node has never seen belongs to the model as well.
    if source.classes is None:
        raise ConfigError(
            "data.classes is missing; every node must name the same number of classes (0: "
            "regression)"
        )
    x, y = pair
    split = Split(
        validation_fraction=source.validation, test_fraction=source.test, seed=study.seeds[0]
    )
    federation = from_arrays(
        x,
        y,
        # One client's, under a name that is dropped again below.
        clients=["own"] * len(y),
        test=test,
        classes=source.classes,
        split=split,
        name="own data",
    )
    # the roster says how the node is called
    return _place_rows(replace(federation, client_names=()), clients, population)


def _build_dataset(file: NodeFile, seed: int, clients: tuple[int, ...]) -> Federation:
    """Build the data that [data] names: one client's, unless the data come with clients.

    A client draws from the stream of its id: its rows are split as in a simulation of all members'
    rows.
    """
    name, options = file.data.dataset, dict(file.data.options)
    if name in datasets.OWN_KINDS:
        # Paths in node.toml are relative to that file, as all others in it are.
        for key in {"path", "test", "schema"} & set(options):
            options[key] = str(file.resolve_path(str(options[key])))
        made = datasets.load_table_or_folder(name, options, shared=True)
    elif ":" in name:
        made = datasets.call_dataset_function(name, options, seed)
    else:
        raise ConfigError(
            f"data.dataset is {name!r}; expected 'table', 'folder' or 'package.module:name'"
        )
    if isinstance(made, Federation):
        return made
    if not made.clients:  # all rows are the one client's
        owners = {"client": torch.zeros(len(made.train), dtype=torch.int64)}
        made = replace(
            made,
            train=replace(made.train, columns={**made.train.columns, **owners}),
            clients="client",
        )
    # The fractions are those of this node: others may split their data in another way.
    config = DataConfig(
        name,
        validation_fraction=file.data.validation,
        test_fraction=file.data.test,
        folds=file.data.folds,
    )
    seed, fold = config.data_seed_and_fold(seed)
    # As many clients as are hosted here: each then draws from the stream of its id.
    alike = len(made.train.columns[made.clients].unique()) == len(clients)
    return build_from_sources(config, (made,), Rng(seed), fold, clients if alike else None)


def _place_rows(federation: Federation, clients: tuple[int, ...], population: int) -> Federation:
    """Give rows their ids in the population; rows that have ids already are chosen by them."""
    # Ids of a smaller federation are its own, and say nothing about this population.
    if federation.population == population and set(clients) <= set(federation.ids.tolist()):
        return federation.host(list(clients))
    if len(federation) != len(clients):
        raise DataError(
            f"the data hold {len(federation)} clients; the roster says that this node hosts "
            f"{len(clients)}"
        )
    return replace(
        federation, ids=torch.tensor(clients, dtype=torch.int64), population=population, truth=None
    )


def _load_arrays(path: Path) -> tuple[tuple[Any, Any], tuple[Any, Any] | None]:
    try:
        # A pickled array could run code when it is read.
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the arrays in {path}: {error}") from None
    for names in (("x", "y"), ("x_test", "y_test")):
        # Without either of them there is no test set; one alone is a mistake.
        if len(found.keys() & set(names)) == 1:
            raise DataError(
                f"{path} holds {', '.join(found)}; expected both of {' and '.join(names)}"
            )
    if "x" not in found:
        raise DataError(f"{path} holds {', '.join(found) or 'nothing'}; expected x and y")
    test = (found["x_test"], found["y_test"]) if "x_test" in found else None
    return (found["x"], found["y"]), test


def _call_function(name: str) -> Any:
    if ":" not in name:
        raise ConfigError(f"data.function is {name!r}; expected 'package.module:name'")
    result = import_function(name, f"data.function {name!r}", ())()
    if not isinstance(result, Federation) and not (isinstance(result, tuple) and len(result) == 2):
        raise DataError(
            f"{name} returned {type(result).__name__}; expected a federation, (x, y), or two such "
            "pairs"
        )
    return result
