"""Who attacks, what becomes of the results, and what acceptance leaves of three attacks that ruined runs."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from tests.selection import first_only

from coterie.data.build import DataConfig, build_federation
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.attacking import Attack, AttackContext
from coterie.functional import metrics
from coterie.methods import METHODS
from coterie.methods.base import Round
from coterie.results.summary import summarize_study
from coterie.rng import Rng
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.settings import Settings
from coterie.simulation import attackers
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation, tiny_settings


def groups(*attacks, data=None, seed=0):
    return [
        ids.tolist()
        for _, ids in attackers.choose_attackers(data or tiny_federation(10), attacks, seed)
    ]


def test_shares_counts_names_and_numbers_choose_attackers():
    named = dataclasses.replace(tiny_federation(10), client_names=tuple("abcdefghij"))
    assert groups(Attack("noise", ["j", "c", 1]), data=named) == [[1, 2, 9]]
    share, count = groups(Attack("noise", 0.3), Attack("copy", 4))
    assert (len(share), len(count)) == (3, 4)
    assert not set(share) & set(count)
    assert groups(Attack("noise", 0.3)) == [share], "the first draw does not depend on the second"
    assert groups(Attack("noise", 0.3), seed=1) != [share]


def test_two_clients_are_honest_at_least():
    assert groups(Attack("noise", 0.8)) == groups(Attack("copy", 8))
    assert len(groups(Attack("noise", list(range(8))))[0]) == 8


def test_attackers_are_drawn_before_the_first_round_by_the_number_of_the_attack():
    """A seed gives the same attackers for ever: the keys of its streams are fixed."""
    stream = Rng(5).at_round(-1).generator("attackers.0")
    assert groups(Attack("noise", 3), seed=5) == [sorted(stream.permutation(10)[:3].tolist())]
    second = Rng(5).at_round(-1).generator("attackers.1")
    free = [row for row in range(10) if row not in (2, 7)]
    chosen = sorted(free[place] for place in second.permutation(8)[:3])
    assert groups(Attack("copy", [7, 2]), Attack("noise", 3), seed=5) == [[2, 7], chosen]


@pytest.mark.parametrize(
    ("attacks", "told"),
    [
        ([Attack("noise", [12])], r"attacks\[0\]: clients is 12; expected 0 to 9"),
        ([Attack("noise", ["x"])], r"attacks\[0\]: clients is 'x'"),
        ([Attack("noise", [1]), Attack("copy", [1])], r"attacks\[1\].*client 1"),
        ([Attack("noise", [1, 1])], r"attacks\[0\]: clients is \(1, 1\); .* attack once; client 1"),
        ([Attack("noise", 9)], "of 10 clients 1 would be honest; expected two or more"),
        ([Attack("noise", 5), Attack("copy", 6)], "of 10 clients 0 would be honest"),
        ([Attack("noise", 0.01)], "at least one of 10 clients"),
        ([Attack("noise", 1.5)], "a share below 1, a whole number, or a list"),
    ],
)
def test_who_cannot_attack_is_told_in_a_line(attacks, told):
    with pytest.raises(ConfigError, match=told) as error:
        groups(*attacks)
    assert "\n" not in str(error.value)


def test_one_attacker_is_enough_and_two_honest_clients_too():
    """Of ten clients a tenth, one, and eight."""
    for share, count in ((0.1, 1), (1, 1), (8, 8)):
        (rows,) = groups(Attack("noise", share))
        assert len(rows) == len(set(rows)) == count


def test_labels_flip_in_the_training_data_of_those_who_flip_them_alone():
    data = tiny_federation(4, classes=3)
    attack = Attack("label-flip", [1])
    flipped = attackers.flip_labels(data, [(attack, torch.tensor([1]))])
    train = data.split[1] == 0
    assert torch.equal(flipped.y[1][train], 2 - data.y[1][train])
    assert torch.equal(flipped.y[1][~train], data.y[1][~train])
    assert torch.equal(flipped.y[[0, 2, 3]], data.y[[0, 2, 3]])
    with pytest.raises(ConfigError, match="not one class a sample"):
        attackers.flip_labels(tiny_federation(4, kind="labels"), [(attack, torch.tensor([1]))])


FLIP = [{"kind": "sign-flip", "clients": [0, 3]}]


def test_results_are_of_the_honest_and_say_how_much_attackers_weigh():
    """Everybody reads everybody: of six models with equal weights two are the attackers'; of five others, two are."""
    extra = ["reductions", "maxima"]
    given = tiny_settings(attacks=FLIP, eval_every=1, metrics=extra)
    run = simulate(tiny_federation(), METHODS["random"](), model="linear", settings=given, seed=3)
    assert sorted(run.metrics["client"].unique()) == [1, 2, 4, 5]
    assert sorted(run.edges["reader"].unique()) == [0, 1, 2, 3, 4, 5]
    tests = select_final_tests(run.metrics)
    means = {
        str(name): values.tolist()
        for name, values in tests.groupby("metric", observed=True)["value"]
    }
    assert means[metrics.ATTACKER_WEIGHT.name] == pytest.approx([1 / 3] * 4)
    assert means[metrics.ATTACKER_READS.name] == pytest.approx([2 / 5] * 4)
    weighted = means[metrics.ACCURACY_SAMPLE_WEIGHTED.name]
    assert weighted == pytest.approx([sum(means["accuracy"]) / 4] * 4), (
        "test sets are of equal size"
    )


