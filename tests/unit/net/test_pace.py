"""Patience is per member: the median of its own times; who is slow is named and left out, and nobody else."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outlaw import frame, serve
from tests.unit.net.test_exchange import begin, message, network, publish, pull  # noqa: F401

from coterie.exchange.base import Message, Reply
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.outbox import Missing
from coterie.net.pace import Pace, Wait, was_held
from coterie.net.post import Post, Terms
from coterie.net.transport import WAIT, Delivery, Hub, InProcess
from coterie.net.wire import Address, Manifest, seal_parcel
from coterie.testing import tiny_federation, tiny_settings

SEALED = Manifest(1, "r", "d", 1, 0, 0, 3, "model", "", "safetensors", 9, 1024, "", "")


def delivery(first: float) -> Delivery:
    """A message whose last part came after 30 s."""
    return Delivery(SEALED, {}, 0, 30.0, b"", first)


SOON = delivery(0.1)


def wait(peer: str, seconds: float, *, held: bool = False, found=SOON) -> Wait:
    return Wait(peer, seconds, held, found)


def pace(others: int = 7, **times) -> Pace:
    """A pace with a floor of 3 s that has seen each member take some seconds, in that order."""
    made = Pace(3.0)
    made.num_others = others
    for round in range(max(map(len, times.values()), default=0)):
        made.judge_waits(round, [wait(n, t[round]) for n, t in times.items() if round < len(t)])
    return made


def test_patience_is_the_median_of_a_members_own_times_between_a_floor_and_half_the_deadline():
    """Members that take 2, 4 and 6 s; 20 and 30 s: three medians of one's own or of the others, whichever is longer."""
    known = pace(a=[2.0], b=[4.0], c=[6.0])
    assert known.patience("new", 60.0) == 3 * 4.0
    assert known.patience("a", 60.0) == 3 * 4.0, "others: 4 and 6 s, of which the smaller"
    assert known.patience("c", 60.0) == 3 * 6.0
    assert known.patience("c", 20.0) == 10.0
    assert pace(a=[0.1], b=[0.1]).patience("a", 60.0) == 3.0
    assert Pace(0.0).patience("a", 60.0) == 60.0


def test_one_members_times_change_nobody_elses_patience():
    known = pace(a=[1.0] * 3, b=[1.1] * 3, c=[0.9] * 3, d=[1e9])
    assert known.patience("a", 1e12) == 3 * 1.1
    assert known.typical_seconds("d") == 1.0


def test_an_answer_is_held_that_comes_later_than_an_honest_not_ready():
    """Of 10 s of patience 5 are for waiting, and four of the others for the way."""
    assert WAIT == 0.5
    assert was_held(delivery(9.5), 10.0)
    assert was_held(Missing("timeout"), 10.0)
    assert not was_held(delivery(8.5), 10.0), "a large message that began in time"
    for reason in ("not_ready", "gone", "unreachable", "busy"):
        assert not was_held(Missing(reason), 10.0)


def test_a_held_answer_leaves_a_member_out_for_4_16_and_64_rounds():
    known = pace(a=[0.1], b=[0.1])
    for round, until in ((0, 5), (10, 27), (30, 95)):
        (slow,) = known.judge_waits(round, [wait("d", 2.9, held=True), wait("a", 0.1)])
        assert (slow.peer, slow.seconds, slow.until) == ("d", 2.9, until)
        assert known.list_slow(until - 1) == ["d"]
        assert known.list_slow(until) == []
    assert known.patience("d", 60.0) == 3 * 0.1, "then thrice what the others take"
    assert known.trial_seconds("d", 95) == 1.0
    assert known.trial_seconds("d", 94) == 0.0, "while it is left out"
    known.local = lambda: 4.0
    assert known.trial_seconds("d", 95) == 8.0, "as long as it takes to train twice"
    assert known.trial_seconds("a", 0) == float("inf")


