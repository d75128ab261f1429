"""RemoteExchange: the exchange of a node, over any transport.

It has the contract of every exchange, so the same methods run on it. Publishing stores a signed
message, which other nodes fetch; pulling fetches those of the chosen peers, a few at a time, until
the round's deadline. When peers are missing in the first exchange of a round, the round is drawn
again without them by the method's own rule; a message that is missing later is `mask == False`,
with the reason in the journal. In server-based methods the node in the server role fetches the
cohort's messages, and every client fetches its answer.
"""

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.mappings import number_items, prefix_keys, select_keys, select_prefix
from coterie._util.tensors import index_each
from coterie.errors import ExchangeError
from coterie.exchange.base import (
    COHORT,
    Inbox,
    Message,
    PeersMissing,
    Reply,
    Rule,
    check_peers,
    check_reply,
    make_inbox,
    row_nbytes,
)
from coterie.exchange.in_memory import InMemory
from coterie.net.outbox import Missing
from coterie.net.payload import MAX_HEADER, Refused, Template
from coterie.net.post import FIELD, Post, RoundMissed, nan_tensors, split_found
from coterie.net.roster import Roster
from coterie.net.summing import MaskedSum
from coterie.net.transport import Delivery
from coterie.net.wire import Address
from coterie.rng import Rng

# Bytes of a server's answer whose size its method does not declare. A gigabyte: tables of many
# clusters fit, and no server fills this node's memory.
MAX_REPLY = 1 << 30
# Other members that are left at least when slow ones are left out: with one alone, a single message
# that does not come makes a round without any.
_COMPANY = 2
# Bytes: enough for the ids of some 130,000 clients.
_MAX_COHORT = 1 << 20


