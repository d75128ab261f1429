"""FedDrift (`methods/feddrift.py`): who drifts starts a model, equal models are merged, and both help."""

import torch

from coterie.data.build import DataConfig, build_federation
from coterie.exchange.base import Message
from coterie.functional.clustering import compute_loss_distances, merge_close
from coterie.methods.fedavg import FedAvg
from coterie.methods.feddrift import FedDrift, FedDriftClusters
from coterie.methods.ifca import Ifca
from coterie.methods.server import ServerContext
from coterie.rng import Rng
from coterie.runtime.settings import LocalTraining, Settings
from coterie.simulation.run import simulate
from coterie.testing.tiny import build_task, tiny_federation

CLIENTS = 8
SWAP = {"kind": "label-swap", "swaps": [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]]}
"""Another concept: five pairs of digits have each other's name."""
THIRD = {"kind": "label-swap", "swaps": [[[0, 2], [1, 3], [4, 6], [5, 7]]]}

# ---------------------------------------------------------------- staggered drift


def run_staggered(method, rounds=24, second=SWAP):
    """Clients 0 and 1 get another concept in round 6, clients 2 and 3 the same or a third in 12."""
    drift = [{**SWAP, "at": 6, "clients": [0, 1]}, {**second, "at": 12, "clients": [2, 3]}]
    data = build_federation(
        DataConfig("digits", num_clients=CLIENTS, train=80, validation=20, drift=drift), 0
    )
    chosen = Settings(
        rounds=rounds,
        eval_every=1,
        evaluate="final",
        check=False,
        local=LocalTraining(epochs=3, batch_size=10, optimizer="adam", lr=0.01),
    )
    result = simulate(data, method, model="linear", settings=chosen, seed=1)
    table = result.metrics[result.metrics["model"] == "current"]
    tests = table[(table["split"] == "test") & (table["metric"] == "accuracy")]
    labels = table[(table["split"] == "train") & (table["metric"] == "label")]
    shape = {"index": "round", "columns": "client", "values": "value"}
    return tests.pivot(**shape), labels.pivot(**shape)


def test_each_drift_gets_a_model_and_the_second_one_joins_the_first():
    """Time steps are of three rounds, so that drifts are found when they come, and merged after one."""
    accuracy, label = run_staggered(FedDrift(delta=1.0, every=3))
    assert (label.loc[5] == 0).all(), "nobody drifts before the data do"
    # in the time step of the first drift, each of the two alone
    assert len({*label.loc[6, [0, 1]], label.loc[6, 4]}) == 3
    # merged at the next one
    assert label.loc[9, 0] == label.loc[9, 1] != label.loc[9, 4]
    # the second two find the model that is there
    assert set(label.loc[12, [0, 1, 2, 3]]) == {label.loc[9, 0]}
    assert set(label.loc[12:, [4, 5, 6, 7]].to_numpy().ravel()) == {0}
    before, end = accuracy.loc[5].mean(), accuracy.loc[23]
    assert end[[0, 1, 2, 3]].mean() > before - 0.06
    assert end[[4, 5, 6, 7]].mean() > before - 0.06


def test_as_many_models_as_concepts_are_found_where_a_fixed_number_is_too_few():
    """IFCA with two models, and three concepts; FedAvg has one model for all."""
    worst = {}
    for method in (FedDrift(delta=1.0, every=3), Ifca(clusters=2), FedAvg()):
        accuracy, label = run_staggered(method, second=THIRD)
        assert accuracy.loc[5].mean() > 0.9
        worst[method.kind] = accuracy.loc[23].min()
        if method.kind == "feddrift":
            assert [label.loc[23, client] for client in (1, 3, 5)] == [
                label.loc[23, client] for client in (0, 2, 4)
            ]
            assert len({*label.loc[23]}) == 3
    assert worst["feddrift"] > 0.85
    assert max(worst["ifca"], worst["fedavg"]) < 0.6


def test_a_rise_below_delta_is_no_drift():
    _, label = run_staggered(FedDrift(delta=50.0, every=3), rounds=14)
    assert (label == 0).all(axis=None)


# ---------------------------------------------------------------- a time step, by hand


def step(method, label, used, chosen, losses, drifted=None, ids=None, samples=None, index=10):
    """The server's state after the first round of a time step; models are their number, 10, 20, ..."""
    population, number = len(label), len(chosen)
    models = torch.arange(method.most, dtype=torch.float64)[:, None].expand(-1, 3).clone() * 10
    shared = FedDriftClusters(models, models[:, :0], torch.tensor(label), torch.tensor(used))
    fields = {
        "samples": torch.tensor(samples or [1.0] * number, dtype=torch.float64),
        "label": torch.tensor(chosen),
        "drifted": torch.tensor(drifted or [0] * number),
        "model_losses": torch.tensor(losses, dtype=torch.float64),
    }
    came = torch.arange(number, dtype=torch.float64)[:, None].expand(-1, 3) + 100
    message = Message(came, fields, torch.tensor(ids or list(range(number))))
    task = build_task(tiny_federation(population))
    context = ServerContext(index, Rng(0), task.layout, population)
    return method.aggregate(context, shared, message)


