"""The shared-backbone engine: clients in one pass have the losses and gradients that each has alone in plain PyTorch.

The models of `transformers` are also in test_loop_transformers.py, with every engine.
"""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from tests.hugging import attach_lora
from tests.selection import full
from torch import nn
from torch.nn import functional

import coterie
from coterie.data.source import InputPart
from coterie.engine import _shared_backbone
from coterie.engine._base import cross_entropy
from coterie.engine._choice import make_engine
from coterie.engine._client_axis import ClientAxis, TrainedLayer
from coterie.engine._loop import LoopEngine
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining
from coterie.engine.options import Workload
from coterie.errors import ModelError
from coterie.functional.losses import make_loss
from coterie.models.draws import KEY, KeyedDraws
from coterie.models.given import InputConversion
from coterie.models.layout import Layout
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.methods import run_grouped

transformers = pytest.importorskip("transformers")

CLIENTS, SAMPLES, WORDS, VOCABULARY, CLASSES = 5, 6, 7, 20, 3
KEYS = torch.tensor([3, 1 << 61, -9, 17, 4])
TEXTS = InputConversion(
    (InputPart("input_ids", (WORDS,), True), InputPart("attention_mask", (WORDS,), True))
)


class Adapter(nn.Module):
    """A frozen layer with trained ones around it, of every kind; `odd` widths fill no vector of a processor."""

    def __init__(self, width=7):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(WORDS, width)
        self.frozen = nn.Sequential(
            nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)
        )
        self.lora_A = nn.Linear(width, 2, bias=False)
        self.lora_B = nn.Linear(2, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.table(x.long()) + self.place(torch.arange(WORDS)[None])
        scores = torch.softmax(x @ x.transpose(1, 2), 2)
        x = functional.gelu(
            self.frozen(scores @ x) + self.lora_B(self.lora_A(x)), approximate="tanh"
        )
        return self.head(input=self.drop(self.norm(x)).mean(1))


class Pictures(nn.Module):
    """A frozen convolution, a trained one, and a trained parameter of a layer's own."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x * (1 + self.by[:, None, None])

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.Mish(), nn.Conv2d(5, 40, 3), nn.Conv2d(40, 5, 1)
        )
        self.frozen.requires_grad_(False)
        self.shift, self.conv = Pictures.Shift(), nn.Conv2d(5, 4, 2)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.head(self.conv(self.shift(self.frozen(x))).flatten(1))


class Encoder(nn.Module):
    """A frozen transformer of PyTorch, whose attention is one function."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, CLASSES)
        self.frozen = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(self.table(x.long())).mean(1))


class Tied(nn.Module):
    """The same trained table at the beginning and at the end."""

    def __init__(self):
        super().__init__()
        self.table, self.frozen = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, VOCABULARY, bias=False)
        self.last.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.table(x.long()))).mean(1))


def make_bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    module = transformers.BertForSequenceClassification(config)
    return attach_lora(
        module, 2, lora_dropout=0.2, target_modules=["query", "value"], init_lora_weights=False,
        modules_to_save=["classifier"],
    )  # fmt: skip


def make_llama(rank=2, **given):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    given = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **given}
    return attach_lora(module, rank, **given)


MODELS = {
    "BERT with masks": make_bert,
    "Llama with masks": make_llama,
    "every kind of layer": Adapter,
    "pictures": Pictures,
    "tied": Tied,
    "attention of PyTorch": Encoder,
}
AS_ONE_FUNCTION = ("attention of PyTorch",)
"""Whose products may round by who else is in the pass."""
LOSSES = {"Llama with masks": make_loss("causal-lm")}


