"""What attackers publish, by numbers worked out by hand."""

import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.attacking import Attack, AttackContext, AttackingExchange
from coterie.exchange.base import Message, Reply
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng

IDS = torch.arange(5)
EVERYBODY = torch.tensor([[j for j in range(5) if j != i] for i in range(5)])
MODELS = torch.tensor(
    [[1.0, 0.0], [2.0, 0.0], [3.0, 6.0], [4.0, 6.0], [7.0, 8.0]], dtype=torch.float64
)
"""Clients 3 and 4 attack. Of the honest, the means are 2 and 2, the deviations sqrt(2/3) and sqrt(8)."""


def attacking(kind, **more) -> AttackingExchange:
    first = torch.full((5, 2), 0.5, dtype=torch.float64)
    return AttackingExchange(
        InMemory(IDS, 5), [(Attack(kind, clients=2, **more), torch.tensor([3, 4]))], first, 5
    )


def published(exchange: AttackingExchange, round: int = 0, models=MODELS):
    """What client 0 reads of all others, and everybody's inbox."""
    exchange.begin_round(Rng(0).at_round(round))
    exchange.set_active(IDS)
    samples = torch.full((5,), 10.0)
    inbox = exchange.pull(Message(models, {"samples": samples}), EVERYBODY)
    return inbox.table[inbox.index[0]], inbox


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("sign-flip", {}, -5 * MODELS[3:]),
        ("sign-flip", {"strength": 1.0}, -MODELS[3:]),
        ("scale", {}, 10 * MODELS[3:]),
        ("label-flip", {}, MODELS[3:]),
        ("copy", {}, torch.full((2, 2), 0.5, dtype=torch.float64)),
        (
            "a-little-is-enough",
            {"strength": 2.0},
            2 - 2 * torch.tensor([[2 / 3, 8.0]] * 2).double().sqrt(),
        ),
    ],
)
def test_what_attackers_publish(kind, more, expected):
    read, _ = published(attacking(kind, **more))
    assert torch.equal(read[:2], MODELS[1:3]), "the honest publish what they have"
    assert torch.allclose(read[2:], expected)
    assert bool((MODELS[3] == torch.tensor([4.0, 6.0])).all()), "arguments stay as they were"


def test_noise_is_of_the_size_of_the_model_and_another_for_each_attacker_and_round():
    models = torch.full((5, 4000), 2.0, dtype=torch.float64)
    first, _ = published(attacking("noise"), models=models)
    noise = (first[2:] - 2) / 2
    assert noise.std(1).tolist() == pytest.approx([3.0, 3.0], rel=0.05)
    assert noise.mean(1).tolist() == pytest.approx([0.0, 0.0], abs=0.2)
    again, _ = published(attacking("noise"), models=models)
    later, _ = published(attacking("noise"), 1, models=models)
    assert torch.equal(first, again)
    assert float((first - later)[2:].abs().mean()) > 1
    assert float((first[2] - first[3]).abs().mean()) > 1


def test_a_free_rider_publishes_what_it_read_in_its_last_exchange_of_the_lowest_number():
    exchange = attacking("copy")
    published(exchange)
    read, _ = published(exchange, 1, MODELS + 100)
    assert torch.equal(read[2:], MODELS[[0, 0]])
    again = attacking("copy")
    again.restore(exchange.snapshot())
    expected, found = (published(one, 2)[0] for one in (exchange, again))
    assert torch.equal(expected, found)
    assert torch.equal(found[2:], MODELS[[0, 0]] + 100)


def test_attackers_claim_what_they_like():
    _, inbox = published(attacking("label-flip", samples=2**62))
    assert inbox.field_by_slot("samples")[0].tolist() == [10, 10, 2.0**62, 2.0**62]


def test_a_server_receives_the_attack():
    exchange = attacking("scale")
    exchange.begin_round(Rng(0))
    exchange.set_active(IDS)
    seen = []

    def rule(shared, message):
        seen.append(message.params)
        return shared, Reply.to_every_client(message.params[:1], len(message))

    exchange.ask_server(Message(MODELS), rule, None)
    assert torch.equal(seen[0], torch.cat([MODELS[:3], 10 * MODELS[3:]]))


def test_who_stopped_goes_on_attacking():
    exchange = attacking("scale")
    published(exchange)
    exchange.begin_round(Rng(0).at_round(1))
    exchange.set_active(IDS[:3])
    exchange.retire_clients(IDS[3:], MODELS[3:])
    inbox = exchange.pull(Message(MODELS[:3], {"samples": torch.ones(3)}), EVERYBODY[:3])
    assert torch.equal(inbox.table[inbox.index[0]][2:], 10 * MODELS[3:])


def negative_mean(seen: AttackContext):
    """An attack of the user's: minus the mean of the honest, times the strength."""
    return (-seen.strength * seen.honest.mean(0)).expand_as(seen.models)


def short(seen: AttackContext):
    """Half of a model."""
    return seen.models[:, :1]


def test_an_attack_of_ones_own_is_found_by_its_import_path():
    for kind in (negative_mean, f"{__name__}:negative_mean"):
        read, _ = published(attacking(kind, strength=3.0))
        assert torch.equal(read[2:], torch.tensor([[-6.0, -6.0]] * 2, dtype=torch.float64))
    with pytest.raises(
        ConfigError, match=r"returned \(2, 1\); expected a tensor of shape \(2, 2\)"
    ):
        published(attacking(short))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "sign-flop"}, r"'sign-flop'.*sign-flip"),
        ({"kind": "copy", "strength": 2.0}, r"strength is 2.0; expected none for 'copy'"),
        ({"kind": "noise", "samples": 0}, "samples is 0"),
    ],
)
def test_what_no_attack_is_is_refused_in_a_line(given, told):
    with pytest.raises(ConfigError, match=told) as error:
        Attack(**given, clients=1)
    assert "\n" not in str(error.value)
