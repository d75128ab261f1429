"""Everything that can be set refuses what its field does not declare: one line, the same in Python and in a file."""

import importlib
import math
import pkgutil
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie._util.settings import (
    Configurable,
    Importable,
    describe_hint,
    parse_settings,
    required_fields,
    settable_fields,
    to_plain,
    to_toml,
)
from coterie.data.shifts import SHIFTS
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.methods.dac import Dac
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.studies import config

NEEDED = {
    "concentration_total": 1.0,
    "groups": [[0]],
    "swaps": [[]],
    "column": "a",
    "concentration_per_client": 1.0,
}
NEEDED |= {"dataset": "digits", "name": "x", "function": "math:sqrt"}
"""What fields without a default are given, where another field is tried."""


def classes() -> list[type[Any]]:
    """Return every class of the package that can be set, by its own name."""
    for module in pkgutil.walk_packages(coterie.__path__, "coterie."):
        if module.name.startswith(
            ("coterie.data", "coterie.studies", "coterie.net.nodefile", "coterie.papers")
        ):
            importlib.import_module(module.name)
    found, rest = [], [Configurable]
    while rest:
        inner = rest.pop().__subclasses__()
        rest += inner
        found += [cls for cls in inner if not getattr(cls, "__abstractmethods__", ())]
    return sorted(
        {cls for cls in found if cls.__module__.startswith("coterie.") and settable_fields(cls)},
        key=str,
    )


def base(cls: type[Any], *leave: str) -> dict[str, Any]:
    """Return a table of a class that is fine but for the fields left out."""
    names = {*required_fields(cls), *({"concentration_total"} & set(settable_fields(cls)))} - {
        *leave
    }
    return {name: NEEDED[name] for name in names if name in NEEDED}


