"""The outbox: what is answered, when, and what is forgotten. Its clock is turned by hand."""

from collections.abc import Iterator

import pytest

from coterie.errors import TransportError
from coterie.net.outbox import Missing, Outbox
from coterie.net.wire import Address, Parcel


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outbox(clock) -> Iterator[Outbox]:
    outbox = Outbox(per_asker=3, clock=clock)
    yield outbox
    outbox.close()


def parcel(text: str) -> Parcel:
    return Parcel(text.encode(), bytes(64), b"payload")


def at(round: int, client: int = 0, exchange: int = 0) -> Address:
    return Address(round, exchange, client)


def ask(outbox, asker, address, wait=60.0) -> list:
    answers: list = []
    outbox.ask(asker, address, wait, answers.append)
    return answers


def test_a_question_waits_for_its_message(outbox):
    answers = ask(outbox, "b", at(0))
    assert answers == []
    outbox.publish(at(0), parcel("m"))
    assert answers == [parcel("m")]
    assert ask(outbox, "c", at(0)) == [parcel("m")]


def test_a_question_about_the_round_that_is_going_on_waits_though_others_of_it_are_there(outbox):
    outbox.publish(at(3), parcel("first"))
    answers = ask(outbox, "b", at(3, exchange=1))
    assert answers == []
    outbox.publish(at(3, exchange=1), parcel("second"))
    assert answers == [parcel("second")]


def test_the_last_eight_rounds_are_kept_and_older_ones_are_gone(outbox):
    for round in range(10):
        outbox.publish(at(round), parcel(str(round)))
    assert ask(outbox, "b", at(2)) == [parcel("2")]
    assert ask(outbox, "b", at(1)) == [Missing("gone", 9)]
    assert outbox.current_load == (8, 0)


def test_of_large_messages_fewer_rounds_are_kept_but_two_at_least(outbox, monkeypatch):
    """With room for 150 bytes: messages of 84 bytes leave room for one, so that two are kept all the same."""
    monkeypatch.setattr("coterie.net.outbox.KEEP_BYTES", 150)
    for round in range(4):
        outbox.publish(at(round), parcel(str(round)))
    assert outbox.current_load == (2, 0)


def test_a_round_that_was_skipped_is_gone_for_those_who_waited(outbox):
    """A node that jumps from round 1 to round 5 will never publish round 3."""
    outbox.publish(at(1), parcel("1"))
    waiting = ask(outbox, "b", at(3))
    outbox.publish(at(5), parcel("5"))
    assert waiting == [Missing("gone", 5)]
    assert ask(outbox, "c", at(1)) == [parcel("1")]


def test_what_is_not_ready_in_time_is_said_to_be_so(outbox, clock):
    answers = ask(outbox, "b", at(0), wait=5.0)
    clock.now = 6.0
    ask(outbox, "c", at(0))
    assert answers == [Missing("not_ready", -2)]


def test_a_message_for_one_reader_is_for_nobody_else(outbox):
    outbox.publish(at(0), parcel("for b"), to="b")
    assert ask(outbox, "c", at(0)) == [Missing("forbidden", 0)]
    assert ask(outbox, "b", at(0)) == [parcel("for b")]


def test_what_is_withheld_is_answered_at_once(outbox):
    outbox.publish(at(0), Missing("withheld"))
    assert ask(outbox, "b", at(0)) == [Missing("withheld", 0)]


def test_a_member_may_have_few_questions_open_and_messages_being_sent(outbox):
    """Three at most: two waiting and one being sent leave no room, until the sending ends."""
    outbox.publish(at(0), parcel("m"))
    assert ask(outbox, "b", at(0)) == [parcel("m")]
    ask(outbox, "b", at(1))
    ask(outbox, "b", at(2))
    assert ask(outbox, "b", at(0)) == [Missing("busy", 0)]
    assert ask(outbox, "c", at(0)) == [parcel("m")]
    outbox.note_sent("b")
    assert ask(outbox, "b", at(0)) == [parcel("m")]


def test_asking_again_replaces_the_question(outbox):
    first = ask(outbox, "b", at(0))
    second = ask(outbox, "b", at(0))
    outbox.publish(at(0), parcel("m"))
    assert (first, second) == ([Missing("busy", -2)], [parcel("m")])


def test_a_question_whose_asker_is_gone_frees_its_place_and_gets_no_answer(outbox):
    gone, others = [], []
    outbox.ask("b", at(0), 60.0, gone.append)
    for client in (1, 2):
        outbox.ask("b", at(0, client), 60.0, others.append)
    assert [one.reason for one in ask(outbox, "b", at(1))] == ["busy"]
    assert outbox.withdraw("b", at(0), gone.append)
    assert outbox.current_load == (0, 2)
    assert not outbox.withdraw("b", at(0), gone.append), "it is not open any more"
    assert not outbox.withdraw("c", at(0, 1), others.append), "it is of another member"
    assert ask(outbox, "b", at(1)) == [], "there is room for it now"
    outbox.publish(at(0), parcel("m"))
    assert gone == []


