"""Node: the run's own loop, with this node's clients and an exchange over the network.

A node waits for the others, runs the rounds, catches up when it has fallen behind, writes the files of a simulation
(with its own rows) after every round, and stays until the others have fetched its last messages. When it is killed, it
continues from its checkpoint as a new incarnation.
"""

import json
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._util.files import write_atomically
from coterie.data.federation import Federation, Truth
from coterie.engine.task import Task
from coterie.errors import ConfigError, TransportError
from coterie.methods.base import Method, Round
from coterie.models.layout import ModelSource, own_name
from coterie.net import head as heads
from coterie.net import identity as identities
from coterie.net.exchange import RemoteExchange
from coterie.net.head import Head
from coterie.net.log import Log, Sample
from coterie.net.outbox import Missing
from coterie.net.payload import Refused
from coterie.net.post import Post, RoundMissed, Terms
from coterie.net.roster import Roster
from coterie.net.transport import Transport
from coterie.net.wire import VERSION
from coterie.rng import Rng
from coterie.simulation import checkpoint
from coterie.simulation.loop import Loop
from coterie.simulation.models import models_of
from coterie.simulation.record import Record
from coterie.simulation.run import make_task
from coterie.simulation.settings import Settings

ARRIVALS = "arrivals.jsonl"
_LEAST_DEADLINE = 30.0


@dataclass(frozen=True)
class RunSpec:
    """The part of a run that is equal on all nodes.

    Args:
        method: the method.
        settings: the settings of the run.
        model: the model.
        model_name: the model in words, the same on every node.
        seed: the seed of the run.
    """

    method: Method
    settings: Settings
    model: ModelSource
    model_name: str
    seed: int = 0

    def task(self, federation: Federation, secret: int | None = None) -> Task:
        """Return the task of a node's rows.

        Args:
            federation: the rows.
            secret: seed of the draws of private training, which nobody else may know.
        """
        return make_task(federation, self.method, self.model, self.settings, secret)

    def agreed(self, population: int) -> dict[str, Any]:
        """Return the settings that must be equal on every node."""
        return heads.settings_of(self.method, self.settings, self.seed, self.model_name, population)


@dataclass(frozen=True)
class Patience:
    """How long a node waits for others.

    Args:
        start: seconds to wait at the start for members that do not answer yet.
        linger: seconds to stay at the end for members that are not done and make no progress.
        ask: seconds to wait for the answer to "how are you?".
        poll: seconds between two such questions.
    """

    start: float = 60.0
    linger: float = 120.0
    ask: float = 2.0
    poll: float = 0.5


class NodeLoop(Loop):
    """The run's loop, in which members that are away cannot be chosen."""

    def _context(self, index: int, rows: Tensor, cohort: Tensor) -> Round:
        rnd = super()._context(index, rows, cohort)
        assert isinstance(self.exchange, RemoteExchange)
        return rnd if self.method.server else replace(rnd, reachable=rnd.reachable & self.exchange.reachable())


