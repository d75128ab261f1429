"""Adapters of clients on tokenized datasets: the run is that of peft and PyTorch alone."""

import pytest
import torch
from tests.hugging import attach_lora, run_fedavg_plainly

import coterie
from coterie.data.federation import TRAIN, VALIDATION
from coterie.errors import ConfigError, DataError, TranslationError
from coterie.models.layout import Layout

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

WORDS, RATE, ROUNDS = 20, 0.2, 2
SIZES = {"ann": 5, "bob": 9, "cleo": 7}


def make_tokenizer(side):
    words = {"[PAD]": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", padding_side=side
    )


def make_collator(side):
    """The collator of transformers for the next token: it pads, and makes `labels` of the inputs."""
    return transformers.DataCollatorForLanguageModeling(make_tokenizer(side), mlm=False)


def make_texts():
    """Tokenized texts of 3 to 8 words for each client, as `datasets` has them."""
    stream, found = torch.Generator().manual_seed(3), {}
    for client, size in SIZES.items():
        items = []
        for number in range(size):
            ids = torch.randint(1, WORDS, (3 + number % 6,), generator=stream).tolist()
            items.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        found[client] = datasets.Dataset.from_list(items)
    return found


def make_llama():
    torch.manual_seed(5)  # noqa: TID251
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    return attach_lora(module, 2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def build(side="right", **given):
    return coterie.from_datasets(make_texts(), collate=make_collator(side), **given)


def split_inputs(data, client, kind):
    """The inputs and labels of a client's samples of a split, as the models of transformers take them."""
    chosen = data.split[client] == kind
    ids, mask = data.x[client][chosen].long().chunk(2, 1)
    return ids, mask, data.y[client][chosen]


def mean_loss(module, ids, mask, labels):
    """The mean over samples of the loss that transformers computes of each alone."""
    found = []
    for place in range(len(ids)):
        one = slice(place, place + 1)
        found.append(module(input_ids=ids[one], attention_mask=mask[one], labels=labels[one]).loss)
    return torch.stack(found).mean()


@pytest.mark.full
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_two_rounds_of_adapters_are_those_of_peft_alone(side, engine):
    data, module = build(side), make_llama()
    settings = coterie.Settings(
        rounds=ROUNDS, engine=engine, loss="causal-lm", evaluate="final", metrics=["perplexity"],
        local=coterie.LocalTraining(optimizer="sgd", lr=RATE, steps=1, batch_size=64),
    )  # fmt: skip
    run = coterie.simulate(data, coterie.FedAvg(), model=module, settings=settings)

    def mean_training_loss(net, client):
        return mean_loss(net, *split_inputs(data, client, TRAIN))

    plain = run_fedavg_plainly(module, data, mean_training_loss, ROUNDS, RATE)
    first, last = dict(module.named_parameters()), dict(plain.named_parameters())
    moved = 0.0
    for name, tensor in run.model("ann").named_parameters():
        torch.testing.assert_close(tensor, last[name].detach(), rtol=0, atol=1e-5)
        moved = max(moved, float((tensor - first[name]).detach().abs().max()))
    assert moved > 1e-3
    # tokens count alike in the perplexity of a client, and samples in its loss
    table = run.metrics[(run.metrics["split"] == "test") & (run.metrics["client"] == 1)]
    values = table.set_index("metric")["value"]
    test = data.tests[data.test_of[1]]
    ids, mask = test.x.long().chunk(2, 1)
    with torch.no_grad():
        loss = mean_loss(plain.eval(), ids, mask, test.y)
        logs = plain(input_ids=ids, attention_mask=mask, labels=test.y).loss
    assert values["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert values["perplexity"] == pytest.approx(float(logs.exp()), rel=1e-5)


def test_a_collator_pads_all_clients_and_the_test_set_to_one_length():
    longest = max(len(item["input_ids"]) for one in make_texts().values() for item in one)
    for side in ("left", "right"):
        data = build(side)
        assert [part.name for part in data.parts] == ["input_ids", "attention_mask"]
        assert data.x.shape[-1] == 2 * longest
        seen = []
        for client in range(3):
            for kind in (TRAIN, VALIDATION):
                for ids, mask, labels in zip(*split_inputs(data, client, kind), strict=True):
                    counted = mask == 1
                    seen.append(ids[counted].tolist())
                    assert labels[counted].tolist() == ids[counted].tolist()
                    assert set(labels[~counted].tolist()) <= {-100}
                    assert bool(counted[-1 if side == "left" else 0])
        for test in data.tests:
            ids, mask = test.x.long().chunk(2, 1)
            seen += [row[kept == 1].tolist() for row, kept in zip(ids, mask, strict=True)]
        given = [item["input_ids"] for one in make_texts().values() for item in one]
        assert sorted(seen) == sorted(given)
    short = datasets.Dataset.from_list([{"input_ids": [1, 2], "attention_mask": [1, 1]}] * 4)
    for test in (short, dict.fromkeys(SIZES, short)):
        data = build(test=test)
        assert all(one.x.shape == (4, 2 * longest) for one in data.tests)


def test_one_dataset_names_the_client_of_each_item_next_to_what_is_padded():
    items = []
    for client, texts in make_texts().items():
        items += [{**item, "site": client} for item in texts]
    whole = datasets.Dataset.from_list(items)
    data = coterie.from_dataset(whole, "site", collate=make_collator("right"))
    assert data.client_names == tuple(SIZES)
    assert data.samples.tolist() == list(SIZES.values()) if hasattr(data, "samples") else True


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda items: items, "collate returned a list for 21 items; expected a table of tensors"),
        (lambda items: {"input_ids": torch.zeros(2, 3)}, "collate returned a dict for 21 items"),
    ],
)
def test_what_is_no_collator_is_one_line(collate, said):
    with pytest.raises(DataError, match=said):
        coterie.from_datasets(make_texts(), collate=collate)
    with pytest.raises(ConfigError, match="collate is given, and test is a tuple; expected a data"):
        build(test=(torch.zeros(2, 3), torch.zeros(2)))


