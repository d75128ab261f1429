"""The remote exchange over the in-process twin: peers that are missing, stop, or send what they should not."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from coterie.errors import ExchangeError, QuorumError, TransportError
from coterie.exchange.base import Message, PeersMissing, Reply, ReplyForm
from coterie.net import local
from coterie.net.exchange import make_template
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import RoundMissed, Terms
from coterie.net.wire import Address
from coterie.rng import Rng


@pytest.fixture
def network() -> Iterator:
    """Makes networks of nodes that host one client each, and closes them."""
    made = []

    def make(size: int, **terms):
        events: list = []
        terms = {"deadline": 5.0, "redraws": 0, **terms}
        hub, exchanges = local.connect_in_process(
            [[i] for i in range(size)], terms=Terms(**terms), journal=events.append
        )
        made.extend(exchanges)
        return hub, exchanges, events

    yield make
    for exchange in made:
        exchange.post.close()
        exchange.post.transport.close()


def message(client: int, **fields) -> Message:
    params = torch.full((1, 4), float(client))
    return Message(params, {"samples": torch.tensor([client + 1.0]), **fields})


def begin(exchange, round: int = 0) -> None:
    exchange.begin_round(Rng(0).at_round(round))
    exchange.set_active(exchange.ids)


def publish(exchange, what: Message | None = None) -> None:
    client = int(exchange.ids[0])
    exchange.pull(what or message(client), torch.full((1, 0), -1))


def pull(exchange, *peers: int):
    return exchange.pull(message(int(exchange.ids[0])), torch.tensor([list(peers)]))


def everywhere(exchanges, action) -> list:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(action, exchanges))


def test_a_peer_that_is_gone_is_masked_with_its_reason(network):
    _, (a, b, c), events = network(3)
    for exchange in (a, b, c):
        begin(exchange)
    publish(b)
    c.post.transport.close()
    inbox = pull(a, 1, 2)
    assert inbox.mask.tolist() == [[True, False]]
    assert inbox.table[inbox.index[0, 0]].tolist() == [1.0] * 4
    assert events[-1]["missing"] == {"2": "unreachable"}
    assert a.post.traffic.missing == {"unreachable": 1}


def test_members_that_never_answer_keep_nobody_waiting_for_the_others(network):
    """Six of seven hold the question; the last one is asked all the same, and so are the last clients of a member."""
    _, (a, *others), _ = network(8)
    served, real = threading.Event(), a.post.transport.fetch

    def fetch(peer, expect, deadline, patience):
        if peer == "n7":
            served.set()
            return real(peer, expect, deadline, patience)
        return Missing("timeout" if served.wait(60) else "never")

    a.post.transport.fetch = fetch
    for exchange in (a, *others):
        begin(exchange)
    publish(others[-1])
    assert pull(a, *range(1, 8)).mask.tolist() == [[False] * 6 + [True]]
    assert a.post.traffic.missing == {"timeout": 6}


def test_of_one_member_a_few_messages_are_asked_for_at_a_time(network):
    _, (a, *_), _ = network(2)
    post, open_, most = a.post, [0], [0]
    post.host_of = {client: "n1" if client < 20 else "n2" for client in range(23)}
    counting = threading.Lock()

    def fetch(peer, address, template, seconds, patience):
        if peer == "n1":
            with counting:
                open_[0] += 1
                most[0] = max(most[0], open_[0])
            threading.Event().wait(0.001)
            with counting:
                open_[0] -= 1
        return Missing("gone", address.client)

    post._ask_once = fetch
    found = post.fetch_all([Address(0, 0, client) for client in range(23)], Template({}), 60.0)
    assert [(client, missing.round) for client, missing in found.items()] == [
        (c, c) for c in range(23)
    ]
    assert 1 <= most[0] <= 4


def test_a_peer_that_does_not_come_to_the_round_in_time_is_masked(network):
    """Its outbox holds the question for half of the deadline and then says that it is not ready."""
    _, (a, b), events = network(2, deadline=0.1)
    begin(a)
    publish(b)
    begin(a, 5)
    assert not pull(a, 1).mask.any()
    assert events[-1]["missing"]["1"] in ("not_ready", "timeout")
    assert events[-1]["seconds"] < 2


def test_a_node_that_has_met_few_of_many_writes_those_down(network):
    """Of ten members it has met two: a journal lists them, and not the eight that it has not."""
    _, (a, *_), events = network(10)
    a.set_away(f"n{number}" for number in range(3, 10))
    begin(a)
    publish(a)
    assert events[-1]["reachable"] == [0, 1, 2]
    assert "unreachable" not in events[-1]
    a.admit(["n3", "n4"])
    publish(a)
    assert events[-1]["unreachable"] == [5, 6, 7, 8, 9], "of as many as are left the usual list"


def test_missing_peers_are_drawn_again_and_asked_once(network):
    """The exchange asks for another draw without client 2; drawn again all the same, it is masked and not asked."""
    _, (a, b, c, d), events = network(4, redraws=3)
    for exchange in (a, b, d):
        begin(exchange)
    publish(b)
    publish(d)
    c.post.transport.close()
    with pytest.raises(PeersMissing) as caught:
        pull(a, 1, 2)
    assert caught.value.ids.tolist() == [2]
    assert pull(a, 1, 3).mask.tolist() == [[True, True]]
    assert a.post.traffic.received == 2, "what came before the new draw is not asked for again"
    assert [e["event"] for e in events if e["readers"] == [0]] == ["redraw", "pull"]
    assert events[-1]["unreachable"] == [2]
    assert pull(a, 2).mask.tolist() == [[False]], (
        "later exchanges of the round do not ask for a new draw"
    )


def test_a_round_has_one_deadline_however_often_its_peers_are_drawn_again(network, monkeypatch):
    """Of ten seconds the first draw takes four and the second three: six and then three are left."""
    _, (a, b, c, d), _ = network(4, redraws=3, deadline=10.0)
    for exchange in (a, b, d):
        begin(exchange)
    publish(b)
    publish(d)
    c.post.transport.close()
    clock, left, gather = SimpleNamespace(now=100.0), [], a.post.fetch_all
    monkeypatch.setattr(a.post, "clock", lambda: clock.now)

    def slow(wanted, template, seconds):
        left.append(seconds)
        found = gather(wanted, template, seconds)
        clock.now += 4.0 if len(left) == 1 else 3.0
        return found

    monkeypatch.setattr(a.post, "fetch_all", slow)
    with pytest.raises(PeersMissing):
        pull(a, 2)
    pull(a, 1)
    begin(d, 1)
    publish(d)
    begin(a, 1)
    pull(a, 3)
    assert left == pytest.approx([10.0, 6.0, 10.0])


def test_what_came_is_put_in_the_order_of_the_clients(network):
    """Client 1 asks 2 and 0, in that order; what a rule or a mix gets is the rows of 0, 1 and 2."""
    _, (a, b, c), _ = network(3)
    for exchange in (a, b, c):
        begin(exchange)
    publish(a)
    publish(c)
    inbox = pull(b, 2, 0)
    assert inbox.table[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert inbox.index.tolist() == [[2, 0]]
    assert inbox.field_by_slot("samples").tolist() == [[3.0, 1.0]]


def test_a_peer_whose_token_went_is_known_to_be_away_at_the_next_round(network):
    _, (a, b, c), _ = network(3)
    for exchange in (a, b, c):
        begin(exchange)
        publish(exchange)
    begin(a, 1)
    assert a.reachable_clients().tolist() == [True, True, True]
    b.post.transport.close()
    begin(a, 2)
    assert a.reachable_clients().tolist() == [True, False, True]
    a.set_away(["n2"])
    begin(a, 3)
    assert a.reachable_clients().tolist() == [True, False, True], (
        "a token that is seen counts more than the start"
    )


def test_a_model_with_nan_is_withheld_at_its_sender(network):
    """The others learn it at once and do not wait; nothing that is not finite travels."""
    _, (a, b), events = network(2)
    begin(a)
    begin(b)
    publish(b, replace(message(1), params=torch.full((1, 4), torch.nan)))
    assert not pull(a, 1).mask.any()
    assert events[-1]["missing"] == {"1": "withheld"}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Message(torch.zeros(1, 5), {"samples": torch.ones(1)}), "refused:size"),
        (Message(torch.zeros(1, 4).double(), {"samples": torch.ones(1)}), "refused:dtype"),
        (Message(torch.zeros(1, 4), {"samples": torch.ones(1, 1)}), "refused:shape"),
        (Message(torch.zeros(1, 4), {"sample": torch.ones(1)}), "refused:names"),
        (Message(torch.zeros(1, 4), {}), "refused:names"),
    ],
)
def test_a_message_that_does_not_look_like_ones_own_is_refused(network, bad, why):
    """A model of five numbers is one number too long; its bytes still fit, so its shape gives it away."""
    _, (a, b), events = network(2)
    begin(a)
    begin(b)
    publish(b, bad)
    assert not pull(a, 1).mask.any()
    assert events[-1]["missing"]["1"] in (why, "refused:shape")


def test_a_message_changed_on_its_way_is_refused(network):
    hub, (a, b), events = network(2)
    begin(a)
    begin(b)
    publish(b)
    hub.tamper = lambda parts: [(attachment, chunk[:-1] + b"\7") for attachment, chunk in parts]
    assert not pull(a, 1).mask.any()
    assert events[-1]["missing"] == {"1": "refused:digest"}


def test_an_older_incarnation_is_refused(network):
    _, (a, b), events = network(2)
    b.post.incarnation = 5
    for round in (0, 1):
        begin(a, round)
        begin(b, round)
        publish(b)
        arrived = pull(a, 1).mask
        assert bool(arrived.all()) == (round == 0)
        b.post.incarnation = 4
    assert events[-1]["missing"] == {"1": "refused:replay"}


def test_a_message_from_before_a_restart_is_refused_afterwards(network):
    """Started for the third time, then one of its second start comes: a replay."""
    _, (a, b), _ = network(2)
    arrived = []
    for round, incarnation in enumerate((5, 7, 6)):
        b.post.incarnation = incarnation
        begin(a, round)
        begin(b, round)
        publish(b)
        arrived.append(bool(pull(a, 1).mask.all()))
    assert arrived == [True, True, False]


def test_a_node_that_fell_behind_learns_how_far(network):
    _, (a, b), events = network(2)
    for round in (3, 4):
        begin(b, round)
        publish(b)
    begin(a, 1)
    assert not pull(a, 1).mask.any()
    assert events[-1]["missing"] == {"1": "gone"}
    assert a.post.ahead == 4


def test_one_that_stopped_goes_on_answering_with_its_best_model_and_its_last_extras(network):
    """As in a simulation: the retired model, the extras of the last message, in every later round."""
    _, (a, b), _ = network(2)
    begin(a)
    begin(b)
    publish(b)
    b.retire_clients(torch.tensor([1]), torch.full((1, 4), 7.0))
    for round in (1, 40):
        begin(a, round)
        inbox = pull(a, 1)
        assert inbox.table[inbox.index[0, 0]].tolist() == [7.0] * 4
        assert inbox.field_by_slot("samples").tolist() == [[2.0]]


def test_a_restarted_one_that_had_stopped_stands_again(network):
    _, (_a, b, c), _ = network(3)
    begin(b)
    publish(b)
    b.retire_clients(torch.tensor([1]), torch.full((1, 4), 7.0))
    kept = b.snapshot()
    c.ids, c.name = b.ids, b.name  # another process with the same client
    c.restore(kept)
    assert set(c.post.transport.outbox._standing) == {(0, 1, "model")}


def double(shared, whole):
    assert whole.ids is not None
    return shared + 1, Reply(
        whole.params * 2, torch.arange(len(whole))[:, None], {"seen": whole.ids}
    )


def test_the_server_goes_on_without_a_client_that_is_missing(network):
    """The rule sees the messages that came; who was not heard in time is told so and keeps its state."""
    _, (a, b, c), events = network(3, deadline=0.2)
    c.post.transport.close()

    def serve(exchange):
        begin(exchange)
        return exchange.ask_server(message(int(exchange.ids[0])), double, torch.zeros(()))

    (shared, _), (other, inbox) = everywhere((a, b), serve)
    assert (float(shared), float(other)) == (1.0, 0.0)
    assert inbox.table.tolist() == [[2.0] * 4]
    assert inbox.field_by_slot("seen").tolist() == [[1]]
    assert inbox.peers.tolist() == [[1]]
    assert next(e for e in events if e["event"] == "serve")["missing"] == {"2": "unreachable"}


def test_a_client_that_came_too_late_misses_the_round(network):
    _, (a, b, c), _ = network(3, deadline=1.0)

    def serve(exchange):
        begin(exchange)
        return exchange.ask_server(message(int(exchange.ids[0])), double, torch.zeros(()))

    everywhere((a, b), serve)
    with pytest.raises(RoundMissed, match="absent"):
        serve(c)


@pytest.mark.parametrize("who", ["peer", "server", "client"])
def test_a_node_that_can_no_longer_go_on_waits_for_nobodys_answer(network, who):
    """It fails while the other member, which has not come to the round, still holds the question."""
    _, (a, b), events = network(2, deadline=60.0)
    exchange, asked = (b, threading.Event()) if who == "client" else (a, threading.Event())
    fetch = exchange.post.transport.fetch

    def noticed(peer, expect, deadline, patience):
        asked.set()
        return fetch(peer, expect, deadline, patience)

    def able():
        if asked.is_set():
            raise OSError("no room")

    exchange.post.transport.fetch, exchange.post.ensure_able = noticed, able
    begin(exchange)
    started = time.monotonic()
    with pytest.raises(OSError, match="no room"):
        pull(a, 1) if who == "peer" else exchange.ask_server(
            message(int(exchange.ids[0])), double, torch.zeros(())
        )
    assert time.monotonic() - started < 20
    assert not events, "no round was exchanged"


def test_a_node_that_is_closed_says_so(network):
    _, (a, b), _ = network(2)
    for exchange, ask in (
        (a, lambda: pull(a, 1)),
        (b, lambda: b.ask_server(message(1), double, torch.zeros(()))),
    ):
        begin(exchange)
        exchange.post.close()
        with pytest.raises(TransportError, match="this node is closed"):
            ask()


def test_closing_does_not_wait_for_questions_that_are_open(network):
    """The transport ends these, which its owner closes afterwards."""
    _, (a, _), _ = network(2)
    asked, free = threading.Event(), threading.Event()
    a.post._pool.submit(lambda: asked.set() or free.wait(60))
    assert asked.wait(10)
    started = time.monotonic()
    a.post.close()
    assert time.monotonic() - started < 10
    free.set()


def test_a_client_gives_up_when_no_server_answers(network):
    _, (a, b), _ = network(2, deadline=0.1, server_wait=0.0)
    a.post.transport.close()
    begin(b)
    with pytest.raises(QuorumError, match="n0 has not answered for 0 s"):
        b.ask_server(message(1), double, torch.zeros(()))


def test_a_request_is_for_the_server_alone(network):
    """Another member that asks for what a client sent to the server is told that it may not have it."""
    _, (a, b, c), _ = network(3)

    def serve(exchange):
        begin(exchange)
        return exchange.ask_server(message(int(exchange.ids[0])), double, torch.zeros(()))

    everywhere((a, b, c), serve)
    request = replace(c._address_of(0, 1), kind="request")
    assert (
        c.post.fetch("n1", request, make_template(message(2), request), 1.0).reason == "forbidden"
    )
    answer = replace(c._address_of(0, 1), kind="reply")
    assert c.post.fetch("n0", answer, make_template(message(2), answer), 1.0).reason == "forbidden"


def test_traces_on_their_way_to_the_server_may_have_gaps_and_nothing_else(network):
    """Loss traces of different lengths are padded with NaN; a model, a scalar or a peer's extra never holds it."""
    _, (a, b), events = network(2)

    def serve(exchange, samples=1.0, trace=torch.nan):
        own = Message(
            torch.ones(1, 4),
            {"samples": torch.tensor([samples]), "trace": torch.tensor([[1.0, trace]])},
        )
        return exchange.ask_server(own, double, torch.zeros(()))

    rounds = [(1.0, torch.nan, [0, 1]), (torch.nan, 1.0, [0]), (1.0, torch.inf, [0])]
    for round, (samples, trace, arrived) in enumerate(rounds):
        begin(a, round)
        begin(b, round)
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(serve, a), pool.submit(serve, b, samples, trace)]
            answers[0].result()
        assert next(e for e in reversed(events) if e["event"] == "serve")["arrived"] == arrived
    begin(a, 3)
    begin(b, 3)
    with pytest.warns(UserWarning, match="whose extra 'trace' holds NaN or infinity reach nobody"):
        publish(b, Message(torch.ones(1, 4), {"trace": torch.tensor([[torch.nan]])}))
    assert not a.pull(
        Message(torch.ones(1, 4), {"trace": torch.ones(1, 1)}), torch.tensor([[1]])
    ).mask.any()


