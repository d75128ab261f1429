"""Attacks by a member of a run: what do the honest nodes end with?

The attacker is the program of tests/stranger, which was written from docs/reference/wire.md and
imports nothing of Coterie, with valid credentials of the roster. Two honest nodes run `coterie
node` with its default settings.
"""

import json
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import netlab
import numpy as np
import pandas as pd

from coterie.data.build import build_federation
from coterie.errors import TransportError
from coterie.net import fleet, setup
from coterie.net import roster as rosters
from coterie.studies import config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/stranger"))
import stranger

PORT, ROUNDS, FAR = 29300, 12, (1 << 31) - 1
STUDY = """
name = "members"
rounds = {rounds}
seeds = [0]
engine = "loop"
model = {{ kind = "linear" }}
data = {{ dataset = "digits", num_clients = 3, train = 60, validation = 60 }}
local = {{ epochs = 1, lr = 0.003 }}

[[methods]]
{method}
"""
DAC, FEDAVG = "kind = 'dac'\nnum_peers = 2", "kind = 'fedavg'"
NETWORK = {"deadline": 5.0, "start": 300.0, "linger": 10.0, "server_wait": 5.0}
START = 300.0  # how long the attacker waits for the others


class Attacker(stranger.Node):
    """Takes part as it should. Each attack below changes one thing."""

    def publish(self, address: stranger.Address, to: str, tensors: stranger.Tensors) -> None:
        """Publish what the attack makes of a message."""
        super().publish(address, to, self.sent(tensors))

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """The tensors of a message."""
        return tensors

    def attack(self, data: stranger.Data) -> None:
        """The whole run of the attacker."""
        stranger.take_part(self, data)


class Gone(Attacker):
    """Answers every question with an unsigned "gone", and has a signed head as far ahead as it can say."""

    reached = FAR

    def find(self, address: stranger.Address, asker: str) -> list[stranger.Part] | None:
        """Answer no question for a message."""
        raise stranger.ErrorReply("gone")

    def attack(self, data: stranger.Data) -> None:
        """Lie until nobody is running."""
        self.newest = self.round = self.reached
        self.start()


class ForgedHeads(Attacker):
    """Sends models as it should; its heads are not its own: another member's name, no signature, another's answer."""

    kept, asked = b"", 0

    def head(self, nonce: str) -> bytes:
        """Own heads before round 1, so that the others know it; then forged ones, in turn."""
        honest = super().head(nonce)
        if self.round < 1:
            self.kept = honest  # an answer to a question that is not asked again
            return honest
        other = json.loads(honest[64:]) | {
            "peer": self.others()[0],
            "round": FAR,
            "state": "running",
        }
        text = stranger.canonical(other)
        self.asked += 1
        return [bytes(64) + text, stranger.sign(self.key, "head", text) + text, self.kept][
            self.asked % 3
        ]


class Wide(Attacker):
    """A column more than the model has."""

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """A row that is too long."""
        return {**tensors, "params": np.append(tensors["params"], np.float32(0))}


class Extra(Attacker):
    """An extra that no message of the method has."""

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """One tensor too many."""
        return {**tensors, "field.extra": np.zeros(3, np.float32)}


class Renamed(Attacker):
    """The right tensors under other names."""

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """`field.sample` instead of `field.samples`."""
        return {
            "field.sample" if name == "field.samples" else name: tensor
            for name, tensor in tensors.items()
        }


class Huge(Attacker):
    """A model of 1e30."""

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """Finite numbers without use."""
        return {**tensors, "params": np.full_like(tensors["params"], 1e30)}


class Turned(Attacker):
    """The own model, turned and five times as large."""

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """-5 x."""
        return {**tensors, "params": -5 * tensors["params"]}


class Samples(Attacker):
    """Noise that says it comes of 2^62 samples."""

    random = np.random.default_rng(0)

    def sent(self, tensors: stranger.Tensors) -> stranger.Tensors:
        """Noise with a large weight."""
        noise = self.random.normal(size=tensors["params"].shape).astype(np.float32)
        return {**tensors, "params": noise, "field.samples": np.array(2.0**62, np.float32)}


class Replayed(Attacker):
    """From round 3 on, the signed message of round 2."""

    def sealed(
        self, address: stranger.Address, to: str, tensors: stranger.Tensors
    ) -> list[stranger.Part]:
        """An old message at a new address."""
        if address.round <= 2:
            self.old = super().sealed(address, to, tensors)
        return self.old


class OldRoster(Attacker):
    """Says that it has a roster of version 99, and sends version 1 to every node that asks; version 2 is in force."""

    def attack(self, data: stranger.Data) -> None:
        """Take part with the roster of before."""
        self.roster.top["version"] = 99
        super().attack(data)