def test_an_answer_in_time_takes_one_strike_back():
    known = pace(a=[0.1])
    known.judge_waits(0, [wait("d", 2.9, held=True)])
    known.judge_waits(6, [wait("d", 2.9, held=True)])
    known.judge_waits(20, [wait("d", 0.1)])
    assert known.describe()["d"] == (0.1, True)
    known.judge_waits(22, [wait("d", 0.1)])
    assert known.describe()["d"] == (0.1, False)


def test_what_the_exchanges_of_a_round_take_together_is_one_time():
    """A client that is late in the first of two exchanges of every round is slow; two short ones are one time."""
    known = pace(a=[0.1], b=[0.1])
    for round in range(3):
        first, second = (known.judge_waits(round, [wait("d", seconds)]) for seconds in (2.5, 0.1))
        assert bool(first) == (round == 2)
        assert not second
    known = pace(a=[0.1, 0.1, 0.1])
    known.judge_waits(2, [wait("a", 0.4)])
    assert known.describe()["a"] == (0.1, False)


def test_a_member_without_times_is_given_a_third_of_the_floor_after_five_rounds():
    assert pace(a=[0.1] * 4).patience("new", 60.0) == 3.0
    known = pace(a=[0.1] * 5)
    assert known.patience("new", 60.0) == 1.0
    assert known.patience("a", 60.0) == 3.0
    assert pace(a=[0.2] * 5).patience("new", 60.0) == 2.0, "on a machine with too much to do"
    assert pace(a=[0.9] * 5).patience("new", 60.0) == 3.0


def test_a_member_that_is_always_behind_is_slow_from_its_third_time_on():
    """A client that comes 25 s after the others, who take 0.1 s."""
    known = pace(a=[0.1], b=[0.1])
    found = [known.judge_waits(round, [wait("late", 25.0)]) for round in range(3)]
    assert [len(slow) for slow in found] == [0, 0, 1]
    known = pace(a=[0.1], b=[0.1])
    silent = Missing("not_ready")
    found = [known.judge_waits(r, [wait("late", 30.0, found=silent)]) for r in range(3)]
    assert [len(slow) for slow in found] == [0, 0, 1]


@pytest.mark.parametrize(
    ("others", "own", "seconds", "slow"),
    [
        ([0.1, 0.1], 0.0, 1.7, False),  # less than 0.6 of the floor
        ([0.1, 0.1], 0.0, 1.9, True),
        ([1.0, 1.0], 0.0, 3.9, False),  # less than four times the others
        ([1.0, 1.0], 0.0, 4.1, True),
        ([0.1, 0.1], 20.0, 19.0, False),  # less than this node's own training
        ([0.1, 0.1], 20.0, 21.0, True),
    ],
)
def test_slow_is_a_multiple_of_the_others(others, own, seconds, slow):
    known = pace(**{f"n{i}": [t] for i, t in enumerate(others)})
    known.local = lambda: own
    found = [known.judge_waits(round, [wait("d", seconds)]) for round in range(3)]
    assert bool(found[-1]) == slow


def test_an_honest_member_that_was_late_twice_of_five_times_is_not_slow():
    known = pace(a=[0.1] * 5, b=[0.1, 2.9, 0.1, 2.9, 0.1])
    assert known.list_slow(0) == []


def test_when_most_are_late_nobody_is_slow():
    known = pace()
    late = [wait(name, 3.0, held=True) for name in "abc"]
    assert known.judge_waits(0, [*late, wait("d", 0.1)]) == []
    assert len(known.judge_waits(0, [*late[:2], wait("c", 0.1), wait("d", 0.1)])) == 2


def test_when_both_of_two_are_late_neither_is_slow_and_one_alone_is():
    """A node of three that was starved: it blames nobody."""
    late = [wait(name, 3.0, held=True) for name in "ab"]
    assert pace(2).judge_waits(0, late) == []
    assert len(pace(2).judge_waits(0, [late[0], wait("b", 0.1)])) == 1
    assert len(pace(2).judge_waits(0, late[:1])) == 1


@pytest.mark.parametrize(("others", "most"), [(1, 0), (2, 1), (3, 1), (7, 3)])
def test_at_most_half_of_the_others_are_slow_at_a_time(others, most):
    known = pace(others)
    for number in range(others):
        known.judge_waits(0, [wait(f"n{number}", 3.0, held=True)])
    assert len(known.list_slow(1)) == most


