"""Draw studies at random, and check what must hold for all: engines, hosting, resume, names, errors, warnings.

    python -m benchmarks.adversary --minutes 10             (or `make adversary MINUTES=10`)
    python -m benchmarks.adversary --trials 40 --first 0    (these trials, not for a time)
    python -m benchmarks.adversary --case '{"rounds": ...}' (the line that a finding prints)

Each trial has a number, from which `benchmarks.combinations` draws the table of a study; the table
decides everything else. What a finding prints is the table after everything is taken out of it that
the finding does not need. With `--store` the numbers are kept in docs/reference/runs/reliability,
from which scripts/reliability.py writes the page.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import math
import multiprocessing
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from benchmarks import combinations
from benchmarks.combinations import Case
from coterie._util.origin import write_results
from coterie._util.settings import to_toml
from coterie.cli.app import main as run_command
from coterie.cluster.blocks import ThreadBlocks, simulate_in_blocks
from coterie.data.federation import Federation
from coterie.data.source import is_images
from coterie.engine import ENGINES
from coterie.errors import CoterieError, ModelError, TranslationError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.functional.metrics import ACCURACY, LOSS, MSE, Undefined
from coterie.methods import METHODS
from coterie.models.layout import ModelSource
from coterie.results.export import Format, export_model
from coterie.rng import Rng
from coterie.runtime import newcomers
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.models import Models, load_models
from coterie.runtime.settings import Settings
from coterie.simulation.run import Progress, Run, simulate
from coterie.studies import config
from coterie.studies.definition import StudyConfig
from coterie.studies.inputs import StudyInputs
from coterie.studies.run import load_stored_study, run_study
from coterie.testing import run_grouped
from coterie.testing.methods import RelabeledRng, relabel_clients, run_method

STORED = Path(__file__).resolve().parents[1] / "docs/reference/runs/reliability/adversary.json"
SPEAKS_OF = ("cluster", "data", "engine", "exchange", "functional", "methods", "models", "results", "runtime", "simulation", "studies")  # fmt: skip
FILES = ("checkpoint.safetensors", "metrics.parquet", "edges.parquet")
LIMITS = {"float64": 1e-10, "float32": 1e-4}
"""How far engines may be apart, relative for weights above 1; see `coterie.testing.check_model`."""
BY_POSITION = {"fesem", "pooled", "sosicfl", "sosicfl-all", "sosicfl-plus"}
"""Methods that draw by the clients' positions: first memberships, seeds of clusterings, the order of a pool."""
SLOW = 240
"""Seconds after which a trial counts as one that does not end."""


class NotForIt(Exception):
    """A check does not apply to a study."""


class _Stop(Exception):
    """Ends a run that is left half done."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check of a study.

    Args:
        check: its name; "refused" for a study that the library refuses to run.
        result: "held", "refused", "not for it", "too sensitive" or "FOUND".
        said: the message.
        case: the table of the study, of a finding.
    """

    check: str
    result: str
    said: str = ""
    case: Case | None = None


class Trial:
    """A study of one method and one seed, and its run with the loop engine.

    Args:
        case: its table.
        folder: for files.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self._number = case, folder, 0
        self.stream = random.Random(json.dumps(case, sort_keys=True))
        self.study: StudyConfig = config.parse_study({"name": "drawn", **case})
        entry = self.study.methods[0]
        self.method, self.seed = entry.method, self.study.seeds[0]
        self.settings: Settings = dataclasses.replace(entry.settings, engine="loop")
        inputs = StudyInputs(self.study)
        self.federation: Federation = inputs.make_federation(self.seed)
        self.model: ModelSource = inputs.model_source

    def new_folder(self) -> Path:
        """Return a folder that is not there yet."""
        self._number += 1
        return self.folder / str(self._number)

    def run(self, *, federation: Federation | None = None, **changes: Any) -> Run:
        """Run the study with some settings changed; `folder`, `exchange` and others go to `simulate`."""
        known = {item.name for item in dataclasses.fields(Settings)}
        own = {key: value for key, value in changes.items() if key in known}
        more = {key: value for key, value in changes.items() if key not in known}
        return simulate(
            federation or self.federation,
            self.method,
            model=self.model,
            settings=dataclasses.replace(self.settings, **own),
            seed=self.seed,
            **{"folder": self.new_folder(), **more},
        )

    @functools.cached_property
    def whole(self) -> Run:
        """The run that others are compared with."""
        return self.run()

    @functools.cached_property
    def final_tests(self) -> pd.DataFrame:
        """The rows of the run's final test."""
        return select_final_tests(self.whole.metrics)


