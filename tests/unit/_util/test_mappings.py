from types import SimpleNamespace

from coterie._util.mappings import (
    drop_empty,
    drop_keys,
    index_by_name,
    map_values,
    number_items,
    prefix_keys,
    select_keys,
    select_prefix,
)


def test_values_change_and_keys_with_their_order_stay() -> None:
    assert list(map_values(len, {"b": "xy", "a": ""}).items()) == [("b", 2), ("a", 0)]


def test_keys_are_selected_in_the_order_asked_for_and_may_be_missing() -> None:
    assert list(select_keys({"a": 1, "b": 2, "c": 3}, ("c", "d", "a")).items()) == [
        ("c", 3),
        ("a", 1),
    ]


def test_dropped_keys_need_not_exist() -> None:
    table = {"a": 1, "b": 2}
    assert drop_keys(table, ("b", "c")) == {"a": 1}
    assert table == {"a": 1, "b": 2}


def test_empty_values_are_dropped() -> None:
    full = {"text": "x", "number": 1}
    assert drop_empty({"none": None, "text": "x", "list": [], "zero": 0, "number": 1}) == full


def test_prefixes_are_added_and_removed() -> None:
    assert prefix_keys("field.", {"a": 1}) == {"field.a": 1}
    assert prefix_keys("client.", {7: 1}) == {"client.7": 1}
    # Only the first prefix goes, and names without it are of somebody else.
    assert select_prefix("field.", {"field.field.a": 1, "params": 2}) == {"field.a": 1}


def test_items_are_numbered_from_zero_and_found_by_name() -> None:
    assert number_items([7, 3, 5]) == {7: 0, 3: 1, 5: 2}
    first, last = SimpleNamespace(name="a", at=1), SimpleNamespace(name="a", at=2)
    assert index_by_name([first, last]) == {"a": last}
