"""Summing: the exchanges of a masked sum between machines, in which the server relays and adds.

Each of the four steps (`masking`) is a question of every client to the server and its answer, at
addresses of their own, so nothing of the wire format is new. Who does not come in a step is in no
later one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie._util.mappings import prefix_keys
from coterie.errors import ExchangeError
from coterie.exchange.base import SAMPLES, Inbox, Message, Reply, Rule, check_reply
from coterie.exchange.secure_sum import (
    KEYS,
    SEALED_SHARES,
    SHARE,
    SIGNATURE,
    find_unfit,
    make_summed,
)
from coterie.functional.fixed_point import WORD_BYTES
from coterie.net.masking import DIGEST, KeyList, MaskingClient, SumContext, SummingServer, to_bytes
from coterie.net.outbox import Missing
from coterie.net.payload import MAX_HEADER, Refused, Template
from coterie.net.post import Post, RoundMissed, split_found
from coterie.net.wire import Address

_U8 = torch.uint8
Tensors = Mapping[str, Tensor]


def _limit(tensors: Mapping[str, tuple[torch.dtype, tuple[int | str, ...]]], most: int) -> Template:
    """Return a template of tensors with named axes of at most so many entries."""
    size = MAX_HEADER + 8
    for dtype, shape in tensors.values():
        entries = 1
        for length in shape:
            # The limit of a message follows from its form: a peer cannot announce more.
            entries *= most if isinstance(length, str) else length
        size += dtype.itemsize * entries
    return Template(tensors, max_bytes=size)


@dataclass
class MaskedSum:
    """A masked sum of a round, at one node.

    Args:
        post: the node's mail.
        round: the round.
        cohort: ids of the clients that the server waits for, ascending.
        hosted: ids of this node's clients that take part.
        next_number: returns the number of the next exchange.
        gone: clients that were missing in this round; clients that are missing now are added.
    """

    post: Post
    round: int
    cohort: Sequence[int]
    hosted: Sequence[int]
    next_number: Callable[[], int]
    gone: set[int]
    _clients: dict[int, MaskingClient] = field(default_factory=dict)

    def run(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Take part in the sum; where the server role is, apply its rule to the mean.

        Raises:
            RoundMissed: when this node's clients are in no sum: the server went on without them,
                too few took part, or the server relayed what would reveal a model.
        """
        assert message.sum_only is not None
        first = self.next_number()
        self._context = SumContext(
            self.post.roster.run, self.round, first, tuple(self.cohort), message.sum_only
        )
        self._begin_clients(message, first)
        params = message.params.shape[1]
        if self.post.roster.server == self.post.transport.name:
            return self._serve(message, rule, shared, first, params)
        if not self._clients:
            raise RoundMissed("withheld")
        try:
            self._take_part(first)
        except Refused as refused:
            raise RoundMissed(f"its masked sum is refused: {refused}") from None
        return shared, Reply.to_every_client(message.params[:0], len(message)).to_inbox()

    def _begin_clients(self, message: Message, first: int) -> None:
        """Make the parts of this node's clients; one whose model does not fit sends nothing."""
        # A model beyond the range of whole numbers would wrap around, and spoil the sum for all.
        unfit = find_unfit(message, len(self.cohort))
        for row, client in enumerate(self.hosted):
            if client in unfit:
                self.post.withhold(Address(self.round, first, client, "request"), unfit[client])
                continue
            self._clients[client] = MaskingClient(
                self._context, client, message.params[row], float(message.fields[SAMPLES][row]),
                self.post.sign, self.post.verify_client,
            )  # fmt: skip

    # ------------------------------------------------------------------ clients

    def _make_keys(self) -> dict[int, Tensors]:
        return {client: one.make_keys() for client, one in self._clients.items()}

    def _take_part(self, first: int) -> None:
        """Do the four steps of the clients of a node that is not the server.

        Raises:
            Refused: when the server relays or asks for what would reveal more than the sum.
        """
        most, clients = len(self.cohort), self._clients
        answers = self._ask(first, self._make_keys(), key_list_template(most))
        sent = self._answer(
            lambda c, got: clients[c].share_secrets(KeyList.from_tensors(got)), answers
        )
        answers = self._ask(self.next_number(), sent, sealed_template(most))
        sent = self._answer(lambda c, got: clients[c].mask_model(*read_sealed(got)), answers)
        answers = self._ask(self.next_number(), sent, question_template(most))
        sent = self._answer(
            lambda c, got: clients[c].answer_unmasking(got["came"].tolist(), got["left"].tolist()),
            answers,
        )
        # The server sends the same question to all clients: the first one's will do.
        self._note_sum(first, next(iter(answers.values()))["came"].tolist())
        # The last step has no answer: the next exchange of the round or the run is one.
        self._publish(self.next_number(), sent)

    def _answer(
        self, act: Callable[[int, Tensors], Tensors], got: Mapping[int, Tensors]
    ) -> dict[int, Tensors]:
        """Return what clients send in the next step; note what the server may not ask.

        Raises:
            Refused: in its place.
        """
        try:
            return {client: act(client, tensors) for client, tensors in got.items()}
        except ExchangeError as error:
            refused = Refused("sum", str(error))
            self.post.record_refusal(refused)
            raise refused from None

    def _publish(self, number: int, sent: Mapping[int, Tensors]) -> None:
        for client, tensors in sent.items():
            at = Address(self.round, number, client, "request")
            self.post.publish(tensors, at, to=self.post.roster.server)

    def _ask(
        self, number: int, sent: Mapping[int, Tensors], template: Template
    ) -> dict[int, Tensors]:
        """Send each client's part of a step, and return the server's answers."""
        self._publish(number, sent)
        found = {}
        for client in sent:
            at = Address(self.round, number, client, "reply")
            found[client] = self.post.fetch_from_server(at, template).tensors
        return found

    # ------------------------------------------------------------------ the server role

    def _serve(
        self, message: Message, rule: Rule, shared: Any, first: int, params: int
    ) -> tuple[Any, Inbox]:
        server, number, clients = SummingServer(self._context, params), first, self._clients
        try:
            came = self._collect(number, self.cohort, self._make_keys(), keys_template())
            listed = server.take_keys(came)
            self._relay(number, dict.fromkeys(listed.ids, listed.to_tensors()))

            # Each step has a number of its own: the next messages are at other addresses.
            number, own = self.next_number(), self._own(listed.ids)
            came = self._collect(
                number, listed.ids, {c: clients[c].share_secrets(listed) for c in own},
                shares_template(len(listed.ids), SEALED_SHARES),
            )  # fmt: skip
            sealed = server.take_shares(came)
            self._relay(number, sealed)

            number, own = self.next_number(), self._own(sealed)
            came = self._collect(
                number, sealed, {c: clients[c].mask_model(*read_sealed(sealed[c])) for c in own},
                masked_template(params),
            )  # fmt: skip
            asked = server.take_masked(came)
            self._relay(number, dict.fromkeys(server.came, asked))

            number, own = self.next_number(), self._own(server.came)
            lists = asked["came"].tolist(), asked["left"].tolist()
            came = self._collect(
                number, server.came, {c: clients[c].answer_unmasking(*lists) for c in own},
                shares_template(len(server.sharing), SHARE),
            )  # fmt: skip
            mean, samples = server.unmask(came, message.params.dtype)
        except ExchangeError as error:
            # Nobody must wait in vain.
            self._relay(number, {})
            text = f"no sum in round {self.round}: {error}"
            self.post.journal({"event": "no_sum", "round": self.round, "text": text})
            raise RoundMissed(text) from None
        self._note_sum(first, server.came)
        new, reply = rule(shared, make_summed(message, mean, samples))
        check_reply(reply, message.expects)
        return new, Reply.to_every_client(message.params[:0], len(message)).to_inbox()

    def _note_sum(self, first: int, came: Sequence[int]) -> None:
        """Record whose models are in the sum, and how much of it this node's clients are."""
        # How much of the sum is this node's own: it says how much the others' part hides.
        own = sum(one.share for client, one in self._clients.items() if client in came)
        self.post.journal({
            "event": "sum", "round": self.round, "exchange": first, "arrived": list(came),
            "of": len(self.cohort), "share": own,
        })  # fmt: skip

    def _own(self, ids: Collection[int]) -> list[int]:
        """Return the clients of some that the server's node hosts."""
        return [client for client in self._clients if client in ids]

    def _collect(
        self, number: int, expected: Iterable[int], own: Mapping[int, Tensors], template: Template
    ) -> dict[int, Tensors]:
        """Return the messages of a step, by client: those of this node, and what others sent."""
        hosted, address = set(self.hosted), Address(self.round, number, -1, "request")
        # Who was missing in a step is in no later one, and is not waited for again.
        others = [c for c in sorted(expected) if c not in hosted and c not in self.gone]
        found = self.post.fetch_all(
            [replace(address, client=client) for client in others], template, self.post.deadline()
        )
        arrived, lost = split_found(found)
        came = dict(own)
        for client, delivery in arrived.items():
            came[client] = delivery.tensors
        self.gone |= set(lost)
        self.post.journal({
            "event": "serve", "round": self.round, "exchange": number, "arrived": sorted(came),
            "missing": prefix_keys("", lost),
        })  # fmt: skip
        return came

    def _relay(self, number: int, answers: Mapping[int, Tensors]) -> None:
        """Answer each client: with its part, or that the sum goes on without it."""
        for client, host in self.post.host_of.items():
            at = Address(self.round, number, client, "reply")
            if host == self.post.transport.name:
                continue
            if client in answers:
                self.post.publish(answers[client], at, to=host)
            else:
                self.post.transport.publish(at, Missing("absent", self.round))


