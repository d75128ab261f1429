"""Every value of every option has a test that works its effect by hand, and that fails when the value is ignored."""

import subprocess
import sys

import pytest
from tests.contract.options import TESTS, marked, options


def test_every_value_of_every_option_has_a_test():
    """A mark on the test says so: `@pytest.mark.option("Dac.two_hop_relay", "direct", "any")`."""
    said = {place: [value for value, _ in known] for place, known in marked().items()}
    lacking = [
        f'@pytest.mark.option("{owner}.{name}", {value!r})'
        for (owner, name), known in options().items()
        for value in known
        if not any(type(one) is type(value) and one == value for one in said.get((owner, name), ()))
    ]
    advice = "work by hand, in a test of its own, what each of these values changes, and mark the test with the line:"
    assert not lacking, "\n".join([advice, *lacking])


@pytest.mark.full
def test_marks_name_options_and_values_that_there_are():
    """An option that was renamed takes its mark with it."""
    known = options()
    strange = [
        f"{where}: {owner}.{name} = {value!r}"
        for (owner, name), said in marked().items()
        for value, where in said
        if not any(
            type(one) is type(value) and one == value for one in known.get((owner, name), ())
        )
    ]
    assert not strange, "\n".join(["no such option or value:", *strange])


def test_options_and_marks_are_read_as_written(tmp_path):
    """Otherwise the tests above could not fail."""
    known = options()
    assert known["Dac", "two_hop"] == [True, False]
    assert known["Settings", "order"] == [None, "exchange_first", "train_first"]
    assert known["Visual", "domains"] == ["clean", "noise", "blur"]
    assert known["Panm", "em"] == ["hard", "soft"]
    assert (known["DacVar", "tau_schedule"], known["FairAvg", "weights"]) == (["var"], ["uniform"])
    assert not {("Dac", "tau"), ("DacVar", "two_hop"), ("Settings", "patience")} & set(known)
    (tmp_path / "test_it.py").write_text(
        '@pytest.mark.option("Dac.two_hop", True, None)\ndef test_it():\n    pass\n'
    )
    where = f"{tmp_path.name}/test_it.py:1"
    assert marked(tmp_path) == {("Dac", "two_hop"): [(True, where), (None, where)]}


@pytest.mark.slow
def test_a_value_that_is_ignored_is_noticed():
    """Each marked test fails with a package that takes the value for any other of the option."""
    files = sorted({where.partition(":")[0] for said in marked().values() for _, where in said})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-m",
        "option",
        "-p",
        "tests.contract.options",
        *files,
    ]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
