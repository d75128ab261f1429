"""What differs on the machines of a cluster."""

import pytest

from coterie import __version__
from coterie.cluster.doctor import (
    NAMES,
    Machine,
    check_equal_software,
    check_same_software,
    describe_differences,
    describe_this_machine,
)
from coterie.errors import ConfigError

OWN = Machine("here", dict.fromkeys(NAMES, "same"))


def other(name, **facts):
    return Machine(name, {**OWN.facts, **facts})


def test_this_machine_tells_what_it_has():
    import torch

    facts = describe_this_machine().facts
    assert set(NAMES) <= set(facts)
    assert facts["coterie"] == __version__
    assert facts["vectors"] == torch.backends.cpu.get_cpu_capability()


def test_machines_that_differ_alike_share_a_line():
    far = [other(f"n{n}", compiler="g++ 9") for n in range(6)] + [other("a", torch=""), OWN]
    assert describe_differences(far, OWN) == [
        "torch: a has none, this machine has same",
        "C++ compiler: n0, n1, n2 and 3 more have g++ 9, this machine has same",
    ]


def test_other_software_is_refused_and_other_processors_are_said():
    check_equal_software([OWN], OWN)
    with pytest.raises(
        ConfigError, match=r"other software .torch: n1 has 2.0, .* install the same on all machines"
    ) as told:
        check_equal_software([other("n1", torch="2.0", processor="old")], OWN)
    assert "\n" not in str(told.value)
    with pytest.warns(
        UserWarning,
        match=r"processor: n1 has old, this machine has same: results agree within the tol",
    ):
        check_equal_software([other("n1", processor="old")], OWN)


def test_a_job_refuses_a_machine_with_other_software_than_the_one_that_asked():
    check_same_software({"torch": describe_this_machine().facts["torch"]})
    with pytest.raises(ConfigError, match=r"torch: .* has .*, the one that asked has 1.0"):
        check_same_software({"torch": "1.0"})
