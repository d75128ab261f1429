"""Who of a roster joins late, and the numbers that clients have then. tests/unit/net/test_node.py has whole runs."""

from dataclasses import replace

import torch

from coterie.methods import METHODS
from coterie.net import latecomers, local
from coterie.testing import tiny_federation, tiny_settings

WHO, _ = local.make_members([[0], [1], [2], [3], [4, 5]])
RANDOM = METHODS["random"]()


def sides(roster, wanted):
    found = latecomers.find_participants(roster, RANDOM, tiny_settings(new_clients=wanted), 0)
    assert found is not None
    return found


def hosted(roster):
    return {member.name: member.clients for member in roster.members}


def test_those_who_take_part_are_numbered_from_0_and_newcomers_behind_them():
    found = sides(WHO, ["n1", "n3"])
    assert found.ids.tolist() == [0, 2, 4, 5, 1, 3]
    assert hosted(found.run_roster) == {"n0": (0,), "n2": (1,), "n4": (2, 3)}
    assert hosted(found.full_roster) == {
        "n0": (0,),
        "n1": (4,),
        "n2": (1,),
        "n3": (5,),
        "n4": (2, 3),
    }
    assert (found.run_roster.population, found.full_roster.population) == (4, 6)
    assert found.late_members == ["n1", "n3"]
    assert found.answers_newcomers("n0")
    assert not found.answers_newcomers("n1")
    assert (found.roster_for("n0"), found.roster_for("n1")) == (found.run_roster, found.full_roster)
    whole = tiny_federation(num_clients=6)
    rows = found.renumber_rows(whole.host([4, 5]), "n4")
    assert (rows.ids.tolist(), rows.population) == ([2, 3], 4)
    assert torch.equal(rows.x, whole.x[[4, 5]])
    assert found.renumber_rows(whole.host([1]), "n1").ids.tolist() == [4]


def test_nobody_is_late_where_the_study_holds_nobody_out():
    assert latecomers.find_participants(WHO, RANDOM, tiny_settings(), 0) is None


def test_clients_of_members_that_were_removed_keep_their_numbers():
    """n0 was removed before, n2 is removed while others wait for n3."""
    left = tuple(member for member in WHO.members if member.name != "n0")
    found = sides(replace(WHO, members=left, removed=(0,)), [3])
    assert found.ids.tolist() == [0, 1, 2, 4, 5, 3]
    assert hosted(found.run_roster) == {"n1": (1,), "n2": (2,), "n4": (3, 4)}
    assert (found.run_roster.removed, found.run_roster.population) == ((0,), 5)
    less = tuple(member for member in left if member.name != "n2")
    newer = found.with_roster(replace(WHO, members=less, removed=(0, 2), version=2))
    assert hosted(newer.full_roster) == {"n1": (1,), "n3": (5,), "n4": (3, 4)}
    assert (newer.run_roster.removed, newer.late_members) == ((0, 2), ["n3"])