def test_a_question_that_was_put_again_is_not_withdrawn_with_the_older_one(outbox):
    first, second = [], []
    outbox.ask("b", at(0), 60.0, first.append)
    outbox.ask("b", at(0), 60.0, second.append)
    assert not outbox.withdraw("b", at(0), first.append)
    outbox.publish(at(0), parcel("m"))
    assert second == [parcel("m")]
    assert not outbox.withdraw("b", at(0), second.append), "it has been answered"


def test_a_thousand_questions_leave_few_open(outbox):
    for round in range(1000):
        ask(outbox, "b", at(round + 10))
    assert outbox.current_load == (0, 3)


def test_one_that_stopped_answers_for_every_later_round(outbox):
    outbox.publish_standing(at(4), lambda address: parcel(f"round {address.round}"))
    assert ask(outbox, "b", at(4)) == [parcel("round 4")]
    outbox.note_sent("b")
    assert ask(outbox, "b", at(900)) == [parcel("round 900")]


def test_closing_answers_everybody(clock):
    outbox = Outbox(clock=clock)
    answers = ask(outbox, "b", at(0))
    outbox.close()
    assert answers == [Missing("closing", -2)]
    assert ask(outbox, "b", at(0)) == [Missing("closing", -2)]
    with pytest.raises(TransportError, match="closed"):
        outbox.publish(at(0), parcel("m"))


def test_a_standing_message_is_sealed_once_for_all_who_ask(outbox):
    """Signing and hashing a model anew for each question would be work that any member can order without end."""
    sealed, got = [], []

    def seal(at: Address) -> Parcel:
        sealed.append(at)
        return parcel("m")

    outbox.publish_standing(Address(3, 0, 5), seal)
    for asker in ("b", "c", "b"):
        outbox.ask(asker, Address(4, 0, 5), 0.0, got.append)
        outbox.note_sent(asker)
    assert (sealed, len(got), got[0] is got[2]) == ([Address(4, 0, 5)], 3, True)


def test_a_standing_message_ends_with_its_last_round(outbox):
    """A probe is of one round, and others of the rounds of the run: members cannot order signatures without end."""
    sealed = []

    def seal(at: Address) -> Parcel:
        sealed.append(at.round)
        return parcel("m")

    outbox.publish_standing(at(4), seal, last=6)
    for round in (3, 4, 6, 7, (1 << 31) - 1):
        ask(outbox, "b", at(round))
        outbox.note_sent("b")
    assert sealed == [4, 6]


def test_standing_messages_of_many_rounds_take_bounded_memory(outbox, monkeypatch):
    """With room for 200 bytes: of messages of 84 bytes the two that were asked for last are kept."""
    monkeypatch.setattr("coterie.net.outbox.KEEP_SEALED", 200)
    outbox.publish_standing(at(0), lambda address: parcel(f"{address.round}"))
    for round in range(320):
        ask(outbox, "b", at(round))
        outbox.note_sent("b")
    assert list(outbox._sealed) == [at(318), at(319)]


def test_how_far_each_reader_was_behind_at_its_newest_question_is_known(outbox, clock):
    """This node has published up to round 9. Questions of other kinds say nothing."""
    outbox.publish(at(9), parcel("nine"))
    clock.now = 5.0
    ask(outbox, "a", at(9))
    ask(outbox, "b", at(2))
    clock.now = 6.0
    ask(outbox, "b", at(4))
    ask(outbox, "c", at(10))
    ask(outbox, "d", Address(1, 0, 0, "request"))
    assert outbox.lags == {"a": (0, 5.0), "b": (5, 6.0), "c": (-1, 6.0)}


def test_a_standing_message_that_is_larger_than_the_room_is_answered(outbox, monkeypatch):
    monkeypatch.setattr("coterie.net.outbox.KEEP_SEALED", 10)
    outbox.publish_standing(at(0), lambda address: parcel("large"))
    for round in (0, 1):
        assert ask(outbox, "b", at(round)) == [parcel("large")]
        outbox.note_sent("b")
    assert list(outbox._sealed) == [at(1)], "the newest one"


def test_messages_of_exactly_the_room_are_kept(outbox, monkeypatch):
    """Three rounds of 76 bytes and a larger one: what is over is forgotten beyond the two newest rounds."""
    size = parcel("m").size
    monkeypatch.setattr("coterie.net.outbox.KEEP_BYTES", 3 * size)
    for round in range(4):
        outbox.publish(at(round), parcel("m"))
    assert outbox.current_load == (3, 0)
    monkeypatch.setattr("coterie.net.outbox.KEEP_BYTES", 3 * size - 1)
    outbox.publish(at(4), parcel("m"))
    assert outbox.current_load == (2, 0)


def test_a_question_ends_when_its_time_is_over_and_not_before(outbox, clock):
    outbox.publish(at(3), parcel("three"))
    waits = ask(outbox, "b", at(4), wait=2.0)
    clock.now = 1.999
    assert outbox._take_due() == []
    clock.now = 2.0
    ((answer, found),) = outbox._take_due()
    assert found == Missing("not_ready", 3)
    assert waits == []
    answer(found)
    assert waits == [Missing("not_ready", 3)]


def test_a_round_that_nobody_published_is_over_when_a_later_one_is_there(outbox):
    outbox.publish(at(3), parcel("three"))
    assert ask(outbox, "b", at(2)) == [Missing("gone", 3)]
    assert ask(outbox, "b", at(3, client=5)) == [], "of this round it may still come"
