"""Clients with adapters of different ranks train as plain PEFT of each rank does, and take home its adapter."""

import json

import numpy as np
import pytest
import torch
from tests.hugging import attach_lora
from tests.selection import first_only, full

import coterie
from coterie.data.federation import TRAIN
from coterie.errors import ConfigError, ModelError
from coterie.models.layout import NamedModel
from coterie.results.adapter_folder import export_adapter_folder
from coterie.runtime.models import load_models

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS, RATE, ROUNDS, STEPS, ALPHA = 20, 0.2, 2, 2, 6.0
RANKS = {"ann": 1, "bob": 4, "cleo": 2}
SIZES = {"ann": 10, "bob": 30, "cleo": 20}
TARGET = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(5)  # noqa: TID251
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build():
    stream = torch.Generator().manual_seed(1)
    clients = [client for client, size in SIZES.items() for _ in range(size)]
    ids = torch.randint(1, TOKENS, (len(clients), 6), generator=stream)
    return coterie.from_arrays(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids, clients=clients
    )


def name_model(stored, **adapter):
    adapter = {"r": dict(RANKS), "alpha": ALPHA, "target": TARGET, **adapter}
    return NamedModel(f"hf:{stored}", adapter=adapter)


def simulate(stored, method, folder=None, rounds=ROUNDS, optimizer="sgd", **adapter):
    local = coterie.LocalTraining(optimizer=optimizer, lr=RATE, steps=STEPS, batch_size=64)
    settings = coterie.Settings(
        rounds=rounds, local=local, loss="causal-lm", engine="loop", evaluate="final"
    )
    model = name_model(stored, **adapter)
    return coterie.simulate(build(), method, model=model, settings=settings, folder=folder)


# ---------------------------------------------------------------- the reference


def attach_plainly(stored, client):
    base = transformers.AutoModelForCausalLM.from_pretrained(stored)
    rank = RANKS[client]
    return attach_lora(
        base, rank, lora_alpha=ALPHA * rank / 4, target_modules=TARGET, task_type="CAUSAL_LM"
    ).train()


def train_plainly(module, data, client, optimizer):
    chosen = data.split[client] == TRAIN
    ids, mask = data.x[client][chosen].long().chunk(2, 1)
    trained = [one for one in module.parameters() if one.requires_grad]
    made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](trained, RATE)
    for _ in range(STEPS):
        made.zero_grad()
        module(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        made.step()


def read_pairs(module):
    """A and B of each adapter, in float64."""
    named = {name: one.detach().double().numpy() for name, one in module.named_parameters()}
    return {
        name: (a, named[name.replace("lora_A", "lora_B")])
        for name, a in named.items()
        if "lora_A" in name
    }


def write_pairs(module, pairs, rank):
    named = dict(module.named_parameters())
    for name, (a, b) in pairs.items():
        named[name].data.copy_(torch.from_numpy(a[:rank]))
        named[name.replace("lora_A", "lora_B")].data.copy_(torch.from_numpy(b[:, :rank]))


def pad(a, b, rank=4):
    return np.pad(a, ((0, rank - len(a)), (0, 0))), np.pad(b, ((0, 0), (0, rank - b.shape[1])))


def merge_apart(found, weights):
    """Zero padding, and the mean of A and of B."""
    each = [pad(*one) for one in found]
    return tuple(sum(w * one[k] for w, one in zip(weights, each, strict=True)) for k in (0, 1))


def merge_products(found, weights):
    """FlexLoRA: the mean of the products, by singular values; A as long as those that came."""
    mean = sum(w * b @ a for w, (a, b) in zip(weights, found, strict=True))
    left, values, right = (part[..., :4] for part in np.linalg.svd(mean))
    right = np.linalg.svd(mean)[2][:4]
    signs = np.sign(right[np.arange(4), np.abs(right).argmax(1)])
    length = sum(
        w * np.linalg.norm(a, axis=1).mean() for w, (a, _) in zip(weights, found, strict=True)
    )
    return signs[:, None] * right * length, left * signs * values / length


def run_plainly(stored, data, start, rule, optimizer):
    """Rounds of FedAvg over models of peft, each of its client's rank."""
    modules = {client: attach_plainly(stored, client) for client in SIZES}
    for client, module in modules.items():
        write_pairs(module, start, RANKS[client])
    samples = np.array([float((one == TRAIN).sum()) for one in data.split])
    for _ in range(ROUNDS):
        for place, module in enumerate(modules.values()):
            train_plainly(module, data, place, optimizer)
        each = [read_pairs(module) for module in modules.values()]
        weights = samples / samples.sum()
        if rule == "norm-weighted":  # HetLoRA
            norms = [sum(((b @ a) ** 2).sum() for a, b in one.values()) ** 0.5 for one in each]
            weights = np.array(norms) / sum(norms)
        merge = merge_products if rule == "product-mean" else merge_apart
        merged = {name: merge([one[name] for one in each], weights) for name in each[0]}
        for client, module in modules.items():
            write_pairs(module, merged, RANKS[client])
    return modules


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        ("product-mean", "sgd"),
        full(None, "sgd", slow=True),
        full("norm-weighted", "sgd", slow=True),
        full("product-mean", "adamw"),
    ],
)
def test_two_rounds_are_those_of_peft_of_each_rank(stored, rule, optimizer):
    method = coterie.FedAvg() if rule is None else coterie.FedAvg(aggregation=rule)
    run = simulate(stored, method, optimizer=optimizer)
    start = simulate(stored, method, rounds=0)
    first = read_pairs(start.model("bob"))
    assert all(not b.any() and a.any() for a, b in first.values())
    plain = run_plainly(stored, build(), first, rule, optimizer)
    for client, module in plain.items():
        found, expected = (dict(one.named_parameters()) for one in (run.model(client), module))
        moved = 0.0
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].detach(), tensor.detach(), rtol=0, atol=1e-5)
            if "lora_B" in name:
                moved = max(moved, float(tensor.detach().abs().max()))
        assert moved > 1e-3


