"""The adversary draws everything that can be set, tries a case again as it was, and finds faults that are put in."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import adversary, combinations
from benchmarks.generated import PIECES
from coterie._util.settings import settable_fields
from coterie.data.shifts import SHIFTS
from coterie.engine._loop import LoopEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine.optim import OPTIMIZERS, LocalTraining
from coterie.engine.schedules import SCHEDULES
from coterie.exchange.attacking import KINDS
from coterie.functional.losses import LOSSES
from coterie.functional.metrics import GROUPS, REGISTRY
from coterie.methods import METHODS, registry
from coterie.runtime.settings import Settings
from coterie.studies import config

PLAIN: dict[str, Any] = {
    "rounds": 2, "seeds": [3], "dtype": "float64", "local": {"optimizer": "sgd", "lr": 0.1},
    "data": {"dataset": "benchmarks.generated:make_data", "options": {"sizes": [[6, 2]] * 3}},
    "model": {"kind": "linear"}, "methods": [{"kind": "random", "num_peers": 1}],
}  # fmt: skip


def drawn_classes() -> dict[str, type[Any]]:
    methods = {kind: registry.find_published(cls) or cls for kind, cls in METHODS.items()}
    tables = {one.__name__: one for one in (*LOSSES.values(), *SCHEDULES.values())}
    own = {"Settings": Settings, "LocalTraining": LocalTraining}
    return {**methods, **SHIFTS, **tables, **own}


def test_every_setting_is_drawn_by_its_annotation_or_says_how():
    """So a new method or setting is drawn by itself, and one that cannot be is named here."""
    missing = [
        f"{owner}.{name}: {hint}"
        for owner, cls in drawn_classes().items()
        for name, hint in settable_fields(cls).items()
        if combinations.cannot_be_drawn(hint) and (owner, name) not in combinations.TABLES
    ]
    assert not missing, f"say in benchmarks.combinations.TABLES how to draw {missing}"


@pytest.mark.full
def test_everything_in_the_registries_is_drawn():
    cases = [combinations.draw_case(number) for number in range(3000)]
    text = json.dumps(cases)
    metrics = [one.name for one in REGISTRY.values() if one.function or one.on_request]
    names = [*METHODS, *LOSSES, *SHIFTS, *SCHEDULES, *KINDS, *OPTIMIZERS, *GROUPS, *metrics]
    assert [name for name in names if f'"{name}"' not in text] == []
    pieces = {piece.partition(":")[0] for piece in PIECES}
    drawn = {
        piece.partition(":")[0]
        for case in cases
        for piece in case["model"].get("options", {}).get("pieces", ())
    }
    assert drawn == pieces
    settings = {key for case in cases for key in case}
    left = set(settable_fields(Settings)) - settings - {"local", "patience"}
    of_nodes = {"pace", "max_staleness"}  # simulations refuse them
    assert left == {"engine", "device", "cuda_graphs", "portable"} | of_nodes, "chosen by checks"
    local = {key for case in cases for key in case["local"]}
    assert local == set(settable_fields(LocalTraining))


def test_drawn_values_are_valid_by_their_declaration():
    """A refusal is then about a combination, or about this data, and not about a range."""
    for owner, cls in drawn_classes().items():
        stream = random.Random(owner)
        for name, hint in settable_fields(cls).items():
            for _ in range(10):
                value = combinations.draw_value(hint, stream, name)
                assert value is None or combinations.accepts(value, hint), (owner, name, value)


def test_a_number_is_always_the_same_case_and_a_case_is_a_line():
    for number in range(50):
        case = combinations.draw_case(number)
        assert combinations.draw_case(number) == case
        line = adversary.format_replay(case)
        assert "\n" not in line
        assert json.loads(line.partition("--case '")[2].removesuffix("'")) == case


@pytest.mark.slow
def test_a_plain_study_holds_in_all_checks_but_those_of_processes():
    checks = [one for one in adversary.CHECKS if one not in ("workers", "engines")]
    found = adversary.try_case(PLAIN, checks)
    assert {one.result for one in found} <= {"held"}, found
    assert [one.check for one in found] == ["run", *checks]


def test_a_study_that_clients_join_at_the_end_is_split_in_blocks_too():
    """Blocks hold the clients of the rounds: others are refused, which looks like a case that is not for it."""
    found = adversary.try_case({**PLAIN, "new_clients": [0], "new_client_rounds": 1}, ["blocks"])
    assert [(one.check, one.result) for one in found] == [("run", "held"), ("blocks", "held")]


def found_by(check: str, case: dict[str, Any] = PLAIN) -> str:
    """What a check finds in a case; an empty text for nothing."""
    return next(
        (
            one.said
            for one in adversary.try_case(case, [check])
            if one.result == "FOUND" and one.check in (check, "run")
        ),
        "",
    )


@pytest.mark.full
def test_an_engine_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch):
    right = VmapEngine.train

    def wrong(self: VmapEngine, rows: torch.Tensor, *more: Any) -> torch.Tensor:
        found = right(self, rows, *more)
        rows.mul_(1 + 1e-6)
        return found

    monkeypatch.setattr(adversary, "ENGINES", {"loop": LoopEngine, "vmap": VmapEngine})
    assert not found_by("engines")
    monkeypatch.setattr(VmapEngine, "train", wrong)
    assert "vmap engine ends" in found_by("engines")


@pytest.mark.parametrize(
    ("loop32", "loop64", "other64", "dtype", "expected"),
    [
        (0.90, 1.00, 1.00, "float32", True),  # the loop engine itself is off by 0.1
        (0.90, 1.00, 1.05, "float32", False),  # as far in float64: no rounding is that large
        (1.00, 1.000001, 1.000001, "float32", False),  # the loop engine is right in float32
        (0.90, 1.00, 1.00, "float64", False),
        (0.90, float("nan"), 1.00, "float32", False),
    ],
)
def test_rounding_is_what_goes_away_in_float64_and_befalls_the_loop_engine_too(
    loop32: float, loop64: float, other64: float, dtype: Any, expected: bool
):
    def run(*, dtype: Any, engine: str = "loop") -> Any:
        value = loop64 if engine == "loop" else other64
        return SimpleNamespace(params=torch.tensor([value], dtype=torch.float64))

    whole = SimpleNamespace(params=torch.tensor([loop32]))
    trial: Any = SimpleNamespace(settings=Settings(dtype=dtype), run=run, whole=whole)
    assert adversary.is_rounding(trial, "vmap", gap=0.08) is expected


def test_an_engine_that_is_wrong_in_float32_is_found(monkeypatch: pytest.MonkeyPatch):
    right = VmapEngine.train

    def wrong(self: VmapEngine, rows: torch.Tensor, *more: Any) -> torch.Tensor:
        found = right(self, rows, *more)
        rows.mul_(1 + 1e-2)
        return found

    monkeypatch.setattr(adversary, "ENGINES", {"loop": LoopEngine, "vmap": VmapEngine})
    monkeypatch.setattr(VmapEngine, "train", wrong)
    assert "vmap engine ends" in found_by("engines", {**PLAIN, "dtype": "float32", "check": False})


def test_a_raw_error_and_a_message_of_two_lines_are_found(monkeypatch: pytest.MonkeyPatch):
    from coterie.errors import ModelError

    def fail(self: LoopEngine, *args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(LoopEngine, "train", fail)
    error: Exception = KeyError("0.weight")
    assert "KeyError" in found_by("run")
    error = ModelError("one\ntwo")
    assert "two" in found_by("run")
    error = ModelError("it cannot be trained; take another")
    assert not found_by("run")


def test_what_depends_on_ids_or_names_is_found(monkeypatch: pytest.MonkeyPatch):
    from coterie.methods.random_gossip import Gossip

    right = Gossip.exchange

    def wrong(self: Any, rnd: Any, state: Any) -> Any:
        state, info = right(self, rnd, state)
        from dataclasses import replace

        return replace(state, params=state.params + 1e-3 * rnd.ids[:, None]), info

    assert not found_by("relabeling")
    monkeypatch.setattr(Gossip, "exchange", wrong)
    assert "relabeled" in found_by("relabeling")


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ({"kind": "fesem", "clusters": 2}, "not for it"),
        ({"kind": "ifca", "clusters": 2, "start": "random_groups"}, "not for it"),
        ({"kind": "ifca", "clusters": 2}, "held"),
    ],
)
def test_first_memberships_that_a_server_draws_belong_to_positions(
    method: dict[str, Any], result: str
):
    """Clients with other ids are in other groups then, and end with other models."""
    found = adversary.try_case({**PLAIN, "methods": [method]}, ["relabeling"])
    assert [one.result for one in found if one.check == "relabeling"] == [result]


def test_a_study_that_reads_back_otherwise_is_found(monkeypatch: pytest.MonkeyPatch):
    right = config.format_study
    monkeypatch.setattr(
        config, "format_study", lambda *a, **k: right(*a, **k).replace("rounds = 2", "rounds = 3")
    )
    assert "another study" in found_by("study file")


def test_a_model_that_scores_otherwise_at_home_is_found(monkeypatch: pytest.MonkeyPatch):
    from coterie.runtime.models import Models

    right = Models.model

    def wrong(self: Models, *args: Any, **kwargs: Any) -> nn.Module:
        module = right(self, *args, **kwargs)
        with torch.no_grad():
            next(module.parameters()).mul_(0.9)
        return module

    assert not found_by("models")
    monkeypatch.setattr(Models, "model", wrong)
    assert "the model taken home of client 0 has loss" in found_by("models")


def test_a_finding_is_made_smaller(monkeypatch: pytest.MonkeyPatch):
    def fake(case: dict[str, Any], checks: Any = None) -> list[adversary.Outcome]:
        is_found = case.get("metrics") and "lr" in case.get("local", {})
        return [adversary.Outcome("run", "FOUND" if is_found else "held")]

    monkeypatch.setattr(adversary, "try_case", fake)
    case = {**PLAIN, "metrics": ["auroc", "f1"], "eval_every": 1}
    smaller = adversary.shrink(case, "run")
    assert smaller["local"] == {"lr": 0.1}
    assert len(smaller["metrics"]) == 1
    assert {"eval_every", "dtype"}.isdisjoint(smaller)


def test_a_trial_that_ends_its_process_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adversary, "run_trial", lambda number: __import__("os")._exit(3))
    monkeypatch.setattr(adversary, "draw_accepted", lambda number: (PLAIN, []))
    found = dict(adversary.hunt(5, trials=2, seconds=60.0))
    assert list(found) == [5, 6]
    assert "ended with 3" in found[5][0].said
