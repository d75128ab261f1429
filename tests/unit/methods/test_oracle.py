"""Oracle."""

import dataclasses

import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.functional.selection import unpack_mask
from coterie.methods import oracle
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.testing import tiny_federation


def test_oracle_reads_its_own_cluster_only(play, planted):
    """Invariant 29: the matrix of pulls is block-diagonal, and a cluster of q members pulls min(m, q - 1)."""
    federation = planted([6, 3, 2])
    run = play(Oracle(num_peers=4), federation).steps(5)
    cluster = federation.truth.cluster
    for info in run.infos[-5:]:
        for i, row in enumerate(info["peers"].tolist()):
            chosen = [j for j in row if j >= 0]
            assert all(cluster[j] == cluster[i] for j in chosen)
            assert i not in chosen
            assert len(chosen) == min(4, int((cluster == cluster[i]).sum()) - 1)


def test_oracle_alone_in_its_cluster_is_local(play, planted):
    """Invariant 29: the singleton's models are those of local training, to the last bit."""
    federation = planted([3, 1])
    ours, local = play(Oracle(), federation).steps(3), play(Local(), federation).steps(3)
    assert torch.equal(ours.state.params[3], local.state.params[3])
    assert not torch.equal(ours.state.params[0], local.state.params[0])


def test_oracle_keeps_vehicles_and_animals_apart(play, planted):
    """Invariant 29: 40 and 60 clients, as in the label shift of the papers; nobody reads across or itself.

    The published code excluded the leftover index of a loop instead of the client, and gossiped
    with 40 .. 98.
    """
    run = play(Oracle(num_peers=5), planted([40, 60]))
    _, info = run.exchange()
    peers = info["peers"]
    assert bool(((peers < 40) == (torch.arange(100) < 40)[:, None]).all())
    assert not (peers == torch.arange(100)[:, None]).any()
    assert peers.shape == (100, 5)


def test_a_lost_message_is_of_no_cluster(play, planted, disturbed):
    """Clients 0 and 3 heard nobody while they enrolled, so they know no fellows; the others know theirs."""
    federation = planted([3, 3])
    run = play(Oracle(), federation, exchange=disturbed(federation, 0, deaf=(0, 3)))
    # Six members in one byte, the first one in its lowest bit.
    assert [bin(byte) for (byte,) in run.memory.same.tolist()] == [
        "0b0", "0b101", "0b11", "0b0", "0b101000", "0b11000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "asked"), [(10**6, [70]), (70 * 40, [40, 30]), (1, [8] * 8 + [6])]
)
def test_few_members_of_a_large_population_are_asked_at_once(
    play, planted, monkeypatch, pairs, asked
):
    """Seventy clients in three clusters; whole bytes of the memory, which is the same in any case."""
    monkeypatch.setattr(oracle, "_PAIRS_AT_ONCE", pairs)
    federation, widths = planted([40, 25, 5]), []

    class Counting(InMemory):
        def pull(self, message, peers):
            if "cluster" in message.fields:
                widths.append(peers.shape[1])
            return super().pull(message, peers)

    memory = play(Oracle(), federation, exchange=Counting(federation.ids, 70)).memory
    assert widths == asked
    cluster = federation.truth.cluster
    fellows = (cluster[:, None] == cluster) & ~torch.eye(70, dtype=torch.bool)
    assert torch.equal(unpack_mask(memory.same, 70), fellows)


def test_oracle_without_the_truth_is_refused(play):
    federation = dataclasses.replace(tiny_federation(), truth=None)
    with pytest.raises(ConfigError, match="needs the planted cluster"):
        play(Oracle(), federation)


def test_no_peers_at_all_is_refused_and_too_many_are_clamped(play):
    with pytest.raises(ConfigError, match=r"num_peers is 0; expected a whole number, 1 or more"):
        Oracle(num_peers=0)
    _, info = play(Oracle(num_peers=99)).exchange()
    assert info["peers"].shape[1] == 5
