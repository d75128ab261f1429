"""Masked sums: the plain mean in float64 with clients that leave at each step, and servers that lie."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import ExchangeError
from coterie.exchange.base import SecureAggregation
from coterie.exchange.secure_sum import TooFewToSum
from coterie.functional.fixed_point import WORD, encode_model, unpack_words
from coterie.net import identity
from coterie.net.masking import KeyList, MaskingClient, SumContext, SummingServer, SumRefused

COLUMNS = 40


class Sum:
    """Some clients and a server, whose messages are passed on by hand."""

    def __init__(self, clients: int = 6, **terms) -> None:
        draw = torch.Generator().manual_seed(clients)
        self.ids = tuple(range(10, 10 + clients))
        self.models = torch.randn(clients, COLUMNS, generator=draw)
        self.samples = torch.randint(1, 500, (clients,), generator=draw).double()
        self.keys = {client: ec.generate_private_key(ec.SECP256R1()) for client in self.ids}
        self.context = SumContext("run", 3, 2, self.ids, SecureAggregation(**terms))
        self.begin(self.context)

    def begin(self, context: SumContext) -> None:
        def verify(client: int, signature: bytes, text: bytes) -> bool:
            return identity.verify(self.keys[client].public_key(), signature, text)

        self.clients = {}
        for row, client in enumerate(self.ids):
            key = self.keys[client]
            self.clients[client] = MaskingClient(
                context, client, self.models[row], float(self.samples[row]),
                lambda text, key=key: identity.sign(key, text), verify,
            )  # fmt: skip
        self.server = SummingServer(context, COLUMNS)

    def without(self, found: dict, gone=()) -> dict:
        return {client: value for client, value in found.items() if client not in gone}

    def to_shares(self, gone=()) -> dict:
        came = {client: one.make_keys() for client, one in self.clients.items()}
        relayed = KeyList.from_tensors(self.server.take_keys(self.without(came, gone)).to_tensors())
        return {client: self.clients[client].share_secrets(relayed) for client in relayed.ids}

    def to_masked(self, gone=((), ())) -> dict:
        came = self.to_shares(gone[0])
        self.relayed = self.server.take_shares(self.without(came, gone[1]))
        found = {}
        for client, got in self.relayed.items():
            sealed = [bytes(row.tolist()) for row in got["shares"]]
            found[client] = self.clients[client].mask_model(got["ids"].tolist(), sealed)
        return found

    def run(self, gone=((), (), (), ())) -> tuple[torch.Tensor, torch.Tensor]:
        """To the mean, with clients gone before each of the four messages."""
        self.masked = self.without(self.to_masked(gone[:2]), gone[2])
        asked = self.server.take_masked(self.masked)
        came, left = asked["came"].tolist(), asked["left"].tolist()
        answers = {c: self.clients[c].answer_unmasking(came, left) for c in came}
        return self.server.unmask(self.without(answers, gone[3]), torch.float64)

    def mean_of(self, ids) -> torch.Tensor:
        rows = [self.ids.index(client) for client in ids]
        weights = self.samples[rows]
        return (self.models[rows].double() * weights[:, None]).sum(0) / weights.sum()


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        (((), (), (), ()), (10, 11, 12, 13, 14, 15)),
        (((12,), (), (), ()), (10, 11, 13, 14, 15)),
        (((), (12,), (), ()), (10, 11, 13, 14, 15)),
        (((), (), (12,), ()), (10, 11, 13, 14, 15)),
        (((), (), (15,), ()), (10, 11, 12, 13, 14)),
        (((), (), (), (12,)), (10, 11, 12, 13, 14, 15)),
        (((), (), (), (10,)), (10, 11, 12, 13, 14, 15)),
    ],
)
def test_the_mean_of_those_whose_vectors_came_whoever_leaves_at_any_step(gone, left):
    one = Sum()
    mean, samples = one.run(gone)
    assert float((mean - one.mean_of(left)).abs().max()) < 1e-6
    assert float(samples.sum()) == float(one.samples[[c - 10 for c in left]].sum())


def test_clients_may_leave_at_all_steps_of_one_sum():
    one = Sum(12)  # 9 must take part to the end
    mean, _ = one.run(((10,), (13,), (21,), ()))
    assert float((mean - one.mean_of([11, 12, *range(14, 21)])).abs().max()) < 1e-6


def test_masked_vectors_say_nothing_and_only_their_sum_does():
    """A masked vector is uniform: as far from its model as from any, by the mean of its bytes and bits."""
    one = Sum(6)
    one.models = torch.zeros(6, COLUMNS)
    one.begin(one.context)
    one.run()
    whole = np.concatenate([unpack_words(one.masked[c]["masked"]) for c in one.ids])
    assert len(set(whole.tolist())) == len(whole)  # zeros, all masked differently
    bits = (whole[:, None] >> np.arange(40)) & 1
    # 9,600 fair bits: five standard deviations are 0.0255.
    assert abs(bits.mean() - 0.5) < 0.0255
    assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / math.sqrt(len(whole))


def test_the_sum_of_the_masked_vectors_is_masked_too():
    """Pairs cancel in it, the masks of each client's own seed do not: nothing is seen before the last step."""
    one = Sum()
    masked = one.to_masked()
    total = sum(unpack_words(masked[c]["masked"]) for c in one.ids) % WORD
    shares = (one.samples / one.samples.sum()).tolist()
    plain = sum(encode_model(m, s, 6) for m, s in zip(one.models, shares, strict=True)) % WORD
    assert not (total == plain).any()