def case(name, make=None):
    """A module, a layout of it, the models of some clients, and a batch of each."""
    torch.manual_seed(5)  # noqa: TID251
    module, stream = (make or MODELS[name])(), torch.Generator().manual_seed(2)
    shape = (CLIENTS, SAMPLES)
    conversion = InputConversion()
    y = torch.randint(0, CLASSES, shape, generator=stream)
    x = torch.randint(1, VOCABULARY, (*shape, WORDS), generator=stream)
    if name == "pictures":
        x = torch.randn(*shape, 1, 8, 8, generator=stream)
    elif name.endswith("masks"):
        mask = torch.ones_like(x)
        # The texts of some samples end early, and those of others begin late.
        mask[:, ::2, 5:], mask[:, 1::3, :2] = 0, 0
        if name in LOSSES:
            y = torch.where(mask == 1, x, -100)
        x, conversion = torch.cat([x * mask, mask], 2), TEXTS
    layout = Layout(module, torch.float32, conversion)
    rows = layout.own_values().repeat(CLIENTS, 1)
    rows[:, : layout.trainable] += 0.1 * torch.randn(CLIENTS, layout.trainable, generator=stream)
    return module, layout, rows, x.float(), y


def draws(layout):
    return {KEY: KEYS} if layout.draws[True] else {}


def make_shared(name, layout, x, y, engine="shared-backbone"):
    return make_engine(engine, layout, LOSSES.get(name, cross_entropy), x[0], y[0])


def step_plainly(given, name, layout, row, x, y, key):
    """The loss of a client and its gradient, by PyTorch alone."""
    module = copy.deepcopy(given).train()
    module.load_state_dict(layout.split_rows(row), strict=False)
    with KeyedDraws(key):
        if name.endswith("masks"):
            ids, mask = x.long().chunk(2, 1)
            outputs = module(input_ids=ids, attention_mask=mask).logits
        else:
            outputs = module(x)
    if name in LOSSES:
        losses = []
        for one, labels in zip(outputs, y, strict=True):
            losses.append(functional.cross_entropy(one[:-1], labels[1:], ignore_index=-100))
        loss = torch.stack(losses).mean()
    else:
        loss = functional.cross_entropy(outputs, y)
    loss.backward()
    slopes = []
    for slot in layout.trained_slots:
        slopes.append(module.get_parameter(slot.name).grad.flatten())
    return loss.detach(), torch.cat(slopes)


@pytest.mark.parametrize("name", MODELS)
def test_clients_in_one_pass_have_what_each_has_in_plain_pytorch(name):
    given, layout, rows, x, y = case(name)
    engine = make_shared(name, layout, x, y)
    assert engine.name == "shared-backbone"
    losses, gradients, _ = engine.compute_gradients(rows, x, y, draws(layout))
    for client in range(CLIENTS):
        wanted = step_plainly(given, name, layout, rows[client], x[client], y[client], KEYS[client])
        torch.testing.assert_close(losses[client], wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients[client], wanted[1], rtol=0, atol=1e-5)
    assert float(gradients.abs().max()) > 1e-2


