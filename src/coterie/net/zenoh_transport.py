"""The transport between machines: eclipse-zenoh peers with mutual TLS, driven by the roster.

Each member dials only those before it on the roster; gossip, multicast, shared memory and the admin
space are off. Keys are tied to certificates by an access list that denies by default, so a member
can only answer, announce and ask under its own name. Models travel as replies of at most 512 KiB
each, and every end of a reply set is checked, because a cut link, a dead peer and a forbidden
question all look alike: an empty set without an error.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import zenoh

from coterie.errors import TransportError
from coterie.net.identity import Identity, split_address
from coterie.net.log import RateLimit
from coterie.net.outbox import REASONS, Missing, Outbox
from coterie.net.payload import Refused, parse_strict_json
from coterie.net.peer_queues import PeerQueues
from coterie.net.roster import Roster
from coterie.net.transport import WAIT, Delivery, HeadSource
from coterie.net.wire import (
    CHUNK,
    KINDS,
    VERSION,
    Address,
    Assembler,
    Expectation,
    Parcel,
    canonical_json,
)

# Bytes of a question and of a reply; the engine drops larger ones before this program sees them.
MAX_QUERY = 64 * 1024
MAX_REPLY = 1024 * 1024
_SETTLE = 10.0  # seconds in which links come up after they were closed and opened again
_REOPEN = 20.0  # seconds to wait for the own address after the session was closed
_SENDERS = 256  # threads at most: a member that reads slowly holds those of its own questions alone
_SURPLUS = 4096  # refusals that may wait, for members that ask too much
_PENDING = 1000  # links that may be coming up; those beyond it are closed at once
# how often a member's coming and going is logged, in how many seconds
_CHANGES, _WITHIN = 20, 200.0
_LOOPBACK = ("127.", "::1", "localhost")


def key_prefix(run: str) -> str:
    """Return the first chunks of every key of a run: the protocol's version and the run's id."""
    return f"coterie/{VERSION}/{run}"


def access_list(me: str, names: Mapping[str, str], run: str) -> dict[str, Any]:
    """Return the access list of one member: the actions allowed to each certificate.

    A question goes out to the member alone that it is for. The engine would also send it to every
    member whose announcements have not come yet, because one of them might answer, and each of
    those would turn the asker away.

    Args:
        me: this member.
        names: the common name of each member's certificate, by the member's name.
        run: the run's id.
    """
    base = key_prefix(run)

    def allow_messages(id: str, flow: str, messages: list[str], *keys: str) -> dict[str, Any]:
        return {
            "id": id,
            "permission": "allow",
            "flows": [flow],
            "messages": messages,
            "key_exprs": list(keys),
        }

    watch = ["liveliness_query", "declare_liveliness_subscriber"]
    own = ["reply", "declare_queryable", "liveliness_token"]
    rules = [
        allow_messages("watch", "ingress", watch, f"{base}/*/alive"),
        allow_messages("out-mine", "egress", own, f"{base}/{me}/**"),
        allow_messages("out-watch", "egress", watch, f"{base}/*/alive"),
    ]
    subjects: list[dict[str, Any]] = [{"id": "members", "cert_common_names": list(names.values())}]
    policies = [{"rules": [rule["id"] for rule in rules], "subjects": ["members"]}]
    # Each member may answer and announce under its own name alone, and ask this node under keys
    # that end in its name.
    for name, common in names.items():
        rules.append(allow_messages(f"own-{name}", "ingress", own, f"{base}/{name}/**"))
        rules.append(allow_messages(f"ask-{name}", "ingress", ["query"], f"{base}/{me}/*/{name}"))
        rules.append(
            allow_messages(f"out-ask-{name}", "egress", ["query"], f"{base}/{name}/*/{me}")
        )
        subjects.append({"id": f"cn-{name}", "cert_common_names": [common]})
        ids = [f"own-{name}", f"ask-{name}", f"out-ask-{name}"]
        policies.append({"rules": ids, "subjects": [f"cn-{name}"]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


def build_config(
    roster: Roster,
    me: str,
    identity: Identity | None,
    *,
    listen: str | None = None,
    lease: float = 10.0,
) -> dict[str, Any]:
    """Return the engine's configuration.

    Args:
        roster: the members.
        me: this member.
        identity: its key and certificate; None for plain TCP on loopback.
        listen: host:port to listen on, when it is not the roster's address (behind a firewall that
            forwards).
        lease: seconds without a sign of life after which a peer counts as down.
    """
    scheme = "tcp" if identity is None else "tls"

    def format_endpoint(address: str) -> str:
        host, port = split_address(address)
        return f"{scheme}/[{host}]:{port}" if ":" in host else f"{scheme}/{host}:{port}"

    link: dict[str, Any] = {
        "protocols": [scheme],
        "rx": {"max_message_size": 8 * 1024 * 1024},
        "tx": {"lease": int(lease * 1000)},
    }
    config: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": [format_endpoint(listen or roster.member(me).address)]},
        "connect": {
            "endpoints": [format_endpoint(m.address) for m in roster.members_before(me)],
            # Dialed without end: members start in any order.
            "timeout_ms": -1,
            "exit_on_failure": False,
            "retry": {"period_init_ms": 500, "period_max_ms": 2000, "period_increase_factor": 1.5},
        },
        # Gossip lost declarations for good among a hundred peers; the roster has all addresses.
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "adminspace": {"enabled": False},
        "transport": {
            "unicast": {"accept_pending": _PENDING},
            "shared_memory": {"enabled": False},
            "link": link,
        },
        "low_pass_filter": [
            {"id": f"cap-{kind}", "flows": ["ingress"], "messages": [kind],
             "key_exprs": ["coterie/**"], "size_limit": limit}
            for kind, limit in (("query", MAX_QUERY), ("reply", MAX_REPLY))
        ],
    }  # fmt: skip
    if identity is not None:
        files = {
            "private_key": str(identity.key_file),
            "certificate": str(identity.certificate_file),
        }
        link["tls"] = {
            "root_ca_certificate": str(identity.ca_file),
            **{
                f"{side}_{what}": path
                for side in ("listen", "connect")
                for what, path in files.items()
            },
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
        }
        config["access_control"] = access_list(
            me, {m.name: m.common_name for m in roster.members}, roster.run
        )
    return config


def _give_threads(members: int) -> None:
    """Give the engine a thread for each link: closing a dead one blocks its thread for 10 s.

    With the engine's one or two threads a cut cable stalls the links that are left. ZENOH_RUNTIME
    wins.
    """
    threads = min(max(members, 4), 32)
    parts = ", ".join(
        f"{part}: (worker_threads: {threads})" for part in ("rx", "tx", "net", "acc", "app")
    )
    os.environ.setdefault("ZENOH_RUNTIME", f"({parts})")


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows: each connection is one.

    The usual limit is 1024; strangers who fill it keep a node from reading its own files.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_loopback(roster: Roster, listen: str | None = None) -> None:
    """Check that all addresses are on loopback, as a run without TLS requires.

    Raises:
        TransportError: when a member has another address.
    """
    for address in [*(m.address for m in roster.members), *([listen] if listen else [])]:
        if not split_address(address)[0].startswith(_LOOPBACK):
            raise TransportError(
                f"{address} is not a loopback address; without TLS only those are allowed"
            )


class ZenohTransport:
    """The transport of one node.

    Always close it (it is a context manager): an open session keeps the interpreter from ending.

    Args:
        roster: the members.
        name: this node's.
        identity: its key and certificate; None for plain TCP, which is refused beyond loopback.
        listen: host:port to listen on instead of the roster's address.
        lease: seconds without a sign of life after which a peer counts as down: 10 over long
            distances, 3 in one building.
        log: receives events (see `log.Log`).
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        identity: Identity | None,
        *,
        listen: str | None = None,
        lease: float = 10.0,
        log: Callable[..., None] = lambda event, **details: None,
    ) -> None:
        if identity is None:
            check_loopback(roster, listen)
        elif identity.name != name:
            raise TransportError(f"the certificate is {identity.name}'s; this node is {name}")
        self.roster, self.name, self._log = roster, name, log
        self._identity, self._address, self._lease = identity, listen, lease
        self._names = frozenset(m.name for m in roster.members)
        self._base = key_prefix(roster.run)
        self._head: HeadSource | None = None
        self._sealed: Callable[[], bytes] | None = None
        self._alive: set[str] = set()
        self._awaited = frozenset[str]()  # seen before, and not now
        self._announced, self._closed, self._token = False, False, None
        self._pause = threading.Event()
        self._renewed = -math.inf
        self._leaving = zenoh.CancellationToken()
        self._lock = threading.Lock()
        # Before the session: the engine reads its number of threads when it starts.
        _give_threads(len(roster.members))
        raise_file_limit()
        self._session = self._open_session()
        self.outbox = Outbox()
        self._senders = ThreadPoolExecutor(
            min(_SENDERS, Outbox.PER_ASKER * len(roster.members)), "coterie-send"
        )
        self._queues = PeerQueues()
        self._start_answering()

    def _open_session(self, patience: float = 0.0) -> Any:
        """Open a session with the roster's links; wait until the own address is free again."""
        config = build_config(
            self.roster, self.name, self._identity, listen=self._address, lease=self._lease
        )
        until = time.monotonic() + patience
        while True:
            try:
                return zenoh.open(zenoh.Config.from_json5(json.dumps(config)))
            except zenoh.ZError as error:
                address, taken = config["listen"]["endpoints"][0], "in use" in str(error)
                if not taken or time.monotonic() > until:
                    why = str(error)
                    if taken:
                        why = "it is in use: this node runs already, or another program does"
                    raise TransportError(f"cannot listen on {address}: {why[:300]}") from None
            self._pause.wait(0.1)

    def _start_answering(self) -> None:
        """Answer and watch over the session."""
        room = max(64, 4 * len(self.roster.members))
        self._questions = self._session.declare_queryable(
            f"{self._base}/{self.name}/**", zenoh.handlers.FifoChannel(room)
        )
        # history: tokens that are there already count too.
        self._tokens = self._session.liveliness().declare_subscriber(
            f"{self._base}/*/alive", zenoh.handlers.FifoChannel(room), history=True
        )
        self._threads = [
            threading.Thread(target=self._listen, name="coterie-listen"),
            threading.Thread(target=self._watch_members, name="coterie-watch"),
        ]
        for thread in self._threads:
            thread.start()

    def _close_session(self) -> None:
        """Withdraw everything and close the session."""
        # The token first: the others must not take a node that closes for one that is alive.
        if self._token is not None:
            self._token.undeclare()
            self._token = None
        self._questions.undeclare()
        self._tokens.undeclare()
        # The threads end with the channels that were just undeclared.
        for thread in self._threads:
            thread.join()
        self._session.close()

    def use_roster(self, roster: Roster) -> None:
        """Continue with another roster: open every link again under the new access list.

        What was published stays. Not to be called while this node is asking for something.
        """
        # The engine reads its access list when a session begins, so a new list needs a new
        # session.
        self._close_session()
        with self._lock:
            self.roster, self._names = roster, frozenset(m.name for m in roster.members)
            self._awaited = (self._awaited | self._alive) & self._names
            self._alive.clear()
        self._session = self._open_session(_REOPEN)
        self._renewed = time.monotonic()
        self._start_answering()
        if self._announced:
            self._announce()

    def name_of(self, common_name: str) -> str:
        """Return the member with a common name, or the common name itself if none has it."""
        return self.roster.name_of(common_name)

    def __enter__(self) -> "ZenohTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ asking

    def fetch(self, peer: str, expect: Expectation, deadline: float) -> Delivery | Missing:
        """Ask a member for a message, wait at most `deadline` seconds, and check it.

        While links are opened again after a new roster, a member that cannot be reached is
        asked again.
        """
        until = time.monotonic() + deadline
        found = self._fetch_once(peer, expect, deadline)
        while isinstance(found, Missing) and found.reason in ("unreachable", "closing"):
            now = time.monotonic()
            # Half a second before the limit, another question would come too late.
            if now > min(self._renewed + _SETTLE, until - 0.5) or self._leaving.is_cancelled:
                break
            self._pause.wait(0.25)
            found = self._fetch_once(peer, expect, until - time.monotonic())
        return found

    def _fetch_once(self, peer: str, expect: Expectation, deadline: float) -> Delivery | Missing:
        started = time.monotonic()
        at = expect.address
        question = f"r={at.round};x={at.exchange};c={at.client};w={WAIT * deadline:.3f}"
        assembler, size = Assembler(expect), 0
        wrong: Refused
        for sample, error in self._iterate_replies(
            f"{peer}/{at.kind}/{self.name}?{question}", deadline
        ):
            if sample is None:
                return error or Missing("unreachable")
            attachment = b"" if sample.attachment is None else sample.attachment.to_bytes()
            chunk = sample.payload.to_bytes()
            size += len(attachment) + len(chunk)
            try:
                assembler.feed(attachment, chunk)
            except Refused as refused:
                wrong = refused
                break
        else:
            # A dead peer, a cut link and a forbidden question all give an empty set.
            if size == 0:
                return Missing("unreachable")
            try:
                tensors = assembler.finish()
            except Refused as refused:
                wrong = refused
            else:
                assert assembler.manifest is not None
                seconds = time.monotonic() - started
                return Delivery(assembler.manifest, tensors, size, seconds, assembler.sealed)
        self._log(
            "refused", level="warning", peer=peer, code=wrong.code, text=str(wrong), about=str(at)
        )
        return Missing(f"refused:{wrong.code}", None, str(wrong))

    def ask_head(self, peer: str, nonce: str, deadline: float) -> bytes | Missing:
        """Ask a member how it is."""
        for sample, error in self._iterate_replies(f"{peer}/head/{self.name}?n={nonce}", deadline):
            return (
                (error or Missing("unreachable")) if sample is None else sample.payload.to_bytes()
            )
        return Missing("unreachable")

    def ask_roster(self, peer: str, deadline: float) -> bytes | Missing:
        """Ask a member for its roster."""
        for sample, error in self._iterate_replies(f"{peer}/roster/{self.name}", deadline):
            return (
                (error or Missing("unreachable")) if sample is None else sample.payload.to_bytes()
            )
        return Missing("unreachable")

    def _iterate_replies(self, selector: str, deadline: float) -> Any:
        """Yield (sample, None) for each reply and (None, Missing) for an error."""
        try:
            replies = self._session.get(
                f"{self._base}/{selector}",
                # Bounded: so many chunks wait in memory at most.
                zenoh.handlers.FifoChannel(16),
                timeout=deadline,
                # All chunks have the same key: consolidation would deliver one of them.
                consolidation=zenoh.ConsolidationMode.NONE,
                cancellation_token=self._leaving,
            )
        except zenoh.ZError as error:
            yield None, Missing("unreachable", None, str(error)[:200])
            return
        for reply in replies:
            if reply.ok is not None:
                yield reply.ok, None
            elif reply.err is not None:
                yield None, _parse_error(reply.err.payload.to_bytes())

    def alive_members(self) -> frozenset[str]:
        """Return the members with a visible liveliness token: a hint only.

        While links are opened again after a new roster, here and then there, members that were
        seen before count too: a node that took them for away would do its next rounds without them.
        """
        with self._lock:
            awaited = self._awaited if time.monotonic() < self._renewed + _SETTLE else frozenset()
            return frozenset(self._alive) | awaited

    def _watch_members(self) -> None:
        changes: dict[str, RateLimit] = {}
        for sample in self._tokens.handler:
            name = str(sample.key_expr).removeprefix(f"{self._base}/").removesuffix("/alive")
            if name not in self._names or name == self.name:
                continue
            there = sample.kind == zenoh.SampleKind.PUT
            with self._lock:
                if there:
                    self._alive.add(name)
                    self._awaited -= {name}
                else:
                    self._alive.discard(name)
                    self._awaited |= {name}
            suppressed = changes.setdefault(name, RateLimit(_CHANGES, _WITHIN))()
            if suppressed is not None:
                details = {"untold": suppressed} if suppressed else {}
                self._log("peer_up" if there else "peer_down", peer=name, **details)

    # ------------------------------------------------------------------ answering

    def publish(self, address: Address, what: Parcel | Missing, *, to: str = "") -> None:
        """Store a message for later requests; from the first one on, this node counts as alive."""
        self.outbox.publish(address, what, to=to)
        self._announce()

    def publish_standing(self, address: Address, seal: Callable[[Address], Parcel]) -> None:
        """Answer with one and the same message from a round on."""
        self.outbox.publish_standing(address, seal)
        # A node that only answers probes does not take part yet.
        if address.kind != "probe":
            self._announce()

    def _announce(self) -> None:
        self._announced = True
        if self._token is None:
            self._token = self._session.liveliness().declare_token(
                f"{self._base}/{self.name}/alive"
            )

    def serve_head(self, head: HeadSource) -> None:
        """Register the handler of questions about this node's state."""
        self._head = head

    def serve_roster(self, sealed: Callable[[], bytes]) -> None:
        """Register the handler of questions for this node's roster."""
        self._sealed = sealed

    def _listen(self) -> None:
        for query in self._questions.handler:
            key = str(query.key_expr)
            chunks = key.removeprefix(f"{self._base}/").split("/")
            # The access list lets a member ask only under keys that end in its own name.
            asker = chunks[2] if len(chunks) == 3 else ""
            if chunks[0] != self.name or asker not in self._names:
                self._enqueue_answer(
                    "", query, partial(_reply_missing, query, Missing("forbidden"))
                )
            elif chunks[1] == "head":
                self._enqueue_answer(asker, query, partial(self._answer_head, query, key))
            elif chunks[1] == "roster":
                self._enqueue_answer(asker, query, partial(self._answer_roster, query, key))
            else:
                self._enqueue_answer(
                    asker, query, partial(self._handle_question, query, key, chunks[1], asker)
                )

    def _enqueue_answer(self, asker: str, query: Any, job: Callable[[], None]) -> None:
        """Queue an answer per asker: an answer that its asker does not read blocks for seconds."""
        refuse = partial(_reply_missing, query, Missing("closing" if self._closed else "busy"))
        # Refusals wait in a queue of their own. Only when that is full too, this thread sends one.
        if not self._queues.put(asker, job) and not self._queues.put("", refuse, _SURPLUS):
            refuse()

    def _answer_head(self, query: Any, key: str) -> None:
        nonce = str(query.parameters).removeprefix("n=")
        if self._head is None or not nonce.isalnum() or len(nonce) > 64:
            _reply_missing(query, Missing("not_ready"))
            return
        with suppress(zenoh.ZError), query:
            query.reply(key, self._head(nonce))

    def _answer_roster(self, query: Any, key: str) -> None:
        if self._sealed is None:
            _reply_missing(query, Missing("not_ready"))
            return
        with suppress(zenoh.ZError), query:
            query.reply(key, self._sealed())

    def _handle_question(self, query: Any, key: str, kind: str, asker: str) -> None:
        try:
            parameters = dict(part.split("=", 1) for part in str(query.parameters)[:200].split(";"))
            address = Address(
                int(parameters["r"]), int(parameters["x"]), int(parameters["c"]), kind
            )
            wait = float(parameters["w"])
        except (ValueError, KeyError):
            _reply_missing(query, Missing("forbidden"))
            return
        if kind not in KINDS:
            _reply_missing(query, Missing("forbidden"))
            return

        def send_answer(what: Parcel | Missing) -> None:
            if isinstance(what, Missing):
                self._enqueue_answer(asker, query, partial(_reply_missing, query, what))
            else:
                try:
                    self._senders.submit(self._send, query, key, what, asker)
                except RuntimeError:  # closing: no more work is taken
                    _reply_missing(query, Missing("closing"))

        self.outbox.ask(asker, address, wait, send_answer)

    def _send(self, query: Any, key: str, parcel: Parcel, asker: str) -> None:
        try:
            with query:
                for attachment, chunk in parcel.iterate_chunks():
                    query.reply(key, bytes(chunk), attachment=attachment)
        except zenoh.ZError as error:
            self._log("not_sent", level="warning", peer=asker, text=str(error)[:200])
        finally:
            self.outbox.note_sent(asker)

    # ------------------------------------------------------------------ leaving

    def close(self) -> None:
        """Leave: withdraw the token, answer open questions, end the threads, close the session."""
        if self._closed:
            return
        self._closed = True
        # Own questions end first. The outbox then answers what is open, which the senders and
        # queues must deliver while the session still lives.
        self._leaving.cancel()
        self.outbox.close()
        self._senders.shutdown(wait=True)
        self._queues.close()
        self._close_session()


def _reply_missing(query: Any, missing: Missing) -> None:
    """Answer a question with the reason why there is no message; ignore an asker that has gone."""
    with suppress(zenoh.ZError), query:
        query.reply_err(canonical_json({"code": missing.reason, "round": missing.round}))


def _parse_error(payload: bytes) -> Missing:
    """Read an error reply: the engine's timeout, or one of our own codes."""
    if payload == b"Timeout":
        return Missing("timeout")
    try:
        document = parse_strict_json(payload[:1024], "error")
    except Refused:
        return Missing("unreachable", None, repr(payload[:80]))
    if not isinstance(document, dict):
        document = {}
    code, round = document.get("code"), document.get("round")
    if code not in REASONS:
        return Missing("unreachable", None, repr(payload[:80]))
    return Missing(code, round if type(round) is int and -2 <= round < 1 << 31 else None)


# The engine must let every chunk through.
assert CHUNK <= MAX_REPLY
