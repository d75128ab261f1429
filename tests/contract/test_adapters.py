"""Rules and similarities of adapters keep the promises of methods, and are found by every family of methods."""

import copy
import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from tests.contract.test_aggregation_options import KINDS, OPTIONS
from tests.selection import first_only, full
from torch import nn

import coterie
from coterie.data.federation import TRAIN
from coterie.errors import ConfigError
from coterie.functional.aggregation import view_tensors
from coterie.methods import METHODS as METHODS_BY_KIND
from coterie.models.layout import NamedModel
from coterie.testing import check_method
from coterie.testing.tiny import tiny_federation, tiny_settings

RULE = {"aggregation": "product-mean"}


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a head."""

    def __init__(self, features, outputs):
        super().__init__()
        inputs = math.prod(features)
        self.frozen = nn.Linear(inputs, 8)
        self.frozen.requires_grad_(False)
        self.lora_A = nn.Linear(inputs, 2, bias=False)
        self.lora_B = nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.tanh(self.frozen(x) + self.lora_B(self.lora_A(x))))


def adapted(features, outputs):
    return Adapted(features, outputs)


MODEL = NamedModel(f"{__name__}:adapted")
METHODS = [
    coterie.Random(num_peers=2, **RULE),
    coterie.FedAvg(**RULE),
    full(coterie.Dac(num_peers=2, similarity="cos_product", **RULE)),
    full(coterie.Dac(num_peers=2, similarity="agreement")),
    full(coterie.Random(num_peers=2, aggregation="norm-weighted")),
    full(coterie.Pens(num_sampled=3, num_kept=1, num_peers=2, stage_one_rounds=1, **RULE)),
    full(coterie.FixTopology(num_peers=2, **RULE)),
    full(coterie.Ifca(clusters=2, **RULE)),
    full(coterie.FeSem(clusters=2, **RULE)),
    full(coterie.Cfl(**RULE)),
    full(coterie.Ditto(**RULE)),
    full(coterie.OneShot(clusters=2, **RULE)),
    full(coterie.FedGwc(**RULE)),
]


@pytest.mark.full
@pytest.mark.parametrize("method", first_only(METHODS, slow=True), ids=lambda method: method.kind)
def test_methods_keep_their_promises_with_rules_of_adapters(method):
    check_method(method, model=MODEL, relabel=method.kind not in ("ifca", "fesem"))


def read_numbers(received):
    """Names and matrices of the adapters, and the weights of the models by samples, with numpy."""
    named = {name: view.double().numpy() for name, view in received.tensors.items()}
    first = next(name for name in named if "lora_A" in name)
    samples = received.samples.double().numpy()
    return first, first.replace("lora_A", "lora_B"), named, samples / samples.sum()


def merge_products_plainly(received):
    """The mean of formed products, cut; as A that are as long as those that came."""
    a, b, named, weights = read_numbers(received)
    rank = named[a].shape[1]
    mean = sum(w * two @ one for w, one, two in zip(weights, named[a], named[b], strict=True))
    left, values, right = np.linalg.svd(mean, full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    signs = np.sign(right[np.arange(rank), np.abs(right).argmax(1)])
    length = (weights * np.linalg.norm(named[a], axis=2).mean(1)).sum()
    out = torch.from_numpy(weights @ received.models.double().numpy()).to(received.before)
    views = view_tensors(out, received.slots)
    views[a].copy_(torch.from_numpy(signs[:, None] * right * length))
    views[b].copy_(torch.from_numpy(left * signs * values / length))
    return out


def merge_by_norms_plainly(received):
    a, b, named, weights = read_numbers(received)
    norms = np.array(
        [np.linalg.norm(two @ one) for one, two in zip(named[a], named[b], strict=True)]
    )
    if norms.sum() > 0:
        weights = norms / norms.sum()
    return torch.from_numpy(weights @ received.models.double().numpy()).to(received.before)


PLAINLY = {"product-mean": merge_products_plainly, "norm-weighted": merge_by_norms_plainly}


def run_rule(kind, aggregation):
    made = METHODS_BY_KIND[kind](**OPTIONS.get(kind, {}), aggregation=aggregation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = tiny_settings(rounds=3 if kind == "pens" else 2)
        return coterie.simulate(tiny_federation(14), made, model=MODEL, settings=settings).params


@pytest.mark.full
@pytest.mark.option(
    (
        "Apfl.aggregation",
        "Cfl.aggregation",
        "Ditto.aggregation",
        "FeSem.aggregation",
        "FedAvg.aggregation",
        "FedAvgM.aggregation",
        "FedBN.aggregation",
        "FedDrift.aggregation",
        "FedGwc.aggregation",
        "FedPer.aggregation",
        "FedProx.aggregation",
        "FedRep.aggregation",
        "FixTopology.aggregation",
        "Gossip.aggregation",
        "Ifca.aggregation",
        "OneShot.aggregation",
        "Oracle.aggregation",
        "PFedMe.aggregation",
        "Pens.aggregation",
        "PerFedAvg.aggregation",
        "SimplexMethod.aggregation",
    ),
    "product-mean",
    "norm-weighted",
)
@pytest.mark.option("Dac.aggregation", "product-mean", "norm-weighted")
@pytest.mark.parametrize(
    "kind", [kind if kind in ("dac", "fedavg") else full(kind, slow=True) for kind in KINDS]
)
def test_every_method_merges_adapters_by_the_rule_that_it_names(kind):
    """Against numpy, which forms the products, in the same rounds."""
    if kind == "sosicfl-all":
        # Its adapters are endpoints of a simplex, which are no adapters one by one.
        with pytest.raises(ConfigError, match="'product-mean' is for adapters"):
            run_rule(kind, "product-mean")
        return
    found = {rule: run_rule(kind, rule) for rule in PLAINLY}
    for rule, params in found.items():
        torch.testing.assert_close(params, run_rule(kind, PLAINLY[rule]), rtol=0, atol=1e-7)
    default = inspect.signature(METHODS_BY_KIND[kind]).parameters["aggregation"].default
    found["none"] = run_rule(kind, default)
    for one, other in itertools.combinations(found.values(), 2):
        assert not torch.allclose(one, other, rtol=0, atol=1e-7)


@pytest.mark.option("Dac.similarity", "cos_product")
def test_dac_measures_the_cosine_of_products():
    settings = tiny_settings(rounds=2, record_similarities=True)
    run = coterie.simulate(
        tiny_federation(),
        coterie.Dac(num_peers=2, similarity="cos_product"),
        model=MODEL,
        settings=settings,
    )
    first = run.edges[run.edges["round"] == 0]
    # What they compare in the first round is what they are after the warm-up, with no exchange.
    alone = coterie.simulate(
        tiny_federation(), coterie.Local(), model=MODEL, settings=tiny_settings(rounds=0)
    )
    updates = []
    for client in range(len(alone.params)):
        module = alone.model(client)
        updates.append((module.lora_B.weight @ module.lora_A.weight).detach().double().flatten())
    assert len(first)
    for row in first.itertuples():
        one, other = updates[row.reader], updates[row.read]
        expected = float(one @ other / one.norm() / other.norm())
        assert row.similarity == pytest.approx(expected, abs=1e-6)


@pytest.mark.option("Dac.similarity", "agreement")
@pytest.mark.parametrize("shared", [(), ("!head",)], ids=["whole", "head at home"])
def test_dac_measures_how_far_two_models_predict_the_same(shared):
    """Of what the untouched modules return; a received part is completed with the client's own rest."""
    data, model = tiny_federation(), MODEL
    settings = tiny_settings(rounds=1, record_similarities=True, shared=shared)
    run = coterie.simulate(
        data, coterie.Dac(num_peers=2, similarity="agreement"), model=model, settings=settings
    )
    alone = coterie.simulate(
        data, coterie.Local(), model=model, settings=tiny_settings(rounds=0, shared=shared)
    )
    assert len(run.edges) == 12
    for row in run.edges.itertuples():
        x = data.x[row.reader][data.split[row.reader] == TRAIN]
        mine, theirs = alone.model(row.reader).double(), alone.model(row.read).double()
        if shared:
            theirs.head = mine.head
        with torch.no_grad():
            one, other = (module(x).softmax(-1) for module in (mine, theirs))
        expected = 1 - float((one - other).abs().sum(1).mean()) / 2
        assert row.similarity == pytest.approx(expected, abs=1e-6)
    values = run.metrics[run.metrics["metric"] == "passes"]["value"]
    assert values.tolist() == [3 * 12] * 6