def test_members_that_are_away_are_not_slow():
    known = pace(a=[0.1])
    for round in range(9):
        away = Missing("unreachable")
        assert known.judge_waits(round, [wait("d", 3.0, found=away)]) == []


def test_a_slow_member_that_is_needed_is_tried_or_waited_for_and_not_slow_again_for_it():
    known = pace(2, a=[0.1] * 5, b=[0.1] * 5)
    assert len(known.judge_waits(5, [wait("b", 3.0, held=True), wait("a", 0.1)])) == 1
    assert (known.patience("b", 60.0), known.trial_seconds("b", 6)) == (3 * 0.1, 0.0)
    known.note_needed("b", wholly=False)
    assert (known.patience("b", 60.0), known.trial_seconds("b", 6)) == (3 * 0.1, 1.0)
    known.note_needed("b", wholly=True)
    assert (known.patience("b", 60.0), known.trial_seconds("b", 6)) == (3.0, float("inf"))
    for found in (SOON, Missing("timeout"), Missing("not_ready")):
        assert known.judge_waits(6, [wait("b", 0.3, held=True, found=found)]) == []
    assert known.list_slow(9) == ["b"]
    assert known.list_slow(10) == [], "its pause is that of its first time"
    assert known.patience("a", 60.0) == 3.0


# ---------------------------------------------------------------- in the exchange


def drip(exchange, share: float = 0.95) -> None:
    """Let a member answer each question for a model after a share of the asker's patience."""
    outbox = exchange.post.transport.outbox
    ask = outbox.ask

    def late(asker, address, wait, answer):
        later = threading.Timer(share * wait / WAIT, ask, (asker, address, 1.0, answer))
        later.daemon = True
        later.start()

    outbox.ask = late


def test_a_member_that_holds_its_answers_is_named_and_left_out(network):  # noqa: F811
    """Of a deadline of 20 s it takes 0.8 s of patience once, and then next to nothing."""
    _, (a, b, c, d), events = network(4, deadline=20.0, slow=0.8)
    drip(d)
    took = []
    for round in range(12):
        for exchange in (a, b, c, d):
            begin(exchange, round)
        for exchange in (b, c, d):
            publish(exchange)
        peers = [x for x in (1, 2, 3) if bool(a.reachable_clients()[x])]
        began = time.monotonic()
        inbox = pull(a, *peers)
        took.append(time.monotonic() - began)
        assert inbox.mask[0, :2].all()
    told = [event for event in events if event["event"] == "slow"]
    assert [(event["peer"], event["round"], event["until"]) for event in told] == [
        ("n3", 0, 5),
        ("n3", 5, 22),
    ]
    assert told[0]["text"].startswith("n3 took 0.")
    assert told[0]["text"].endswith("it is left out until round 5")
    named = {name for event in events for name in event.get("members", ())}
    assert named <= {"n3"}
    assert took[0] > 0.7
    assert max(took[1:]) < 0.7


def test_a_member_that_waits_for_a_slow_one_is_not_blamed(network):  # noqa: F811
    """b reaches the round later than a's patience: it says so, is asked again, and arrives."""
    _, (a, b, c), events = network(3, deadline=20.0, slow=0.2)
    for exchange in (a, b, c):
        begin(exchange)
    publish(c)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, a, 1, 2)
        threading.Event().wait(0.5)
        assert not waiting.done()
        publish(b)
        assert waiting.result(10).mask.all()
    assert [event["event"] for event in events if event["event"] in ("slow", "redraw")] == []
    assert a.post.traffic.missing == {}


