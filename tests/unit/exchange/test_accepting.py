"""What is refused, how far the rest counts, and how long a peer is left unread, by numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.accepting import Acceptance, AcceptingExchange, Reputation
from coterie.exchange.base import Message
from coterie.exchange.in_memory import InMemory
from coterie.models.part import ColumnSet, ParameterSharing
from coterie.rng import Rng

EVERYTHING, NOTHING = ColumnSet(((0, 2),), 2), ColumnSet((), 2)
IDS = torch.arange(4)
ALONE = torch.tensor([[1, 2, 3], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]])
"""Client 0 reads all others, who read nobody."""


class Judge:
    """Clients whose loss is the squared length of a model, so that losses can be read off."""

    def __init__(self, samples: float = 10.0, part: ParameterSharing | None = None) -> None:
        self.num_samples, self.population = torch.full((4,), samples), 4
        self.sharing = part or ParameterSharing(EVERYTHING, NOTHING, EVERYTHING, EVERYTHING)
        self.scored = 0

    def count_samples(self, split):
        return torch.full((4,), 5 if split == "validation" else 10)

    def loss(self, params, split):
        return params.square().sum(1)

    def score(self, inbox, split):
        self.scored += int(inbox.mask.sum())
        return self.loss(inbox.table, split)[inbox.index].masked_fill(~inbox.mask, torch.inf)


def reputation(first: float = 1e9, step: float = 0.0) -> Reputation:
    start = Reputation.from_first_losses(torch.full((4,), first))
    return dataclasses.replace(start, step=torch.full((4,), step, dtype=torch.float64))


def door(
    known: Reputation, rules: Acceptance | None = None, round: int = 0, judge: Judge | None = None
) -> AcceptingExchange:
    exchange = AcceptingExchange(
        InMemory(IDS, 4), rules or Acceptance(), judge or Judge(), known, round
    )
    exchange.begin_round(Rng(0).at_round(round))
    exchange.set_active(IDS)
    return exchange


def pulled(exchange: AcceptingExchange, own, others, samples=None):
    params = torch.tensor([own, *others], dtype=torch.float64)
    fields = {} if samples is None else {"samples": torch.tensor(samples, dtype=torch.float64)}
    return exchange.pull(Message(params, fields), ALONE)


def test_a_model_is_refused_when_it_is_worse_than_the_own_by_half_and_than_one_that_learned_nothing():
    """The reader's loss is 4, so 6 is the bound; and where the first model's loss was 9, 9 is."""
    others = [[math.sqrt(5.9), 0.0], [math.sqrt(6.1), 0.0], [math.sqrt(9.1), 0.0]]
    assert pulled(door(reputation(first=1.0)), [2.0, 0.0], others).mask[0].tolist() == [
        True,
        False,
        False,
    ]
    assert pulled(door(reputation(first=9.0)), [2.0, 0.0], others).mask[0].tolist() == [
        True,
        True,
        False,
    ]
    wider = Acceptance(worse=2.5)
    assert pulled(door(reputation(first=1.0), wider), [2.0, 0.0], others).mask[0].tolist() == [
        True,
        True,
        True,
    ]


def test_a_client_whose_own_model_is_broken_holds_others_against_its_first():
    others = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    assert pulled(door(reputation(first=4.0)), [math.nan, 0.0], others).mask[0].tolist() == [
        True,
        True,
        False,
    ]


def test_what_is_no_number_is_refused_and_never_measured():
    judge = Judge()
    exchange = door(reputation(), judge=judge)
    inbox = pulled(exchange, [0.0, 0.0], [[math.nan, 0.0], [math.inf, 0.0], [1.0, 0.0]])
    assert inbox.mask[0].tolist() == [False, False, True]
    assert judge.scored == 1
    assert inbox.bytes[0].tolist() == [0, 0, 16], "a model that is not finite is not sent"
    with pytest.warns(UserWarning, match="extra 'samples' holds NaN or infinity reach nobody"):
        claimed = pulled(
            door(reputation()), [0.0, 0.0], [[1.0, 0.0]] * 3, samples=[10.0, -1.0, math.nan, 3.0]
        )
    assert claimed.mask[0].tolist() == [False, False, True]
    # What was refused was received all the same; the count that is no number was not sent.
    assert (claimed.bytes[0] > 0).tolist() == [True, False, True]


def test_a_far_model_counts_as_if_it_were_three_own_steps_away():
    """At distance 50 with steps of 5 three tenths of the way count: half of it moves (0, 0) by 0.15 x (30, 40)."""
    exchange = door(reputation(step=5.0))
    inbox = pulled(exchange, [0.0, 0.0], [[30.0, 40.0], [3.0, 4.0], [0.0, 0.0]])
    own = torch.zeros(4, 2, dtype=torch.float64)
    half = torch.full((4,), 0.5, dtype=torch.float64)
    weights = torch.zeros(4, 3, dtype=torch.float64)
    weights[:, 0] = 0.5
    assert torch.allclose(
        inbox.mix(weights, own=own, own_weight=half)[0],
        torch.tensor([4.5, 6.0], dtype=torch.float64),
    )
    near = weights.roll(1, 1)
    assert torch.equal(
        inbox.mix(near, own=own, own_weight=half)[0], torch.tensor([1.5, 2.0], dtype=torch.float64)
    )
    models = inbox.limited_models(0, torch.tensor([0, 1]))
    assert torch.allclose(models, torch.tensor([[9.0, 12.0], [3.0, 4.0]], dtype=torch.float64))
    info = {
        "peers": ALONE,
        "arrived": inbox.mask,
        "weights": torch.where(inbox.mask, weights, 0),
        "own_weight": half,
    }
    counted = exchange.finish_round(info)[1]
    assert counted["weights"][0].tolist() == pytest.approx([0.15, 0.0, 0.0])
    assert float(counted["own_weight"][0]) == pytest.approx(0.85)
    assert counted["passes"].tolist() == [15, 0, 0, 0], "three models, five samples each"


def test_the_rest_of_a_clipped_weight_goes_to_the_published_model_not_to_what_is_mixed_already():
    """A second mix on top of a first one, as PANM does: own 10, 0.4 x 20, then a tenth of the way to 110 at weight
    0.3.
    """
    exchange = door(reputation(step=10 / 3))
    inbox = pulled(exchange, [10.0, 0.0], [[20.0, 0.0], [110.0, 0.0], [10.0, 0.0]])
    own = torch.full((4, 2), 10.0, dtype=torch.float64) * torch.tensor([1.0, 0.0])
    first = torch.tensor([[0.4, 0.0, 0.0]] * 4, dtype=torch.float64)
    second = torch.tensor([[0.0, 0.3, 0.0]] * 4, dtype=torch.float64)
    mixed = inbox.mix(first, own=own, own_weight=torch.full((4,), 0.3, dtype=torch.float64))
    mixed = inbox.mix(second, own=mixed, own_weight=torch.ones(4, dtype=torch.float64))
    assert float(mixed[0, 0]) == pytest.approx(3 + 8 + 0.3 * (10 + 0.1 * 100))


def test_only_what_is_shared_is_far():
    """The second column stays at home: the distance is 3, not 5."""
    first, second = ColumnSet(((0, 1),), 2), ColumnSet(((1, 2),), 2)
    known = reputation(step=1.0)
    inbox = pulled(
        door(known, judge=Judge(part=ParameterSharing(first, second, first, first))),
        [0.0, 0.0],
        [[3.0, 4.0]] * 3,
    )
    assert inbox.limits is not None
    assert inbox.limits.scale[0].tolist() == [1.0, 1.0, 1.0]


def test_a_peer_counts_for_at_most_four_times_the_own_samples():
    inbox = pulled(
        door(reputation()), [0.0, 0.0], [[0.0, 0.0]] * 3, samples=[10.0, 2.0**62, 7.0, 41.0]
    )
    assert inbox.field_by_slot("samples")[0].tolist() == [40.0, 7.0, 40.0]


def test_quarantine_doubles_with_each_refusal_and_halves_with_each_acceptance():
    """Refused in rounds 0, 2 and 5 it is unread for 1, 2 and 4 rounds; accepted in 10 and refused in 11, for 4
    again.
    """
    known = reputation(first=0.0)
    unread = []
    for round in range(17):
        if 1 in known.unread_members(round)[0].tolist():
            unread.append(round)
            continue
        exchange = door(known, round=round)
        model = [1.0, 0.0] if round in (10, 16) else [9.0, 0.0]
        inbox = pulled(exchange, [1.0, 0.0], [model, [1.0, 0.0], [1.0, 0.0]])
        assert bool(inbox.mask[0, 0]) == (round in (10, 16))
        known = exchange.finish_round({})[0]
    assert unread == [1, 3, 4, 6, 7, 8, 9, 12, 13, 14, 15]
    assert known.unread_members(16)[0].tolist() == [-1]
    endless = reputation()
    for _ in range(100):
        endless = endless.after_round(0, IDS.expand(4, 4), IDS[:0].expand(4, 0))
    assert int(endless.until.max()) == 1 + 2**15


def test_a_peer_in_quarantine_is_not_mixed_when_a_method_reads_it_all_the_same_nor_measured():
    barred = torch.tensor([[1], [-1], [-1], [-1]])
    known, judge = reputation().after_round(0, barred, barred[:, :0]), Judge()
    exchange = door(known, round=1, judge=judge)
    assert pulled(exchange, [0.0, 0.0], [[0.0, 0.0]] * 3).mask[0].tolist() == [False, True, True]
    assert judge.scored == 2
    assert torch.equal(exchange.finish_round({})[0].strikes, known.strikes), (
        "it was neither refused nor accepted"
    )
    without = door(known, Acceptance(quarantine=False), round=1)
    assert bool(pulled(without, [0.0, 0.0], [[0.0, 0.0]] * 3).mask[0].all())


def test_the_own_step_is_the_largest_of_the_recent_ones():
    """Steps of 10, 2 and none: 10, then nine tenths of it, then the same, since nothing was learned."""
    part, zero = Judge().sharing, torch.zeros(4, 2, dtype=torch.float64)
    known = reputation().after_training(part, zero, zero + torch.tensor([6.0, 8.0]))
    assert known.step.tolist() == [10.0] * 4
    known = known.after_training(part, zero, zero + torch.tensor([2.0, 0.0]))
    assert known.step.tolist() == [9.0] * 4
    assert known.after_training(part, zero, zero).step.tolist() == [9.0] * 4
    assert known.after_training(part, zero, zero * math.nan).step.tolist() == [9.0] * 4


def test_before_the_first_step_nothing_is_clipped():
    inbox = pulled(door(reputation()), [0.0, 0.0], [[300.0, 400.0]] * 3)
    assert inbox.limits is not None
    assert bool((inbox.limits.scale == 1).all())


def test_messages_without_models_are_checked_for_numbers_only():
    exchange = door(reputation())
    fields = {"scores": torch.tensor([[1.0], [math.nan], [2.0], [3.0]])}
    with pytest.warns(UserWarning, match="extra 'scores' holds NaN or infinity reach nobody"):
        inbox = exchange.pull(Message(torch.zeros(4, 0), fields), ALONE)
    assert inbox.mask[0].tolist() == [False, True, True]
    assert not exchange.passes.any()


@pytest.mark.parametrize(
    ("rules", "told"), [({"worse": 0.5}, "1 or more"), ({"clip": 0.0}, "above 0")]
)
def test_rules_have_ranges(rules, told):
    with pytest.raises(ConfigError, match=told):
        Acceptance(**rules)


@dataclasses.dataclass
class StrikesOfPairs:
    """Strikes and pauses of all pairs: the reference."""

    strikes: torch.Tensor
    until: torch.Tensor

    def after_round(self, round, refused, accepted):
        good = accepted & ~refused
        strikes = (self.strikes + refused.int() - good.int()).clamp(0, 16)
        pause = 2 ** (strikes - 1).clamp(min=0)
        return StrikesOfPairs(strikes, torch.where(refused, round + 1 + pause, self.until))


def masked(ids: torch.Tensor, population: int) -> torch.Tensor:
    out = torch.zeros(len(ids), population, dtype=torch.bool)
    for row, members in enumerate(ids.tolist()):
        out[row, [member for member in members if member >= 0]] = True
    return out


@pytest.mark.parametrize("seed", range(3))
def test_strikes_of_those_that_have_some_are_those_of_all_pairs(monkeypatch, seed):
    """Of 40 rounds of eight clients that judge up to six slots each, also of one member in two exchanges."""
    monkeypatch.setattr("coterie.exchange.accepting._ROWS_AT_ONCE", 3)
    clients, population, draw = 8, 12, torch.Generator().manual_seed(seed)
    ours = Reputation.from_first_losses(torch.zeros(clients, dtype=torch.float64))
    zero = torch.zeros(clients, population, dtype=torch.int64)
    reference, widest = StrikesOfPairs(zero, zero), 0
    for round in range(40):
        read = torch.randint(-1, population, (clients, 6), generator=draw)
        fine = torch.rand(clients, 6, generator=draw) < 0.7
        # Some clients take no part.
        rows = (torch.rand(clients, generator=draw) < 0.8).nonzero().flatten()
        refused, accepted = read.masked_fill(fine, -1)[rows], read.masked_fill(~fine, -1)[rows]
        ours = ours.replace_rows(rows, ours.take_rows(rows).after_round(round, refused, accepted))
        of_rows = StrikesOfPairs(reference.strikes[rows], reference.until[rows])
        of_rows = of_rows.after_round(
            round, masked(refused, population), masked(accepted, population)
        )
        reference = StrikesOfPairs(
            reference.strikes.index_copy(0, rows, of_rows.strikes),
            reference.until.index_copy(0, rows, of_rows.until),
        )
        spread = torch.zeros(clients, population, dtype=torch.int64)
        for row in range(clients):
            members = [one for one in ours.members[row].tolist() if one >= 0]
            assert members == sorted(set(members))
            spread[row, members] = ours.strikes[row, : len(members)].long()
        assert torch.equal(spread, reference.strikes)
        for later in (round + 1, round + 2, round + 5):
            unread = masked(ours.unread_members(later), population)
            assert torch.equal(unread, reference.until > later)
        assert ours.members.shape[1] == int((ours.members >= 0).sum(1).max()), "no wider"
        widest = max(widest, ours.members.shape[1])
    assert 2 < widest < population


def test_groups_of_clients_are_joined_with_the_columns_of_the_widest():
    first = torch.zeros(2, dtype=torch.float64)
    nobody = torch.full((2, 1), -1)
    wide = Reputation.from_first_losses(first).after_round(
        0, torch.tensor([[3, 1], [2, -1]]), nobody
    )
    both = Reputation.join_rows([Reputation.from_first_losses(first), wide])
    assert both.members.tolist() == [[-1, -1], [-1, -1], [1, 3], [2, -1]]
    assert both.strikes.tolist() == [[0, 0], [0, 0], [1, 1], [1, 0]]
    assert both.until.tolist() == [[0, 0], [0, 0], [2, 2], [2, 0]]
    assert wide.list_new_terms(Reputation.from_first_losses(first)) == [
        (0, 1, 2), (0, 3, 2), (1, 2, 2),
    ]  # fmt: skip
    assert not wide.list_new_terms(wide)
