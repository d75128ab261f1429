"""What users write in Python: the main job, and their own model and data in ten lines or fewer."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import coterie as ct
from coterie.errors import ConfigError

rng = np.random.default_rng(0)
X = rng.normal(size=(240, 6)).astype(np.float32)
owners = np.repeat(np.arange(6), 40)
# odd clients disagree with even ones
Y = np.where(owners % 2 == 0, X[:, 0] > 0, X[:, 0] < 0).astype(np.int64)


class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )

    def forward(self, x):
        return self.layers(x)


def own_arrays(out):
    data = ct.from_arrays(X, Y, clients=owners, clusters=[0, 1, 0, 1, 0, 1])
    local = ct.LocalTraining(lr=0.02)
    gossip, oracle = ct.Random(num_peers=2), ct.Oracle(num_peers=2)
    methods = {"Gossip": gossip, "Oracle": oracle, "Alone": ct.Local()}
    study = ct.make_study(methods, seeds=[0], settings=ct.Settings(rounds=8, local=local))
    result = ct.run_study(study, federation=data, model=MyNet, out=out)
    ct.write_report(result.folder)
    return result


def own_dataset():
    dataset = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    data = ct.from_dataset(dataset, clients=owners)
    return ct.simulate(data, ct.Random(num_peers=2), model=MyNet, settings=ct.Settings(rounds=2))


def own_list_of_datasets():
    parts = [
        TensorDataset(torch.from_numpy(X[owners == i]), torch.from_numpy(Y[owners == i]))
        for i in range(6)
    ]
    data = ct.from_datasets(parts)
    return ct.simulate(data, ct.Random(num_peers=2), model=MyNet, settings=ct.Settings(rounds=2))


@pytest.mark.parametrize("example", [own_arrays, own_dataset, own_list_of_datasets])
def test_bringing_ones_own_model_and_data_takes_ten_lines_or_fewer(example):
    assert len(inspect.getsource(example).strip().splitlines()) - 2 <= 10


@pytest.mark.full
def test_arrays_with_client_ids_and_ones_own_module(tmp_path):
    """Clients that disagree about the labels: with the true clusters gossip helps, with everybody it harms."""
    result = own_arrays(tmp_path)
    mean = result.rows.set_index(["label", "cluster", "metric"])["mean"]
    assert mean["Oracle", "all", "accuracy"] > mean["Gossip", "all", "accuracy"] + 0.1
    assert (result.folder / "report.html").exists()


def test_a_dataset_and_a_list_of_datasets_give_the_same_run():
    one, other = own_dataset(), own_list_of_datasets()
    assert torch.equal(one.params, other.params)
    assert set(one.metrics["split"]) == {"train", "validation", "test"}


@pytest.mark.full
def test_the_study_of_the_command_line_is_one_call(tmp_path):
    study = ct.load_study(
        "rotated-digits", ["rounds=1", "seeds=1", "data.num_clients=4", "data.shift=[]"]
    )
    result = ct.run_study(study, out=tmp_path)
    assert set(result.rows["label"]) == {entry.label for entry in study.methods}


@pytest.mark.full
def test_what_was_given_in_python_is_asked_for_again(tmp_path):
    result = own_arrays(tmp_path)
    with pytest.raises(ConfigError, match=r"federation=\.\.\."):
        ct.resume_study(result.folder)
    data = ct.from_arrays(X, Y, clients=owners, clusters=[0, 1, 0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"model=\.\.\."):
        ct.resume_study(result.folder, federation=data)
    assert ct.resume_study(result.folder, federation=data, model=MyNet).rows.equals(result.rows)


def test_two_methods_of_one_kind_need_labels():
    with pytest.raises(ConfigError, match="give each a label"):
        ct.make_study([ct.Random(), ct.Random(num_peers=1)])