# ---------------------------------------------------------------- the promises


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, NaN like NaN."""
    return one.shape == other.shape and torch.equal(
        one.nan_to_num(nan=1.25e37), other.nan_to_num(nan=1.25e37)
    )


def assert_same_run(one: Run, other: Run, what: str) -> None:
    """Raise an AssertionError unless two runs have equal models, tables and files."""
    assert are_equal(one.params, other.params), f"{what}: other models"
    assert one.metrics.equals(other.metrics), f"{what}: other metrics"
    assert one.edges.equals(other.edges), f"{what}: other edges"
    assert one.diverged == other.diverged, f"{what}: other clients diverged"
    for name in FILES:
        if one.folder is not None and other.folder is not None:
            files = [run.folder / name for run in (one, other) if run.folder is not None]
            equal = files[0].read_bytes() == files[1].read_bytes()
            assert equal, f"{what}: {_find_difference(*files)}"


def check_repeat(trial: Trial) -> None:
    """The same study twice has the same bytes; stopped after any round and resumed, too."""
    assert_same_run(trial.run(), trial.whole, "run again")
    if trial.settings.rounds < 2:
        return
    last = trial.stream.randint(1, trial.settings.rounds - 1)
    resumed = _run_in_two_parts(trial, last, lambda: None)
    assert_same_run(resumed, trial.whole, f"stopped after round {last} and resumed")


def _run_in_two_parts(trial: Trial, last: int, make_exchange: Callable[[], Any]) -> Run:
    """Stop a run behind a round, and resume it from its last checkpoint."""
    folder = trial.new_folder()

    def stop(progress: Progress) -> None:
        if progress.round + 1 > last:
            raise _Stop

    with contextlib.suppress(_Stop):
        trial.run(folder=folder, observer=stop, checkpoint_seconds=0, exchange=make_exchange())
    return trial.run(folder=folder, resume=True, exchange=make_exchange())


def check_watching(trial: Trial) -> None:
    """What is only measured or stored changes no model."""
    choices: list[dict[str, Any]] = [
        {"metrics": (), "eval_every": 0},
        {"eval_every": trial.settings.validate_every},
        {"record_similarities": not trial.settings.record_similarities},
        {"checkpoint_seconds": 0, "block": trial.stream.choice([1, 2, 100])},
        {"block": trial.stream.choice([1, 2, 3])},
    ]
    changes = trial.stream.choice(choices)
    other = trial.run(**changes)
    assert are_equal(other.params, trial.whole.params), f"with {changes}: other models"


def check_blocks(trial: Trial) -> None:
    """Hosted in blocks of any sizes the run has the bytes of one process."""
    taking = len(trial.federation) - len(set(_list_newcomers(trial)))
    sizes, left = [], taking
    while left:
        sizes.append(trial.stream.randint(1, left))
        left -= sizes[-1]
    split = simulate_in_blocks(
        trial.federation, trial.method, model=trial.model, settings=trial.settings,
        seed=trial.seed, folder=trial.new_folder(), blocks=sizes, start=ThreadBlocks.start,
    )  # fmt: skip
    assert_same_run(split, trial.whole, f"in blocks of {sizes} clients")


def _list_newcomers(trial: Trial) -> list[int]:
    """Return the clients that join late."""
    table = trial.whole.metrics
    return sorted(set(table.loc[(table["split"] == newcomers.SPLIT).to_numpy(), "client"].tolist()))


def check_groups(trial: Trial) -> None:
    """Hosted by several members that exchange messages the final models are those of one process."""
    settings = dataclasses.replace(trial.settings, new_clients=None, attacks=None, patience=None)
    if settings.schedule != "synchronous" or trial.method.needs or settings.custom_loss is not None:
        raise NotForIt("one process only")
    ids = list(range(len(trial.federation)))
    trial.stream.shuffle(ids)
    cut = sorted(trial.stream.sample(range(1, len(ids)), min(2, len(ids) - 1)))
    groups = [ids[a:b] for a, b in zip([0, *cut], [*cut, len(ids)], strict=True)]
    server = trial.stream.randrange(len(groups)) if trial.method.server else 0
    given: dict[str, Any] = {"model": trial.model, "settings": settings}
    loop = run_method(trial.method, federation=trial.federation, seed=trial.seed, **given)
    found = run_grouped(
        trial.federation, trial.method, groups, server=server, seed=trial.seed, **given
    )
    assert are_equal(found, loop.state.params), f"hosted as {groups}: other models"


def check_engines(trial: Trial) -> None:
    """The other engines end where the loop engine does."""
    name = trial.stream.choice([one for one in ENGINES if one != "loop"])
    limit = LIMITS[trial.settings.dtype]
    if trial.settings.precision != "full":
        raise NotForIt("rounding of bfloat16")
    try:
        other = trial.run(engine=name)
    except ModelError as error:
        if name != "shared-backbone":
            raise
        raise NotForIt("a module without an axis of clients") from error
    gap = measure_gap(other.params, trial.whole.params)
    if gap <= limit and _have_same_rows(other, trial.whole):
        _compare_metrics(other, trial.whole, limit, name)
        return
    # Rounding decides ties and grows in training that diverges: so it does where the rate is
    # another by one part in 10^13, and nobody can ask engines for more.
    for sign in (1, -1):
        moved = trial.run(**move_slightly(trial, sign))
        if not _have_same_rows(moved, trial.whole):
            raise NotForIt("too sensitive")
        limit = max(limit, 1000 * measure_gap(moved.params, trial.whole.params))
    if gap > limit and is_rounding(trial, name, gap):
        raise NotForIt("too sensitive")
    assert gap <= limit, f"the {name} engine ends {gap:.3g} away from the loop engine"
    assert _have_same_rows(other, trial.whole), f"the {name} engine has other rows of metrics"


def is_rounding(trial: Trial, name: str, gap: float) -> bool:
    """Return whether an engine's distance from the loop engine is float32's rounding, not a fault.

    Moving the data does not show it where a loss is saturated: a gradient is exactly zero in one
    engine and 1e-9 in the other, and Adam divides it by its own size. Two signs are needed: in
    float64 the engines are nearer by as much as rounding is smaller, which no wrong formula is, and
    float32 takes the loop engine itself as far from its own float64 run.
    """
    if trial.settings.dtype != "float32" or not math.isfinite(gap):
        return False
    exact = trial.run(dtype="float64")
    other = trial.run(dtype="float64", engine=name)
    rounding = measure_gap(trial.whole.params.double(), exact.params)
    return measure_gap(other.params, exact.params) <= 1e-3 * gap and gap <= 10 * rounding


def move_slightly(trial: Trial, sign: int) -> dict[str, Any]:
    """Return a study's data and training, moved by about the rounding of its numbers."""
    part = sign * {"float64": 4e-13, "float32": 4e-7}[trial.settings.dtype]
    local, federation, changes = trial.settings.local, trial.federation, dict[str, Any]()
    inputs = federation.x
    assert isinstance(inputs, Tensor), "no drawn data are read from disk"
    if inputs.is_floating_point():
        draws = Rng(trial.seed).generator("adversary").uniform(-1, 1, size=tuple(inputs.shape))
        changes["x"] = inputs * (1 + part * torch.from_numpy(draws))
    elif is_images(inputs[0, 0]):  # bytes: what they are divided by
        changes["std"] = tuple((1 + part) * one for one in federation.std or (1.0,))
        changes["mean"] = federation.mean or (0.0,)
    return {
        "local": dataclasses.replace(local, lr=local.lr * (1 + part)),
        "federation": dataclasses.replace(federation, **changes),
    }