def test_a_member_that_was_slow_and_is_behind_is_waited_for_and_taken_back(network):  # noqa: F811
    """b was slow once. It comes 0.3 s after a asks, later than c ever did, and says until then that it is not ready."""
    _, (a, b, c), events = network(3, deadline=20.0, slow=1.0)
    a.post.pace.judge_waits(0, [wait("n1", 2.0, held=True), wait("n2", 0.01)])
    assert a.post.pace.patience("n1", 20.0) == 0.05
    for exchange in (a, b, c):
        begin(exchange, 9)
    publish(c)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, a, 1, 2)
        threading.Event().wait(0.3)
        publish(b)
        assert waiting.result(10).mask.all()
    assert not a.post.pace.describe()["n1"][1]
    assert [event for event in events if event["event"] == "slow"] == []


def test_a_member_that_was_slow_and_does_not_come_is_slow_again(network):  # noqa: F811
    _, (a, b, c), events = network(3, deadline=20.0, slow=1.0)
    a.post.pace.judge_waits(0, [wait("n1", 2.0, held=True), wait("n2", 0.01)])
    for exchange in (a, b, c):
        begin(exchange, 9)
    publish(c)
    began = time.monotonic()
    assert pull(a, 1, 2).mask.tolist() == [[False, True]]
    assert 0.4 < time.monotonic() - began < 1.5
    assert [event["until"] for event in events if event["event"] == "slow"] == [26]


def test_a_member_that_does_not_hold_questions_is_asked_a_few_times_a_second(network):  # noqa: F811
    """b is not in this run for a second, as while it starts again: it says so at once. Then it comes."""
    _, (a, b), _ = network(2, deadline=20.0, slow=3.0)
    begin(a)
    begin(b)
    outbox, asked, away_until = b.post.transport.outbox, [], time.monotonic() + 1.0
    ask = outbox.ask

    def ask_or_refuse(asker, address, wait, answer):
        asked.append(time.monotonic())
        if time.monotonic() < away_until:
            answer(Missing("not_ready"))
        else:
            ask(asker, address, wait, answer)

    outbox.ask = ask_or_refuse
    publish(b)
    assert pull(a, 1).mask.all(), "it is not given up"
    assert 3 <= len(asked) <= 8
    assert asked[-1] - away_until < 0.8


def test_a_member_that_does_not_come_is_not_ready_at_the_deadline(network):  # noqa: F811
    """Also where nothing holds the questions: the last one is not asked after the deadline."""
    _, (a, b), events = network(2, deadline=0.6, slow=3.0)
    begin(a)
    begin(b)
    asked = []

    def refuse(asker, address, wait, answer):
        asked.append(wait)
        answer(Missing("not_ready"))

    b.post.transport.outbox.ask = refuse
    began = time.monotonic()
    assert not pull(a, 1).mask.any()
    assert 0.5 < time.monotonic() - began < 1.5
    assert 2 <= len(asked) <= 4
    assert min(asked) > 0
    assert dict(a.post.traffic.missing) == {"not_ready": 1}
    assert [event["missing"] for event in events if event.get("missing")] == [{"1": "not_ready"}]


def test_slow_members_are_asked_where_fewer_than_two_others_could_be(network):  # noqa: F811
    """n3 is slow. With n1 and n2 it is left out; with one of them it is tried; alone it is waited for."""
    _, (a, *_), _ = network(4, deadline=20.0, slow=3.0)
    paces = a.post.pace
    paces.judge_waits(0, [wait("n3", 2.0, held=True), wait("n1", 0.01), wait("n2", 0.01)])
    everybody = torch.ones(1, 4, dtype=torch.bool)
    for readable, asked, patience in (
        ([True, True, True, True], [True, True, True, False], 0.05),
        ([True, True, False, True], [True, True, True, True], 0.05),
        ([True, False, False, True], [True, True, True, True], 3.0),
        ([True, True, True, True], [True, True, True, False], 0.05),
    ):
        begin(a, 2)
        a.readmit_slow(everybody & torch.tensor(readable))
        assert a.reachable_clients().tolist() == asked
        assert paces.patience("n3", 20.0) == patience


def test_who_is_missing_is_named(network):  # noqa: F811
    _, (a, b, c), events = network(3)
    for exchange in (a, b, c):
        begin(exchange)
    publish(b)
    c.post.transport.close()
    pull(a, 1, 2)
    assert events[-1]["members"] == ["n2"]


