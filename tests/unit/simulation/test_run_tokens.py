"""Classes of tokens and pairs of sequences: adapters on random models train as those of peft and PyTorch alone."""

import pytest
import torch
from tests.hugging import attach_lora, require_peft, run_fedavg_plainly

import coterie
from coterie.data.federation import TRAIN

transformers = pytest.importorskip("transformers")
require_peft()

WORDS, LABELS, LENGTH, RATE, ROUNDS = 20, 4, 6, 0.2, 2
SIZES = {"ann": 8, "bob": 16, "cleo": 12}


def make_bert():
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=LABELS,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = transformers.BertForTokenClassification(config)
    return attach_lora(module, 2, target_modules=["query", "value"], task_type="TOKEN_CLS")


def make_t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    module = transformers.T5ForConditionalGeneration(config)
    return attach_lora(module, 2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")


def draw_targets(count, classes, stream):
    """Targets of which some positions at the end do not count."""
    targets = torch.randint(1, classes, (count, LENGTH), generator=stream)
    targets[::3, 4:] = -100
    return targets


def build(kind):
    """Clients with padded inputs; the decoder of a pair gets the targets, one place later."""
    stream = torch.Generator().manual_seed(1)
    clients = [client for client, size in SIZES.items() for _ in range(size)]
    ids = torch.randint(1, WORDS, (len(clients), LENGTH), generator=stream)
    ids[::4, 5:] = 0
    parts = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    targets = draw_targets(len(ids), WORDS if kind == "T5" else LABELS, stream)
    if kind == "T5":
        start = torch.zeros(len(ids), 1, dtype=torch.int64)
        parts["decoder_input_ids"] = torch.cat([start, targets[:, :-1].clamp(min=0)], 1)
    return coterie.from_arrays(parts, targets, clients=clients)


def mean_loss(module, data, client):
    """The mean over a client's samples of the loss that transformers computes of each alone, from `labels`."""
    chosen, found = data.split[client] == TRAIN, []
    x, y = data.x[client][chosen].long(), data.y[client][chosen]
    for row, labels in zip(x, y, strict=True):
        # Of a model for pairs, transformers makes the inputs of the decoder itself.
        ids, mask = row[:LENGTH], row[LENGTH : 2 * LENGTH]
        given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append(module(**{name: one[None] for name, one in given.items()}).loss)
    return torch.stack(found).mean()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "make"), [("BERT", make_bert), ("T5", make_t5)])
def test_two_rounds_are_those_of_transformers_alone(kind, make):
    torch.manual_seed(5)  # noqa: TID251
    data, module = build(kind), make()
    settings = coterie.Settings(
        rounds=ROUNDS, engine="loop", loss="tokens", evaluate="final",
        local=coterie.LocalTraining(optimizer="sgd", lr=RATE, steps=1, batch_size=64),
    )  # fmt: skip
    run = coterie.simulate(data, coterie.FedAvg(), model=module, settings=settings)
    plain = run_fedavg_plainly(
        module, data, lambda net, client: mean_loss(net, data, client), ROUNDS, RATE
    )
    first, last = dict(module.named_parameters()), dict(plain.named_parameters())
    moved = 0.0
    for name, tensor in run.model("ann").named_parameters():
        torch.testing.assert_close(tensor, last[name].detach(), rtol=0, atol=1e-5)
        moved = max(moved, float((tensor - first[name]).detach().abs().max()))
    assert moved > 1e-3