class Node:
    """One member of a run.

    Args:
        plan: the part that is equal on all nodes.
        federation: this node's own rows, in a population of the roster's size.
        roster: the members.
        transport: the transport of messages; its owner closes it.
        sign: signs bytes with this node's key.
        folder: folder of this node's run; a killed node continues from its checkpoint there.
        terms: deadlines and options of the exchange; a deadline of 0 is measured (see `deadline`).
        patience: how long it waits for others.
        log: receives events.
    """

    def __init__(
        self,
        plan: RunSpec,
        federation: Federation,
        roster: Roster,
        transport: Transport,
        sign: Callable[[bytes], bytes],
        folder: Path,
        *,
        terms: Terms | None = None,
        patience: Patience | None = None,
        log: Log | None = None,
    ) -> None:
        self.plan, self.roster, self.transport, self.folder = plan, roster, transport, folder
        self.patience, self.log = patience or Patience(), log or Log(transport.name)
        self._sign, self._stop, self._state = sign, threading.Event(), "starting"
        self._met: frozenset[str] = frozenset()
        self._check(federation)
        clusters = torch.tensor(roster.clusters or [-1] * roster.population)
        planted = Truth(clusters[federation.ids], (), ()) if roster.clusters else None
        # drawn anew at every start and never written: noise that is used twice could be taken off
        self.task = plan.task(replace(federation, truth=planted), secret=secrets.randbits(63))
        self.schema = heads.schema_hash(self.task.layout)
        self.settings = heads.with_frozen(plan.agreed(roster.population), self.task.layout)
        folder.mkdir(parents=True, exist_ok=True)
        self.incarnation = self._new_incarnation()
        self._journal_file = (folder / ARRIVALS).open("a")
        self.post = Post(
            transport, replace(roster, schema=self.schema), sign, incarnation=self.incarnation,
            terms=terms or Terms(), deadline=self.deadline, journal=self._journal,
        )  # fmt: skip
        self.exchange = RemoteExchange(self.post, self.task.part.shared.count)
        names = {**roster.client_names, **federation.names}
        record = Record(clusters, names)
        self.loop = NodeLoop(self.task, plan.method, self.exchange, plan.settings, Rng(plan.seed), record)
        self._identity = checkpoint.identity(
            plan.method, plan.settings, plan.seed, federation, self.task, own_name(plan.model)
        )
        self._earlier = checkpoint.load(folder, self.loop, self._identity)
        self._started, self._local = time.perf_counter(), [0.0]

    def _check(self, federation: Federation) -> None:
        own = sorted(self.roster.member(self.transport.name).clients)
        if sorted(federation.ids.tolist()) != own or federation.population != self.roster.population:
            raise ConfigError(
                f"the data are of clients {federation.ids.tolist()[:10]} of {federation.population}; on the roster "
                f"{self.transport.name} hosts {own[:10]} of {self.roster.population}"
            )
        if "truth" in self.plan.method.needs and not self.roster.clusters:
            raise ConfigError(f"{self.plan.method.kind} needs the planted clusters; this roster names none")
        if "pool" in self.plan.method.needs:
            raise ConfigError(
                f"{self.plan.method.kind} needs the data of all members in one place; between machines data stay put"
            )
        if self.plan.method.server and not self.roster.server:
            raise ConfigError(f"{self.plan.method.kind} needs a server; this roster names none")
        if self.plan.settings.new_clients is not None:
            raise ConfigError(
                f"new_clients is {self.plan.settings.new_clients!r}; between machines nobody is held out: leave it out"
            )
        if self.plan.settings.schedule != "synchronous":
            raise ConfigError(
                f"schedule is {self.plan.settings.schedule!r}; between machines there is only 'synchronous'"
            )

    def _new_incarnation(self) -> int:
        path = self.folder / "incarnation.json"
        before = json.loads(path.read_text())["incarnation"] if path.exists() else 0
        now = max(before + 1, int(time.time()))
        write_atomically(path, json.dumps({"incarnation": now}).encode())
        return now

    def _journal(self, event: Mapping[str, Any]) -> None:
        """Record what arrived in the journal, for replay, and log it."""
        self._journal_file.write(json.dumps(event) + "\n")
        self._journal_file.flush()
        details = {k: v for k, v in event.items() if k not in ("event", "round")}
        self.log(str(event["event"]), level="warning" if details.get("missing") else "debug", **details)

    def deadline(self) -> float:
        """Return the deadline of a round: as set, or three transfers and two trainings, at least half a minute."""
        if self.post.terms.deadline:
            return self.post.terms.deadline
        traffic = self.post.traffic
        transfer = traffic.transfer / traffic.received if traffic.received else 0.0
        return max(_LEAST_DEADLINE, 3 * transfer + 2 * statistics.median(self._local))

    # ------------------------------------------------------------------ meeting the others

    def _head(self, nonce: str) -> bytes:
        return Head(
            self.roster.run, self.transport.name, self.incarnation, nonce, self.loop.next_round, self._state, VERSION,
            heads.study_hash(self.settings), self.schema, self.roster.version, time.time(),
            sorted(self._met), self.settings,
        ).seal(self._sign)  # fmt: skip

    def ask_heads(self, names: Iterable[str]) -> dict[str, Head]:
        """Ask members for their heads; return those that arrived."""

        def one(name: str) -> Head | None:
            nonce = secrets.token_hex(8)
            data = self.transport.head(name, nonce, self.patience.ask)
            if isinstance(data, Missing):
                return None
            key = identities.public_key(self.roster.member(name).key)
            try:
                return heads.read(
                    data, lambda s, d: identities.verify(key, s, d), run=self.roster.run, peer=name, nonce=nonce
                )
            except Refused as refused:
                self.log("refused", level="warning", peer=name, code=refused.code, text=str(refused))
                return None

        with ThreadPoolExecutor(8, "coterie-heads") as pool:
            names = list(names)
            return {n: h for n, h in zip(names, pool.map(one, names), strict=True) if h is not None}

    @property
    def others(self) -> list[str]:
        """The other members."""
        return [m.name for m in self.roster.members if m.name != self.transport.name]

    def look_around(self, seconds: float) -> dict[str, Head]:
        """Ask all members for their heads until all have answered, some have started, or `seconds` are over."""
        until, met = time.monotonic() + seconds, {}
        while len(met) < len(self.others):
            met |= self.ask_heads(n for n in self.others if n not in met)
            if time.monotonic() > until or any(h.state == "running" and h.round > 0 for h in met.values()):
                break
            if len(met) < len(self.others) and self._stop.wait(self.patience.poll):
                break
        return met

    def meet(self) -> bool:
        """Wait for the other members and check that they run the same study.

        Returns:
            Whether they have started already, so that this node has to catch up.

        Raises:
            PeerMismatch: when this node's study or model differs from the roster's.
        """
        self.transport.serve_head(self._head)
        self.post.serve_probe()
        met = self.look_around(self.patience.start)
        odd = heads.check_study(self.roster, self.settings, self.schema, met)
        for name in odd:
            text = heads.difference(self.settings, met[name].settings)
            self.log("mismatch", level="error", peer=name, text=text or "another model or wire format")
        self.exchange.away([n for n in self.others if n not in met], for_good=odd)
        absent = sorted(set(self.others) - set(met))
        self.log("met", peers=sorted(met), absent=absent, resumes=self.loop.next_round)
        self._journal({"event": "start", "round": self.loop.next_round, "incarnation": self.incarnation})
        self._met, self._state = frozenset(met), "running"
        late = any(h.state == "running" and self.transport.name not in h.met for h in met.values())
        return late or self.loop.next_round >= 0

    def _catch_up(self) -> None:
        """Jump to the round of the others, which do not wait for a node that has fallen behind."""
        self.post.ahead = None
        rounds = [h.round for h in self.ask_heads(self.others).values() if h.state != "done"]
        target = int(statistics.median_high(rounds)) if rounds else -1
        if target > self.loop.next_round >= 0:
            self.log("catch_up", level="warning", came_from=self.loop.next_round, goes_to=target)
            self.loop.next_round = min(target, self.plan.settings.rounds)

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Run from the checkpoint or the start to the end."""
        behind = self.meet()
        if self.loop.next_round < 0 and not self._stop.is_set():
            self._step()
        if behind:
            self._catch_up()
        while not self.loop.finished and not self._stop.is_set():
            self._step()
        if self._stop.is_set():
            self.log("stopped", resumes=self.loop.next_round)
            return
        self._state = "done" if not self.plan.method.server else "running"
        self.loop.final()
        models = models_of(self.loop, self.plan.model, self.plan.method.kind)
        checkpoint.finish(self.folder, self.loop, self._identity, self._timing(), models.files())
        self._state = "done"
        self.log("done", received=self.post.traffic.received, bytes=self.post.traffic.bytes)
        self._linger()

    def _step(self) -> None:
        index, exchanging, began = self.loop.next_round, self.post.traffic.seconds, time.perf_counter()
        self.log.round = index
        try:
            self.loop.step()
        except RoundMissed as missed:
            if index < 0 and type(self.plan.method).enroll is not Method.enroll:
                raise TransportError(
                    f"{self.plan.method.kind} enrolls its clients before the first round, and this node came too late"
                ) from None
            self.log("round_missed", level="warning", text=str(missed))
            self._journal({"event": "missed", "round": index})
            self.loop.next_round = index + 1
        seconds = time.perf_counter() - began
        exchanging = self.post.traffic.seconds - exchanging
        self._local = [*self._local[-20:], seconds - exchanging]
        checkpoint.save(self.folder, self.loop, self._identity, self._timing())
        self._journal({"event": "round", "round": index})
        values: dict[str, Any] = {name: float(value.nanmean()) for name, value in self.loop.validation.items()}
        self.log("round", seconds=seconds, exchanging=exchanging, **values)
        if self.post.ahead is not None and self.post.ahead > self.loop.next_round:
            self._catch_up()

    def _timing(self) -> dict[str, float]:
        return {
            "wall_s": time.perf_counter() - self._started + self._earlier.get("wall_s", 0.0),
            "train_s": self.task.train_seconds + self._earlier.get("train_s", 0.0),
            "train_samples": self.loop.train_samples,
        }

    def _linger(self) -> None:
        """Stay while others are running, so that they can fetch this node's messages."""
        seen, until = {}, time.monotonic() + self.patience.linger
        while time.monotonic() < until:
            found = {n: (h.state, h.round) for n, h in self.ask_heads(self.others).items()}
            if all(state != "running" for state, _ in found.values()):
                return
            if found != seen:
                seen, until = found, time.monotonic() + self.patience.linger
            if self._stop.wait(self.patience.poll):
                return

    def stop(self) -> None:
        """End after the current round; callable from a signal handler or another thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop asking and close the journal. The transport's owner closes the transport."""
        self._stop.set()
        self.post.close()
        self._journal_file.close()

    def samples(self) -> list[Sample]:
        """Return numbers for Prometheus."""
        traffic, labels = self.post.traffic, {"node": self.transport.name}
        out: list[Sample] = [
            ("coterie_round", "round that is going on", labels, self.loop.next_round),
            ("coterie_peers_alive", "members whose token is seen", labels, len(self.transport.alive())),
            ("coterie_received_total", "messages received", labels, traffic.received),
            ("coterie_received_bytes_total", "bytes received", labels, traffic.bytes),
            ("coterie_exchange_seconds_total", "time spent exchanging", labels, traffic.seconds),
        ]
        for reason, number in sorted(traffic.missing.items()):
            out.append(("coterie_missing_total", "messages missing", {**labels, "reason": reason}, number))
        for name, value in self.loop.validation.items():
            mean = float(value.nanmean())
            out.append((f"coterie_validation_{name}", "newest, mean over clients", labels, mean))
        out.append(("coterie_process_id", "id of the process", labels, os.getpid()))
        return out
