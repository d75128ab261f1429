"""A member attacks two honest nodes with mutual TLS; benchmarks/network.py members has all attacks."""

import network_members
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_member_that_says_the_run_is_over_ends_nobodys_training(tmp_path, port):
    """Before the first round and in every one it answers "gone", round 2147483647, and signs a head that says so.

    Both train all rounds without it, and say in their logs why it was missing and that a claim is
    not backed.
    """
    rounds = 5
    found = network_members.attacked(tmp_path, "gone", rounds=rounds, port=port)
    assert (found["statuses"], found["done"]) == ([0, 0], [True, True])
    assert found["rounds"] == [rounds, rounds]
    assert found["mixed"] == [0, 0]
    assert found["events"]["redraw: gone"] == 2 * rounds
    assert found["events"]["not_backed"] >= 2
    assert min(found["test"]) > 50