def test_everybody_learns_the_cohort_from_the_server(network):
    _, exchanges, _ = network(3)

    def choose(exchange):
        begin(exchange)
        return exchange.agree_on_cohort(lambda: torch.tensor([0, 2])).tolist()

    assert everywhere(exchanges, choose) == [[0, 2]] * 3


def test_a_server_waits_for_the_clients_of_its_cohort_alone(network):
    _, (a, _b, c), events = network(3)

    def take_part(exchange):
        begin(exchange)
        exchange.agree_on_cohort(lambda: torch.tensor([0, 2]))
        return exchange.ask_server(message(int(exchange.ids[0])), double, torch.zeros(()))

    everywhere((a, c), take_part)
    served = [(e["arrived"], e["missing"]) for e in events if e["event"] == "serve"]
    assert served == [([0, 2], {})]


@pytest.mark.parametrize("ids", [[0, 0, 2], [2, 0], [0, 3], [-1, 0]])
def test_a_cohort_that_is_no_set_of_clients_is_refused(network, ids):
    """Twice the same, out of order, beyond the population of three, below 0: a server that is wrong or lies."""
    _, (a, b, _c), events = network(3, server_wait=0.0)
    begin(b)
    a.post.publish({"ids": torch.tensor(ids)}, Address(0, 0, -1, "cohort"))
    with pytest.raises(TransportError, match="cohort is not a set of clients in ascending order"):
        b.agree_on_cohort(lambda: torch.arange(3))
    assert [(e["peer"], e["code"]) for e in events if e["event"] == "refused"] == [("n0", "cohort")]