def measure_gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative for weights above 1; infinite where one is not finite."""
    both = found.isfinite() & expected.isfinite()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    scale = expected[both].abs().clamp(min=1.0)
    gaps = (found - expected)[both].abs() / scale
    return float(gaps.max()) if len(gaps) else 0.0


def _have_same_rows(one: Run, other: Run) -> bool:
    names = ["round", "client", "split", "model", "metric"]
    return one.metrics[names].equals(other.metrics[names]) and one.diverged == other.diverged


def _compare_metrics(one: Run, other: Run, limit: float, name: str) -> None:
    # A count of samples moves by whole samples where a tie is broken: shares are not compared.
    smooth = (other.metrics["metric"] == LOSS.name).to_numpy()
    a, b = (torch.tensor(run.metrics.loc[smooth, "value"].to_numpy()) for run in (one, other))
    gap = measure_gap(a, b)
    assert gap <= 1e3 * limit, f"the {name} engine has a loss that is {gap:.3g} away"


def check_relabeling(trial: Trial) -> None:
    """Clients with other ids have the same models."""
    settings = trial.settings
    if (
        trial.method.kind in BY_POSITION
        # IFCA's server then draws first memberships, as FeSEM's does.
        or getattr(trial.method, "start", None) == "random_groups"
        or type(trial.method) is not METHODS[trial.method.kind]
        or settings.schedule != "synchronous"
        or settings.participation != 1
        or settings.new_clients is not None
        or settings.attacks
        or settings.local.dp is not None
        or len(trial.federation) < 2
    ):
        raise NotForIt("draws by position")
    ids = list(range(len(trial.federation)))
    order = trial.stream.sample(ids, len(ids))
    order = order[::-1] if order == ids else order
    places = torch.tensor(order)

    def final_models(federation: Federation, rng: Rng, settings: Settings) -> Tensor:
        return run_method(
            trial.method, federation=federation, model=trial.model, settings=settings, rng=rng
        ).state.params

    rng, moved_rng = Rng(trial.seed), RelabeledRng(trial.seed, -1, tuple(order))
    whole = final_models(trial.federation, rng, settings)
    found = final_models(relabel_clients(trial.federation, places), moved_rng, settings)
    gap, limit = measure_gap(found, whole[places]), LIMITS[settings.dtype]
    if gap <= limit:
        return
    for sign in (1, -1):
        moved = move_slightly(trial, sign)
        near = dataclasses.replace(settings, local=moved["local"])
        limit = max(limit, 1000 * measure_gap(final_models(moved["federation"], rng, near), whole))
    assert gap <= limit, f"relabeled by {order}: models are {gap:.3g} away"


def check_names(trial: Trial) -> None:
    """Names change nothing but names, and lead to the models; files and study files give them back."""
    number = len(trial.federation)
    names = trial.federation.client_names or tuple(combinations.ODD_NAMES[:number])
    if any(isinstance(one, str) for one in _list_given_clients(trial.settings)):
        raise NotForIt("the settings name clients")
    named = trial.run(federation=dataclasses.replace(trial.federation, client_names=names))
    assert are_equal(named.params, trial.whole.params), "clients with names: other models"
    values = [run.metrics.drop(columns=["client"], errors="ignore") for run in (named, trial.whole)]
    assert values[0].equals(values[1]), "clients with names: other metrics"
    assert named.folder is not None
    assert named.models is not None
    stored = load_models(named.folder)
    assert stored.clients == named.models.clients, f"stored names are {stored.clients}"
    assert set(stored.clients) <= set(names), f"stored names are {stored.clients}"
    ids = dict(enumerate(names))
    assert dict(named.names) == ids, f"the run's names are {dict(named.names)}"


def _list_given_clients(settings: Settings) -> list[Any]:
    given = [settings.new_clients, *(one["clients"] for one in settings.attacks or ())]
    return [client for one in given if isinstance(one, list | tuple) for client in one]


def check_study_file(trial: Trial) -> None:
    """A study written and read is the same study; so is that of a run's folder."""
    text = config.format_study(trial.study)
    again = config.parse_study_text(text)
    assert again == trial.study, "written as a study file and read it is another study"
    assert config.format_study(again) == text, "written again its text is another one"
    short = config.parse_study_text(config.format_study(trial.study, decided=False))
    assert short == trial.study, "written without what presets decide it is another study"
    done = run_study(trial.study, out=trial.new_folder())
    stored, _ = load_stored_study(done.folder, to_run=True)
    assert stored == trial.study, "the study in the folder of its runs is another one"
    for row in done.summary["rows"]:
        row_name = row["method"] if isinstance(row, dict) else row[0]
        assert row_name == trial.study.methods[0].label, f"a summary of {row_name!r}"


