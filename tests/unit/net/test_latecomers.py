"""Members that join late: who takes part in the run, under which numbers."""

from coterie import METHODS
from coterie.net import latecomers
from coterie.net.roster import Member, Roster
from coterie.simulation.settings import Settings


def test_a_removed_client_keeps_its_place_on_both_sides():
    """Clients 0 to 4; 1 was removed and 2 joins late, so that 0, 1, 3, 4 are 0 to 3 for those that take part."""
    members = tuple(Member(name, f"127.0.0.1:{7000 + c}", (c,)) for name, c in (("a", 0), ("c", 2), ("d", 3), ("e", 4)))
    roster = Roster("study", members, 5, version=2, removed=(1,))
    found = latecomers.sides(roster, METHODS["dac"](), Settings(new_clients=["c"]), seed=0)
    assert found is not None
    assert found.ids.tolist() == [0, 1, 3, 4, 2]
    assert found.late == ["c"]
    assert (found.taking.removed, found.whole.removed) == ((1,), (1,))
    assert found.taking.host_of == {0: "a", 2: "d", 3: "e"}
    assert found.whole.host_of == {0: "a", 2: "d", 3: "e", 4: "c"}