def test_further_columns_of_a_tokenized_dataset_are_named():
    item = {"input_ids": [1, 2], "attention_mask": [1, 1], "idx": 3, "labels": 1}
    with pytest.raises(ConfigError, match=r"such as inputs=\['input_ids', 'attention_mask'\]"):
        coterie.from_datasets([[item] * 4] * 2)
    del item["idx"]
    data = coterie.from_datasets([[{**item, "labels": place % 2} for place in range(10)]] * 2)
    assert [part.name for part in data.parts] == ["input_ids", "attention_mask"]


def test_a_loss_that_shows_each_token_to_itself_is_said():
    local = coterie.LocalTraining(steps=1)
    settings = coterie.Settings(rounds=1, loss="tokens", engine="loop", local=local)
    with pytest.warns(UserWarning, match="to predict the next token take loss = 'causal-lm'"):
        coterie.simulate(build(), coterie.Local(), model=make_llama(), settings=settings)


@pytest.mark.full
@pytest.mark.parametrize("fault", [True, False])
def test_dropout_before_a_weight_of_zero_is_compared_by_means(fault, monkeypatch):
    """It changes gradients and no output: the check of the translation compares draws, and still names a dropout that is left out."""
    module = make_llama()
    for part in module.modules():
        if isinstance(getattr(part, "lora_dropout", None), torch.nn.ModuleDict):
            part.lora_dropout["default"] = torch.nn.Dropout(0.5)
    settings = coterie.Settings(
        rounds=1, loss="causal-lm", engine="loop", local=coterie.LocalTraining(steps=1)
    )
    if fault:
        built = Layout.__init__

        def leave_out(self, *given, **more):
            built(self, *given, **more)
            for part in self.train_module.modules():
                if isinstance(part, torch.nn.Dropout):
                    part.p = 0.0

        monkeypatch.setattr(Layout, "__init__", leave_out)
        with pytest.raises(TranslationError, match="gradient"):
            coterie.simulate(build(), coterie.Local(), model=module, settings=settings)
        return
    coterie.simulate(build(), coterie.Local(), model=module, settings=settings)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the server left out the message of cleo")
@pytest.mark.parametrize(
    "method",
    [coterie.Random(num_peers=2, aggregation="product-mean"), coterie.FedAvg(aggregation="product-mean")],
    ids=["peers", "server"],
)  # fmt: skip
def test_adapters_are_trained_privately_and_those_of_an_attacker_are_bounded(method):
    """The check of the start compares private gradients with plain PyTorch; a server refuses an attacker's noise, and peers shorten it."""
    dp = {"clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-5}
    local = coterie.LocalTraining(steps=2, batch_size=8, lr=0.05, dp=dp)
    given = {"rounds": 2, "loss": "causal-lm", "engine": "loop", "evaluate": "final"}
    run = coterie.simulate(
        build(), method, model=make_llama(), settings=coterie.Settings(**given, local=local)
    )
    spent = run.metrics[run.metrics["metric"] == "epsilon"]["value"]
    assert float(spent.max()) > 0
    assert bool(torch.isfinite(run.params).all())
    attacks = [{"kind": "noise", "clients": 1, "strength": 1e6}]
    largest = {}
    # A server leaves out what no honest client sends in any case; peers do only with acceptance.
    for acceptance in (True,) if method.server else (True, False):
        settings = coterie.Settings(**given, attacks=attacks, acceptance=acceptance)
        attacked = coterie.simulate(build(), method, model=make_llama(), settings=settings)
        largest[acceptance] = float(attacked.params.abs().max())
        refused = attacked.metrics[attacked.metrics["metric"] == "refused"]["value"]
        assert not method.server or float(refused.max()) > 0
    assert largest[True] < 2
    assert largest.get(False, 101.0) > 100