STUDY = """
name = "s"
rounds = 2
seeds = [3]
attacks = [{ kind = "sign-flip", clients = [0, 3] }]
data = { dataset = "coterie.testing:tiny_federation" }
model = { kind = "linear" }
methods = [{ kind = "random" }, { kind = "fedavg" }]
"""


def test_a_summary_shows_the_weight_of_attackers_and_the_results_of_the_honest(tmp_path):
    """A server has no mixing weights to tell of; its attackers are out of the means all the same."""
    study = run_study(config.parse_study_text(STUDY), out=tmp_path)
    rows = [row for row in summarize_study(study.folder)["rows"] if row["cluster"] == "all"]
    told = {(row["label"], row["metric"]): row["mean"] for row in rows}
    assert told["random", "attacker_weight"] == pytest.approx(1 / 3)
    assert ("fedavg", "attacker_weight") not in told
    for label in ("random", "fedavg"):
        tests = select_final_tests(
            pd.read_parquet(study.folder / label / "seed-3" / "metrics.parquet")
        )
        honest = tests[tests["metric"] == "accuracy"]
        assert sorted(honest["client"]) == [1, 2, 4, 5]
        assert told[label, "accuracy"] == pytest.approx(float(honest["value"].mean()))


def test_without_attacks_and_acceptance_nothing_of_them_is_in_a_run():
    run = simulate(
        tiny_federation(), METHODS["random"](), model="linear", settings=tiny_settings(), seed=3
    )
    assert not {"refused", "attacker_weight", "passes"} & {
        *map(str, run.metrics["metric"].unique())
    }
    assert "refused" not in run.edges["purpose"].cat.categories


def test_refused_models_cost_their_bytes_and_weigh_nothing():
    given = tiny_settings(attacks=FLIP, acceptance={"worse": 1.0})
    run = simulate(tiny_federation(), METHODS["random"](), model="linear", settings=given, seed=3)
    refused = run.edges[run.edges["purpose"] == "refused"]
    assert len(refused)
    assert set(refused["weight"]) == {0.0}
    assert bool((refused["bytes"] > 0).all())
    rounds = run.metrics[run.metrics["metric"] == "refused"]
    honest = refused[~refused["reader"].isin([0, 3])]
    assert rounds["value"].sum() == len(honest)


