"""Masked sums between nodes: the bytes of the simulation, clients that leave, servers that lie, and what each sees."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from coterie.exchange.base import Message, Reply, SecureAggregation
from coterie.exchange.secure_sum import SUMMED, count_bytes, sum_messages
from coterie.net import local, summing
from coterie.net.masking import MaskingClient, SummingServer
from coterie.net.outbox import Missing
from coterie.net.post import RoundMissed, Terms
from coterie.rng import Rng

TERMS = SecureAggregation()


class Nodes:
    """Six nodes of one client each; the server's is n0. Rounds are run in threads."""

    def __init__(self, groups=None, deadline: float = 5.0, columns: int = 30) -> None:
        self.groups = groups or [[i] for i in range(6)]
        self.events: list[dict] = []
        self.hub, self.doors = local.connect_in_process(
            self.groups,
            terms=Terms(deadline=deadline, server_wait=20.0, slow=0),
            journal=lambda event: self.events.append(dict(event)),
        )
        draw = torch.Generator().manual_seed(5)
        count = sum(map(len, self.groups))
        self.params = torch.randn(count, columns, generator=draw)
        self.samples = torch.randint(1, 300, (count,), generator=draw).double()

    def message(self, ids) -> Message:
        ids = torch.tensor(list(ids), dtype=torch.int64)
        fields = {"samples": self.samples[ids]}
        return Message(self.params[ids], fields, ids, sum_only=TERMS)

    def round(self, number: int = 0, absent=()) -> list:
        """Return what each node gets: the summed message at the server, an inbox elsewhere, or its error."""

        def take_part(place: int):
            door = self.doors[place]
            door.begin_round(Rng(0).at_round(number))
            door.set_active(torch.tensor(self.groups[place], dtype=torch.int64))
            seen = []

            def rule(shared, message):
                seen.append(message)
                return shared, Reply(
                    message.params[:0], torch.zeros(len(message), 0, dtype=torch.int64)
                )

            try:
                _, inbox = door.ask_server(self.message(self.groups[place]), rule, None)
            except RoundMissed as error:
                return error
            return seen[0] if seen else inbox

        there = [k for k in range(len(self.groups)) if k not in absent]
        with ThreadPoolExecutor(len(there)) as pool:
            return list(pool.map(take_part, there))

    def mean_of(self, ids) -> torch.Tensor:
        weights = self.samples[list(ids)]
        return (self.params[list(ids)].double() * weights[:, None]).sum(0) / weights.sum()

    def close(self) -> None:
        for door in self.doors:
            door.post.close()
            door.post.transport.close()