def test_no_mask_is_used_twice():
    """The same models of the same clients in two sums: no number of a masked vector is the same."""
    one = Sum()
    first = one.to_masked()
    one.begin(replace(one.context, round=4))
    second = one.to_masked()
    one.begin(one.context)  # the same round once more, as after a restart
    third = one.to_masked()
    for client in one.ids:
        found = [unpack_words(masked[client]["masked"]) for masked in (first, second, third)]
        assert not (found[0] == found[1]).any()
        assert not (found[0] == found[2]).any()


def test_a_client_masks_once_and_takes_one_list():
    one = Sum()
    one.to_masked()
    client, got = one.clients[10], one.relayed[10]
    sealed = [bytes(row.tolist()) for row in got["shares"]]
    with pytest.raises(SumRefused, match="a masked model twice"):
        client.mask_model(got["ids"].tolist(), sealed)
    with pytest.raises(SumRefused, match="a second list of keys"):
        client.share_secrets(one.server.keys)


# ---------------------------------------------------------------- too few


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_fewer_than_the_threshold_at_any_step_reveal_nothing_and_that_is_an_error(step):
    gone: list[tuple] = [(), (), (), ()]
    gone[step] = (10, 11)
    one = Sum()
    with pytest.raises(TooFewToSum, match="4 of 6 clients can be summed; at least 5 must be"):
        one.run(tuple(gone))


def test_clients_themselves_refuse_a_sum_of_too_few():
    """A server that goes on below the threshold gets nothing from them."""
    one = Sum()
    came = {client: found.make_keys() for client, found in one.clients.items()}
    whole = one.server.take_keys(came)
    few = KeyList(*(part[:4] for part in (whole.ids, whole.keys, whole.samples, whole.signatures)))
    with pytest.raises(TooFewToSum, match="4 of 6"):
        one.clients[10].share_secrets(few)
    one = Sum()
    one.to_shares()
    with pytest.raises(TooFewToSum, match="4 of 6"):
        one.clients[10].mask_model([10, 11, 12, 13], [bytes(82)] * 4)
    one = Sum()
    one.to_masked()
    with pytest.raises(TooFewToSum, match="4 of 6"):
        one.clients[10].answer_unmasking([10, 11, 12, 13], [14, 15])


# ---------------------------------------------------------------- servers that lie


def test_a_server_that_asks_for_both_shares_of_a_client_is_refused():
    one = Sum()
    one.to_masked()
    with pytest.raises(SumRefused, match="both shares of client 14, which would reveal its model"):
        one.clients[10].answer_unmasking([10, 11, 12, 13, 14, 15], [14])


def test_a_server_that_asks_twice_is_refused_and_gets_the_same_answer_for_the_same_question():
    one = Sum()
    one.to_masked()
    client = one.clients[10]
    first = client.answer_unmasking([10, 11, 12, 13, 15], [14])
    again = client.answer_unmasking([10, 11, 12, 13, 15], [14])
    assert torch.equal(first["shares"], again["shares"])
    with pytest.raises(SumRefused, match="a second time and names other clients"):
        client.answer_unmasking([10, 11, 12, 13, 14, 15], [])


