import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st

from coterie._util.settings import Configurable, WithPresets, parse_settings, to_plain, to_toml
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Example(Configurable):
    size: int
    rate: float = 0.5
    on: bool = False
    mode: Literal["a", "b"] = "a"
    levels: float | Sequence[float] | None = None
    groups: Sequence[Sequence[int]] = ()
    extra: Mapping[str, Any] | None = None


def test_lists_become_tuples_and_whole_numbers_become_floats_where_floats_are_expected():
    made = parse_settings(
        Example, {"size": 3, "rate": 1, "levels": [1, 2.5], "groups": [[1, 2], []]}, "x"
    )
    assert made == Example(3, 1.0, levels=(1.0, 2.5), groups=((1, 2), ()))
    assert isinstance(made.rate, float)
    assert isinstance(made.levels, tuple)
    assert isinstance(made.levels[0], float)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"size": "3"}, "x: size is '3'; expected a whole number"),
        ({"size": True}, "x: size is True; expected a whole number"),
        ({"size": 3.0}, "x: size is 3.0; expected a whole number"),
        ({"size": 1, "on": "false"}, "x: on is 'false'; expected true or false"),
        ({"size": 1, "rate": True}, "x: rate is True; expected a number"),
        ({"size": 1, "mode": "c"}, "x: mode is 'c'; expected 'a' or 'b'"),
        ({"size": 1, "levels": ["1"]}, 'expected a number or a list of numbers or "none"'),
        ({"size": 1, "groups": "12"}, "expected a list of lists of whole numbers"),
        ({"size": 1, "extra": []}, 'expected a table or "none"'),
        ({"size": 1, "raet": 2}, "x: unknown key 'raet'; did you mean 'rate'?"),
        ({}, "x: size is missing"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(table, message):
    with pytest.raises(ConfigError) as caught:
        parse_settings(Example, table, "x")
    assert message in str(caught.value)


def test_what_the_caller_decides_is_no_key_of_the_table():
    assert parse_settings(Example, {"rate": 2.0}, "x", size=3) == Example(3, 2.0)
    with pytest.raises(ConfigError, match="x: unknown key 'size'"):
        parse_settings(Example, {"size": 4}, "x", size=3)


@dataclass(frozen=True)
class Plain(Configurable):
    number: int
    share: float = 0.5
    rule: Literal["a", 1] = "a"
    limit: int | None = None
    seen: Sequence[float] = ()


plain_values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), plain_values, max_size=4))
def test_what_is_written_as_toml_is_read_back(content):
    """Any table of plain values, whatever its keys and texts, survives the way through a file."""
    assert tomllib.loads(to_toml(content)) == content


def test_a_dataclass_comes_back_from_its_table():
    made = Plain(3, seen=(0.25, 1.0), limit=4)
    assert parse_settings(Plain, to_plain(made), "x") == made


def test_what_may_be_unset_is_unset_by_none():
    assert parse_settings(Plain, {"number": 1, "limit": "none"}, "x").limit is None


@dataclass(frozen=True)
class Bounded(Configurable):
    least: Annotated[float, Ge(1)] = 1.0
    above: Annotated[float, Gt(1)] = 2.0
    most: Annotated[float, Le(1)] = 1.0
    below: Annotated[float, Lt(1)] = 0.0


@dataclass(frozen=True)
class Unset(Configurable):
    epochs: int | None = 10
    rule: str | None = "mean"
    note: str | None = None


def test_what_is_unset_in_place_of_a_default_is_stored_as_unset():
    """Left out it would be read as the default again."""
    made = parse_settings(Unset, {"epochs": "none", "rule": "none"}, "x")
    assert made == Unset(None, None) != Unset()
    assert to_plain(made) == {"epochs": "none", "rule": "none"}
    assert parse_settings(Unset, to_plain(made), "x") == made
    assert to_plain(Unset()) == {"epochs": 10, "rule": "mean"}


def test_a_range_has_its_end_or_not():
    assert Bounded(least=1, most=1) == Bounded()
    for name in ("above", "below"):
        with pytest.raises(ConfigError, match=f"{name} is 1; expected a number, {name} 1"):
            Bounded(**{name: 1})


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_is_finite(value):
    with pytest.raises(ConfigError, match=f"rate is {value}; expected a number"):
        Example(1, rate=value)


@dataclass(frozen=True)
class Preset(WithPresets):
    preset: Literal["ours", "paper"] = "ours"
    lr: float = 0.1
    steps: int = 5

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"lr": 0.5, "steps": 9}}


def test_what_is_given_wins_over_the_preset_and_stays_given():
    """lr is given, so the preset decides steps alone; back to the defaults, lr is still the one that was given."""
    made = Preset("paper", lr=0.2)
    assert (made.lr, made.steps) == (0.2, 9)
    back = replace(made, preset="ours")
    assert (back.lr, back.steps) == (0.2, 5)
    assert (Preset("paper").lr, Preset("paper").steps) == (0.5, 9)
