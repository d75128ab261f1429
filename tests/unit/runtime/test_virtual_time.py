"""Virtual time: ends of rounds, delays and pauses, against slow counting by hand."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.methods.local import Local
from coterie.rng import Rng
from coterie.runtime import virtual_time
from coterie.runtime.virtual_time import (
    SECOND,
    Clock,
    RoundTraffic,
    VirtualTime,
    _work_between_pauses,
)
from coterie.runtime.virtual_time import Pause as PauseTable
from coterie.simulation.run import simulate
from coterie.testing.tiny import tiny_federation, tiny_settings

_TENTH = SECOND // 10
_pauses = st.lists(
    st.builds(
        lambda start, length, gap: (start, length, gap),
        st.integers(0, 30),
        st.integers(1, 8),
        st.none() | st.integers(1, 9),
    ),
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(_pauses, st.integers(0, 40), st.integers(1, 25))
def test_work_goes_on_between_pauses(tables, begin, work):
    """Against a count of every tenth of a second in which nobody pauses."""
    pauses = []
    for start, length, gap in tables:
        every = None if gap is None else (length + gap) / 10
        pauses.append(PauseTable(start=start / 10, seconds=length / 10, every=every))

    def is_paused(tick):
        for start, length, gap in tables:
            since = tick - start
            if gap is not None and since >= 0:
                since %= length + gap
            if 0 <= since < length:
                return True
        return False

    tick, left = begin, work
    while left and tick < 2_000:
        left -= not is_paused(tick)
        tick += 1
    if left:  # pauses that cover all time
        with (
            mock.patch.object(virtual_time, "_MOST_PAUSES", 500),
            pytest.raises(ConfigError, match="no time to end a round"),
        ):
            _work_between_pauses(pauses, begin * _TENTH, work * _TENTH)
        return
    assert _work_between_pauses(pauses, begin * _TENTH, work * _TENTH) == tick * _TENTH


def test_a_round_takes_its_steps_with_its_own_jitter():
    time = VirtualTime(step_seconds=[0.5, 2.0], jitter=0.25)
    clock = Clock(time, [4, 3], seed=7)
    for client, seconds in ((0, 2.0), (1, 6.0)):
        noise = Rng(7).at_round(5).generator("time.jitter", client).standard_normal()
        expected = 11 + round(seconds * np.exp(0.25 * noise) * SECOND)
        assert clock.end_round(client, 5, 11) == (expected, 0)


def test_what_a_client_draws_does_not_depend_on_the_others():
    time = VirtualTime(round_seconds={"kind": "lognormal", "median": 2.0, "sigma": 0.5})
    few, many = Clock(time, [1] * 3, seed=1), Clock(time, [1] * 30, seed=1)
    assert few.work.tolist() == many.work[:3].tolist()
    assert len(set(many.work.tolist())) == 30


def test_drawn_pauses_are_as_often_and_as_long_as_said():
    clock = Clock(VirtualTime(pause_share=0.25, pause_seconds=3.0), [1] * 400, seed=0)
    ends = [clock.end_round(client, round, 0) for client in range(400) for round in range(5)]
    assert {*ends} == {(SECOND, 0), (4 * SECOND, 3 * SECOND)}
    share = np.mean([paused > 0 for _, paused in ends])
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 2000)


def test_a_message_takes_both_latencies_and_the_slower_link():
    clock = Clock(VirtualTime(latency=[0.1, 0.2, 0.0], bandwidth=[100, 400, 50]), [1] * 3, seed=0)
    delays = clock.message_delays(np.array([[0], [1]]), np.array([[1, 2], [0, 2]]), 200)
    assert (delays / SECOND).tolist() == [[2.3, 4.1], [2.3, 4.2]]
    # no reader is farther than this
    everybody = np.arange(3)
    farthest = clock.message_delays(everybody[:, None], everybody, 200).max(0)
    assert (clock.longest_delays(200) >= farthest).all()


# Client 0 works 2 s, 1 works 5 s, 2 works 1 s; links of 0.1, 0 and 1 s, 100 bytes a second.
def test_a_message_over_hardly_any_bandwidth_never_comes_in_time():
    """10^12 seconds do not fit into 63 bits of nanoseconds: it came before it was sent."""
    time = VirtualTime(bandwidth=[100.0, 1e-9, 1e-300])
    clock, longest = Clock(time, [1] * 3, seed=0), 10**9 * SECOND
    everybody = np.arange(3)
    delays = clock.message_delays(everybody, np.zeros(3, dtype=int), 1000)
    assert delays.tolist() == [10 * SECOND, longest, longest]
    up = clock.move_to_server(everybody, np.full(3, 1000.0))
    assert up.tolist() == [10 * SECOND, longest, longest]
    assert (clock.longest_delays(1000) == longest).all()


SLOW_LINKS = VirtualTime(round_seconds=[2.0, 5.0, 1.0], latency=[0.1, 0.0, 1.0], bandwidth=100.0)


def in_seconds(found):
    return found.done.max() / SECOND, (found.worked / SECOND).tolist()


def test_a_common_round_that_reads_first_waits_for_messages_and_then_for_the_slowest():
    """0 reads 1 (50 bytes: 0.1 + 0.5 s) and works until 2.6; 1 reads 2 (1 + 0.5) and works until 6.5."""
    clock = Clock(SLOW_LINKS, [1] * 3, seed=0)
    traffic = RoundTraffic(np.array([[1, -1], [2, -1], [-1, -1]]), np.full((3, 2), 50))
    found = clock.time_round(0, 3 * SECOND, np.arange(3), traffic, reads_first=True)
    assert in_seconds(found) == (9.5, [2.0, 5.0, 1.0])


def test_a_common_round_that_trains_first_waits_for_the_slowest_that_somebody_reads():
    """1 is not there: it stopped, and its message left at the beginning. 0 reads it until 0.6 s and
    2 until 1 + 0.1 + 1 + 0.5; 2 reads 0 until 2 + 1.1 + 0.5."""
    clock = Clock(SLOW_LINKS, [1] * 3, seed=0)
    traffic = RoundTraffic(np.array([[1, 2], [0, -1]]), np.full((2, 2), 50))
    found = clock.time_round(0, 0, np.array([0, 2]), traffic, reads_first=False)
    assert in_seconds(found) == (3.6, [2.0, 1.0])
    traffic = RoundTraffic(np.array([[1, 2], [-1, -1]]), np.full((2, 2), 50))
    found = clock.time_round(0, 0, np.array([0, 2]), traffic, reads_first=False)
    assert in_seconds(found) == (2.6, [2.0, 1.0])


def test_a_common_round_with_a_server_moves_models_down_and_up():
    """0 takes 0.1 + 1 s down, 2 s, and 0.1 + 2 s up; a night from 4.0 to 14.0 does not stop messages."""
    time = {**SLOW_LINKS.__dict__, "pauses": [{"start": 4.0, "seconds": 10.0}]}
    clock = Clock(VirtualTime(**time), [1] * 3, seed=0)
    none = np.full((1, 0), -1)
    traffic = RoundTraffic(none, none, down=np.array([100.0]), up=np.array([200.0]))
    assert in_seconds(clock.time_round(0, 0, np.array([0]), traffic, reads_first=True)) == (
        5.2,
        [2.0],
    )
    # begun a second later it works until 4, and from 14 to 14.1
    assert in_seconds(clock.time_round(0, SECOND, np.array([0]), traffic, reads_first=True)) == (
        16.2,
        [2.0],
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"round_seconds": 0.0}, "takes 0.0 seconds for a round; expected more than 0"),
        ({"round_seconds": [1.0]}, "has 1 numbers; expected one for each of the 2"),
        ({"bandwidth": [1.0, 0.0]}, "bandwidth is 0 for a client"),
        ({"pauses": [{"start": 0, "seconds": 1, "clients": [2]}]}, "expected numbers below 2"),
        ({"pause_seconds": [1.0] * 3, "pause_share": 0.5}, "has 3 numbers"),
    ],
)
def test_what_does_not_fit_the_clients_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        Clock(VirtualTime(**table), [1, 1], seed=0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"latency": {"kind": "normal"}}, "unknown distribution 'normal'"),
        ({"latency": {"median": 1.0}}, "latency: kind is missing"),
        ({"round_seconds": {"kind": "uniform", "low": 2, "high": 1}}, "high is 1.0; expected low"),
        ({"pauses": [{"start": 0, "seconds": 5, "every": 5}]}, "every is 5.0; expected more than"),
        ({"record_seconds": 1e-12}, "record_seconds"),
        ({"record_second": 1}, "did you mean 'record_seconds'"),
    ],
)
def test_a_table_is_checked_where_it_is_given(table, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(schedule="asynchronous", time=table)


def test_rounds_in_step_end_within_the_longest_time():
    """After 9.2 10^9 seconds the time since the beginning was negative."""
    slow = tiny_settings(rounds=3, time={"round_seconds": 6e8})
    with pytest.raises(ConfigError, match=r"the end of round 1 is 1200000000.0; expected at most"):
        simulate(tiny_federation(), Local(), model="linear", settings=slow)