@pytest.mark.full
def test_the_adapter_taken_home_is_of_the_rank_of_its_client(stored, tmp_path):
    run = simulate(stored, coterie.Random(num_peers=1), folder=tmp_path / "run")
    models = load_models(tmp_path / "run")
    ids = build().x[0, :4].long().chunk(2, 1)[0]
    for client, rank in RANKS.items():
        folder = export_adapter_folder(models, client, tmp_path / client)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (rank, ALPHA * rank / 4)
        base = transformers.AutoModelForCausalLM.from_pretrained(stored)
        loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
        pairs = read_pairs(loaded)
        assert {len(a) for a, _ in pairs.values()} == {rank}
        with torch.no_grad():
            found, expected = (one(input_ids=ids).logits for one in (loaded, run.model(client)))
        # A file's tensors may lie at odd addresses, where sums round in another order.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        for name, (a, b) in read_pairs(run.model(client)).items():
            assert np.array_equal(a, pairs[name][0])
            assert np.array_equal(b, pairs[name][1])
        wide = {name: tuple(one.shape) for name, one in models.state_dict(client).items()}
        assert {wide[name] for name in pairs} == {a.shape for a, _ in pairs.values()}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the server left out the message")
@pytest.mark.parametrize(
    "method",
    first_only(
        [
            coterie.Random(num_peers=2),
            coterie.FedAvg(),
            coterie.Dac(num_peers=2, similarity="cos_product"),
        ],
        slow=True,
    ),
    ids=lambda method: method.kind,
)
def test_noise_of_privacy_and_of_attackers_makes_no_rank_larger(stored, method):
    """`run.model` refuses rows with more; so every model that is measured has its own rank."""
    local = coterie.LocalTraining(
        steps=2, batch_size=8, lr=0.05, dp={"clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-5}
    )
    settings = coterie.Settings(
        rounds=2, local=local, loss="causal-lm", engine="loop", evaluate="final",
        attacks=[{"kind": "noise", "clients": 1, "strength": 0.1}],
    )  # fmt: skip
    run = coterie.simulate(build(), method, model=name_model(stored), settings=settings)
    for client, rank in RANKS.items():
        for a, b in read_pairs(run.model(client)).values():
            assert len(a) == rank
            assert np.abs(a).min(1).max() > 0
            assert np.abs(b).max() > 0


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"r": {"ann": 1, "bob": 2}}, "model.adapter.r has no rank of client 'cleo'; expected one for each client, found ann, bob"),
        ({"r": {"ann": 1, "bob": 0, "cleo": 2}}, "model.adapter: r is .*expected the rank of each client"),
        ({"r": []}, "model.adapter: r is .*expected"),
        ({"r": [1, -2]}, "model.adapter: r is .*expected"),
        ({"r": [1, 2], "kind": "ffa-lora"}, "kind is 'ffa-lora', whose A is one for all clients: give one rank"),
        ({"options": {"rank_pattern": {"q_proj": 2}}}, "options.rank_pattern gives layers ranks of their own"),
        ({"options": {"init_lora_weights": False}}, "the adapters do not begin at 0"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_are_one_line(stored, adapter, said):
    with pytest.raises((ConfigError, ModelError), match=said) as raised:
        simulate(stored, coterie.Local(), **adapter)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        (coterie.Pooled(), {}, "pooled trains one model for all clients"),
        (coterie.Random(num_peers=1), {"acceptance": True}, "acceptance compares models by their dist"),
    ],
)  # fmt: skip
def test_what_takes_one_rank_for_all_says_so(stored, method, settings, said):
    given = coterie.Settings(rounds=1, loss="causal-lm", engine="loop", **settings)
    with pytest.raises(ConfigError, match=said):
        coterie.simulate(build(), method, model=name_model(stored), settings=given)
