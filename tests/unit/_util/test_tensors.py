"""Parts of tensors, of absent ones too."""

import torch

from coterie._util.tensors import index_each, index_optional, select_rows


def test_an_absent_tensor_has_no_part():
    values = torch.tensor([[1, 2], [3, 4]])
    assert index_optional(values, (slice(None), 1)).tolist() == [2, 4]
    assert index_optional(None, 1) is None


def test_each_tensor_gives_the_same_part():
    tensors = {"a": torch.arange(3), "b": torch.arange(6).reshape(3, 2)}
    found = index_each(tensors, torch.tensor([2, 0]))
    assert {name: part.tolist() for name, part in found.items()} == {
        "a": [2, 0],
        "b": [[4, 5], [0, 1]],
    }


def test_rows_that_follow_each_other_are_a_view_and_others_a_copy():
    table = torch.arange(6).reshape(3, 2)
    one, two, some, again, none = (
        select_rows(table, torch.tensor(rows, dtype=torch.int64))
        for rows in ([1], [1, 2], [2, 0], [0, 0], [])
    )
    assert one.tolist() == [[2, 3]]
    assert two.tolist() == [[2, 3], [4, 5]]
    assert some.tolist() == [[4, 5], [0, 1]]
    assert again.tolist() == [[0, 1], [0, 1]]
    assert none.shape == (0, 2)
    table.zero_()
    assert one.tolist() == [[0, 0]]
    assert two.tolist() == [[0, 0], [0, 0]]
    assert some.tolist() == [[4, 5], [0, 1]]
