"""Damaged messages between nodes in one program: every field is checked, what is refused changes nothing.

A member signs what it likes, so the damage here is signed by its sender: only the checks behind the
signature are left.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from coterie.errors import TransportError
from coterie.exchange.base import Message, Reply
from coterie.net import local
from coterie.net.exchange import RemoteExchange
from coterie.net.post import RoundMissed, Terms
from coterie.net.wire import Manifest, Parcel, canonical_json
from coterie.rng import Rng

Parts = list[tuple[bytes, bytes]]
SIZE = 600  # numbers of a model: its payload is longer than the least chunk


class Network:
    """Three nodes with a client each; n0 is the server. Damage is done to what one sender's messages say."""

    def __init__(self) -> None:
        self.hub, self.exchanges = local.connect_in_process(
            [[0], [1], [2]], terms=Terms(deadline=5.0, redraws=0, server_wait=0.0)
        )
        for exchange in self.exchanges:
            self.begin(exchange, 0)

    def begin(self, exchange: RemoteExchange, round: int) -> None:
        exchange.begin_round(Rng(0).at_round(round))
        exchange.set_active(exchange.ids)

    def damage(
        self, kind: str, change: Callable[[dict, bytes], tuple[dict, bytes]], client: int = 1
    ) -> None:
        """Change manifest and payload of every message of a kind that is from or for a client, and sign it anew."""

        def tamper(parts: Parts) -> Parts:
            manifest = json.loads(parts[0][0][68:])
            if manifest["kind"] != kind or manifest["client"] not in (client, -1):
                return parts
            sender = next(e for e in self.exchanges if e.name == manifest["peer"])
            manifest, payload = change(manifest, b"".join(chunk for _, chunk in parts))
            text = canonical_json(manifest)
            again = Parcel(text, sender.post.sign(b"coterie manifest 1\n" + text), payload)
            return [(attachment, bytes(chunk)) for attachment, chunk in again.iterate_chunks()]

        self.hub.tamper = tamper


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for exchange in made.exchanges:
        exchange.post.close()
        exchange.post.transport.close()


def message(client: int) -> Message:
    return Message(
        torch.full((1, SIZE), float(client + 1)), {"samples": torch.tensor([client + 1.0])}
    )


def publish(exchange: RemoteExchange) -> None:
    exchange.pull(message(int(exchange.ids[0])), torch.full((1, 0), -1))


def known(exchange: RemoteExchange) -> tuple:
    """What a node keeps of what it received."""
    traffic = exchange.post.traffic
    return (
        dict(exchange.post._newest),
        traffic.received,
        traffic.bytes,
        dict(exchange._got),
        exchange.post.ahead,
    )


def saying(**changes) -> Callable[[dict, bytes], tuple[dict, bytes]]:
    """Damage to the manifest alone."""
    return lambda manifest, payload: (manifest | changes, payload)


def adding(name: str, more: int) -> Callable[[dict, bytes], tuple[dict, bytes]]:
    """A number of the manifest that is greater or less by some."""
    return lambda manifest, payload: (manifest | {name: manifest[name] + more}, payload)


# One value for each field that its sender could sign and that must be refused, and as what.
FIELDS = {
    "v": (adding("v", 1), "version"),
    "run": (saying(run="another"), "run"),
    "peer": (saying(peer="n2"), "sender"),
    "inc": (adding("inc", -1), "replay"),
    "round": (adding("round", 1), "address"),
    "exchange": (adding("exchange", 1), "address"),
    "client": (adding("client", 1), "address"),
    "kind": (saying(kind="probe"), "address"),
    "to": (saying(to="n2"), "reader"),
    "codec": (saying(codec="safetensors-f16"), "dtype"),
    "bytes": (adding("bytes", 1), "chunk"),
    "chunk": (saying(chunk=1024), "chunk"),
    "sha256": (saying(sha256="0" * 64), "digest"),
    "schema": (saying(schema="0" * 64), "schema"),
}


def test_every_field_of_a_manifest_is_damaged_here():
    assert FIELDS.keys() == {field.name for field in fields(Manifest)}


@pytest.mark.parametrize("name", FIELDS)
def test_a_model_with_a_damaged_field_is_refused_and_changes_nothing(network, name):
    """The next message of the same peer is read as if nothing had been."""
    reader, sender, _ = network.exchanges
    sender.post.incarnation = 5
    publish(sender)
    assert bool(reader.pull(message(0), torch.tensor([[1]])).mask.all())
    for exchange in (reader, sender):
        network.begin(exchange, 1)
    publish(sender)
    before = known(reader)
    change, code = FIELDS[name]
    network.damage("model", change)
    inbox = reader.pull(message(0), torch.tensor([[1]]))
    assert not inbox.mask.any()
    assert reader.post.traffic.missing == {f"refused:{code}": 1}
    assert known(reader) == before
    own = inbox.mix(torch.zeros(1, 1), own=message(0).params, own_weight=torch.ones(1))
    assert torch.equal(own, message(0).params), "the own model is as it was"
    network.hub.tamper = None
    for exchange in (reader, sender):
        network.begin(exchange, 2)
    publish(sender)
    inbox = reader.pull(message(0), torch.tensor([[1]]))
    assert inbox.table[inbox.index[0, 0]].tolist() == [2.0] * SIZE


