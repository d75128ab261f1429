"""What must hold for all studies holds for those that the adversary draws from fixed numbers.

`make adversary` draws others. A finding prints the line that tries its study again.
"""

import pytest

from benchmarks import adversary

PARTS, EACH = 8, 3
"""Parts, and trials of a part; all together take a minute on one core."""


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_what_must_hold_for_all_studies_holds_for_these(part: int):
    trials = adversary.hunt(100_000 + part * EACH, trials=EACH, seconds=500)
    lines = [
        f"{one.check}: {one.said}\n{adversary.format_replay(one.case)}"
        for _, outcomes in trials
        for one in outcomes
        if one.result == "FOUND" and one.case is not None
    ]
    assert not lines, "\n".join(lines)