def test_the_distance_is_what_a_model_loses_on_the_others_data():
    """By hand: on data 0 model 1 loses 0.3 more than model 0; on data 1 model 0 gains, which is none."""
    losses = torch.tensor([[1.0, 1.3, 3.0], [1.5, 2.0, 2.1], [4.0, 2.4, 2.0]])
    wanted = [[0.0, 0.3, 2.0], [0.3, 0.0, 0.4], [2.0, 0.4, 0.0]]
    assert torch.allclose(compute_loss_distances(losses), torch.tensor(wanted), atol=1e-6)


def test_a_group_is_as_close_in_all_its_pairs():
    """Complete linkage: 0 and 1, 1 and 2 are close, and 0 and 2 are not."""
    chain = torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.2], [0.9, 0.2, 0.0]])
    assert merge_close(chain, 0.3).tolist() == [0, 0, 1]
    assert merge_close(chain, 0.05).tolist() == [0, 1, 2]
    assert merge_close(chain, 0.9).tolist() == [0, 0, 0]


def test_models_that_do_alike_become_the_mean_of_what_their_clients_return():
    """Clients 0 (3 samples) and 1 have models 0 and 2; client 3 does not take part and has model 2."""
    new = step(
        FedDrift(delta=0.2, most=4),
        label=[0, 2, 3, 2],
        used=[9, -1, 9, 9],
        chosen=[0, 2, 3],
        losses=[[1.0, 1.1, 5.0], [1.2, 1.1, 5.0], [5.0, 5.0, 1.0]],
        samples=[3.0, 1.0, 1.0],
    )
    assert new.label.tolist() == [0, 0, 3, 0]
    assert new.models[:, 0].tolist() == [100.25, 10.0, 20.0, 102.0]
    assert new.used.tolist() == [10, -1, -1, 10], "the place of the other one is empty"


def test_the_loss_of_a_cluster_weighs_its_clients_by_samples():
    """Model 2 is 1.0 worse for client 0 (1 sample) and as good for client 1 (9): 0.1 on the whole."""
    given = {
        "label": [0, 0, 1],
        "used": [9, 9, -1],
        "chosen": [0, 0, 1],
        "losses": [[1.0, 2.0], [1.0, 1.0], [1.0, 1.0]],
        "samples": [1.0, 9.0, 1.0],
    }
    assert step(FedDrift(delta=0.11, most=3), **given).label.tolist() == [0, 0, 0]
    assert step(FedDrift(delta=0.09, most=3), **given).label.tolist() == [0, 0, 1]


def test_who_drifts_has_a_model_alone_that_is_not_merged_yet():
    """Client 1 alone; its losses do not count for model 0, nor is its new model compared."""
    new = step(
        FedDrift(delta=0.2, most=3),
        label=[0, 0, 0],
        used=[9, -1, -1],
        chosen=[0, 0, 0],
        losses=[[1.0], [9.0], [1.0]],
        drifted=[0, 1, 0],
    )
    assert new.label.tolist() == [0, 1, 0]
    assert new.models[:, 0].tolist() == [101.0, 101.0, 20.0]
    assert new.used.tolist() == [10, 10, -1]


def test_a_place_is_taken_from_the_model_that_had_no_client_for_longest():
    """Models 1 and 2 serve nobody; the third that drifts finds no place, and takes the best one."""
    new = step(
        FedDrift(delta=0.2, most=3),
        label=[0, 0, 0, 0],
        used=[9, 7, 4],
        chosen=[0, 0, 0, 0],
        losses=[[1.0, 9.0, 9.0]] * 4,
        drifted=[1, 0, 1, 1],
    )
    assert new.label.tolist() == [2, 0, 1, 0]


def test_a_model_without_clients_stays_for_a_concept_that_comes_back():
    new = step(FedDrift(most=3), [0, 0], [9, 4, -1], [0, 0], [[1.0, 9.0]] * 2)
    assert new.used.tolist() == [10, 4, -1]
    back = step(FedDrift(most=3), [0, 0], [9, 4, -1], [0, 1], [[1.0, 9.0], [9.0, 1.0]])
    assert back.label.tolist() == [0, 1]