NETS = {
    "ViT with dropped paths": (
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2, "drop_rate": 0.1,
                                  "attn_drop_rate": 0.1, "drop_path_rate": 0.1}),
        {"target_modules": ["qkv"], "modules_to_save": ["head"], "lora_dropout": 0.1},
    ),
    "ConvNeXt": (
        ("convnext_atto", {}),
        {"target_modules": ["fc1", "fc2"], "modules_to_save": ["head.fc"]},
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("net", NETS)
def test_nets_of_timm_with_adapters_have_what_each_client_has_in_plain_pytorch(net):
    timm = pytest.importorskip("timm", reason="no timm: it is in no extra")
    (kind, options), adapter = NETS[net]
    torch.manual_seed(5)  # noqa: TID251
    module = timm.create_model(kind, num_classes=CLASSES, **options)
    given = attach_lora(module, 2, init_lora_weights=False, **adapter)
    layout = Layout(given)
    x, y = torch.randn(2, 4, 3, 32, 32), torch.randint(0, CLASSES, (2, 4))
    engine = make_shared(net, layout, x, y, "auto")
    assert engine.name == "shared-backbone"
    rows = layout.own_values().repeat(2, 1)
    rows[:, : layout.trainable] += 0.05 * torch.randn(2, layout.trainable)
    inputs = {KEY: KEYS[:2]} if layout.draws[True] else {}
    losses, gradients, _ = engine.compute_gradients(rows, x, y, inputs)
    for client in range(2):
        wanted = step_plainly(given, net, layout, rows[client], x[client], y[client], KEYS[client])
        torch.testing.assert_close(losses[client], wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients[client], wanted[1], rtol=0, atol=1e-5)


GROUPS = [[[0, 1], [2, 3], [4]], [[4, 0, 2], [3, 1]], [[one] for one in range(CLIENTS)]]


@pytest.mark.parametrize("threads", [1, full(3)])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in AS_ONE_FUNCTION])
def test_the_bytes_of_a_client_do_not_depend_on_who_else_is_in_the_pass(name, threads):
    _, layout, rows, x, y = case(name)
    engine, before = make_shared(name, layout, x, y), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = engine.compute_gradients(rows, x, y, draws(layout))
        for group in (group for groups in GROUPS for group in groups):
            inputs = {name: value[group] for name, value in draws(layout).items()}
            found = engine.compute_gradients(rows[group], x[group], y[group], inputs)
            for one, other in zip(found, whole, strict=True):
                assert torch.equal(one, other[group]), group
    finally:
        torch.set_num_threads(before)


def train(engine, layout, rows, x, y, block, local):
    """Two steps of each client, the second with fewer samples of some."""
    places = torch.arange(CLIENTS * SAMPLES).reshape(CLIENTS, 1, SAMPLES).repeat(1, 2, 1)
    sizes = torch.full((CLIENTS, 2), SAMPLES)
    sizes[::2, 1] = 4
    samples = RawSamples(x.flatten(0, 1), y.flatten(0, 1), torch.float32)
    keys = KEYS if layout.draws[True] else None
    out = rows.clone()
    engine.train(out, TrainingWork(samples, places, sizes, local, draw_keys=keys), block)
    return out


@pytest.mark.parametrize("name", ["BERT with masks", "every kind of layer"])
def test_blocks_of_any_size_train_the_same_bytes_and_end_where_the_loop_ends(name):
    _, layout, rows, x, y = case(name)
    engine, local = make_shared(name, layout, x, y), LocalTraining(optimizer="adamw", lr=0.01)
    whole = train(engine, layout, rows, x, y, CLIENTS, local)
    for block in (1, 2, 3):
        assert torch.equal(train(engine, layout, rows, x, y, block, local), whole)
    loop = LoopEngine(layout, cross_entropy)
    alone = train(loop, layout, rows, x, y, 1, local)
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-5)
    assert float((whole - rows).abs().max()) > 1e-3


def test_blocks_are_as_small_as_the_memory_asks_for(monkeypatch):
    name = "BERT with masks"
    _, layout, rows, x, y = case(name)
    engine, local = make_shared(name, layout, x, y), LocalTraining(optimizer="sgd", lr=0.1)
    # What autograd keeps of a sample, counted by hand: at least the inputs of GELU in both layers,
    # and not the weights, which are one for all.
    assert engine.sample_bytes > 2 * WORDS * 32 * 4
    assert engine.sample_bytes < 100_000
    whole, seen = train(engine, layout, rows, x, y, CLIENTS, local), []
    run = engine._run_pass
    monkeypatch.setattr(
        engine, "_run_pass", lambda rows, *rest: (seen.append(len(rows)), run(rows, *rest))[1]
    )
    budget = 2 * SAMPLES * engine.sample_bytes + 1
    monkeypatch.setattr(_shared_backbone, "_MAX_KEPT_BYTES", {"cpu": budget, "cuda": 0})
    assert torch.equal(train(engine, layout, rows, x, y, CLIENTS, local), whole)
    assert max(seen) == 2
    monkeypatch.setattr(_shared_backbone, "_MAX_KEPT_BYTES", {"cpu": 1, "cuda": 0})
    seen.clear()
    assert torch.equal(train(engine, layout, rows, x, y, CLIENTS, local), whole)
    assert set(seen) == {1}


