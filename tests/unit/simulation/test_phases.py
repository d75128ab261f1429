"""Runs whose data change: each round has the data of its phase, in training, in scores and in every evaluation."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tests.drifting import build

from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.dac import Dac
from coterie.net import fleet
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation.run import check_run, simulate
from coterie.studies import config

ROTATED = [{"kind": "rotation", "degrees": [0, 180]}]
MOVED = {"kind": "move", "at": 2, "share": 0.5}
TURNED = {"kind": "rotation", "degrees": [180], "at": 2}
MANY = {
    "dac": {"num_peers": 3, "tau": 5.0},
    "pens": {"num_sampled": 4, "num_kept": 2, "stage_one_rounds": 3},
    "panm-loss": {"num_peers": 2, "num_candidates": 2, "stage_one_rounds": 3, "interval": 1},
    "random": {"num_peers": 2},
    "fedavg": {},
    "ifca": {"clusters": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
}
LOCAL = LocalTraining(epochs=1, batch_size=5, lr=0.05)


def list_kinds(*fast):
    """The methods, of which some are tested each time."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.full) for one in MANY]


def settings(**more):
    return Settings(
        **{"rounds": 4, "local": LOCAL, "engine": "loop", "eval_every": 1, "check": False} | more
    )


def run(data, kind, more=None, **options):
    method = METHODS[kind](**MANY.get(kind, {}))
    return simulate(
        data, method, model="linear", settings=settings(**(more or {})), seed=1, **options
    )


def rows(table, **wanted):
    found = table
    for name, value in wanted.items():
        found = found[(found[name] == value).to_numpy()]
    return found


@pytest.mark.parametrize("kind", list_kinds("random", "fedavg"))
def test_rounds_before_the_change_are_those_without_drift(kind):
    plain = run(build(shift=ROTATED), kind).metrics
    moved = run(build(MOVED, shift=ROTATED), kind).metrics
    for one, other in zip(
        *(
            table[table["round"] < 2].astype(str).to_dict("list").values()
            for table in (plain, moved)
        ),
        strict=True,
    ):
        assert one == other
    after = [rows(table, round=2, metric="loss", split="train") for table in (plain, moved)]
    assert not np.array_equal(*(table["value"].to_numpy() for table in after))


@pytest.mark.parametrize("kind", list_kinds("random", "ifca"))
def test_rounds_after_the_change_are_those_of_a_run_on_the_new_data(kind):
    """A loop on data that are turned by hand goes on with the state of a loop on the first ones."""
    plain = build()
    tests = tuple(replace(one, x=one.x.rot90(2, (-2, -1))) for one in plain.tests)
    turned = replace(plain, x=plain.x.rot90(2, (-2, -1)), tests=tests)
    method, given = METHODS[kind](**MANY[kind]), settings(evaluate="final")

    def make_loop(data):
        task = make_task(data, method, "linear", given)
        record = Record(torch.zeros(8, dtype=torch.int64))
        return Loop(task, method, InMemory(task.ids, 8), given, Rng(1), record)

    first, second = make_loop(plain), make_loop(turned)
    while first.next_round < 2:
        first.run_next_round()
    second.state, second.next_round = first.state, 2
    while not second.is_finished:
        second.run_next_round()
    found = run(build(TURNED), kind, {"evaluate": "final"})
    expected = second.evaluate_final()
    assert torch.equal(found.params, expected)
    for split in ("train", "validation", "test"):
        for number in (2, 3):
            wanted = {"round": number, "split": split, "model": "current"}
            one, other = (
                rows(table, **wanted).set_index(["metric", "client"])["value"].to_dict()
                for table in (found.metrics, second.record.metrics)
            )
            assert one
            assert one == other
    pd.testing.assert_frame_equal(
        rows(found.edges, round=3).reset_index(drop=True).astype(str),
        rows(second.record.edges, round=3).reset_index(drop=True).astype(str),
    )


def test_the_best_model_is_chosen_among_those_of_the_last_phase():
    """Labels are exchanged for all: models of before predict them wrong, and were better on what is gone."""
    swaps = [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]]
    data = build({"kind": "label-swap", "swaps": swaps, "at": 3})
    done = run(data, "fedavg", {"rounds": 5, "local": replace(LOCAL, epochs=3)})
    losses = rows(done.metrics, split="validation", metric="loss", model="current")
    tests = rows(done.metrics, split="test", metric="accuracy")
    before = losses[losses["round"] == 2]["value"].mean()
    assert before < losses[losses["round"] == 3]["value"].mean()
    for client in range(8):
        own = rows(losses, client=client).set_index("round")["value"]
        best = own[own.index >= 3].idxmin()
        expected = rows(tests, client=client, round=best, model="current")["value"]
        found = rows(tests, client=client, model="best")["value"]
        assert found.tolist() == expected.tolist()


