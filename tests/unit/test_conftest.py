"""What tests run under: checks of types and shapes that find what is wrong, and no skipped test where all is there."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from tests.conftest import blocks_of_ports, next_free

import coterie
from coterie.functional import similarity

SOURCE = """
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def add(a: Float[Tensor, "rows columns"], b: Float[Tensor, " columns"]) -> Float[Tensor, "rows columns"]:
    return a + b


def wrong(a: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    return torch.cat([a, a])


def quoted(a: "Float[Tensor, ' rows']", b: "Later | None" = None) -> "Float[Tensor, ' rows']":
    return a


def outer(scale: float) -> Callable[[Tensor], Tensor]:
    def inner(a: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return a * scale

    return inner


def rows(a: Float[Tensor, "rows columns"]) -> Iterator[Tensor]:
    yield from a


def plain(number: float, text: str = "") -> str:
    return text if number else number


@dataclass(frozen=True)
class Pair:
    a: Float[Tensor, " rows"]
    b: Float[Tensor, " rows"]

    @property
    def total(self) -> Float[Tensor, ""]:
        return self.a

    @classmethod
    def twice(cls, a: Float[Tensor, " rows"]) -> "Pair":
        return cls(a, a)

    @staticmethod
    def first(a: Float[Tensor, " rows"]) -> float:
        return float(a[0])


class Later:
    pass
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    (tmp_path / "_probe.py").write_text(SOURCE)
    monkeypatch.setattr(coterie, "__path__", [*coterie.__path__, str(tmp_path)])
    yield importlib.import_module("coterie._probe")
    del sys.modules["coterie._probe"]


ROWS, TABLE = torch.zeros(3), torch.zeros(2, 3)
GOOD = {
    "shapes that agree": lambda p: p.add(TABLE, ROWS),
    "in quotes": lambda p: p.quoted(ROWS, None),
    "within a function": lambda p: p.outer(2)(ROWS),
    "a generator": lambda p: list(p.rows(TABLE)),
    "a whole number as a float": lambda p: p.plain(1),
    "a dataclass": lambda p: p.Pair(ROWS, ROWS),
    "a class method": lambda p: p.Pair.twice(ROWS),
}
BAD = {
    "an axis of two lengths": lambda p: p.add(TABLE, torch.zeros(4)),
    "too many axes": lambda p: p.add(TABLE, TABLE),
    "another type": lambda p: p.add(TABLE, ROWS.long()),
    "what is returned": lambda p: p.wrong(ROWS),
    "in quotes": lambda p: p.quoted(TABLE),
    "within a function": lambda p: p.outer(2)(TABLE),
    "a generator": lambda p: list(p.rows(ROWS)),
    "a text as a number": lambda p: p.plain("1"),
    "another type is returned": lambda p: p.plain(0),
    "a dataclass": lambda p: p.Pair(ROWS, torch.zeros(4)),
    "a property": lambda p: p.Pair(ROWS, ROWS).total,
    "a class method": lambda p: p.Pair.twice(TABLE),
    "a static method": lambda p: p.Pair.first(TABLE),
}


@pytest.mark.parametrize("call", GOOD.values(), ids=GOOD)
def test_what_is_right_passes(probe, call):
    call(probe)


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_what_is_wrong_is_found(probe, call):
    with pytest.raises((BeartypeCallHintViolation, TypeError)):
        call(probe)


def test_a_function_within_a_function_keeps_what_is_its_own(probe):
    """Its checks are made once, for all that are defined later."""
    double, triple = probe.outer(2), probe.outer(3)
    assert double(torch.ones(1)).item() == 2
    assert triple(torch.ones(1)).item() == 3
    with pytest.raises(BeartypeCallHintViolation):
        triple(TABLE)


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintViolation):
        similarity.cosine(torch.zeros(3))


SKIPPING = {
    "no data": "def test_it(data_dir):\n    pass\n",
    "no tool": "import pytest\n@pytest.mark.skipif(True, reason='needs chromium')\ndef test_it():\n    pass\n",
    "no package": "import pytest\nit = pytest.importorskip('no_such_package')\ndef test_it():\n    pass\n",
    "in the test": "import pytest\ndef test_it():\n    pytest.skip('torchvision is not installed')\n",
}
FINE = {
    "extra": "import pytest\ndef test_it():\n    pytest.skip('the extra mlflow is not installed')\n",
    "xfail": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert False\n",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run each source under this conftest where there are no data, as in CI and not: its outcome and what is said.

    One process runs all of them, since most of its time is that of starting.
    """
    outcomes: dict[str, dict[str, tuple[str, str]]] = {}
    for ci in ("", "1"):
        folder = tmp_path_factory.mktemp("ended")
        shutil.copy(Path(__file__).parents[1] / "conftest.py", folder)
        for name, source in {**SKIPPING, **FINE}.items():
            (folder / f"test_{name.replace(' ', '_')}.py").write_text(source)
        environment = {
            **os.environ,
            "COTERIE_CI": ci,
            "COTERIE_DATA": str(folder / "none"),
            "PYTHONPATH": "",
        }
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--continue-on-collection-errors",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--junitxml=found.xml", "--rootdir", str(folder)],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1, 2), done.stdout
        outcomes[ci] = {}
        for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
            file = (case.get("classname") or case.get("name") or "").removeprefix("test_")
            (found, *_) = [child for child in case if child.tag != "system-out"] or [case]
            said = f"{found.get('message')} {found.text}"
            outcomes[ci][file.replace("_", " ")] = (found.tag, said)
    return outcomes


@pytest.mark.full
@pytest.mark.parametrize("name", SKIPPING)
def test_what_is_absent_skips_a_test_and_fails_it_where_ci_says_that_everything_is_there(
    ended, name
):
    outcome, said = ended[""][name]
    assert outcome == "skipped", said
    outcome, said = ended["1"][name]
    assert outcome in ("failure", "error"), said
    assert "skipped where COTERIE_CI=1 says that everything is there" in said


@pytest.mark.full
@pytest.mark.parametrize("name", FINE)
def test_extras_that_are_left_out_and_known_failures_do_not_fail_in_ci(ended, name):
    assert ended["1"][name][0] == "skipped"


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_no_two_workers_of_a_run_have_a_port_in_common(workers):
    firsts = [
        first
        for worker in range(workers)
        for first in islice(blocks_of_ports(worker, workers), 120 // workers)
    ]
    taken = {port for first in firsts for port in range(first, first + 100)}
    assert len(taken) == 100 * len(firsts)
    assert max(taken) < 32768, "from where on systems give ports to outgoing connections"


def test_a_block_with_a_port_in_use_is_passed_over(port, ports):
    other = ports()
    assert next_free(iter([port, other])) == port
    with socket.create_server(("127.0.0.1", port + 99)):
        assert next_free(iter([port, other])) == other