def check_models(trial: Trial) -> None:
    """A model taken home is that of the run, and scores what was reported; its files have its weights."""
    run = trial.whole
    assert run.folder is not None
    assert run.models is not None
    stored = load_models(run.folder)
    client = trial.stream.choice(list(run.models.clients))
    first, second = (one.state_dict(client) for one in (run.models, stored))
    assert first.keys() == second.keys(), "the stored model has other tensors"
    for name, tensor in first.items():
        same = tensor.dtype == second[name].dtype
        assert same, f"the stored model has another type of {name}"
        if not tensor.is_complex():
            assert are_equal(tensor.double(), second[name].double()), f"stored: another {name}"
    format_: Format = trial.stream.choice(("safetensors", "pt"))
    path = trial.new_folder().with_suffix(f".{format_}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*it diverged")
        export_model(stored, client, path, format=format_)
    found = _load_weights(path)
    assert found.keys() == first.keys(), "the exported model has other tensors"
    _check_scores(trial, stored, client)


def _load_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return load_file(path)


def _check_scores(trial: Trial, models: Models, client: int | str) -> None:
    """Compare the reported loss and accuracy with those of the module, in plain PyTorch."""
    federation, row = trial.federation, models.find_row(client)
    number = models.spec.ids[row]
    test = federation.tests[int(federation.test_of[number])]
    table = trial.final_tests
    own = table.loc[(table["client"] == number).to_numpy()].set_index("metric")["value"]
    if (
        test.noise
        or models.spec.missing
        or LOSS.name not in own
        or trial.settings.precision != "full"
    ):
        raise NotForIt("nothing to compare")
    outputs = models.predict(client, test.x)
    assert isinstance(outputs, Tensor)
    expected: dict[str, float] = {}
    if trial.settings.loss in (None, "cross-entropy") and federation.classes:
        expected[LOSS.name] = float(functional.cross_entropy(outputs.double(), test.y))
        expected[ACCURACY.name] = float((outputs.argmax(1) == test.y).double().mean())
    elif trial.settings.loss in (None, "mse") and test.y.is_floating_point():
        wanted = test.y.reshape(outputs.shape).double()
        expected[LOSS.name] = expected[MSE.name] = float(
            (outputs.double() - wanted).square().mean()
        )
    if not bool(outputs.isfinite().all()):
        expected = {}  # `check_said` looks at those
    limit = 1e4 * LIMITS[trial.settings.dtype]
    for name, value in expected.items():
        gap = abs(float(own[name]) - value)
        # `measure_gap` in one number; an accuracy has no rounding but that of ties.
        assert gap <= limit * max(1.0, abs(value)), (
            f"the model of client {client!r} has {name} {value:.6g} in plain PyTorch; reported {own[name]:.6g}"
        )