@pytest.fixture
def nodes():
    made: list[Nodes] = []

    def make(*args, **options) -> Nodes:
        made.append(Nodes(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("groups", [None, [[0, 4], [1], [2, 3], [5]], [[], [0, 1, 2], [3, 4, 5]]])
def test_a_sum_between_nodes_has_the_bytes_of_that_in_one_process(nodes, groups):
    some = nodes(groups)
    found = some.round()
    wanted, _ = sum_messages(some.message(range(6)), TERMS)
    assert torch.equal(found[0].params, wanted.params)
    assert torch.equal(found[0].fields["samples"], wanted.fields["samples"])
    assert int(found[0].fields[SUMMED]) == 6
    assert float((found[0].params[0].double() - some.mean_of(range(6))).abs().max()) < 1e-6
    noted = [event for event in some.events if event["event"] == "sum"]
    assert len(noted) == len(some.groups)
    assert all(event["arrived"] == [0, 1, 2, 3, 4, 5] for event in noted)
    assert sum(event["share"] for event in noted) == pytest.approx(1)
    assert all(inbox.table.shape[1] == 30 and not len(inbox.table) for inbox in found[1:])


def record(monkeypatch, nodes: Nodes) -> list:
    """What the server's node receives, decoded: (number of the step, client, tensors)."""
    server, seen = nodes.doors[0].post, []
    fetch_all = server.fetch_all

    def watch(wanted, template, seconds):
        wanted = list(wanted)
        found = fetch_all(wanted, template, seconds)
        for address in wanted:
            if not isinstance(found[address.client], Missing):
                seen.append((address.exchange, address.client, found[address.client].tensors))
        return found

    monkeypatch.setattr(server, "fetch_all", watch)
    return seen


def test_the_server_receives_no_model_and_nothing_that_is_alike_in_two_rounds(nodes, monkeypatch):
    some = nodes()
    seen = record(monkeypatch, some)
    for number in range(2):
        some.round(number)
    assert {step for step, _, _ in seen} == {0, 1, 2, 3}
    for _, client, tensors in seen:
        assert "params" not in tensors
        model = some.params[client].numpy().tobytes()
        for tensor in tensors.values():
            assert model[:16] not in tensor.numpy().tobytes()
    masked = [t["masked"] for _, client, t in seen if "masked" in t and client == 3]
    keys = [t["keys"] for _, client, t in seen if "keys" in t and client == 3]
    assert len(masked) == len(keys) == 2
    words = [one.reshape(-1, 5) for one in masked]
    assert not (words[0] == words[1]).all(1).any()
    for part in keys[0].split(32):
        assert bytes(part.tolist()) not in bytes(keys[1].tolist())


def test_bytes_on_the_wire_are_at_most_one_and_a_half_times_those_of_plain_models(nodes):
    """Of 60,000 numbers and six clients: all that the server's node received, headers included."""
    plain, masked = nodes(columns=60_000), nodes(columns=60_000)
    masked.round()
    send = plain.message
    plain.message = lambda ids: Message(send(ids).params, send(ids).fields, send(ids).ids)
    plain.round()
    counted = [some.doors[0].post.traffic.bytes for some in (plain, masked)]
    assert 1.2 < counted[1] / counted[0] < 1.3
    # what a run reports is what was sent, without the headers of messages
    up, _ = count_bytes(60_000, 6)
    assert 5 * up < counted[1] < 5 * (up + 4 * 1500)


# ---------------------------------------------------------------- clients that leave


def leave_before(monkeypatch, name: str, clients) -> None:
    """Some clients end before they do a step."""
    act = getattr(MaskingClient, name)

    def stop(self, *args):
        if self.client in clients:
            raise RoundMissed("gone")
        return act(self, *args)

    monkeypatch.setattr(MaskingClient, name, stop)


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("make_keys", [0, 1, 3, 4, 5]),
        ("share_secrets", [0, 1, 3, 4, 5]),
        ("mask_model", [0, 1, 3, 4, 5]),
        ("answer_unmasking", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_node_that_leaves_at_any_step_costs_its_own_model_at_most(nodes, monkeypatch, step, left):
    leave_before(monkeypatch, step, {2})
    some = nodes(deadline=1.0)
    found = some.round()
    assert float((found[0].params[0].double() - some.mean_of(left)).abs().max()) < 1e-6
    assert isinstance(found[2], RoundMissed)


@pytest.mark.full
@pytest.mark.parametrize("step", ["make_keys", "share_secrets", "mask_model", "answer_unmasking"])
def test_with_fewer_than_the_threshold_no_rule_is_called_and_nobody_waits_in_vain(
    nodes, monkeypatch, step
):
    leave_before(monkeypatch, step, {2, 3})
    some = nodes(deadline=1.0)
    found = some.round()
    assert isinstance(found[0], RoundMissed)
    assert "4 of 6 clients can be summed; at least 5 must be" in str(found[0])
    (event,) = [event for event in some.events if event["event"] == "no_sum"]
    assert "4 of 6" in event["text"]
    if step != "answer_unmasking":  # after that step clients ask for nothing more
        assert all(isinstance(one, RoundMissed) for one in found)


def test_a_member_that_is_away_is_in_no_sum(nodes):
    some = nodes(deadline=1.0)
    found = some.round(absent=[4])
    assert float((found[0].params[0].double() - some.mean_of([0, 1, 2, 3, 5])).abs().max()) < 1e-6


def test_a_model_out_of_range_is_withheld_by_its_own_node_with_the_reason(nodes):
    some = nodes(deadline=1.0)
    some.params[3, 4] = 20_000.0
    found = some.round()
    assert float((found[0].params[0].double() - some.mean_of([0, 1, 2, 4, 5])).abs().max()) < 1e-6
    assert isinstance(found[3], RoundMissed)
    (event,) = [event for event in some.events if event["event"] == "withheld"]
    assert event["client"] == 3
    assert "numbers up to 20000; a secure sum over 6 clients holds at most 16383" in event["why"]


# ---------------------------------------------------------------- servers that lie


def test_a_server_that_asks_for_both_shares_of_a_client_is_refused_by_every_node(
    nodes, monkeypatch
):
    ask = SummingServer.take_masked

    def lie(self, came):
        asked = ask(self, came)
        return {**asked, "left": torch.tensor([2])}

    monkeypatch.setattr(SummingServer, "take_masked", lie)
    some = nodes(deadline=1.0)
    found = some.round()
    assert all(isinstance(one, RoundMissed) for one in found)
    said = [event["text"] for event in some.events if event["event"] == "refused"]
    assert len(said) == 5
    assert all("both shares of client 2, which would reveal its model" in text for text in said)


def test_a_server_that_claims_a_billion_samples_for_others_is_refused(nodes, monkeypatch):
    take = SummingServer.take_keys

    def lie(self, came):
        listed = take(self, came)
        object.__setattr__(listed, "samples", (listed.samples[0], *[1e12] * 5))
        return listed

    monkeypatch.setattr(SummingServer, "take_keys", lie)
    some = nodes(deadline=1.0)
    assert all(isinstance(one, RoundMissed) for one in some.round())
    said = [event["text"] for event in some.events if event["event"] == "refused"]
    assert any("are not signed by its member" in text for text in said)


def test_forms_of_messages_have_bounds():
    """A node reads no list of more clients than the cohort has."""
    for make in (summing.key_list_template, summing.sealed_template, summing.question_template):
        each = make(6).max_bytes - make(5).max_bytes
        assert each in (8 + 96 + 8 + 64, 8 + 82, 8 + 8)
    header = summing.masked_template(0).max_bytes
    assert summing.masked_template(1000).max_bytes == header + 5000
