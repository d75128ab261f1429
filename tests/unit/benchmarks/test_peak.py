"""The core's peak is measured by a program that does what is counted."""

import numpy as np
import pytest

from benchmarks import _peak
from benchmarks._peak import CHAINS, Peak


def test_the_program_computes_all_chains():
    """Twelve chains start at 1, 2, ... 12 times the term, in every lane of a register."""
    peak = Peak()
    assert peak.lanes in (4, 8, 16)
    chains = np.arange(1, CHAINS + 1, dtype=np.float64)
    for _ in range(3):
        chains = chains * 0.5 + 1
    assert peak.chains(3, 0.5, 1.0) == peak.lanes * chains.sum()


def test_operations_a_second_are_those_of_the_fastest_timing(monkeypatch: pytest.MonkeyPatch):
    """An addition and a multiplication of each lane, of 12 chains, of 2,000 steps, in 2 ms."""
    peak = Peak()
    times = iter([0.004, 0.003, 0.002, 0.005])
    monkeypatch.setattr(peak, "_seconds", lambda _steps: next(times))
    assert peak.flops(0.003, repeats=3) == pytest.approx(2 * 12 * peak.lanes * 2000 / 0.002)


def test_a_core_reaches_more_than_a_simple_loop_would():
    """One multiply-add a nanosecond and lane is far below any processor with such registers."""
    assert Peak().flops() > 2e9 * Peak().lanes
    assert _peak.machine_with_peak()["fma_gflops"] > 1