def holding(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Callable[[dict, bytes], tuple[dict, bytes]]:
    """Damage to the tensors, with the length and the digest that go with it."""

    def damage(manifest: dict, payload: bytes) -> tuple[dict, bytes]:
        payload = save(change(load(payload)))
        return manifest | {
            "bytes": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }, payload

    return damage


def other(
    name: str, change: Callable[[Tensor], Tensor]
) -> Callable[[dict, bytes], tuple[dict, bytes]]:
    return holding(
        lambda tensors: {n: change(t).contiguous() if n == name else t for n, t in tensors.items()}
    )


TENSORS = {
    "a tensor is missing": (holding(lambda t: {"params": t["params"]}), "names"),
    "a tensor too many": (holding(lambda t: t | {"field.more": torch.ones(1)}), "names"),
    "a model of another type": (other("params", Tensor.int), "dtype"),
    "a model of another shape": (other("params", lambda t: t[None]), "shape"),
    "a model with NaN": (other("params", lambda t: t / 0 * 0), "not_finite"),
    "a number that is infinite": (other("field.samples", lambda t: t / 0), "not_finite"),
    "a number of another type": (other("field.samples", Tensor.long), "dtype"),
    "a number that is a vector": (other("field.samples", lambda t: t[None]), "shape"),
}


@pytest.mark.parametrize("kind", ["model", "request"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_differ_from_ones_own_are_refused_by_peers_and_by_the_server(
    network, name, kind
):
    reader, sender, third = network.exchanges
    change, code = TENSORS[name]
    network.damage(kind, change)
    if kind == "model":
        publish(sender)
        assert not reader.pull(message(0), torch.tensor([[1]])).mask.any()
    else:
        with ThreadPoolExecutor(3) as pool:
            served = pool.submit(reader.ask_server, message(0), total, torch.zeros(SIZE))
            waiting = [
                pool.submit(one.ask_server, message(one.ids.item()), total, torch.ones(1))
                for one in (sender, third)
            ]
            shared, inbox = served.result()
            with pytest.raises(RoundMissed, match="absent"):
                waiting[0].result()
            waiting[1].result()
        assert shared.tolist() == [1.0 + 3.0] * SIZE, "the sum of the two that were read"
        assert inbox.table.tolist() == [[4.0] * SIZE]
    assert reader.post.traffic.missing == {f"refused:{code}": 1}


def total(shared: Tensor, whole: Message) -> tuple[Tensor, Reply]:
    """Every client gets the sum of all models."""
    summed = whole.params.sum(0)
    return summed, Reply(
        summed[None], torch.zeros(len(whole), 1, dtype=torch.int64), {"one": torch.ones(1)}
    )


REPLIES = {
    "a row that is not there": (other("index", lambda t: t - 1), "shows 1 rows and has 1"),
    "fewer rows than are shown": (holding(lambda t: {n: v[:0] if n != "index" else v for n, v in t.items()}), "has 0"),
    "more rows than are shown": (
        holding(lambda t: {n: torch.cat([v, v]) if n != "index" else v for n, v in t.items()}), "shows 1 rows and has 2"
    ),
    "models of another type": (other("table", Tensor.double), "has not answered"),
    "models with NaN": (other("table", lambda t: t / 0 * 0), "has not answered"),
    "places that are no whole numbers": (other("index", Tensor.float), "has not answered"),
    "no places": (holding(lambda t: {n: v for n, v in t.items() if n != "index"}), "has not answered"),
    "an extra of another length": (other("field.one", lambda t: torch.cat([t, t])), "has not answered"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_servers_answer_that_makes_no_sense_ends_in_an_error_and_not_in_a_model(network, name):
    server, client, _ = network.exchanges
    change, text = REPLIES[name]
    network.damage("reply", change)
    server._expected = torch.tensor([0, 1])
    shared = torch.zeros(SIZE)
    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(server.ask_server, message(0), total, shared)
        asked = pool.submit(client.ask_server, message(1), total, shared)
        with pytest.raises(TransportError, match=text):
            asked.result()
        served.result()
    assert not shared.any()


COHORTS = {
    "twice": torch.tensor([1, 1]),
    "not in order": torch.tensor([2, 1]),
    "below zero": torch.tensor([-1, 1]),
    "beyond the population": torch.tensor([1, 3]),
}


@pytest.mark.parametrize("name", COHORTS)
def test_a_cohort_that_is_no_set_of_clients_is_refused(network, name):
    server, client, _ = network.exchanges
    network.damage("cohort", holding(lambda tensors: {"ids": COHORTS[name]}))
    server.agree_on_cohort(lambda: torch.tensor([0, 1]))
    with pytest.raises(TransportError, match="not a set of clients in ascending order"):
        client.agree_on_cohort(lambda: torch.tensor([0]))
    assert client._expected is None
    network.hub.tamper = None
    network.begin(server, 1)
    network.begin(client, 1)
    server.agree_on_cohort(lambda: torch.tensor([0, 1]))
    assert client.agree_on_cohort(lambda: torch.tensor([0])).tolist() == [0, 1]


def test_a_newer_incarnation_is_no_damage(network):
    """Otherwise a node that comes back would be refused for good."""
    reader, sender, _ = network.exchanges
    publish(sender)
    network.damage("model", adding("inc", 3))
    assert bool(reader.pull(replace(message(0)), torch.tensor([[1]])).mask.all())
    assert reader.post._newest == {"n1": 3}