def check_said(trial: Trial) -> None:
    """What is not finite is no score, and is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trial.run()
    undefined = any(issubclass(one.category, Undefined) for one in caught)
    tests = select_final_tests(run.metrics)
    for name, value, client in zip(tests["metric"], tests["value"], tests["client"], strict=True):
        missing = value != value
        assert not missing or undefined or client in run.diverged or caught, (
            f"the final {name} of client {client} is NaN, and nothing was said"
        )
    by_client = {
        name: tests.loc[(tests["metric"] == name).to_numpy()].set_index("client")["value"]
        for name in (LOSS.name, ACCURACY.name)
    }
    for client, value in by_client[ACCURACY.name].items():
        loss = float(by_client[LOSS.name].get(client, 0.0))
        assert math.isfinite(loss) or value != value, (
            f"the final loss of client {client} is {loss}, and its accuracy {value:.3f}"
        )


def check_faulty(trial: Trial) -> None:
    """With messages that are lost, late or double a resumed run has the same bytes."""
    rounds = trial.settings.rounds
    if trial.method.server or trial.settings.schedule != "synchronous" or rounds < 2:
        raise NotForIt("no messages between peers")
    chances = {
        name: trial.stream.choice([0.0, 0.3, 1.0]) for name in ("drop", "delay", "duplicate")
    }
    taking = len(trial.federation) - len(_list_newcomers(trial))

    def make_exchange() -> Faulty:
        return Faulty(InMemory(torch.arange(taking), taking), **chances)

    whole, last = trial.run(exchange=make_exchange()), trial.stream.randint(1, rounds - 1)
    parts = _run_in_two_parts(trial, last, make_exchange)
    assert_same_run(parts, whole, f"with {chances}, resumed after round {last}")


def check_commands(trial: Trial) -> None:
    """The command line takes the study, and shows, compares, reports and exports it: 0, or 2 and a line."""
    file, out = trial.new_folder().with_suffix(".toml"), trial.new_folder()
    file.write_text(to_toml({"name": "drawn", **trial.case}), encoding="utf-8")
    folder = out / "drawn"
    status, said = call_command("run", str(file), "--out", str(out), "--workers", "1", "--quiet")
    assert status == 0, f"`coterie run` ends with {status}, `simulate` runs it: {said}"
    for command in (
        ("show", str(folder)),
        ("show", str(folder), "--json"),
        ("compare", str(folder)),
        ("report", str(folder), "--out", str(out / "report.html")),
        ("export", str(folder), "--all", "--out", str(out / "models")),
        ("resume", str(folder)),
    ):
        status, said = call_command(*command)
        assert status in (0, 2), f"`coterie {command[0]}` ends with {status}: {said}"
        lines = said.strip().splitlines()
        assert status == 0 or (lines and lines[-1].startswith("coterie: ")), (
            f"`coterie {command[0]}` ends with 2 and says {said!r}"
        )
        assert "Traceback" not in said


def call_command(*arguments: str) -> tuple[int, str]:
    """Call the command line in this process; return its status, and its standard error."""
    out, err, before = io.StringIO(), io.StringIO(), warnings.formatwarning
    try:
        with (
            mock.patch.object(sys, "argv", ["coterie", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", UserWarning)
            run_command()
    except SystemExit as end:
        return int(end.code or 0), err.getvalue()
    finally:
        warnings.formatwarning = before


def check_workers(trial: Trial) -> None:
    """Two worker processes leave the bytes of one."""
    study = dataclasses.replace(trial.study, seeds=(trial.seed, trial.seed + 1))
    folders = [
        run_study(study, out=trial.new_folder(), workers=workers).folder for workers in (1, 2)
    ]
    for path in sorted(folders[0].rglob("*")):
        if path.name in FILES or path.name == "summary.json":
            other = folders[1] / path.relative_to(folders[0])
            assert _read(path) == _read(other), f"with two workers {_find_difference(path, other)}"


def _find_difference(one: Path, other: Path) -> str:
    """Say in which tensor, or column, two files differ."""
    if one.suffix == ".safetensors":
        first, second = load_file(one), load_file(other)
    elif one.suffix == ".parquet":
        first, second = pd.read_parquet(one), pd.read_parquet(other)
    else:
        return f"{one.name} differs"
    differ = [name for name in first if str(first[name]) != str(second.get(name))]
    return f"{one.name} differs in {differ or 'its bytes alone'}"


def _read(path: Path) -> Any:
    if path.suffix != ".json":
        return path.read_bytes()
    return {k: v for k, v in json.loads(path.read_text("utf-8")).items() if k != "timing"}


CHECKS: dict[str, tuple[Callable[[Trial], None], float]] = {
    "resume": (check_repeat, 0.5),
    "engines": (check_engines, 0.7),
    "blocks": (check_blocks, 0.3),
    "groups": (check_groups, 0.3),
    "watching": (check_watching, 0.3),
    "relabeling": (check_relabeling, 0.3),
    "names": (check_names, 0.2),
    "study file": (check_study_file, 0.3),
    "models": (check_models, 0.6),
    "said": (check_said, 0.4),
    "faulty": (check_faulty, 0.3),
    "command line": (check_commands, 0.15),
    "workers": (check_workers, 0.02),
}
"""The checks, and the share of trials that try each."""


# ---------------------------------------------------------------- trials


@contextlib.contextmanager
def _no_raw_warnings() -> Iterator[None]:
    """Turn warnings that are not meant for users into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UserWarning)
        # `check_said` records warnings of its own; those of torch's own code are not ours.
        yield


