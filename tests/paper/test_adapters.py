"""Merging and comparing low-rank adapters: what papers claim of it, where the answer is known."""

import pytest
import torch
from tests.contract.test_adapters import Adapted, train_plainly

import coterie
from coterie.functional.adapters import AdapterPair
from coterie.functional.aggregation import ReceivedModels
from coterie.functional.robust import make_rule
from coterie.models.layout import Slot

pytestmark = pytest.mark.paper
STEPS, RATE = 4, 0.5


def make_data(clients=3, flipped=(), samples=30, tested=0):
    """Clients of one problem of three classes; those of a second cluster have other labels for the same inputs.

    All of them have 30 further inputs, without labels. With `tested`, each has so many test samples
    more; else it holds out its own.
    """
    stream, each = torch.Generator().manual_seed(0), samples + tested
    x = torch.randn(clients * each, 6, generator=stream)
    y = (x @ torch.randn(6, 3, generator=stream)).argmax(1)
    owner = torch.arange(clients).repeat_interleave(each)
    for client in flipped:
        y[owner == client] = (y[owner == client] + 1) % 3
    clusters = [int(client in flipped) for client in range(clients)]
    own = torch.arange(len(x)) % each < samples
    test = (x[~own], y[~own], owner[~own].tolist()) if tested else None
    data = coterie.from_arrays(
        x[own], y[own], clients=owner[own].tolist(), clusters=clusters, test=test
    )
    unlabeled = torch.randn(30, 6, generator=stream)
    return data.with_public_set(coterie.from_arrays(unlabeled, torch.arange(30) % 3, num_clients=1))


def make_start(train_a=True):
    torch.manual_seed(1)  # noqa: TID251
    start = Adapted((6,), 3)
    torch.nn.init.zeros_(start.lora_B.weight)
    start.lora_A.weight.requires_grad_(train_a)
    return start


def product(module):
    return (module.lora_B.weight @ module.lora_A.weight).detach().double()


@pytest.mark.parametrize("train_a", [True, False], ids=["LoRA", "FFA-LoRA"])
def test_the_mean_of_both_factors_is_that_of_the_products_only_where_a_is_frozen(train_a):
    """Sun et al. 2024 (FFA-LoRA), of FedAvg on LoRA (FedIT)."""
    data, start = make_data(), make_start(train_a)
    local = coterie.LocalTraining(optimizer="sgd", lr=RATE, steps=STEPS, batch_size=90)
    settings = coterie.Settings(rounds=1, local=local, evaluate="final", engine="loop")
    found = coterie.simulate(data, coterie.FedAvg(), model=start, settings=settings)
    ends = [train_plainly(start, data, client, STEPS, RATE) for client in range(3)]
    weights = data.count_samples("train").double()
    mean = sum(w * product(one) for w, one in zip(weights / weights.sum(), ends, strict=True))
    gap = float((product(found.model(0)) - mean).norm() / mean.norm())
    if train_a:
        assert gap > 1e-3
    else:
        assert gap < 1e-6
        # and a message is as small as B and the head
        assert found.params.shape[1] == 8 * 2 + 8 * 3 + 3


def test_updates_of_lower_rank_are_merged_without_a_loss():
    """Bai et al. 2024 (FlexLoRA): two updates of rank 1 fit an adapter of rank 2, and their factors averaged apart do not meet it."""
    slots = (Slot("lora_A.weight", (2, 6), 0, 12), Slot("lora_B.weight", (5, 2), 12, 22))
    stream = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 22, generator=stream, dtype=torch.float64)
    pair = AdapterPair(*slots)
    a, b = (rows[:, slot.start : slot.stop].view(2, *slot.shape) for slot in slots)
    a[:, 1], b[:, :, 1] = 0, 0  # the unused half of the rank
    samples = torch.tensor([1.0, 3.0], dtype=torch.float64)
    mean = 0.25 * b[0] @ a[0] + 0.75 * b[1] @ a[1]
    merged = make_rule("product-mean")(ReceivedModels(rows, samples, None, rows[0], slots))
    new_a, new_b = pair.read(merged[None])
    torch.testing.assert_close(new_b[0] @ new_a[0], mean)
    apart_a, apart_b = (0.25 * one[0] + 0.75 * one[1] for one in (a, b))
    assert float((apart_b @ apart_a - mean).norm() / mean.norm()) > 0.1


def test_models_of_larger_products_count_more():
    """Cho et al. 2024 (HetLoRA): a client whose update is 9 times as large has 9 times the weight."""
    slots = (Slot("lora_A.weight", (2, 6), 0, 12), Slot("lora_B.weight", (5, 2), 12, 22))
    rows = torch.randn(1, 22, generator=torch.Generator().manual_seed(0)).repeat(2, 1).double()
    rows[1] *= 3
    merged = make_rule("norm-weighted")(
        ReceivedModels(rows, torch.ones(2).double(), None, rows[0], slots)
    )
    torch.testing.assert_close(merged, 0.1 * rows[0] + 0.9 * rows[1])


