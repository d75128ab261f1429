"""A text is a table or one error, however deep it is."""

import tomllib

import pytest

from coterie._util.toml import DEEPEST, parse_toml


def nest_lists(depth: int) -> str:
    return "a = " + "[" * depth + "]" * depth


def nest_tables(depth: int) -> str:
    return ".".join(["a"] * (depth + 1)) + " = 1"


@pytest.mark.parametrize("nest", [nest_lists, nest_tables])
def test_tables_and_lists_may_be_in_each_other_so_often_and_no_more(nest):
    assert parse_toml(nest(DEEPEST)) == tomllib.loads(nest(DEEPEST))
    for depth in (DEEPEST + 1, 900, 5000):
        with pytest.raises(tomllib.TOMLDecodeError, match="in each other more than 50 times"):
            parse_toml(nest(depth))


def test_a_number_that_python_does_not_read_is_an_error_of_the_text():
    with pytest.raises(tomllib.TOMLDecodeError, match="4300"):
        parse_toml("a = " + "1" * 5000)
    with pytest.raises(tomllib.TOMLDecodeError, match="line 1"):
        parse_toml("a = \nb = 1")