# ---------------------------------------------------------------- the forms of the messages


def keys_template() -> Template:
    """Return the form of a client's keys."""
    parts = {
        "keys": (_U8, (KEYS,)),
        "samples": (torch.float64, ()),
        "signature": (_U8, (SIGNATURE,)),
    }
    return _limit(parts, 1)


def key_list_template(most: int) -> Template:
    """Return the form of the list of keys of at most so many clients."""
    parts = {
        "ids": (torch.int64, ("clients",)),
        "keys": (_U8, ("clients", KEYS)),
        "samples": (torch.float64, ("clients",)),
        "signatures": (_U8, ("clients", SIGNATURE)),
    }
    return _limit(parts, most)


def shares_template(clients: int, width: int) -> Template:
    """Return the form of one client's shares for others, or of others."""
    return _limit({"shares": (_U8, (clients, width)), "digest": (_U8, (DIGEST,))}, 1)


def sealed_template(most: int) -> Template:
    """Return the form of what at most so many clients encrypted for one."""
    parts = {"ids": (torch.int64, ("clients",)), "shares": (_U8, ("clients", SEALED_SHARES))}
    return _limit(parts, most)


def masked_template(params: int) -> Template:
    """Return the form of a masked vector."""
    return _limit({"masked": (_U8, (params * WORD_BYTES,)), "digest": (_U8, (DIGEST,))}, 1)


def question_template(most: int) -> Template:
    """Return the form of the server's question for shares."""
    return _limit({"came": (torch.int64, ("came",)), "left": (torch.int64, ("left",))}, most)


def read_sealed(got: Tensors) -> tuple[list[int], list[bytes]]:
    """Return the ids of clients, and what each encrypted."""
    return got["ids"].tolist(), list(map(to_bytes, got["shares"]))