def test_a_server_that_tells_some_that_a_client_left_and_others_that_it_came_has_too_few_shares():
    """Six clients, one share each: three of the key and three of the seed, where five are needed."""
    one = Sum()
    one.to_masked()
    others, told = [10, 11, 12, 13, 15], {}
    for client in others:
        left = client in (10, 11, 12)
        come = others if left else [*others[:4], 14, 15]
        told[client] = one.clients[client].answer_unmasking(come, [14] * left)
    for of_key in (True, False):
        got = [c for c in others if (c in (10, 11, 12)) == of_key]
        assert len(got) < one.context.threshold


def test_a_client_that_is_said_to_have_left_does_not_answer():
    one = Sum()
    one.to_masked()
    with pytest.raises(SumRefused, match="ascending, with 14"):
        one.clients[14].answer_unmasking([10, 11, 12, 13, 15], [14])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k: replace(k, samples=(1e12, *k.samples[1:])), "client 10 are not signed"),
        (lambda k: replace(k, keys=(k.keys[1], *k.keys[1:])), "client 10 are not signed"),
        (lambda k: replace(k, samples=(-1.0, *k.samples[1:])), "client 10 claims -1 samples"),
        (lambda k: replace(k, ids=(9, *k.ids[1:])), "expected some of"),
        (lambda k: replace(k, ids=(11, *k.ids[1:])), "expected some of"),
    ],
)
def test_a_list_that_the_server_changed_is_refused(change, said):
    one = Sum()
    came = {client: found.make_keys() for client, found in one.clients.items()}
    with pytest.raises(SumRefused, match=said):
        one.clients[15].share_secrets(change(one.server.take_keys(came)))


def test_keys_of_an_earlier_sum_are_refused():
    """Signed by the member, but for another round: their secrets may be known by now."""
    one = Sum()
    old = {client: found.make_keys() for client, found in one.clients.items()}
    one.begin(replace(one.context, round=4))
    came = {client: found.make_keys() for client, found in one.clients.items()}
    with pytest.raises(SumRefused, match="client 10 are not signed"):
        one.clients[15].share_secrets(one.server.take_keys({**came, 10: old[10]}))


def test_clients_that_are_shown_different_numbers_of_samples_have_masks_that_do_not_cancel():
    """A member that signs two numbers helps a server to make all others weigh nothing beside one
    client, whose model would be the sum: but then masks stay in it, and nothing is seen."""
    one = Sum()
    came = {client: found.make_keys() for client, found in one.clients.items()}
    honest = one.server.take_keys(came)
    liar = one.clients[15]
    liar.samples = 1e12
    false = KeyList(
        honest.ids, honest.keys, (*honest.samples[:5], 1e12),
        (*honest.signatures[:5], bytes(liar.make_keys()["signature"].tolist())),
    )  # fmt: skip
    total = np.zeros(COLUMNS, dtype=np.int64)
    for client in one.ids[:5]:
        found = one.clients[client]
        found.share_secrets(honest if client == 10 else false)
        masked = found.mask_model(one.ids, [bytes(82)] * 6)
        total = (total + unpack_words(masked["masked"])) % WORD
    share = float(one.samples[0] / one.samples.sum())
    target = encode_model(one.models[0], share, 6)
    assert not (total == target).any()


def test_a_wrong_share_is_noticed_and_nothing_is_aggregated():
    for gone in ((), (13,)):
        one = Sum()
        masked = one.without(one.to_masked(), gone)
        asked = one.server.take_masked(masked)
        came, left = asked["came"].tolist(), asked["left"].tolist()
        answers = {c: one.clients[c].answer_unmasking(came, left) for c in came}
        answers[10]["shares"][3, 5] ^= 1
        with pytest.raises(ExchangeError, match="some of them are wrong"):
            one.server.unmask(answers, torch.float64)


def test_messages_for_another_list_are_not_counted():
    """Of clients that answered a server before it was started again."""
    one = Sum()
    shares = one.to_shares()
    shares[10]["digest"] = shares[10]["digest"] ^ 1
    assert sorted(one.server.take_shares(shares)) == [11, 12, 13, 14, 15]


def test_a_public_key_with_which_all_agree_on_the_same_is_refused():
    one = Sum()
    bad = one.clients[15]
    bad._keys = bytes(32) + bad._keys[32:]
    with pytest.raises(SumRefused, match="public key is none"):
        one.to_shares()
