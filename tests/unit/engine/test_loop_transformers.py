"""Models of `transformers` and adapters of `peft` on them, unwrapped and with their own dropout, train as plain PyTorch trains them.

The reference is PyTorch's own optimizer over the untouched model; what it draws comes from the same
keys, whose distributions tests/unit/models/test_draws.py has.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from tests.hugging import attach_lora
from tests.selection import full
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine._choice import make_engine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork, step_keys
from coterie.engine.optim import LocalTraining
from coterie.functional.losses import make_loss
from coterie.models.draws import KeyedDraws
from coterie.models.given import InputConversion
from coterie.models.layout import Layout

transformers = pytest.importorskip("transformers")

SAMPLES, RATE, WORDS, VOCABULARY, CLASSES = 24, 0.05, 7, 20, 3
KEYS = torch.tensor([3, 1 << 61])
# of two clients in two steps
LENGTHS = torch.tensor([[6, 4], [5, 6]])


def make_bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def make_distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def make_gpt2(kind="GPT2LMHeadModel", padding=None):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0,
        eos_token_id=0, pad_token_id=padding, num_labels=CLASSES,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def make_llama(kind="LlamaForCausalLM", padding=None):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, pad_token_id=padding, num_labels=CLASSES,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def make_vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS = {
    "BERT": make_bert,
    "DistilBERT": make_distilbert,
    "GPT-2": make_gpt2,
    "GPT-2 for classes": lambda: make_gpt2("GPT2ForSequenceClassification", padding=0),
    "Llama": make_llama,
    "Llama for classes": lambda: make_llama("LlamaForSequenceClassification", padding=0),
    "ViT": make_vit,
}
TARGETS = {
    "BERT": ["query", "value"],
    "DistilBERT": ["q_lin", "v_lin"],
    "GPT-2": ["c_attn"],
    "Llama": ["q_proj", "v_proj"],
    "ViT": ["q_proj", "v_proj"],
}
HEADS = {"BERT": ["classifier"], "DistilBERT": ["classifier"], "ViT": ["classifier"]}


def make_adapted(name):
    """A model with adapters whose B is not 0, so that their dropout shows, and a new head."""
    return attach_lora(
        MODELS[name](),
        lora_dropout=0.2,
        target_modules=TARGETS[name],
        modules_to_save=HEADS.get(name),
        init_lora_weights=False,
        fan_in_fan_out=name == "GPT-2",
    )


MODELS |= {f"LoRA on {name}": partial(make_adapted, name) for name in TARGETS}
ENGINES = ("loop", "vmap", "compiled", "shared-backbone")
WITHOUT_DROPOUT = ("Llama", "Llama for classes", "ViT")
"""By their own defaults."""
OF_TOKENS = ("GPT-2", "Llama", "LoRA on GPT-2", "LoRA on Llama")
"""Models whose outputs are a distribution over the vocabulary at each place."""
# what an engine leaves to another one, with a part of its reason
LEFT = {
    ("vmap", "GPT-2 for classes"): "data-dependent control flow",
    ("compiled", "GPT-2 for classes"): "depends on its data",
    ("compiled", "Llama for classes"): "indexing with several tensors",
}


def case(name):
    """Return a model, its layout, the models of two clients and their training."""
    torch.manual_seed(7)  # noqa: TID251
    module, stream = MODELS[name](), torch.Generator().manual_seed(1)
    if name.endswith("ViT"):
        x, conversion = torch.randn(SAMPLES, 1, 8, 8, generator=stream), InputConversion()
    else:
        # 0 pads: it is behind the words of some samples.
        x = torch.randint(1, VOCABULARY, (SAMPLES, WORDS), generator=stream)
        x[::3, 5:] = 0
        x, conversion = x.float(), InputConversion(whole=True)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=stream)
    if name in OF_TOKENS:
        y = torch.randint(1, VOCABULARY, (SAMPLES, WORDS), generator=stream)
    layout = Layout(module, torch.float32, conversion)
    places = torch.randint(0, SAMPLES, (2, 2, 6), generator=stream)
    local = LocalTraining(optimizer="sgd", lr=RATE)
    work = TrainingWork(RawSamples(x, y, torch.float32), places, LENGTHS, local, draw_keys=KEYS)
    rows = layout.own_values().repeat(2, 1)
    rows[:, : layout.trainable] += 0.05 * torch.randn(2, layout.trainable, generator=stream)
    return module, layout, rows, work


def run_plainly(module, x):
    return module(x if x.ndim == 4 else x.long()).logits


def mean_loss(outputs, y):
    """Return PyTorch's cross-entropy, of samples or of tokens."""
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


