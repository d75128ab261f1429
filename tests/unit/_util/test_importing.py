"""Import paths: what is found under them, and what is said when there is nothing, or something else."""

import re

import pytest
from torch import nn

from coterie._util.importing import (
    find_import_path,
    import_class,
    import_function,
    import_object,
    parse_kind,
)
from coterie.errors import ConfigError
from coterie.methods.base import Method


class Outer:
    """Has a class inside."""

    class Inner:
        """Is named by two names."""


def test_what_a_path_names_is_named_by_it_again():
    for found in (Outer, Outer.Inner, import_object):
        assert import_object(find_import_path(found, "it"), "it") is found
    assert find_import_path(Outer.Inner, "it") == f"{__name__}:Outer.Inner"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "nowhere.at_all:thing",
            "it: there is no module 'nowhere'; install the package that has it",
        ),
        (
            "math:nothing",
            "it: module 'math' has no attribute 'nothing'; expected package.module:name",
        ),
        ("math", "expected package.module:name, importable from here"),
        (":name", "expected package.module:name, importable from here"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(path, said):
    with pytest.raises(ConfigError) as raised:
        import_object(path, "it")
    assert said in str(raised.value)


def test_what_to_install_is_said_where_it_is_known():
    with pytest.raises(ConfigError, match=r"install ring==1\.0, or add its folder to PYTHONPATH"):
        import_object("nowhere:thing", "it", "ring==1.0")


def test_a_kind_is_a_name_or_an_import_path_with_the_rest_of_its_table():
    known = {"near": 1}
    table = {"kind": "near", "by": 2}
    assert parse_kind("near", known, "place", "at") == ("near", {})
    assert parse_kind(table, known, "place", "at") == ("near", {"by": 2})
    assert table == {"kind": "near", "by": 2}, "what is given stays as it is"
    assert parse_kind({"kind": "no.module:there", "by": 2}, known, "place", "at") == (
        "no.module:there",
        {"by": 2},
    )
    assert parse_kind(import_object, known, "place", "at") == (
        "coterie._util.importing:import_object",
        {},
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"by": 2}, "at: kind is missing; valid: far, near; or package.module:name"),
        ({"kind": 3}, "at: kind is 3; valid: far, near; or package.module:name"),
        (
            "naer",
            "at: unknown place 'naer'; did you mean 'near'? valid: far, near; or package.module:name",
        ),
        (lambda: 3, "at is <function <lambda>"),
    ],
)
def test_what_is_no_kind_is_said_in_the_same_words_everywhere(given, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        parse_kind(given, {"near": 1, "far": 2}, "place", "at")


def test_what_has_no_path_is_refused():
    def inner():
        """Is made inside a function."""

    for found in (inner, lambda: None):
        with pytest.raises(
            ConfigError, match="expected one that is defined at the top of a module, with a name"
        ):
            find_import_path(found, "it")
    # An object holds settings, which have a place of their own.
    for found in (3, nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.raises(
            ConfigError, match=r"it is an object, (3|CrossE.*\)); .* next to its kind"
        ):
            find_import_path(found, "it")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("math:pi", "it is 3.141592653589793; expected a subclass of coterie.Method"),
        ("coterie:Rng", "expected a subclass of coterie.Method"),
        ("coterie:PeerMethod", "it lacks exchange; a method defines them all"),
    ],
)
def test_a_class_is_of_its_kind_and_whole(path, said):
    with pytest.raises(ConfigError) as raised:
        import_class(path, "it", Method, "coterie.Method")
    assert said in str(raised.value)
    assert import_class("coterie:Local", "it", Method, "coterie.Method").kind == "local"


@pytest.mark.parametrize("path", ["math:pi", "coterie:Local"])
def test_a_function_is_one(path):
    with pytest.raises(ConfigError, match="expected a function"):
        import_function(path, "it")
    assert import_function("math:sqrt", "it")(9) == 3


def of_two(one, other, more=()):
    """Takes two values, or three."""


@pytest.mark.parametrize("takes", [("one",), (), ("a", "b", "c", "d")])
def test_a_function_that_takes_other_arguments_is_refused(takes):
    path = f"{__name__}:of_two"
    words = r"it has the arguments \(one, other, more=\(\)\); expected "
    with pytest.raises(ConfigError, match=words + re.escape(f"({', '.join(takes)})")):
        import_function(path, "it", takes)
    assert import_function(path, "it") is of_two
    assert import_function(path, "it", ("a", "b")) is of_two
    assert import_function(path, "it", ("a", "b", "c")) is of_two
