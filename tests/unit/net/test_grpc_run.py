"""Runs behind one address: each has its members, its messages and its own say about who takes part."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tests.outbound import until

from coterie.errors import TransportError
from coterie.net import identity, local
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import Post
from coterie.net.roster import Roster
from coterie.net.transport import Transport
from coterie.net.wire import Address, Expectation

OVER = "study-9"


@pytest.fixture
def three(port) -> Iterator[tuple[Roster, list[GrpcTransport]]]:
    """Three members of a federation without certificates, on loopback."""
    who, _ = local.make_members([[0], [1], [2]], port=port)
    made = [GrpcTransport(who, member.name, None) for member in who.members]
    for one in made:
        one.serve_head(lambda nonce: b"of the federation")
        one.allow_runs({}, lambda run: run == OVER)
    yield who, made
    for one in made:
        one.close()


def of_two(who: Roster, run: str = "study-1") -> Roster:
    return replace(who, run=run, members=who.members[:2], removed=(2,))


def test_a_run_is_a_transport_of_its_own(three):
    who, (a, b, _) = three
    first, second = a.open_run(of_two(who)), b.open_run(of_two(who))
    assert isinstance(first, Transport)
    second.serve_head(lambda nonce: b"of the study")
    assert a.ask_head("n1", "1", 2.0) == b"of the federation"
    assert first.ask_head("n1", "1", 2.0) == b"of the study"
    with pytest.raises(TransportError, match="study-1 is open"):
        a.open_run(of_two(who))


def test_a_run_that_is_not_open_yet_is_not_ready_and_nobody_is_blamed_for_asking(three):
    who, (a, b, _) = three
    first = a.open_run(of_two(who))
    assert first.ask_head("n1", "1", 2.0) == Missing("not_ready")
    second = b.open_run(of_two(who))
    second.serve_head(lambda nonce: b"now")
    assert first.ask_head("n1", "1", 2.0) == b"now"
    second.close()
    assert first.ask_head("n1", "1", 2.0) == Missing("not_ready")
    assert not b.turned_away
    assert a.ask_head("n1", "1", 2.0) == b"of the federation", "the links stay"


def test_a_member_that_does_not_come_back_to_a_study_says_so(three):
    """ "not_ready" is asked again until the deadline of a round; "closing" is not."""
    who, (a, b, _) = three
    for run, reason in ((OVER, "closing"), ("study-1", "not_ready")):
        roster = replace(of_two(who, run), schema="0" * 64)
        asking = b.open_run(roster)
        with closing(Post(asking, roster, lambda data: b"")) as post:
            assert asking.fetch("n0", _expect(post), 5.0) == Missing(reason)
            assert asking.ask_head("n0", "1", 2.0) == Missing(reason)
        with a.open_run(roster) as opened:
            opened.serve_head(lambda nonce: b"here")
            assert asking.ask_head("n0", "1", 2.0) == b"here", "what is open is answered"


def test_who_is_no_member_of_a_study_gets_nothing_of_it(three):
    """c is in the federation, and asks in the study's name all the same."""
    who, (a, _, c) = three
    a.open_run(of_two(who)).serve_head(lambda nonce: b"of the study")
    stranger = c.open_run(replace(who, run="study-1"))
    assert stranger.ask_head("n0", "1", 2.0) == Missing("forbidden")
    assert stranger.ask_roster("n0", 2.0) == Missing("forbidden")


def test_a_node_of_one_run_refuses_questions_of_others(port):
    who, _ = local.make_members([[0], [1]], port=port)
    with GrpcTransport(who, "n0", None) as a, GrpcTransport(who, "n1", None) as b:
        other = b.open_run(replace(who, run="study-1"))
        assert other.ask_head("n0", "1", 2.0) == Missing("forbidden")
        # The question, and what the link says of the run when it comes up, in either order.
        until(lambda: a.turned_away == {"not_allowed": 2})


def test_who_takes_part_is_known_for_each_run(three):
    who, (a, b, _) = three
    first, second = a.open_run(of_two(who)), b.open_run(of_two(who))
    a.ask_head("n1", "1", 2.0)
    second.publish(Address(0, 0, 0), Missing("withheld", 0))
    first.publish(Address(0, 0, 0), Missing("withheld", 0))
    until(lambda: first.alive_members() == {"n1"} and second.alive_members() == {"n0"})
    assert a.alive_members() == frozenset()
    second.close()
    until(lambda: not first.alive_members())
    assert first.lost_members() == frozenset(), "it has said that it leaves"


