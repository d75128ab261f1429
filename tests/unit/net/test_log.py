"""What may be told rarely is told rarely, and how often it was not told is said."""

from coterie.net.log import Rarely


def test_what_happens_without_end_is_told_so_often_in_so_many_seconds():
    now = [0.0]
    rarely = Rarely(2, 10.0, clock=lambda: now[0])
    assert [rarely() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 9.9
    assert rarely() is None
    now[0] = 10.0
    assert [rarely(), rarely(), rarely()] == [4, 0, None]