def test_the_backbone_is_in_memory_once():
    _, layout, _, x, y = case("BERT with masks")
    engine = make_shared("BERT with masks", layout, x, y)
    for module in engine.modules:
        held = dict(module.named_parameters())
        for name, one in layout.frozen.items():
            assert held[name].data_ptr() == one.data_ptr()


@pytest.mark.parametrize("name", ["BERT with masks", "Llama with masks"])
def test_a_trial_runs_the_backbone_no_more_often_than_it_must(name):
    """Once in training and once in evaluation alone, once with another client, and once to count products."""
    _, layout, _, x, y = case(name)
    seen = []
    for module in (layout.train_module, layout.eval_module):
        table = next(part for part in module.modules() if isinstance(part, nn.Embedding))
        table.register_forward_pre_hook(lambda part, _: seen.append(part.training))
    work = Workload(train_samples=100.0, batch_size=SAMPLES, clients=CLIENTS)
    engine = make_engine("auto", layout, LOSSES.get(name, cross_entropy), x[0], y[0], work)
    assert engine.name == "shared-backbone"
    assert sorted(seen) == [False, False, True, True]


# ---------------------------------------------------------------- what has no axis of clients


class Frozen(nn.Module):
    """A frozen layer and a head, with something between them."""

    def __init__(self, between):
        super().__init__()
        self.frozen, self.between = nn.Linear(4, 8).requires_grad_(False), between
        self.adapter, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.between(torch.tanh(self.adapter(self.frozen(x)))))


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class AgainstTheFirst(nn.Module):
    """Right for the first client alone; others differ by its weights, where its samples are the same."""

    def forward(self, x):
        return x - x[:1]


class CenteredGradient(nn.Module):
    """Outputs are those of each client, and gradients are not."""

    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: grad - grad.mean(0))
        return x


class OneDraw(nn.Module):
    def forward(self, x):
        return x * (torch.rand(x.shape[1]) < 0.5)


class OneDrawOfManyEntries(nn.Module):
    """Its draw has a first axis that fits to the samples of many clients by chance."""

    def forward(self, x):
        kept = torch.rand(16 * len(x), x.shape[1]) < 0.5
        return x * kept[:1]


class SamplesSecond(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.stack([x, x, x])).mean(0)


class OfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))
        self.large = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.large(x) * self.by


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return functional.linear(x, self.layer.weight)


