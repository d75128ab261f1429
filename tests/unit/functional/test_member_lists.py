"""Lists of members whose rows are as wide as the longest one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.functional.member_lists import MemberLists, align_lists, find_columns, trim_lists
from coterie.methods import base
from coterie.methods.base import State


@dataclass(frozen=True)
class Scores(MemberLists):
    """A number for each member, and one for the client."""

    fills: ClassVar[Mapping[str, int]] = {"members": -1, "score": 9}
    members: Tensor
    score: Tensor
    own: Tensor


def lists(*rows):
    """Lists of (member, score); the client's own number is how many there are."""
    width = max(map(len, rows), default=0)
    members = [[one for one, _ in row] + [-1] * (width - len(row)) for row in rows]
    score = [[value for _, value in row] + [9] * (width - len(row)) for row in rows]
    own = torch.tensor([float(len(row)) for row in rows])
    shape = (len(rows), width)
    ids = torch.tensor(members, dtype=torch.int64).reshape(shape)
    return Scores(ids, torch.tensor(score, dtype=torch.int64).reshape(shape), own)


def rows_of(memory):
    """What each client has in its columns that are not empty, which come first."""
    found = []
    for members, score in zip(memory.members.tolist(), memory.score.tolist(), strict=True):
        number = sum(one >= 0 for one in members)
        assert members[number:] == [-1] * (len(members) - number)
        assert score[number:] == [9] * (len(members) - number)
        found.append(list(zip(members[:number], score[:number], strict=True)))
    return found


ONE, TWO = [(3, 5)], [(4, 6), (1, 7)]


def test_rows_of_other_widths_are_padded_before_they_are_joined():
    narrow, wide, nobody = lists(ONE), lists(TWO, ONE), lists([], [])
    aligned = align_lists([narrow, wide, nobody, None])
    assert [one.width for one in aligned[:3]] == [2, 2, 2]
    assert aligned[3] is None
    joined = base.concatenate_tensors([narrow, wide, nobody])
    assert rows_of(joined) == [ONE, TWO, ONE, [], []]
    assert joined.own.tolist() == [1, 2, 1, 0, 0]
    assert narrow.width == 1, "nothing is changed in place"


@pytest.mark.parametrize(
    ("old", "new", "width"),
    [
        ([ONE, [], ONE], [TWO, []], 2),
        ([TWO, TWO, TWO], [[], ONE], 2),
        # Nobody has two any more: the column goes.
        ([TWO, ONE, TWO], [[], []], 1),
        ([[], [], []], [[], []], 0),
    ],
)
def test_some_clients_rows_replace_those_of_others_width(old, new, width):
    """Clients 0 and 2 get other lists; client 1 keeps its own."""
    rows = torch.tensor([0, 2])
    before = State(torch.zeros(3, 1), lists(*old))
    after = before.replace_rows(rows, State(torch.ones(2, 1), lists(*new)))
    expected = [new[0], old[1], new[1]]
    assert rows_of(after.memory) == expected
    assert after.memory.width == width
    assert after.memory.own.tolist() == [float(len(row)) for row in expected]
    assert after.params[:, 0].tolist() == [1, 0, 1]
    assert rows_of(before.memory) == old
    written = before.assign_rows(rows, State(torch.ones(2, 1), lists(*new)))
    assert rows_of(written.memory) == expected
    assert written.params is before.params, "the caller's own tensors"


def test_trimmed_lists_do_not_keep_the_wider_tensor_alive():
    wide = lists(ONE, []).pad_to(1000)
    slim = trim_lists(wide)
    assert rows_of(slim) == [ONE, []]
    assert slim.members.untyped_storage().nbytes() == slim.members.nbytes
    assert trim_lists(slim) is slim
    assert trim_lists(None) is None
    assert slim.pad_to(0) is slim


def test_a_member_has_one_column_and_a_new_one_takes_the_next_empty_one():
    """Against a list of Python, for 200 rounds of three distinct peers, some of which do not answer."""
    draw, population = np.random.default_rng(0), 12
    members, expected = torch.full((4, population), -1), [[] for _ in range(4)]
    for _ in range(200):
        peers = np.stack([draw.permutation(population)[:3] for _ in range(4)])
        mask = draw.random((4, 3)) < 0.1
        columns = find_columns(members, torch.from_numpy(peers), torch.from_numpy(mask))
        for row in range(4):
            for slot in range(3):
                peer = int(peers[row, slot])
                if not mask[row, slot]:
                    assert columns[row, slot] == -1
                    continue
                if peer not in expected[row]:
                    expected[row].append(peer)
                assert columns[row, slot] == expected[row].index(peer)
                members[row, columns[row, slot]] = peer
    assert any(len(row) > 8 for row in expected)


def test_lists_without_columns_take_members_in():
    none = torch.zeros(2, 0, dtype=torch.int32)
    peers, everybody = torch.tensor([[7, 4], [2, 9]]), torch.ones(2, 2, dtype=torch.bool)
    assert find_columns(none, peers, everybody).tolist() == [[0, 1], [0, 1]]
    assert find_columns(none, peers[:, :0], everybody[:, :0]).shape == (2, 0)