def train_plainly(given, layout, rows, work):
    """Train copies of the untouched model, whose values are those of the rows."""
    found = []
    for client, row in enumerate(rows):
        module = copy.deepcopy(given).train()
        module.load_state_dict(layout.split_rows(row), strict=False)
        optimizer = torch.optim.SGD(module.parameters(), RATE)
        for step, size in enumerate(LENGTHS[client].tolist()):
            chosen = work.sample_indices[client, step, :size]
            optimizer.zero_grad()
            with KeyedDraws(step_keys(KEYS[client : client + 1], step)[0]):
                outputs = run_plainly(module, work.samples.x[chosen])
            mean_loss(outputs, work.samples.y[chosen]).backward()
            optimizer.step()
        found.append(module)
    return found


def list_cases():
    """Every model in every engine; `make test` compiles none, `make test-more` two."""
    cases = []
    for name in MODELS:
        for engine in ENGINES:
            often = not name.startswith("LoRA") or engine == "loop"
            if engine == "shared-backbone":  # made for adapters
                often = name.startswith("LoRA")
            if engine == "compiled":
                often = (engine, name) in LEFT
            seldom = engine == "compiled" and name not in ("BERT", "ViT")
            cases.append((name, engine) if often else full(name, engine, slow=seldom))
    return cases


@pytest.mark.parametrize(("name", "engine"), list_cases())
def test_an_engine_trains_and_measures_it_as_plain_pytorch_does(engine, name):
    given, layout, rows, work = case(name)
    plain = train_plainly(given, layout, rows, work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what a warning says is in the reason
        loss = make_loss("tokens") if name in OF_TOKENS else cross_entropy
        made = make_engine(engine, layout, loss, work.samples.x[:6], work.samples.y[:6])
    expected = LEFT.get((engine, name))
    assert (made.name == engine) == (expected is None), made.reason
    assert expected is None or expected in made.reason
    before = rows.clone()
    made.train(rows, work, 2)
    assert (rows - before).abs().max() > 1e-3
    everything, number = torch.arange(SAMPLES)[None], torch.tensor([SAMPLES])
    pairs = EvaluationPairs(
        work.samples, everything, number, torch.arange(2), torch.zeros(2, dtype=torch.int64)
    )
    losses = made.measure_pairs(rows, pairs, {}, 2)["loss"]
    for row, loss, module in zip(rows, losses, plain, strict=True):
        torch.testing.assert_close(row, layout.flatten_module(module), rtol=0, atol=3e-5)
        with torch.no_grad():
            outputs = run_plainly(module.eval(), work.samples.x)
        wanted = mean_loss(outputs, work.samples.y)
        torch.testing.assert_close(loss, wanted, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", MODELS)
def test_its_dropout_is_not_left_out(name):
    """Another key gives other outputs where the model drops by default, so that the agreement above is one with dropout."""
    given, _, _, work = case(name)
    outputs = []
    for key in (1, 2):
        with torch.no_grad(), KeyedDraws(torch.tensor(key)):
            outputs.append(run_plainly(given.train(), work.samples.x))
    assert torch.allclose(*outputs) == (name in WITHOUT_DROPOUT)