class RemoteExchange:
    """The exchange between one node's clients and those of other nodes.

    Args:
        post: publishes and fetches single messages.
        width: numbers of a model in a message; what a server sends must have as many. Any number
            when None.
    """

    def __init__(self, post: Post, width: int | None = None) -> None:
        self.post, self.width = post, width
        self.name = post.transport.name
        self.server = post.roster.server == self.name
        self.ids = torch.tensor(post.roster.member(self.name).clients, dtype=torch.int64)
        self._away: frozenset[str] = frozenset()
        self._odd: frozenset[str] = frozenset()
        self._seen: frozenset[str] = frozenset()
        self._own = InMemory(self.ids, post.roster.population)
        self.begin_round(Rng(0))

    @property
    def roster(self) -> Roster:
        """The members, as they are now."""
        return self.post.roster

    # ------------------------------------------------------------------ the round

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._rng, self._number, self._groups = rng, 0, 0
        self._own.begin_round(rng)
        self._expected: Tensor | None = None
        self._got: dict[Address, Delivery] = {}
        self._lost: set[int] = set()
        self._redraws, self._until = 0, 0.0
        away = self._unreachable_clients()
        self._slow = self._clients_of(self.post.pace.list_slow(rng.round)) - away
        self._down = away | self._slow
        # whether messages of others were wanted in this round
        self.is_asking = False

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part in this round."""
        self._own.set_active(ids)

    def set_away(self, names: Iterable[str]) -> None:
        """Note members that did not answer at the start; they are asked once they are seen."""
        self._away = frozenset(names)

    def list_present(self, names: Iterable[str]) -> list[str]:
        """Return those of some members that are not known to be away."""
        self._unreachable_clients()
        # Once, and not for each of thousands of names.
        away = self._away | self._odd
        return [name for name in names if name not in away]

    def note_present(self, names: Iterable[str]) -> None:
        """Note members that have answered just now."""
        # They are asked from now on, as members that were never seen are.
        self._away, self._seen = self._away - set(names), self._seen - set(names)

    def admit(self, names: Iterable[str]) -> None:
        """Note members that have answered in this round, which are asked in it already."""
        names = list(names)
        self.note_present(names)
        self._down -= self._clients_of(names) - self._slow

    def shut_out(self, names: Iterable[str]) -> None:
        """Never ask members that run another study."""
        self._odd |= set(names)

    def list_strangers(self) -> set[str]:
        """Return the members that have not been met, where strangers are not asked."""
        return set(self._away - self._seen - self._odd)

    def admit_strangers(self, passed_over: Iterable[str]) -> None:
        """Let members be asked in this round that were not met, but for some without an answer."""
        self._down -= self._clients_of(self.list_strangers().difference(passed_over)) - self._slow

    def open_clients(self, passed_over: Iterable[str]) -> Bool[Tensor, " population"]:
        """Return the clients that can be asked, or could be when their members were met.

        Args:
            passed_over: members that did not answer.
        """
        out = self.reachable_clients()
        strangers = self.list_strangers().difference(passed_over)
        out[list(self._clients_of(strangers))] = True
        return out

    def _unreachable_clients(self) -> set[int]:
        """Return the clients of members that are away now or were removed."""
        alive = self.post.transport.alive_members()
        # A member that was never seen is asked all the same: it may come at any moment.
        self._seen |= alive
        self._away = (self._away | self._seen) - alive
        return self._clients_of(self._away | self._odd) | set(self.roster.removed)

    def _clients_of(self, names: Container[str]) -> set[int]:
        return {client for client, name in self.post.host_of.items() if name in names}

    def _describe_reach(self, down: Set[int]) -> dict[str, list[int]]:
        """Return which clients can be asked, for the journal, by the shorter of two lists.

        A node that has met 60 members of 10,000 would else write the others down in each pull.
        """
        if 2 * len(down) <= self.roster.population:
            return {"unreachable": sorted(down)}
        return {"reachable": sorted(set(range(self.roster.population)) - down)}

    def _members_of(self, clients: Iterable[int]) -> dict[str, list[str]]:
        """Return the members of clients that are missing, by name, for a record of it."""
        host_of = self.post.host_of
        names = sorted(set(select_keys(host_of, clients).values()))
        return {"members": names} if names else {}

    def reachable_clients(self) -> Bool[Tensor, " population"]:
        """Return the clients that can be asked in this round, as known at its beginning."""
        out = torch.ones(self.roster.population, dtype=torch.bool)
        out[list(self._down)] = False
        return out

    def readmit_slow(self, readable: Bool[Tensor, "*clients population"]) -> None:
        """Ask slow members in this round where they are needed.

        Better a slow round than a lonely one.

        Args:
            readable: the clients that the method may read: it can have left out others.
        """
        pace, host_of = self.post.pace, self.post.host_of
        pace.note_needed((), wholly=False)
        if not self._slow:
            return
        left = readable.reshape(-1, self.roster.population).any(0) & self.reachable_clients()
        others = {host_of.get(client, self.name) for client in left.nonzero().flatten().tolist()}
        others -= {self.name}
        if len(others) < _COMPANY:
            self._down -= self._slow
            pace.note_needed({host_of[client] for client in self._slow}, wholly=not others)

    def _next_number(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    # ------------------------------------------------------------------ sending

    def _publish_rows(self, message: Message, number: int) -> None:
        for row, client in enumerate(self._own.active.tolist()):
            self.post.publish(cut_row(message, row), self._address_of(number, client))

    # ------------------------------------------------------------------ asking

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish the hosted clients' message and fetch the chosen peers': see `Exchange.pull`.

        Raises:
            PeersMissing: in the first exchange of a round, when peers are missing and others may be
                drawn.
        """
        if message.sum_only is not None:
            raise ExchangeError(
                "between machines no single model of a group can be hidden yet from its reader"
            )
        started, number, clock = time.monotonic(), self._next_number(), self.post.clock
        own, message = self._own.active, replace(message, ids=self._own.active)
        check_peers(own, peers, self.roster.population)
        board = self._own.publish_message(message)
        self._publish_rows(message, number)
        assert board.ids is not None
        # Own clients and stopped ones are on the board already.
        wanted = sorted(set(peers[peers >= 0].tolist()) - set(board.ids.tolist()))
        # Nobody is asked also where all others are away.
        self.is_asking |= bool(wanted or self._down)
        # One deadline for the first exchange of a round with all its repetitions.
        if not self._until:
            self._until = clock() + self.post.deadline()
        left = max(0.0, self._until - clock()) if number == 0 else self.post.deadline()
        lost = self._fetch_missing(
            wanted, number, make_template(message, self._address_of(number, -1)), left
        )
        self.post.traffic.seconds += time.monotonic() - started
        # Only the first exchange can be repeated: later messages depend on earlier ones.
        again = (
            number == 0
            and self._rng.round >= 0
            and lost
            and self._redraws < self.post.terms.redraws
            and clock() < self._until
        )
        # The journal has all that a replay needs: what was reachable, and what arrived.
        self.post.journal({
            "event": "redraw" if again else "pull", "round": self._rng.round, "exchange": number,
            "readers": own.tolist(), "asked": wanted,
            "missing": prefix_keys("", lost), **self._members_of(lost),
            "arrived": [c for c in wanted if self._address_of(number, c) in self._got],
            **self._describe_reach(self._down | self._lost), "seconds": time.monotonic() - started,
        })  # fmt: skip
        if number == 0:
            self._lost |= set(lost)
        if again:
            # The same number again: addresses stay the same, and what has arrived counts.
            self._redraws, self._number = self._redraws + 1, 0
            self._own.begin_round(self._rng)
            raise PeersMissing(torch.tensor(sorted(lost)))
        rows = []
        for client in wanted:
            if (found := self._got.get(self._address_of(number, client))) is not None:
                rows.append((client, found.tensors))
        whole = join_messages(board, rows)
        return make_inbox(whole, own, peers, self.roster.population)

    def _address_of(self, number: int, client: int) -> Address:
        return Address(self._rng.round, number, client)

    def _fetch_missing(
        self, wanted: Iterable[int], number: int, template: Template, seconds: float
    ) -> dict[int, str]:
        """Fetch messages neither here nor known as missing; return why others are missing."""
        skip = self._lost | self._down
        fresh = []
        for client in wanted:
            address = self._address_of(number, client)
            if client not in skip and address not in self._got:
                fresh.append(address)
        came, lost = split_found(self.post.fetch_all(fresh, template, seconds))
        for client, delivery in came.items():
            self._got[self._address_of(number, client)] = delivery
        return lost

    # ------------------------------------------------------------------ the server role

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send the message to the server's node and wait for its answer: see `Exchange.ask_server`.

        Raises:
            RoundMissed: when the server continued without this node's message.
            TransportError: when no server answers for `Terms.server_wait` seconds.
        """
        if not self.roster.server:
            raise ExchangeError(
                "this method needs a server and the roster names none; set `server` in the roster"
            )
        started, message = time.monotonic(), replace(message, ids=self._own.active)
        if message.sum_only is not None:
            answer = self._ask_for_sum(message, rule, shared)
            self.post.traffic.seconds += time.monotonic() - started
            return answer
        address = Address(self._rng.round, self._next_number(), -1, "request")
        if self.server:
            answer = self._answer_clients(message, rule, shared, address)
        else:
            for row, client in enumerate(self._own.active.tolist()):
                self.post.publish(
                    cut_row(message, row), replace(address, client=client), to=self.roster.server
                )
            answer = shared, self._fetch_replies(message, address)
        self.post.traffic.seconds += time.monotonic() - started
        return answer

    def _list_cohort(self) -> list[int]:
        """Return the clients for which the server waits: all where none was agreed on."""
        if self._expected is None:
            return list(range(self.roster.population))
        return self._expected.tolist()

    def _ask_for_sum(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send masked models, of which the server gets the weighted mean alone."""
        cohort = self._list_cohort()
        self.is_asking |= bool(set(cohort) - set(self.ids.tolist()))
        one = MaskedSum(
            self.post, self._rng.round, cohort, self._own.active.tolist(),
            self._next_number, self._lost,
        )  # fmt: skip
        return one.run(message, rule, shared)

    def _answer_clients(
        self, message: Message, rule: Rule, shared: Any, address: Address
    ) -> tuple[Any, Inbox]:
        # One that was absent in this round is asked no more in it.
        others = sorted(set(self._list_cohort()) - set(self.ids.tolist()) - self._lost)
        self.is_asking |= bool(others)
        template = make_template(message, address)
        found = self.post.fetch_all(
            [replace(address, client=c) for c in others], template, self.post.deadline()
        )
        came, lost = split_found(found)
        whole = join_messages(message, [(client, one.tensors) for client, one in came.items()])
        assert whole.ids is not None
        self._lost |= set(lost)
        self.post.journal({
            "event": "serve", "round": address.round, "exchange": address.exchange,
            "arrived": whole.ids.tolist(), "missing": prefix_keys("", lost),
            **self._members_of(lost),
        })  # fmt: skip
        if not len(whole):
            raise RoundMissed("no client's message arrived")
        new, reply = rule(shared, whole)
        check_reply(reply, message.expects)
        places = number_items(whole.ids.tolist())
        # Each client gets its row, or the reason why there is none: it must not wait in vain.
        for client, host in self.post.host_of.items():
            at = replace(address, client=client, kind="reply")
            if client in places and host != self.name:
                self.post.publish(_reply_row(reply, places[client]), at, to=host)
            elif host != self.name:
                self.post.transport.publish(at, Missing("absent", address.round))
        assert message.ids is not None
        rows = torch.tensor([places[c] for c in message.ids.tolist()], dtype=torch.int64)
        return new, reply.to_inbox(rows)

    def _fetch_replies(self, message: Message, address: Address) -> Inbox:
        template, like = self._reply_template(message), dict[str, Tensor]()
        rows: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        index = []
        for client in self._own.active.tolist():
            at = replace(address, client=client, kind="reply")
            got = self.post.fetch_from_server(
                at, template, partial(_check_reply, like=like)
            ).tensors
            # The first answer fixes the form, since the answers of all clients here are joined.
            like = like or got
            # A server's table has the rows of the index in ascending order; see `_reply_row`.
            for place, sender in enumerate(torch.unique(got["index"]).tolist()):
                fields = index_each(select_prefix(FIELD, got), place)
                rows[sender] = (got["table"][place], fields)
            index.append(got["index"])
        if not rows:
            return Reply.to_every_client(message.params[:0], len(message)).to_inbox()
        order = sorted(rows)
        table = torch.stack([rows[s][0] for s in order]).to(message.params.device)
        first, fields = rows[order[0]][1], {}
        for name in first:
            fields[name] = torch.stack([rows[s][1][name] for s in order]).to(table.device)
        peers = torch.stack(index)
        return Inbox(
            table=table,
            # The index counts rows of the server's table; here only the rows that came are stored.
            index=torch.searchsorted(torch.tensor(order), peers),
            peers=peers,
            mask=torch.ones_like(peers, dtype=torch.bool),
            age=torch.zeros_like(peers),
            fields=fields,
            bytes=torch.full_like(peers, row_nbytes(table) + sum(v.nbytes for v in first.values())),
        )

    def _reply_template(self, message: Message) -> Template:
        """Return the template of the server's answer, by the form that its method declares."""
        form, dtype = message.expects, message.params.dtype
        width = self.width if form is None or form.models else None
        columns = "params" if width is None else width
        peers = "peers" if form is None else form.models
        tensors: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
            "table": (dtype, ("senders", columns)),
            "index": (torch.int64, (peers,)),
        }
        most = MAX_REPLY
        if form is not None:
            for name, (kind, shape) in form.fields.items():
                tensors[f"field.{name}"] = (kind, ("senders", *shape))
            each = sum(kind.itemsize * math.prod(shape) for kind, shape in form.fields.values())
            # 8 bytes for the entry of the index.
            each += 8 + dtype.itemsize * (width or 0)
            if width is not None or not form.models:
                most = MAX_HEADER + 8 + form.models * each
        return Template(
            tensors,
            free="field." if form is None else "",
            lead="senders",
            halved=frozenset({"table"}),
            max_bytes=most,
        )

    def agree_on_cohort(
        self, compute: Callable[[], Int[Tensor, " active"]]
    ) -> Int[Tensor, " active"]:
        """Compute the cohort as the server, or fetch it: see `Exchange.agree_on_cohort`."""
        number, self._groups = self._groups, self._groups + 1
        self._number = self._groups * COHORT
        address = Address(self._rng.round, number, -1, "cohort")
        if self.server:
            self._expected = compute()
            self.post.publish({"ids": self._expected}, address)
            return self._expected
        template = Template({"ids": (torch.int64, ("active",))}, max_bytes=_MAX_COHORT)

        def check_cohort(tensors: Mapping[str, Tensor]) -> None:
            ids = tensors["ids"]
            inside = (ids >= 0) & (ids < self.roster.population)
            if not torch.equal(ids, torch.unique(ids)) or not bool(inside.all()):
                raise Refused(
                    "cohort", "the server's cohort is not a set of clients in ascending order"
                )

        self._expected = self.post.fetch_from_server(address, template, check_cohort).tensors["ids"]
        return self._expected

    # ------------------------------------------------------------------ those who stopped

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients answer with these models in every later round."""
        self._own.retire_clients(ids, params)
        self._publish_stopped(ids.tolist())

    def _publish_stopped(self, clients: Iterable[int]) -> None:
        for number, board in self._own.last.items():
            assert board.ids is not None
            places = number_items(board.ids.tolist())
            for client in places.keys() & set(clients):
                row = cut_row(board, places[client])
                # An exchange of extras alone has no columns.
                tensors = {**row, "params": self._own.stopped[client][: len(row["params"])]}
                # From the next round on: the message of this round is published already.
                at = Address(self._rng.round + 1, number, client)
                self.post.publish_standing(tensors, at)

    def skip_round(self, exchanges: int) -> None:
        """Pass a round; stopped clients still answer."""

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that a later round depends on, for a checkpoint."""
        return self._own.snapshot()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        self._own.restore(tensors)
        self._publish_stopped(self._own.stopped)