def attempt(check: str, action: Callable[[], object]) -> Outcome:
    """Do something and return what came of it."""
    try:
        with _no_raw_warnings():
            action()
    except NotForIt as reason:
        sensitive = str(reason) == "too sensitive"
        return Outcome(check, "too sensitive" if sensitive else "not for it")
    except CoterieError as error:
        is_line = bool(str(error).strip()) and "\n" not in str(error)
        # What a run's own check finds is no refusal of the case.
        is_fine = is_line and not isinstance(error, TranslationError)
        return Outcome(check, "refused" if is_fine else "FOUND", str(error))
    except AssertionError as error:
        if str(error) and not _is_ours(error):
            return Outcome(check, "FOUND", f"AssertionError: {error}")
        return Outcome(check, "FOUND", str(error) or traceback.format_exc(limit=-2))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        last = traceback.extract_tb(error.__traceback__)
        own = [one for one in last if "coterie" in one.filename] or last
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return Outcome(check, "FOUND", f"{type(error).__name__} at {where}: {lines[0]}")
    return Outcome(check, "held")


def _is_ours(error: AssertionError) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].filename == __file__


def try_case(case: Case, checks: Iterable[str] | None = None) -> list[Outcome]:
    """Run a study and check it; return what came of each check.

    Args:
        case: the table of the study.
        checks: names of `CHECKS`; drawn when None.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        made: list[Trial] = []
        first = attempt("run", lambda: made.append(Trial(case, Path(name))))
        if first.result == "held":
            first = attempt("run", lambda: made[0].whole)
        found = [first]
        if first.result == "held":
            trial = made[0]
            drawn = random.Random(json.dumps([case, "checks"], sort_keys=True))
            chosen = [one for one, (_, share) in CHECKS.items() if drawn.random() < share]
            for check in chosen if checks is None else [c for c in checks if c in CHECKS]:
                found.append(attempt(check, functools.partial(CHECKS[check][0], trial)))
    return [dataclasses.replace(one, case=case) if one.result == "FOUND" else one for one in found]


def draw_accepted(number: int) -> tuple[Case, list[Outcome]]:
    """Draw the study of a trial; take settings out of it until the library runs it.

    Returns:
        The study, and what came of those that were refused on the way.
    """
    case, refused = combinations.draw_case(number), []
    stream = random.Random(f"removals {number}")
    for _ in range(8):
        with tempfile.TemporaryDirectory() as name:
            outcome = attempt("run", lambda case=case, name=name: _try_start(case, Path(name)))
        if outcome.result != "refused":
            break
        refused.append(outcome)
        if len(refused) == 5:  # the method may be the reason, without a word of its settings
            case = {**case, "methods": [combinations.draw_method(stream)]}
        else:
            case = combinations.remove(case, _choose_removal(case, outcome.said, stream))
    return case, refused


def _choose_removal(case: Case, said: str, stream: random.Random) -> tuple[str, ...]:
    """Return what to take out of a study: something that the refusal names, or anything."""
    paths = [path for path in combinations.list_removals(case) if path[1:2] != ("options",)]
    named = [path for path in paths if not path[-1].isdecimal() and path[-1] in said]
    return stream.choice(named or paths or [("rounds",)])


def _try_start(case: Case, folder: Path) -> None:
    trial = Trial(case, folder)
    trial.run(rounds=min(1, trial.settings.rounds), folder=None)


def shrink(case: Case, check: str, seconds: float = 60.0) -> Case:
    """Take out of a study what a finding does not need."""
    end = time.monotonic() + seconds
    tried = True
    while tried and time.monotonic() < end:
        tried = False
        for path in combinations.list_removals(case):
            try:
                smaller = combinations.remove(case, path)
            except (KeyError, IndexError):  # a part of what is out already
                continue
            found = try_case(smaller, () if check == "run" else [check])
            if any(one.result == "FOUND" and one.check == check for one in found):
                case, tried = smaller, True
            if time.monotonic() > end:
                break
    return case


def run_trial(number: int) -> list[Outcome]:
    """Draw and check the study of a number."""
    case, refused = draw_accepted(number)
    return [*refused, *try_case(case)]


def format_replay(case: Case) -> str:
    """Return the command that tries a study again, with all checks."""
    return f"python -m benchmarks.adversary --case '{json.dumps(case)}'"


def _serve(pipe: Any, first: int, step: int) -> None:
    """Try one number after another, and send what comes of each."""
    number = first
    while True:
        pipe.send((number, run_trial(number)))
        number += step


def hunt(first: int, *, trials: int | None, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
    """Yield the number and the outcomes of each trial, for a number of trials or a time.

    Trials run in a process of their own, so that one that does not end, or ends the process, is a
    finding too.
    """
    context, number = multiprocessing.get_context("fork"), first
    end = time.monotonic() + seconds
    worker, pipe = None, None
    try:
        while (trials is None or number < first + trials) and time.monotonic() < end:
            if worker is None:
                pipe, other = context.Pipe()
                worker = context.Process(target=_serve, args=(other, number, 1))
                worker.start()
                other.close()
            found = None
            try:
                found = pipe.recv() if pipe is not None and pipe.poll(SLOW) else None
            except EOFError:
                worker.join()
            if found is None:
                ended = f"ended with {worker.exitcode}" if worker.exitcode else "did not end"
                worker.kill()
                worker.join()
                worker = None
                case = draw_accepted(number)[0]
                yield number, [Outcome("run", "FOUND", f"the trial's process {ended}", case)]
            else:
                yield found
            number += 1
    finally:
        if worker is not None:
            worker.kill()
            worker.join()


def main() -> None:
    """Read the command line; try studies, or one again; print findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trials", type=int, help="so many, whatever the minutes")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--case", help="try this study again, with all checks")
    parser.add_argument("--check", action="append", help="of --case: this check alone")
    parser.add_argument("--shrink", action="store_true", help="make findings smaller")
    parser.add_argument("--store", action="store_true", help="keep the numbers for the page")
    given = parser.parse_args()
    if given.case is not None:
        found = try_case(json.loads(given.case), given.check or CHECKS)
        for one in found:
            print(f"{one.result:12} {one.check}: {one.said}")
        sys.exit(any(one.result == "FOUND" for one in found))
    counts: Counter[tuple[str, str]] = Counter()
    findings: dict[tuple[str, str], dict[str, Any]] = {}
    tried, began = 0, time.monotonic()
    seconds = given.minutes * 60 if given.trials is None else 1e9
    for number, outcomes in hunt(given.first, trials=given.trials, seconds=seconds):
        tried += 1
        counts.update((one.check, one.result) for one in outcomes)
        for one in outcomes:
            if one.result != "FOUND" or one.case is None:
                continue
            kind = one.check, re.sub(r"[\d.,e+-]+|'[^']*'|\[.*\]", "", one.said)[:80]
            if kind in findings:  # told already
                findings[kind]["times"] += 1
                continue
            findings[kind] = {"trial": number, "check": one.check, "said": one.said, "times": 1}
            case = shrink(one.case, one.check) if given.shrink else one.case
            print(f"trial {number}, {one.check}: {one.said}\n  {format_replay(case)}", flush=True)
    rows: list[dict[str, Any]] = []
    for (check, result), times in sorted(counts.items()):
        rows.append({"check": check, "result": result, "times": times})
        if result == "FOUND":
            rows[-1]["kinds"] = [one for one in findings.values() if one["check"] == check]
    for row in rows:
        print(f"{row['times']:6d}  {row['check']}: {row['result']}")
    minutes = (time.monotonic() - began) / 60
    print(f"{tried} studies in {minutes:.1f} minutes, {len(findings)} kinds of findings")
    if given.store:
        settings = {key: value for key, value in vars(given).items() if value is not None}
        write_results(
            STORED, rows, SPEAKS_OF, settings, seeds=(given.first,),
            studies=tried, minutes=round(minutes, 1),
        )  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