def test_the_tables_have_the_cluster_of_each_round_and_a_test_at_the_end_of_each_phase():
    data = build(MOVED, shift=ROTATED)
    table = run(data, "random", {"eval_every": 0, "validate_every": 4}).metrics
    for number in range(-1, 4):
        planted = (data if number < 2 else data.phases[0]).truth.cluster
        found = table[table["round"] == number].drop_duplicates("client").sort_values("client")
        assert found["cluster"].tolist() == planted[found["client"].tolist()].tolist()
    tested = sorted({*rows(table, split="test", metric="accuracy")["round"]})
    # The last round of a phase and the first are evaluated, whatever the grid is.
    assert tested == [1, 2, 3]
    current = rows(table, split="test", metric="accuracy", model="current")
    assert sorted({*current["round"]}) == [1, 2, 3]
    assert sorted({*rows(table, split="validation")["round"]}) == [-1, 1, 2, 3]


def test_the_oracle_knows_who_moved():
    data = build(MOVED, shift=ROTATED)
    edges = run(data, "oracle").edges
    for number in range(4):
        planted = (data if number < 2 else data.phases[0]).truth.cluster.numpy()
        own = edges[edges["round"] == number]
        assert len(own)
        assert (planted[own["reader"]] == planted[own["read"]]).all()


def test_all_clients_are_measured_on_the_new_data_though_some_take_no_part():
    done = run(build(TURNED), "fedavg", {"participation": 0.5})
    found = rows(done.metrics, round=2, split="validation", metric="loss")
    assert sorted(found["client"]) == list(range(8))
    peers = run(build(TURNED), "random", {"participation": 0.5})
    assert rows(peers.metrics, round=2, split="validation")["value"].notna().all()


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmap", "compiled"])
def test_engines_agree(engine):
    more = {"model": "linear", "seed": 1}
    one, other = (
        simulate(
            build(MOVED, TURNED, shift=ROTATED),
            Dac(num_peers=3),
            settings=settings(engine=name, dtype="float64"),
            **more,
        )
        for name in ("loop", engine)
    )
    torch.testing.assert_close(one.params, other.params, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "stop", [2, *(pytest.param(number, marks=pytest.mark.full) for number in (0, 1, 3))]
)
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path, stop):
    change = {**MOVED, "lasts": 1}

    def files(folder):
        names = ("metrics.parquet", "edges.parquet")
        return [(folder / name).read_bytes() for name in names]

    more = {"checkpoint_seconds": 0}
    whole = run(build(change, shift=ROTATED), "dac", more, folder=tmp_path / "whole")

    def stop_after(progress):
        if progress.round == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(build(change, shift=ROTATED), "dac", more, folder=tmp_path / "b", observer=stop_after)
    again = run(build(change, shift=ROTATED), "dac", more, folder=tmp_path / "b", resume=True)
    assert torch.equal(whole.params, again.params)
    assert files(tmp_path / "whole") == files(tmp_path / "b")


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("random", {"schedule": "asynchronous", "time": {"round_seconds": 1.0}}, "schedule is set"),
        ("random", {"schedule": "sequential"}, "schedule is set"),
        ("random", {"patience": 3}, "patience is set"),
        ("random", {"new_clients": 2}, "new_clients is set"),
        ("random", {"attacks": [{"kind": "noise", "clients": 1}]}, "attacks is set"),
        (
            "random",
            {"local": replace(LOCAL, dp={"clip": 1.0, "noise_multiplier": 1.0})},
            "local.dp is set",
        ),
        ("pooled", {}, "pooled pools the data of all clients"),
        ("random", {"rounds": 2}, "changes data in round 2, and rounds is 2"),
    ],
)
def test_what_cannot_follow_is_refused_before_anything_is_written(tmp_path, kind, more, said):
    method = METHODS[kind](**MANY.get(kind, {}))
    with pytest.raises(ConfigError) as caught:
        check_run(build(TURNED), method, "linear", settings(**more))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        run(build(TURNED), kind, more, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_blocks_and_tasks_that_follow_no_change_are_refused():
    with pytest.raises(ConfigError, match="split into blocks"):
        run(build(TURNED), "random", host=lambda *_: None)
    for host in (build(TURNED), build(TURNED).host([0])):
        with pytest.raises(ConfigError, match="follows no change of the data"):
            make_task(host, METHODS["random"](), "linear", settings())


def test_nodes_are_refused_before_they_have_keys(tmp_path):
    study = config.parse_study_text(
        """
        name = "moved"
        rounds = 4
        seeds = [0]
        model = "linear"
        methods = [{ kind = "random" }]
        [data]
        dataset = "digits"
        num_clients = 4
        train = 10
        drift = [{ kind = "rotation", degrees = [90], at = 2 }]
        """
    )
    with pytest.raises(ConfigError, match="follows no change of the data"):
        fleet.lay_out(tmp_path, study)
    assert not list(tmp_path.iterdir())