def test_adapters_of_peers_that_average_come_near_each_other():
    """Ghiasvand et al. 2025 (Dec-LoRA): gossip on A and B alone brings clients to consensus."""
    gaps = {}
    for name, method in {"gossip": coterie.Random(num_peers=3), "alone": coterie.Local()}.items():
        local = coterie.LocalTraining(optimizer="sgd", lr=0.1, steps=2, batch_size=90)
        settings = coterie.Settings(
            rounds=8, local=local, evaluate="final", engine="loop", check=False
        )
        run = coterie.simulate(make_data(6), method, model=make_start(), settings=settings)
        gaps[name] = float((run.params - run.params.mean(0)).norm(dim=1).mean())
    assert gaps["gossip"] < 0.5 * gaps["alone"]


@pytest.mark.full
def test_products_tell_who_solves_the_same_problem():
    """Two clusters with conflicting labels: DAC by products reads its own cluster, beyond chance (5 of 11)."""
    data = make_data(12, flipped=range(6, 12), samples=60)
    shares = {}
    for name, method in {
        "products": coterie.Dac(num_peers=3, similarity="cos_product"),
        "sketches": coterie.Dac(num_peers=3, similarity="cos_product", sketch=64),
        "agreement": coterie.Dac(num_peers=3, similarity="agreement"),
        "public": coterie.Dac(num_peers=3, similarity="public_agreement"),
        "random": coterie.Random(num_peers=3),
    }.items():
        local = coterie.LocalTraining(optimizer="sgd", lr=0.3, steps=5, batch_size=64)
        settings = coterie.Settings(
            rounds=10, local=local, evaluate="final", engine="loop", check=False
        )
        run = coterie.simulate(data, method, model=make_start(), settings=settings)
        late = run.edges[run.edges["round"] >= 5]
        shares[name] = float(((late["reader"] < 6) == (late["read"] < 6)).mean())
    assert min(shares[name] for name in ("products", "sketches", "public")) > 0.8
    assert shares["agreement"] > shares["random"] + 0.2
    assert shares["random"] < 0.6


@pytest.mark.slow
def test_trust_by_predictions_beats_averaging_everybody_and_nobody():
    """Wagner, Fan, Jaggi 2024: with few samples a client and two conflicting clusters; means of three seeds.

    By predictions for a public set, as there, and for the own data. KNEXA-FL (arXiv 2601.17133): matched
    peers are better than random ones.
    """
    methods = {
        "public": coterie.Dac(num_peers=3, similarity="public_agreement", aggregation="fedsim"),
        "random": coterie.Random(num_peers=3),
        "agreement": coterie.Dac(num_peers=3, similarity="agreement", aggregation="fedsim"),
        "everybody": coterie.FedAvg(),
        "nobody": coterie.Local(),
    }
    accuracy = dict.fromkeys(methods, 0.0)
    for name, method in methods.items():
        for seed in range(3):
            local = coterie.LocalTraining(optimizer="sgd", lr=0.3, steps=5, batch_size=16)
            settings = coterie.Settings(
                rounds=15, local=local, evaluate="final", engine="loop", check=False
            )
            data = make_data(12, flipped=range(6, 12), samples=24, tested=100)
            run = coterie.simulate(data, method, model=make_start(), settings=settings, seed=seed)
            tested = run.metrics[run.metrics["split"] == "test"]
            accuracy[name] += float(tested[tested["metric"] == "accuracy"]["value"].mean()) / 3
    for name in ("public", "agreement"):
        assert accuracy[name] > max(accuracy["nobody"], accuracy["random"]) + 0.04
        assert accuracy[name] > accuracy["everybody"] + 0.1


def test_what_is_shared_of_fedsa_is_averaged_and_b_stays_at_home():
    """Guo et al. 2024 (FedSA-LoRA): A is the mean of all after a round, and each client keeps the B that it trained."""
    data, start = make_data(), make_start()
    local = coterie.LocalTraining(optimizer="sgd", lr=RATE, steps=STEPS, batch_size=90)
    settings = coterie.Settings(
        rounds=1, local=local, evaluate="final", engine="loop", shared=["*lora_A*"]
    )
    run = coterie.simulate(data, coterie.FedAvg(), model=start, settings=settings)
    ends = [train_plainly(start, data, client, STEPS, RATE) for client in range(3)]
    weights = data.count_samples("train").double()
    mean = sum(
        w * one.lora_A.weight.double() for w, one in zip(weights / weights.sum(), ends, strict=True)
    )
    for client, end in enumerate(ends):
        found = run.model(client)
        torch.testing.assert_close(found.lora_A.weight.double(), mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.lora_B.weight, end.lora_B.weight, rtol=0, atol=1e-6)
    assert not torch.allclose(ends[0].lora_B.weight, ends[1].lora_B.weight, rtol=0, atol=1e-3)
