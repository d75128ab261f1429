"""Attacks on runs: they find what a model remembers, and nothing where it saw nothing."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.engine.privacy import DPSGD
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError, DataError
from coterie.methods.registry import METHODS
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.studies import leakage
from coterie.studies.definition import make_study
from coterie.testing import tiny_federation


class Wide(nn.Sequential):
    """More parameters than samples: it can remember labels."""

    def __init__(self):
        super().__init__(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def noisy(clients=4, train=40):
    """Labels that cannot be learned, only remembered."""
    federation = tiny_federation(clients, train=train, features=(8,))
    labels = torch.from_numpy(Rng(1).generator("labels").integers(3, size=federation.y.shape))
    return replace(federation, y=labels.to(federation.y))


def attacked(lr, *kinds, private=None, epochs=15, shadows=6):
    local = LocalTraining(epochs=epochs, batch_size=10, optimizer="adam", lr=lr)
    settings = Settings(rounds=2, local=local, engine="vmap", evaluate="final", init="shared")
    study = make_study([METHODS[kind]() for kind in kinds], settings=settings, seeds=1)
    return list(
        leakage.audit_study(study, shadows=shadows, federation=noisy(), model=Wide, private=private)
    )


@pytest.mark.slow
def test_an_overfitted_model_is_found_out():
    found = attacked(0.02, "local", "random", "fedavg")
    assert [(one.label, one.attack) for one in found] == [
        (label, attack) for label in ("local", "random", "fedavg") for attack in ("loss", "lira")
    ]
    assert [one.target for one in found[::2]] == ["unpublished", "published", "published"]
    for one in found:
        assert one.auc_low > 0.7
        # by the loss alone, samples that are easy without being members come first
        if one.attack == "lira":
            assert one.tpr > 0.05
        assert one.auc_low <= one.auc <= one.auc_high
        assert one.epsilon is None


@pytest.mark.full
def test_a_model_that_never_saw_the_data_tells_nothing():
    for one in attacked(0.0, "random", epochs=1):
        assert one.auc == pytest.approx(0.5, abs=0.06)
        assert one.tpr < 0.05


@pytest.mark.slow
def test_noise_hides_what_was_remembered():
    found = attacked(0.02, "random", private=DPSGD(1.0, 8.0, 1e-3), epochs=3)
    plain, private = found[:2], found[2:]
    assert [one.noise_multiplier for one in found] == [None, None, 8.0, 8.0]
    assert private[0].epsilon is not None
    assert 0 < private[0].epsilon < 3
    for before, after in zip(plain, private, strict=True):
        assert after.auc == pytest.approx(0.5, abs=0.08)
        assert before.auc > after.auc + 0.05


def test_a_study_that_is_private_is_attacked_without_too():
    local = LocalTraining(epochs=1, batch_size=10, dp={"clip": 1.0, "noise_multiplier": 3.0})
    study = make_study(
        [METHODS["fedper"]()], settings=Settings(rounds=1, local=local, engine="vmap"), seeds=1
    )
    found = list(leakage.audit_study(study, shadows=6, federation=noisy(2, 10), model=Wide))
    assert [(one.noise_multiplier, one.target) for one in found] == [(None, "part"), (3.0, "part")]
    assert all(math.isnan(one.auc) for one in found)
    text = json.dumps(leakage.make_table(found), allow_nan=False)
    assert json.loads(text)[0]["auc"] is None


def test_the_leakage_of_a_model_that_is_not_finite_is_not_defined():
    """Equal losses would be an AUC of 0.5, that of a method that reveals nothing."""
    notes: list[str] = []
    local = LocalTraining(epochs=1, batch_size=10, optimizer="sgd", lr=1e30)
    settings = Settings(rounds=1, local=local, engine="vmap", evaluate="final", check=False)
    study = make_study([METHODS["local"]()], settings=settings, seeds=1)
    found = list(
        leakage.audit_study(
            study, shadows=6, federation=noisy(2, 10), model=Wide, notify=notes.append
        )
    )
    assert [one.attack for one in found] == ["loss", "lira"]
    assert all(math.isnan(value) for one in found for value in (one.auc, one.tpr, one.score))
    assert notes[-1].endswith("a published model has no finite loss; its leakage is not defined")


def test_each_sample_is_a_member_of_one_run_of_a_pair():
    federation = noisy(3, 9)
    member = leakage.draw_halves(federation, 6, Rng(0))
    train = federation.split == 0
    for pair in range(3):
        assert torch.equal(member[2 * pair] ^ member[2 * pair + 1], train)
        assert member[2 * pair].sum(1).tolist() == [4, 4, 4]
    assert not torch.equal(member[0], member[2])


def test_bad_input_is_refused():
    study = make_study([METHODS["local"]()], seeds=1)
    with pytest.raises(ConfigError, match="shadows is 5; expected an even number, 6 or more"):
        next(leakage.audit_study(study, shadows=5))
    hidden = make_study([METHODS["fedavg"]()], settings=Settings(secure_aggregation=True), seeds=1)
    with pytest.raises(ConfigError, match="with fedavg nobody sees a single one"):
        next(leakage.audit_study(hidden, federation=noisy(4, 8), model="linear"))
    single = noisy(2, 9)
    split = single.split.clone()
    split[1, 1:9] = -1
    with pytest.raises(DataError, match="client 1 has one training sample; expected two or more"):
        leakage.draw_halves(replace(single, split=split), 6, Rng(0))