def test_a_server_asks_an_absent_client_once_in_a_round(network):  # noqa: F811
    """Two questions of the server in one round: the second one goes to the client that answered the first."""
    _, (a, b, c), events = network(3, deadline=1.0)
    for exchange in (a, b, c):
        begin(exchange)
    c.post.transport.close()
    asked = []
    fetch_all = a.post.fetch_all

    def noticed(wanted, template, seconds):
        asked.append([address.client for address in wanted])
        return fetch_all(wanted, template, seconds)

    a.post.fetch_all = noticed

    def rule(shared, whole):
        return shared, Reply(
            whole.params.mean(0, keepdim=True), torch.zeros(len(whole), 1, dtype=torch.int64)
        )

    def client() -> None:
        for _ in range(2):
            b.ask_server(message(1), rule, None)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client)
        for _ in range(2):
            a.ask_server(message(0), rule, None)
        running.result(20)
    assert asked == [[1, 2], [1]]
    assert next(event["missing"] for event in events if event["event"] == "serve").keys() == {"2"}


class Fleet:
    """Nodes of one client inside one program; each notes when it ends its rounds."""

    def __init__(self, folder: Path, kind: str, size: int, rounds: int, **terms) -> None:
        federation, self.rounds = tiny_federation(size), rounds
        options = {} if kind == "fedavg" else {"num_peers": 2}
        settings = tiny_settings(rounds=rounds)
        plan = RunSpec(METHODS[kind](**options), settings, "linear", "linear", seed=3)
        hub = Hub()
        who, keys = local.make_members(
            [[i] for i in range(size)], server="n0" if plan.method.server else ""
        )
        self.lines: list[str] = []
        self.ended: dict[tuple[int, int], float] = {}
        stream = SimpleNamespace(write=self.lines.append, flush=lambda: None)
        self.nodes = [
            Node(
                plan,
                federation.host([number]),
                who,
                InProcess(hub, f"n{number}"),
                local.make_signer(keys[number]),
                folder / f"n{number}",
                terms=Terms(deadline=20.0, **terms),
                log=Log(f"n{number}", stream=stream),
                patience=Patience(start=10.0, linger=5.0, poll=0.02),
            )
            for number in range(size)
        ]

    def run(self, pauses: dict[int, float]) -> None:
        """Run all nodes to their end, each with a pause in every round."""
        for number, node in enumerate(self.nodes):
            node.loop.run_next_round = partial(
                self._run_round, number, node, pauses[number], node.loop.run_next_round
            )
        try:
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                for run in [pool.submit(node.run) for node in self.nodes]:
                    run.result(120)
        finally:
            for node in self.nodes:
                node.close()
                node.transport.close()

    def _run_round(self, number: int, node: Node, pause: float, run_next) -> None:
        time.sleep(pause)
        run_next()
        self.ended[number, node.loop.next_round] = time.monotonic()

    def events(self, *names: str) -> list[dict]:
        found = [json.loads(line) for line in self.lines]
        return [event for event in found if event["event"] in names]


@pytest.mark.full
def test_one_slow_member_of_eight_is_named_and_costs_a_tenth_of_the_time_at_most(tmp_path):
    """n7 answers at 0.95 of the asker's patience; from the fifth round on nobody waits long for it."""
    fleet = Fleet(tmp_path, "random", 8, 40, slow=1.5)
    drip(fleet.nodes[7].exchange)
    fleet.run(dict.fromkeys(range(8), 0.05))
    waited = [e["seconds"] for e in fleet.events("slow") if e["round"] >= 5 and e["node"] != "n7"]
    lasted = fleet.ended[0, 40] - fleet.ended[0, 5]
    assert sum(waited) / 7 < 0.1 * lasted
    warnings = [json.loads(line) for line in fleet.lines if '"level": "warning"' in line]
    warnings = [event for event in warnings if event["node"] != "n7"]
    assert {event["peer"] for event in warnings if event["event"] == "slow"} == {"n7"}
    assert all("n7" in json.dumps(event) for event in warnings), warnings