class OldKey(Attacker):
    """Goes on with the key and certificate that the organizer has replaced."""

    def answered(self, round: int, client: int) -> bool:
        """Whether a question for a client's model gets any answer."""
        address = stranger.Address("model", round, 0, client)
        try:
            self.read(host(self, client), address, {"params": ("F32", (stranger.PARAMS,))}, 1.0)
        except stranger.ErrorReply as error:
            # What gRPC says of a door that stays shut; a node's own codes are answers.
            return error.code not in ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
        except stranger.Refused:
            pass
        return True

    def attack(self, data: stranger.Data) -> None:
        """Ask for heads and models, and publish, whether or not a node receives it."""
        # A door at which nobody listens yet refuses no key.
        for client in (0, 1):
            await_listener(self.roster.members[host(self, client)]["address"])
        self.publish(stranger.Address("model", 0, 0, self.client), "", {})
        for round in range(3):
            for client in (0, 1):
                assert self.ask_head(host(self, client)) is None, "somebody answers the old key"
                assert not self.answered(round, client), "somebody answers the old key"


class Server(Attacker):
    """A member in the server role whose answers have another form than the method's: a column more."""

    def reply_tensors(self) -> stranger.Tensors:
        """The answer to a request."""
        return {
            "table": np.zeros((1, stranger.PARAMS + 1), np.float32),
            "index": np.zeros(1, np.int64),
        }

    def attack(self, data: stranger.Data) -> None:
        """Choose everybody, and answer whatever comes."""
        self.start()
        self.round = 0
        for round in (-1, 0):
            for number in range(2):
                self.publish(
                    stranger.Address("cohort", round, number, -1),
                    "",
                    {"ids": np.arange(self.population)},
                )
            for client in range(1, self.population):
                for exchange in (1024, 1025, 2048):
                    address = stranger.Address("reply", round, exchange, client)
                    self.publish(address, host(self, client), self.reply_tensors())


class ServerRows(Server):
    """An answer with two models where the method shows one."""

    def reply_tensors(self) -> stranger.Tensors:
        """A row more."""
        return {"table": np.zeros((2, stranger.PARAMS), np.float32), "index": np.arange(2)}


class ServerNames(Server):
    """An answer with an extra that the method does not have."""

    def reply_tensors(self) -> stranger.Tensors:
        """A tensor more."""
        fine = {"table": np.zeros((1, stranger.PARAMS), np.float32), "index": np.zeros(1, np.int64)}
        return {**fine, "field.extra": np.zeros(1, np.float32)}


def host(node: stranger.Node, client: int) -> str:
    """The member that hosts a client."""
    return next(name for name, member in node.roster.members.items() if client in member["clients"])


ATTACKS: dict[str, type[Attacker]] = {
    "none": Attacker,
    "gone": Gone,
    "forged heads": ForgedHeads,
    "wide": Wide,
    "extra": Extra,
    "renamed": Renamed,
    "1e30": Huge,
    "-5 x": Turned,
    "samples": Samples,
    "replayed": Replayed,
    "old roster": OldRoster,
    "old key": OldKey,
    "server, wide": Server,
    "server, rows": ServerRows,
    "server, names": ServerNames,
}


def await_listener(address: str) -> None:
    """Wait until somebody listens at an address."""
    name, port = address.rsplit(":", 1)
    until = time.monotonic() + START
    while time.monotonic() < until:
        try:
            socket.create_connection((name, int(port)), 1.0).close()
            return
        except OSError:
            threading.Event().wait(0.2)
    raise TransportError(f"nobody listens at {address}")


def credentials(keys: Path, folder: Path, name: str) -> Path:
    """Copy what the attacker has to a folder of its own."""
    folder.mkdir()
    for file in ("roster.toml", "roster.toml.sig", "organizer.pub", "ca.pem", f"{name}.key"):
        shutil.copy(keys / file, folder / file)
    shutil.copy(keys / f"members/{name}.pem", folder / f"{name}.pem")
    return folder


def data_of(study: config.StudyConfig, client: int) -> stranger.Data:
    """The client's samples as plain arrays, scaled as the model of a node gets them."""
    federation = build_federation(study.data, study.seeds[0], None).host([client])
    x = (federation.x[0].flatten(1).numpy() / 255 - federation.mean[0]) / federation.std[0]
    y, held = federation.y[0].numpy(), federation.split[0].numpy() == 1
    kept = federation.split[0].numpy() == 0
    return stranger.Data(x[kept], y[kept], x[held], y[held])