@pytest.mark.parametrize(
    ("kind", "attack"),
    [
        ("random", "copy"),
        *(
            pytest.param(kind, attack, marks=pytest.mark.full)
            for kind in ("random", "dac", "panm-grad")
            for attack in ("copy", "noise")
            if (kind, attack) != ("random", "copy")
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, kind, attack):
    """Quarantine, own steps and what free riders hold are in the checkpoint."""
    given = tiny_settings(
        acceptance={"worse": 1.0},
        attacks=[{"kind": attack, "clients": 2}],
        rounds=6,
        patience=3,
        checkpoint_seconds=0.0,
    )

    class Stop(Exception):
        pass

    def stop(step):
        if step.round == 2:
            raise Stop

    def go(folder, **more):
        method = METHODS[kind](num_peers=2)
        return simulate(
            tiny_federation(), method, model="linear", settings=given, seed=3, folder=folder, **more
        )

    whole = go(tmp_path / "whole")
    with pytest.raises(Stop):
        go(tmp_path / "parts", observer=stop)
    parts = go(tmp_path / "parts", resume=True)
    assert torch.equal(whole.params, parts.params)
    for name in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (
            tmp_path / "parts" / name
        ).read_bytes(), name
    assert "refused" in whole.edges["purpose"].cat.categories


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"acceptance": {"wors": 2.0}}, r"acceptance: .*'wors'"),
        ({"acceptance": {"worse": 0.1}}, "worse is 0.1"),
        ({"attacks": [{"kind": "noise"}]}, r"attacks\[0\]: clients is missing"),
        ({"attacks": FLIP, "schedule": "sequential"}, "'synchronous'"),
        ({"acceptance": True, "schedule": "sequential"}, "'synchronous'"),
        ({"attacks": FLIP, "new_clients": 2}, "no new_clients with it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        Settings(**given)


def test_a_study_file_says_both_and_is_written_as_it_was_read():
    text = """
    acceptance = true
    attacks = [{ kind = "noise", clients = 0.1, samples = 1000 }]
    [data]
    dataset = "digits"
    [[methods]]
    kind = "dac"
    [[methods]]
    kind = "random"
    acceptance = { clip = 5 }
    [[methods]]
    kind = "pens"
    acceptance = false
    """
    study = config.parse_study_text(text)
    assert config.parse_study_text(config.format_study(study)) == study
    rules = [entry.settings.acceptance_rules for entry in study.methods]
    assert [None if one is None else one.clip for one in rules] == [3.0, 5.0, None]
    assert study.settings.attack_list == (Attack("noise", 0.1, samples=1000.0),)
    off = config.parse_study_text(
        text, overrides=["acceptance=false", "methods.random.acceptance=none"]
    )
    assert [entry.settings.acceptance for entry in off.methods] == [False, None, False]


# ---------------------------------------------------------------- what ruined runs


def huge_once(seen: AttackContext):
    """A model of 1e30, in round 3 alone."""
    return torch.full_like(seen.models, 1e30) if seen.round == 3 else seen.models


RUINS = {
    "1e30 once": {"kind": f"{__name__}:huge_once", "clients": 1},
    "-5 times the model": {"kind": "sign-flip", "clients": 1},
    "2^62 samples of noise": {"kind": "noise", "clients": 1, "samples": 2**62},
}


@pytest.fixture(scope="module")
def digits():
    return build_federation(DataConfig("digits", num_clients=6, train=60, validation=30), 0)


def accuracy(data, **given):
    """The last models of the honest, in DAC of one cluster."""
    local = LocalTraining(epochs=2, lr=0.01)
    settings = Settings(rounds=6, local=local, engine="loop", evaluate="final", **given)
    run = simulate(data, METHODS["dac"](num_peers=3), model="linear", settings=settings, seed=0)
    tests = select_final_tests(run.metrics)
    return 100 * float(tests[tests["metric"] == "accuracy"]["value"].mean())


@pytest.mark.full
@pytest.mark.parametrize("what", first_only(list(RUINS), slow=True))
def test_one_member_ruins_a_run_that_accepts_everything_and_not_one_that_judges(digits, what):
    unharmed = accuracy(digits)
    assert unharmed > 80
    assert accuracy(digits, attacks=[RUINS[what]]) < unharmed - 10
    assert accuracy(digits, attacks=[RUINS[what]], acceptance=True) > unharmed - 3
    assert accuracy(digits, acceptance=True) > unharmed - 1


@pytest.mark.full
@pytest.mark.parametrize("participation", [0.2, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["random", "dac"])
def test_honest_clients_that_were_in_no_cohort_have_no_share_of_attackers(
    kind, seed, participation
):
    """2 of 10 clients a round, two rounds: most honest ones mix nothing, and the others have the mean of their rounds."""
    settings = Settings(
        rounds=2,
        participation=participation,
        attacks=({"kind": "sign-flip", "clients": 1},),
        local=LocalTraining(epochs=1, batch_size=4),
    )
    run = simulate(
        tiny_federation(num_clients=10),
        METHODS[kind](),
        model=lambda: torch.nn.Linear(4, 3),
        seed=seed,
        settings=settings,
    )
    share = run.metrics[run.metrics["metric"] == metrics.ATTACKER_WEIGHT.name]
    by_round = share[(share["split"] == "train") & (share["round"] >= 0)]
    final = share[share["split"] == "test"].set_index("client")["value"]
    assert len(final) in (0, 9)  # honest clients, where any mixed at all
    expected = by_round.groupby("client")["value"].mean().reindex(final.index)
    assert np.allclose(final.to_numpy(float), expected.to_numpy(float), equal_nan=True)


def make_deep():
    """Three layers: products of large weights overflow."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )  # fmt: skip


def test_honest_clients_whose_models_an_attack_made_worthless_are_named():
    """One round, so that nobody trains the ruined average: it has no finite output, and that is said."""
    result = simulate(
        tiny_federation(), METHODS["fedavg"](), model=make_deep,
        settings=tiny_settings(
            rounds=1, dtype="float32", evaluate="final",
            attacks=[{"kind": "noise", "clients": [1, 5], "strength": 1e18}],
        ),
        seed=1,
    )  # fmt: skip
    tests = select_final_tests(result.metrics)
    assert tests.loc[(tests["metric"] == "accuracy").to_numpy(), "value"].isna().all()
    assert result.diverged == (0, 2, 3, 4)
    assert "4 of 6 clients" in result.facts()[1]["diverged"]


def test_an_attackers_share_is_of_the_whole_weight_whatever_its_sum():
    """By hand: 1 of 1 + 2 + 1; an attacker that did not arrive, and an empty slot, weigh nothing."""
    extension = attackers.AttackExtension(torch.tensor([False, False, True]), METHODS["random"]())
    info = {
        "peers": torch.tensor([[1, 2], [2, -1], [2, 1]]),
        "weights": torch.tensor([[2.0, 1.0], [3.0, 9.0], [1.0, 4.0]]),
        "own_weight": torch.tensor([1.0, 1.0, 0.0]),
        "arrived": torch.tensor([[True, True], [True, False], [False, True]]),
    }
    # The round itself is not looked at.
    found = extension.finish_round(object.__new__(Round), torch.arange(3), info)
    assert found[metrics.ATTACKER_WEIGHT.name].tolist() == [0.25, 0.75, 0.0]