def cut_row(message: Message, row: int) -> dict[str, Tensor]:
    """Return one client's message as the tensors that travel."""
    fields = prefix_keys(FIELD, index_each(message.fields, row))
    return {"params": message.params[row], **fields}


def make_template(message: Message, address: Address) -> Template:
    """Return the template of a message like this one from another client."""
    tensors = {"params": message.params, **prefix_keys(FIELD, message.fields)}
    rows = {}
    for name, t in tensors.items():
        # On no device: a template is a form, and takes no memory.
        rows[name] = torch.empty(t.shape[1:], dtype=t.dtype, device="meta")
    return Template.of(rows, halved=frozenset({"params"}), gaps=nan_tensors(rows, address))


def join_messages(own: Message, came: Sequence[tuple[int, Mapping[str, Tensor]]]) -> Message:
    """Join the client's own rows and those received to one message, in the order of ids.

    Args:
        own: a message with ids.
        came: clients and the tensors of their messages.
    """
    if not came or own.ids is None:
        return own
    ids = torch.cat([own.ids, torch.tensor([client for client, _ in came])])
    # The order of ids, as in one process: sums must not depend on which message came first.
    order = torch.argsort(ids)

    def join_rows(mine: Tensor, name: str) -> Tensor:
        rows = [*mine, *(tensors[name] for _, tensors in came)]
        return torch.stack([rows[place].to(mine.device) for place in order.tolist()])

    fields = {name: join_rows(value, f"{FIELD}{name}") for name, value in own.fields.items()}
    return Message(join_rows(own.params, "params"), fields, ids[order])


def _check_reply(got: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Check that a server's answer is consistent, and has the form of another client's answer.

    Raises:
        Refused: when they do not.
    """
    shown = torch.unique(got["index"])
    # The table has one row for each distinct entry of the index.
    if len(shown) != len(got["table"]) or bool((shown < 0).any()) or bool((shown >= 1 << 31).any()):
        raise Refused(
            "index", f"the server's answer shows {len(shown)} rows and has {len(got['table'])}"
        )
    if not like:
        return

    def describe_form(reply: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
        rows = {name: (t.dtype, t.shape[1:]) for name, t in reply.items()}
        return {**rows, "index": (reply["index"].dtype, reply["index"].shape)}

    if describe_form(got) != describe_form(like):
        raise Refused("shape", "the server's answers to two clients of this node differ in form")


def _reply_row(reply: Reply, row: int) -> dict[str, Tensor]:
    """The part of a server's answer for one client: each row of the table once, in order."""
    # In ascending order, so that a reader finds the row of an entry by its place.
    used = torch.unique(reply.index[row])
    fields = prefix_keys(FIELD, index_each(reply.fields, used))
    return {"table": reply.table[used], "index": reply.index[row].contiguous(), **fields}