def outcome(place: Path, reader: int, attacker: int) -> dict[str, Any]:
    """Return what a node ended with: rounds that it trained, accuracy in percent, rounds with the attacker's model.

    Args:
        place: its run's folder.
        reader: its client.
        attacker: the attacker's client.

    Returns:
        Also "mixed" and "refused": in how many rounds it mixed the attacker's model, and tried and
        refused it.
    """
    metrics = pd.read_parquet(place / "metrics.parquet")
    edges = pd.read_parquet(place / "edges.parquet")
    score = metrics[metrics["metric"] == "accuracy"]
    validation = score[
        (score["split"] == "validation") & (score["model"] == "current")
    ].sort_values("round")
    trained = validation[validation["round"] >= 0]["round"].nunique()
    mine = edges[(edges["reader"] == reader) & (edges["read"] == attacker)]
    return {
        "rounds": trained,
        "validation": round(100 * float(validation["value"].iloc[-1]), 1),
        "test": round(netlab.final_accuracy(place)[reader], 1),
        "mixed": mine[mine["weight"] > 0]["round"].nunique(),
        "refused": mine[mine["purpose"] == "refused"]["round"].nunique(),
    }


def attacked(folder: Path, name: str, *, rounds: int = ROUNDS, port: int = PORT) -> netlab.Result:
    """Run an attack on two honest nodes; return what they ended with.

    Args:
        folder: an empty folder.
        name: of the attack.
        rounds: of the run.
        port: of the first node.
    """
    kind, served = ATTACKS[name], issubclass(ATTACKS[name], Server)
    study = config.parse_study_text(STUDY.format(rounds=rounds, method=FEDAVG if served else DAC))
    study = study.select_run(study.methods[0].label, 0)
    patience = {**NETWORK, "start": 20.0} if kind is OldKey else NETWORK
    files = fleet.lay_out(folder, study, port=port, network=patience)
    keys, me = folder / "keys", "node-00" if served else "node-02"
    own = credentials(keys, folder / "attacker", me)
    if kind is OldRoster:
        known = rosters.load(keys / "roster.toml", keys / "organizer.pub")
        rosters.write_signed(
            keys / "roster.toml", replace(known, version=2), keys / "organizer.key"
        )
    if kind is OldKey:
        (folder / "new").mkdir()
        stranger.request(me, "127.0.0.1", folder / "new")
        setup.rekey_member(keys, me, folder / "new" / f"{me}.csr")
    honest = {other: file for other, file in files.items() if other != me}
    events: dict[str, Counter[str]] = {other: Counter() for other in honest}
    ended = dict.fromkeys(honest, False)

    def look(node: str, event: Mapping[str, Any]) -> None:
        if event["level"] in ("warning", "error"):
            detail = event.get("code") or event.get("reason") or ""
            if event["event"] in ("pull", "redraw"):
                detail = ", ".join(
                    sorted({str(why) for why in (event.get("missing") or {}).values()})
                )
            events[node][f"{event['event']}: {detail}" if detail else event["event"]] += event.get(
                "times", 1
            )
        ended[node] |= event["event"] == "done"

    began = time.perf_counter()
    (folder / "logs").mkdir()
    with (
        (folder / "logs/attacker.jsonl").open("w") as told,
        redirect_stdout(told),
        fleet.Fleet(honest, logs=folder / "logs", listener=look) as nodes,
    ):
        for other in honest:
            nodes.start(other)
        attacker = kind(own, me, START)
        try:
            attacker.attack(data_of(study, int(me[-2:])))
            attacker.state = "done"
            while any(process.poll() is None for process in nodes.processes.values()):
                threading.Event().wait(0.2)
        finally:
            attacker.leave()
        statuses = nodes.wait(120)
    result: netlab.Result = {
        "attack": name, "what": " ".join((kind.__doc__ or "").split()), "method": study.methods[0].label,
        "of": rounds, "seconds": round(time.perf_counter() - began, 1), "statuses": list(statuses.values()),
        "done": list(ended.values()),
        "events": dict(sorted(sum(events.values(), Counter[str]()).items())),
    }  # fmt: skip
    run = Path(study.name) / study.methods[0].label / "seed-0"
    places = [folder / "nodes" / other / run for other in honest]
    if all((place / "metrics.parquet").exists() for place in places):
        found = [
            outcome(place, int(other[-2:]), int(me[-2:]))
            for other, place in zip(honest, places, strict=True)
        ]
        result |= {what: [one[what] for one in found] for what in found[0]}
    return result


def members(emit: netlab.Emit, folder: Path, *, names: list[str] | None = None) -> None:
    """Run all attacks, or some."""
    for number, name in enumerate(names or ATTACKS):
        place = folder / f"attack-{number}"
        place.mkdir()
        emit(attacked(place, name, port=PORT + 10 * number))