@pytest.mark.parametrize(
    ("index", "rows", "said"),
    [([0], 2, "shows 1 rows and has 2"), ([0, 2], 1, "shows 2 rows and has 1"), ([-1], 1, "")],
)
def test_an_answer_that_shows_other_rows_than_it_has_is_refused(network, index, rows, said):
    """A row that no slot shows, a slot without a row, a slot below 0."""
    _, (a, b), _ = network(2, server_wait=0.0)
    begin(b)
    answer = {"table": torch.ones(rows, 4), "index": torch.tensor(index)}
    a.post.publish(answer, Address(0, 0, 1, "reply"), to="n1")
    with pytest.raises(TransportError, match=f"the server's answer {said}"):
        b.ask_server(message(1), double, torch.zeros(()))


REGION = ReplyForm(1, {"center": (torch.float64, (3,))})
CENTER = torch.ones(1, 3).double()
ANSWER = {"table": torch.ones(1, 4), "index": torch.tensor([0]), "field.center": CENTER}
FORMS = {
    "a model of another width": ({"table": torch.ones(1, 5)}, "shape"),
    "a model of no width": ({"table": torch.ones(1, 0)}, "shape"),
    "a model of another type": ({"table": torch.ones(1, 4).double()}, "dtype"),
    "two models": ({"table": torch.ones(2, 4), "index": torch.tensor([0, 1]), "field.center": CENTER.expand(2, 3)},
                   "shape"),
    "no model": ({"table": torch.ones(0, 4), "index": torch.zeros(0).long(), "field.center": CENTER[:0]}, "shape"),
    "an extra that is wider": ({"field.center": torch.ones(1, 4).double()}, "shape"),
    "an extra of more axes": ({"field.center": torch.ones(1, 3, 1).double()}, "shape"),
    "an extra of another type": ({"field.center": torch.ones(1, 3)}, "dtype"),
    "an extra that no method has": ({"field.more": torch.ones(1)}, "names"),
    "an extra is missing": ({"field.center": None}, "names"),
    "a model that is not shown": ({"table": torch.ones(2, 4), "field.center": CENTER.expand(2, 3)}, "index"),
    "a model with a number beyond all": ({"index": torch.tensor([1 << 40])}, "index"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_servers_answer_of_another_form_than_its_methods_counts_as_one_that_has_not_come(
    network, name
):
    """Signed by the server itself: refused with its name and the reason, and asked for again until the wait is over."""
    _, (a, b), _ = network(2, server_wait=0.0)
    b.width = 4
    begin(b)
    change, code = FORMS[name]
    answer = {n: t for n, t in {**ANSWER, **change}.items() if t is not None}
    a.post.publish(answer, Address(0, 0, 1, "reply"), to="n1")
    with pytest.raises(TransportError, match="the server n0 has not answered for 0 s"):
        b.ask_server(replace(message(1), expects=REGION), double, torch.zeros(()))
    assert {reason.partition(":")[2] for reason in b.post.traffic.missing} <= {code, "size"}
    assert sum(b.post.traffic.missing.values()) == 1
    a.post.publish(ANSWER, Address(1, 0, 1, "reply"), to="n1")
    begin(b, 1)
    _, inbox = b.ask_server(replace(message(1), expects=REGION), double, torch.zeros(()))
    assert inbox.field_by_slot("center").tolist() == [[[1.0] * 3]], "what has the form is taken"


def test_a_server_may_not_answer_two_clients_of_a_node_in_two_forms():
    """A method that says nothing of its answers: two clients of one node are sent extras of different widths."""
    _, exchanges = local.connect_in_process(
        [[0], [1, 2]], terms=Terms(deadline=5.0, server_wait=0.0)
    )
    a, b = exchanges
    try:
        begin(b)
        for client, size in ((1, 2), (2, 3)):
            answer = {
                "table": torch.ones(1, 4),
                "index": torch.tensor([client]),
                "field.x": torch.ones(1, size),
            }
            a.post.publish(answer, Address(0, 0, client, "reply"), to="n1")
        own = Message(torch.ones(2, 4), {"samples": torch.ones(2)})
        with pytest.raises(
            TransportError, match="answers to two clients of this node differ in form"
        ):
            b.ask_server(own, double, torch.zeros(()))
    finally:
        for exchange in exchanges:
            exchange.post.close()
            exchange.post.transport.close()


def test_a_method_with_a_server_needs_one_in_the_roster():
    _, (a,) = local.connect_in_process([[0]], server="")
    with pytest.raises(ExchangeError, match="the roster names none"):
        a.ask_server(message(0), double, None)
    a.post.close()
    a.post.transport.close()


def test_half_precision_halves_the_bytes(network):
    """A hundred thousand numbers of four bytes: 400 kB become 200 kB and an envelope."""
    sizes = []
    for half in (False, True):
        _, (a, b), _ = network(2, half=half)
        begin(a)
        begin(b)
        big = Message(torch.ones(1, 100_000), {})
        publish(b, big)
        assert torch.equal(a.pull(big, torch.tensor([[1]])).table[0], big.params[0])
        sizes.append(a.post.traffic.bytes)
    assert 0.5 <= sizes[1] / sizes[0] < 0.502
