"""The built-in studies: each can be read, its data can be made, its methods can start, its rows are the paper's."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from coterie.data.build import build_federation, build_from_sources
from coterie.data.datasets import load_dataset
from coterie.data.source import Samples, Source
from coterie.errors import ModelError
from coterie.models.layout import build_model
from coterie.papers import numbers
from coterie.rng import Rng
from coterie.runtime.task import make_task
from coterie.studies import config
from coterie.studies.sweep import expand_sweep

FORMS = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "emnist": ((1, 28, 28), 47),
    "tiny_imagenet": ((3, 64, 64), 200),
    "landmarks-user-160k": ((3, 64, 64), 30),
    "inaturalist-user-120k": ((3, 64, 64), 30),
}
USERS = 20
NAMES = list(config.find_builtin_studies())


@lru_cache
def source(name):
    """A small stand-in of the form of a dataset; the bundled ones are themselves."""
    if name not in FORMS:
        return load_dataset(name, rng=Rng(0), samples=1200)
    shape, classes = FORMS[name]

    def part(size):
        users = {"user_id": torch.arange(size) % USERS}
        return Samples(
            torch.zeros(size, *shape, dtype=torch.uint8), torch.arange(size) % classes, users
        )

    return Source(name, part(2000), part(600), classes)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_study_can_start(name):
    """Its clients get few samples each; its first method takes a look at the model; clusters have the paper's names."""
    study = config.load_study(name)
    data = study.data
    if "hospital" in name or "heart" in name:  # bundled, and small
        federation = build_federation(data, 0)
    else:
        data = replace(
            data, train=2, validation=1, test_samples=1 if study.data.test == "client" else None
        )
        federation = build_from_sources(data, [source(one) for one in data.dataset_names], Rng(0))
        assert len(federation) == (study.data.num_clients or USERS)
    if study.paper is not None:
        published = {
            p.cluster
            for p in numbers.load_published(study.paper)
            if p.metric in ("accuracy", "mse")
        }
        # natural users are of no cluster
        planted = federation.truth.names if federation.truth is not None else ()
        assert published - {"all", "clusters"} <= set(planted)
    entry = study.methods[0]
    # torchvision, and files with weights
    if not study.model.kind.startswith(("resnet", "mobilenet", "squeezenet")):
        make_task(
            federation, entry.method, study.model.kind, replace(entry.settings, engine="loop"),
            follows_phases=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_is(name):
    study = config.load_study(name)
    assert study.name == name
    assert study.description.endswith((".", "?"))
    assert study.paper == numbers.EXPERIMENTS.get(name)
    if study.paper is not None:
        named = {entry.paper for entry in study.methods if entry.paper}
        rows = {one.row for one in numbers.load_published(study.paper)}
        assert named == rows, "every published row has its method"


@pytest.mark.full
def test_a_sweep_changes_something_at_every_point():
    sweeps = [study for study in map(config.load_study, NAMES) if study.sweep]
    assert sweeps
    for sweep in sweeps:
        studies = expand_sweep(sweep)
        points = {
            config.hash_study(study.select_run(entry.label, 0))
            for study in studies
            for entry in study.methods
        }
        runs = sum(len(study.methods) for study in studies)
        assert len(points) == runs > len(sweep.methods), sweep.name


def test_every_published_experiment_has_its_study():
    assert set(numbers.EXPERIMENTS) <= set(NAMES)


def test_the_synthetic_study_is_made_at_full_size():
    study = config.load_study("similarity/synthetic")
    federation = build_federation(study.data, 0)
    assert len(federation) == 99
    assert federation.split.eq(0).sum(1).eq(50).all()
    assert federation.split.eq(1).sum(1).eq(100).all()
    assert sorted(federation.truth.cluster.bincount().tolist()) == [33, 33, 33]


def test_pretrained_weights_that_are_not_there_are_asked_for(monkeypatch):
    monkeypatch.delenv("COTERIE_RESNET18", raising=False)
    with pytest.raises(
        ModelError, match="COTERIE_RESNET18 is not set; expected a safetensors file"
    ):
        build_model("resnet-18-pretrained", (3, 32, 32), 100)


@pytest.mark.parametrize("name", ["four-hospitals", "flamby-heart-disease"])
def test_the_studies_of_hospitals_have_them_by_name(name):
    """No planted clusters; the study with folds tests every patient five times."""
    study = config.load_study(name)
    federation = build_federation(study.data, 0)
    assert federation.client_names == ("cleveland", "hungary", "long-beach-va", "switzerland")
    assert federation.truth is None
    assert (study.data.folds, len(study.seeds)) == {
        "four-hospitals": (5, 25),
        "flamby-heart-disease": (None, 5),
    }[name]
    assert {"local", "pooled"} < {entry.kind for entry in study.methods}


def test_flambys_rounds_are_those_of_its_code():
    """100 updates a round; 50 epochs in all of a mean hospital: 486 rows, 4 hospitals, whole batches of 4."""
    study = config.load_study("flamby-heart-disease")
    assert study.settings.rounds == (486 // 4 // 4) * 50 // 100
    assert study.settings.local.steps == 100
    for label in ("Pooled", "Local"):
        settings = study.find_method(label).settings
        assert (settings.rounds, settings.local.epochs, settings.local.steps) == (1, 50, None)
        assert settings.local.optimizer == "adam"