@pytest.mark.slow
def test_a_client_that_is_always_late_is_left_out_by_its_server(tmp_path):
    """n3 comes 0.8 s after the others in each of seven rounds; three of them wait for it."""
    fleet = Fleet(tmp_path, "fedavg", 4, 7, slow=0.3)
    fleet.run({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.8})
    took = [fleet.ended[0, n + 1] - fleet.ended[0, n] for n in range(6)]
    told, *_ = fleet.events("slow")
    assert (told["node"], told["peer"]) == ("n0", "n3")
    assert told["round"] <= 3
    assert all(seconds < 0.75 for seconds in took[told["round"] + 1 :]), took
    served = [event for event in fleet.events("serve") if event.get("missing")]
    assert {name for event in served for name in event["members"]} == {"n3"}
    assert len([event for event in fleet.events("round_missed") if event["node"] == "n3"]) >= 1


@pytest.mark.full
def test_no_round_of_three_is_done_alone_because_a_member_was_slow(tmp_path):
    """n2 holds every answer: the others name it, and ask it in every round all the same."""
    fleet = Fleet(tmp_path, "random", 3, 12, slow=0.4)
    drip(fleet.nodes[2].exchange)
    fleet.run(dict.fromkeys(range(3), 0.02))
    assert fleet.events("alone") == []
    assert {event["peer"] for event in fleet.events("slow") if event["node"] == "n0"} == {"n2"}
    journal = (tmp_path / "n0" / "arrivals.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in journal]
    asked = {line["round"] for line in lines if 2 in line.get("asked", ())}
    assert asked >= set(range(12)), "a pause of its first time, or of its second, is longer"


# ---------------------------------------------------------------- over sockets


@pytest.mark.full
@pytest.mark.parametrize("how", ["drip", "tarpit", "cut"])
def test_over_mutual_tls_a_member_that_holds_its_answer_costs_its_patience_once(
    tmp_path, port, how
):
    """n2 answers at 0.95 of the patience, never, or sends the first of its chunks and then nothing."""
    who, _ = local.make_members([[0], [1], [2]], port=port)
    who, people = local.create_credentials(tmp_path, who)
    size, told = 200_000, []
    rows = {"params": torch.zeros(size), "field.samples": torch.tensor(1.0)}
    over = threading.Event()

    def answer(method: str, body: dict):
        if method != "Message":
            return
        sealed = seal_parcel(
            rows, run=who.run, peer="n2", inc=1, address=Address(body["round"], 0, 2), schema="",
            sign=people[2].sign,
        )  # fmt: skip
        first, *rest = (frame(head, bytes(chunk)) for head, chunk in sealed.iterate_chunks())
        if how == "cut":
            yield first
        over.wait(0.95 * body["wait"] / WAIT if how == "drip" else 30.0)
        yield from [first, *rest] if how == "drip" else rest

    with ExitStack() as stack:
        exchanges = []
        for own in people[:2]:
            transport = stack.enter_context(GrpcTransport(who, own.name, own))
            terms = Terms(deadline=20.0, redraws=0, slow=1.0)
            post = Post(transport, who, own.sign, terms=terms, journal=told.append)
            stack.callback(post.close)
            exchanges.append(RemoteExchange(post))
        stack.enter_context(serve(people[2], who.members[2].address, answer))
        stack.callback(over.set)
        took = []
        for round in range(4):
            for exchange in exchanges:
                begin(exchange, round)
            own = Message(torch.zeros(1, size), {"samples": torch.ones(1)})
            exchanges[1].pull(own, torch.full((1, 0), -1))
            began = time.monotonic()
            inbox = exchanges[0].pull(own, torch.tensor([[1, 2]]))
            took.append(time.monotonic() - began)
            assert bool(inbox.mask[0, 0])
            assert not round or not inbox.mask[0, 1]
    assert next(event["peer"] for event in told if event["event"] == "slow") == "n2"
    assert {event["peer"] for event in told if event["event"] == "slow"} == {"n2"}
    assert took[0] > 0.9
    assert max(took[1:]) < 0.9
