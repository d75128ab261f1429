"""The checks of types and shapes that tests run under: they find what is wrong, wherever it is."""

import importlib
import sys

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

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