UNFIT = {
    "normalization": (lambda: nn.BatchNorm1d(8), "training changes 'between.running_mean'"),
    "no statistics": (
        lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False),
        "depends on the other clients",
    ),
    "mean over samples": (Centered, "depends on the other clients of a pass"),
    "first sample": (
        AgainstTheFirst,
        "the loss of a client depends on the other clients of a pass",
    ),
    "mean over gradients": (
        CenteredGradient,
        "the gradient of 'adapter.weight' depends on the other",
    ),
    "one draw": (OneDraw, "OneDraw 'between': .*one draw for all clients"),
    "one draw of many entries": (OneDrawOfManyEntries, "depends on the other clients of a pass"),
    "samples second": (SamplesSecond, "Linear 'between.layer'"),
    "most of the module": (OfItsOwn, "'between.by' is trained, and belongs to a layer with 64%"),
    "a weight without its layer": (ByHand, "ByHand 'between': a trained weight multiplies"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_has_no_axis_of_clients_is_refused_by_name_and_left_to_the_loop(what):
    torch.manual_seed(3)  # noqa: TID251
    make, said = UNFIT[what]
    module = Frozen(make())
    if what != "most of the module":
        module.more = nn.Linear(40, 40).requires_grad_(False)
    x, y = torch.randn(8, 4), torch.arange(8) % CLASSES
    with pytest.raises(ModelError, match=f"'shared-backbone' cannot train the module: .*{said}"):
        make_engine("shared-backbone", Layout(module), cross_entropy, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = make_engine("auto", Layout(module), cross_entropy, x, y)
    assert chosen.name in ("loop", "vmap")
    assert "clients cannot share a pass: " in chosen.reason


def test_auto_takes_it_where_most_weights_are_frozen():
    x, y = torch.randn(8, 4), torch.arange(8) % CLASSES
    module = Frozen(nn.Identity())
    assert make_engine("auto", Layout(module), cross_entropy, x, y).name != "shared-backbone"
    module.more = nn.Linear(40, 40).requires_grad_(False)
    assert make_engine("auto", Layout(module), cross_entropy, x, y).name == "shared-backbone"


# ---------------------------------------------------------------- precision, checkpoints, constants


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_give_the_gradients_of_plain_ones(reentrant):
    name = "Llama with masks"

    def make():
        module = make_llama()
        module.activation_checkpointing_enable({"use_reentrant": reentrant})
        return module

    given, layout, rows, x, y = case(name, make)
    engine = make_shared(name, layout, x, y)
    losses, gradients, _ = engine.compute_gradients(rows, x, y, {})
    for client in range(CLIENTS):
        given.activation_checkpointing_disable()
        wanted = step_plainly(given, name, layout, rows[client], x[client], y[client], KEYS[client])
        torch.testing.assert_close(losses[client], wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients[client], wanted[1], rtol=0, atol=1e-5)
    plain = case(name)
    whole = make_shared(name, plain[1], x, y)
    assert engine.sample_bytes < 0.7 * whole.sample_bytes


def test_bfloat16_rounds_as_in_the_loop_engine():
    name = "BERT with masks"
    _, layout, rows, x, y = case(name)
    made = {}
    for engine in ("loop", "shared-backbone"):
        made[engine] = make_engine(engine, layout, cross_entropy, x[0], y[0], precision="bf16")
    found = made["shared-backbone"].compute_gradients(rows, x, y, draws(layout))
    wanted = made["loop"].compute_gradients(rows, x, y, draws(layout))
    exact = LoopEngine(layout, cross_entropy).compute_gradients(rows, x, y, draws(layout))
    for one, other, full_one in zip(found[:2], wanted[:2], exact[:2], strict=True):
        rounded = float((other - full_one).abs().max())
        assert rounded > 1e-4
        assert float((one - other).abs().max()) < 0.1 * rounded


def test_a_client_with_constants_of_its_own_keeps_them():
    """A table that is a buffer, and is drawn anew for each client: the pass has it once."""
    module = Frozen(nn.Identity())
    module.register_buffer("scale", torch.ones(8))
    module.forward = None
    del module.forward

    class Scaled(Frozen):
        def forward(self, x):
            return self.head(self.adapter(self.frozen(x)) * self.scale)

    module.__class__ = Scaled
    torch.manual_seed(3)  # noqa: TID251
    layout = Layout(module)
    x, y = torch.randn(3, 8, 4), torch.arange(24).reshape(3, 8) % CLASSES
    engine = make_engine("shared-backbone", layout, cross_entropy, x[0], y[0])
    rows = layout.own_values().repeat(3, 1)
    rows[0, layout.trainable :] *= 1 + 1e-7  # rounding of an average
    rows[1, layout.trainable :] = 3.0
    losses, gradients, after = engine.compute_gradients(rows, x, y, {})
    wanted = LoopEngine(layout, cross_entropy).compute_gradients(rows, x, y, {})
    for one, other in zip((losses, gradients, after), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert torch.equal(after, rows[:, layout.trainable :])


# ---------------------------------------------------------------- one launch for all clients


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "linear without a bias": (lambda: nn.Linear(6, 4, bias=False), (6,)),
    "linear with a frozen bias": (lambda: freeze(nn.Linear(6, 4), "bias"), (5, 6)),
    "normalization": (lambda: nn.LayerNorm((5, 6)), (2, 5, 6)),
    "normalization with a frozen weight": (lambda: freeze(nn.LayerNorm(6), "weight"), (5, 6)),
    "embedding": (lambda: nn.Embedding(9, 4), (5,)),
}


def freeze(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_of_all_clients_at_once_is_that_of_each(what):
    """As a device computes it; a CPU runs client by client."""
    make, shape = LAYERS[what]
    torch.manual_seed(3)  # noqa: TID251
    layer = make()
    names = [name for name, one in layer.named_parameters() if one.requires_grad]
    values = {name: torch.randn(CLIENTS, *getattr(layer, name).shape) for name in names}
    x = torch.randn(CLIENTS, SAMPLES, *shape)
    if what == "embedding":
        x = torch.randint(0, 9, (CLIENTS, SAMPLES, *shape))
    weights, wanted = None, []
    for client in range(CLIENTS):
        own = copy.deepcopy(layer)
        own.load_state_dict({name: one[client] for name, one in values.items()}, strict=False)
        out = own(x[client])
        weights = torch.randn(CLIENTS, *out.shape) if weights is None else weights
        (out * weights[client]).sum().backward()
        wanted.append([out.detach(), *(getattr(own, name).grad for name in names)])
    trained = {name: one.clone().requires_grad_() for name, one in values.items()}
    axis = ClientAxis()
    placed = TrainedLayer(layer, {name: name for name in names}, axis)
    assert placed._batched is not None
    placed.bind(trained)
    out = placed._batched(layer, CLIENTS, x.flatten(0, 1)).unflatten(0, (CLIENTS, SAMPLES))
    (out * weights).sum().backward()
    for client in range(CLIENTS):
        found = [out[client].detach(), *(trained[name].grad[client] for name in names)]
        for one, other in zip(found, wanted[client], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_not_the_usual_layer_runs_client_by_client():
    layer = nn.Linear(6, 4)
    layer.forward = lambda x: x
    assert TrainedLayer(layer, {"weight": "w"}, ClientAxis())._batched is None
    assert (
        TrainedLayer(nn.Embedding(9, 4, padding_idx=0), {"weight": "w"}, ClientAxis())._batched
        is None
    )


# ---------------------------------------------------------------- whole runs


class Small(Frozen):
    def __init__(self, features, outputs):
        super().__init__(nn.Dropout(0.2))
        self.frozen = nn.Linear(features[0], 8).requires_grad_(False)
        self.more = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(8, outputs)


def small(features, outputs):
    return Small(features, outputs)


@pytest.mark.option("Settings.engine", "shared-backbone")
def test_hosts_of_any_clients_and_a_run_that_is_killed_end_with_the_same_bytes(tmp_path):
    data, method = tiny_federation(8), coterie.Random(num_peers=2)
    settings = tiny_settings(rounds=4, engine="shared-backbone", dtype="float32", evaluate="final")
    model = f"{__name__}:small"
    given = {"model": model, "settings": settings, "seed": 3}
    whole = coterie.simulate(data, method, **given)
    for groups in ([[0, 1, 2], [3], [4, 5, 6, 7]], [[one] for one in range(8)]):
        found = run_grouped(data, method, groups, model=model, settings=settings)
        assert torch.equal(found, whole.params), groups

    def kill(done):
        if done.round == 2:
            raise KeyboardInterrupt

    settings = replace(settings, checkpoint_seconds=0.0)
    given = {"model": model, "settings": settings, "seed": 3, "folder": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        coterie.simulate(data, method, **given, observer=kill)
    again = coterie.simulate(data, method, **given, resume=True)
    assert torch.equal(again.params, whole.params)