def fits(value: Any, hint: Any) -> bool:
    """Say whether a declaration accepts a value: written once more, by what the declaration means."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and Importable() in inner:
        return isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value) is not None
    if origin is Annotated:
        return fits(value, inner[0]) and all(inside(value, bound) for bound in inner[1:])
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if hint is type(None):
        return value is None or value == "none"
    if hint in (int, float):
        kinds = (int, np.integer) if hint is int else (int, float, np.integer, np.floating)
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if origin is Callable:
        return callable(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    return hint is Any or isinstance(value, hint)


def inside(value: Any, bound: Any) -> bool:
    if isinstance(bound, MinLen):
        return len(value) >= bound.min_length
    if isinstance(bound, Ge | Gt):
        return value >= bound.ge if isinstance(bound, Ge) else value > bound.gt
    return value <= bound.le if isinstance(bound, Le) else value < bound.lt


def beyond(hint: Any) -> list[Any]:
    """Return values just outside the ranges of a declaration, and lists of them."""
    out: list[Any] = []
    for bound in typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ():
        if isinstance(bound, Ge | Gt):
            out.append(bound.ge - 1 if isinstance(bound, Ge) else bound.gt)  # type: ignore[operator]
        elif isinstance(bound, Le | Lt):
            out.append(bound.le + 1 if isinstance(bound, Le) else bound.lt)  # type: ignore[operator]
        elif isinstance(bound, MinLen):
            out.append([])
    origin = typing.get_origin(hint)
    if origin is not None and origin is not Literal:
        inner = [value for option in typing.get_args(hint) for value in beyond(option)]
        out += (
            [[value] for value in inner]
            if isinstance(origin, type) and issubclass(origin, Sequence)
            else inner
        )
    return out


WRONG = ["?", True, 2.5, math.nan, ["?"], {"a": 1}, np.float64("inf")]


def refusal(make: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_what_a_field_does_not_declare_is_refused_in_the_same_words_everywhere(cls):
    kind = getattr(cls, "kind", None)
    owner = kind if isinstance(kind, str) and "kind" not in settable_fields(cls) else cls.__name__
    for name, hint in settable_fields(cls).items():
        wrong = [value for value in [*WRONG, *beyond(hint)] if not fits(value, hint)]
        assert wrong, f"{name} accepts everything: it declares nothing"
        # made of other settings: nothing that a table could hold
        if required_fields(cls) - {*base(cls, name), name}:
            continue
        for value in wrong:
            table = {**base(cls, name), name: value}
            said = f"{name} is {value!r}; expected {describe_hint(hint)}"
            assert refusal(lambda table=table: cls(**table)) == f"{owner}: {said}"
            if not isinstance(value, np.generic):
                read = tomllib.loads(to_toml(table))
                assert (
                    refusal(lambda read=read: parse_settings(cls, read, "here")) == f"here: {said}"
                )


def test_every_method_and_shift_and_table_of_a_file_is_among_them():
    names = {cls.__name__ for cls in classes()}
    assert names >= {method.__name__ for method in METHODS.values() if settable_fields(method)}
    assert names >= {shift.__name__ for shift in SHIFTS.values() if settable_fields(shift)}
    assert names >= {
        "Settings",
        "LocalTraining",
        "DataConfig",
        "ModelConfig",
        "NodeFile",
        "DataSource",
    }


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        (
            "methods.DAC",
            "[[methods]]\nkind='dac'\nlabel='DAC'\nnum_peers=2.5",
            "num_peers is 2.5; expected a whole number",
        ),
        (
            "methods.fedgwc",
            "[[methods]]\nkind='fedgwc'\nupv_axis='x'",
            "upv_axis is 'x'; expected 'column' or 'row'",
        ),
        (
            "study",
            "buffers='avg'\n[[methods]]\nkind='dac'",
            "buffers is 'avg'; expected 'average', 'local' or 'reset'",
        ),
        (
            "local",
            "[local]\nlr=-1\n[[methods]]\nkind='dac'",
            "lr is -1; expected a number, 0 or more",
        ),
    ],
)
def test_a_study_file_says_where_it_stands(where, text, said):
    assert refusal(
        lambda: config.parse_study_text(f"data={{dataset='digits'}}\n{text}")
    ).startswith(f"{where}: {said}")


@settings(max_examples=10)
@given(st.integers(1, 1000), st.sampled_from([np.int32, np.int64, np.uint32]))
def test_numbers_of_numpy_are_numbers(value, kind):
    dac = Dac(num_peers=kind(value), tau=kind(value), b=np.float32(0.5))  # type: ignore[arg-type]
    assert (dac.num_peers, dac.tau, dac.b) == (value, float(value), 0.5)
    assert [type(found) for found in (dac.num_peers, dac.tau, dac.b)] == [int, float, float]


PRESETS = ("coterie", "paper", "released")
GIVEN: dict[str, Any] = {
    "ddof": 0,
    "upv_axis": "column",
    "patience": 2,
    "explore": True,
    "min_pair_updates": 1.0,
}


@settings(max_examples=30)
@given(
    st.sampled_from(PRESETS),
    st.sampled_from(PRESETS),
    st.sets(st.sampled_from(sorted(GIVEN))),
    st.booleans(),
)
def test_a_preset_can_be_changed_and_what_is_given_stays(first, second, names, later):
    """However the fields came: with the preset, before it, or in the same replacement."""
    fields = {name: GIVEN[name] for name in names}
    wanted = PublishedFedGwc(preset=second, **fields)
    before = PublishedFedGwc(preset=first) if later else PublishedFedGwc(preset=first, **fields)
    after = replace(before, preset=second, **(fields if later else {}))
    assert after == wanted
    assert all(getattr(after, name) == value for name, value in fields.items())
    assert replace(after, preset=first) == PublishedFedGwc(preset=first, **fields)
    assert (
        parse_settings(
            PublishedFedGwc, {k: v for k, v in to_plain(after).items() if k != "kind"}, "x"
        )
        == wanted
    )