@pytest.fixture
def words(monkeypatch) -> tuple[list[bool], list[float]]:
    """The words of whether a node takes part, as the others get them, and the seconds that each of them takes."""
    heard, busy, answer = [], [], GrpcTransport._answer_presence

    async def answer_late(self, question, context):
        if question.fields["run"] == "study-1":
            await asyncio.sleep(busy.pop(0) if busy else 0)
            heard.append(question.fields["here"])
        await answer(self, question, context)

    monkeypatch.setattr(GrpcTransport, "_answer_presence", answer_late)
    return heard, busy


def test_no_word_overtakes_another(words, three):
    """As a link came up this node took no part yet; by the time that this is read, it does."""
    heard, busy = words
    busy.append(0.5)
    who, (a, b, _) = three
    first, second = a.open_run(of_two(who)), b.open_run(of_two(who))
    a.ask_head("n1", "1", 2.0)
    until(lambda: not busy)
    first.publish(Address(0, 0, 0), Missing("withheld", 0))
    until(lambda: len(heard) == 2)
    assert heard == [False, True]
    until(lambda: second.alive_members() == {"n0"})


def test_that_a_node_is_here_is_said_again_when_there_is_no_answer_in_time(words, three):
    heard, busy = words
    who, (a, b, _) = three
    first, second = a.open_run(of_two(who)), b.open_run(of_two(who))
    first.announced = True
    link = a._run(a._link_to("n1"))
    until(lambda: heard == [True])
    second.note_presence("n0", False)
    busy += [1.0, 1.0]
    a._run(a._exchange_presence(link, first, 0.2))
    assert second.alive_members() == {"n0"}


@pytest.mark.parametrize("over", [False, True])
def test_a_member_without_the_run_takes_no_part_in_it(three, over):
    """It left just before this node said that it is here, and so did not tell it."""
    who, (a, b, _) = three
    of = of_two(who, OVER if over else "study-1")
    first, second = a.open_run(of), b.open_run(of)
    second.announced = True
    link = a._run(a._link_to("n1"))
    until(lambda: first.alive_members() == {"n1"})
    assert not second.alive_members(), "n0 has not said that it is here"
    second.close()
    a._run(a._exchange_presence(link, first))
    assert not first.alive_members()
    assert first.lost_members() == (frozenset() if over else {"n1"}), "it may come back"


def test_a_message_of_one_study_is_no_answer_in_another(three):
    """The same address in two runs: each reader gets the message of its own."""
    who, keys = local.make_members([[0], [1], [2]], port=three[0].members[0].host_and_port[1])
    _, (a, b, _) = three
    posts = []
    for run in ("study-1", "study-2"):
        roster = replace(of_two(who, run), schema="0" * 64)
        pair = []
        for transport, key in ((a, keys[0]), (b, keys[1])):
            opened = transport.open_run(roster)
            pair.append(Post(opened, roster, local.make_signer(key)))
        posts.append(pair)
    try:
        for number, (sender, _) in enumerate(posts):
            sender.publish({"x": torch.full((3,), float(number))}, Address(0, 0, 0))
        for number, (_, reader) in enumerate(posts):
            found = reader.transport.fetch("n0", _expect(reader), 5.0)
            assert not isinstance(found, Missing), found
            assert found.tensors["x"].tolist() == [float(number)] * 3
        # What the first study sent, under the second's name.
        posts[1][0].transport.outbox = posts[0][0].transport.outbox
        crossed = posts[1][1].transport.fetch("n0", _expect(posts[1][1]), 5.0)
        assert isinstance(crossed, Missing)
        assert crossed.reason == "refused:run"
    finally:
        for pair in posts:
            for post in pair:
                post.close()


def _expect(reader: Post) -> Expectation:
    key = identity.decode_public_key(reader.roster.member("n0").key)
    return Expectation(
        reader.roster.run, "n0", "n1", Address(0, 0, 0), reader.roster.schema,
        Template.of({"x": torch.zeros(3)}), lambda s, d: identity.verify(key, s, d),
    )  # fmt: skip