@pytest.mark.parametrize(
    ("method", "shared", "said"),
    [
        (coterie.Random(num_peers=2, **RULE), ["!lora_B"], "aggregation 'product-mean' is for adapt"),
        (coterie.FedAvg(**RULE), ["lora_A"], "aggregation 'product-mean' is for adapters"),
        (coterie.Dac(num_peers=2, similarity="cos_product"), ["head"], "similarity 'cos_product' is"),
    ],
)  # fmt: skip
def test_half_an_adapter_is_not_merged_or_compared_as_a_whole(method, shared, said):
    settings = coterie.Settings(
        rounds=2, shared=shared, engine="loop", local=coterie.LocalTraining(steps=1), check=False
    )
    with pytest.raises(ConfigError, match=said):
        coterie.simulate(tiny_federation(), method, model=MODEL, settings=settings)


def train_plainly(start, data, client, steps, rate):
    """Steps of SGD on all training samples of a client, in plain PyTorch."""
    module = copy.deepcopy(start)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], rate)
    chosen = data.split[client] == TRAIN
    x, y = data.x[client][chosen], data.y[client][chosen]
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize(
    "method", [coterie.FedAvg(**RULE), coterie.Random(num_peers=9, **RULE)], ids=["server", "peers"]
)
def test_what_is_merged_is_the_mean_of_products_of_all(method):
    """After one exchange; the reference trains in plain PyTorch and forms the products."""
    stream = torch.Generator().manual_seed(0)
    x, clients = torch.randn(90, 6, generator=stream), [place % 3 for place in range(90)]
    data = coterie.from_arrays(x, torch.arange(90) // 3 % 3, clients=clients)
    torch.manual_seed(1)  # noqa: TID251
    start = Adapted((6,), 3)
    steps, rate = 4, 0.5
    local = coterie.LocalTraining(optimizer="sgd", lr=rate, steps=steps, batch_size=90)
    settings = coterie.Settings(
        rounds=1, local=local, evaluate="final", engine="loop", order="train_first"
    )
    found = coterie.simulate(data, method, model=start, settings=settings)
    weights = data.count_samples("train").double()
    weights /= weights.sum()
    ends = [train_plainly(start, data, client, steps, rate) for client in range(3)]

    def product(module):
        return (module.lora_B.weight @ module.lora_A.weight).detach().double()

    mean = sum(w * product(module) for w, module in zip(weights, ends, strict=True))
    left, values, right = torch.linalg.svd(mean, full_matrices=False)
    nearest = (left[:, :2] * values[:2]) @ right[:2]
    for client in range(3):
        after = found.model(client)
        torch.testing.assert_close(product(after), nearest, rtol=0, atol=1e-6)
        for name in ("head.weight", "head.bias"):
            each = (w * one.state_dict()[name] for w, one in zip(weights, ends, strict=True))
            torch.testing.assert_close(after.state_dict()[name], sum(each), rtol=0, atol=1e-6)
    # A and B averaged apart have another product, and it is further from the mean.
    apart = [sum(w * one.state_dict()[name] for w, one in zip(weights, ends, strict=True))
             for name in ("lora_B.weight", "lora_A.weight")]  # fmt: skip
    assert float((apart[0] @ apart[1] - mean).norm()) > float((nearest - mean).norm()) > 0
