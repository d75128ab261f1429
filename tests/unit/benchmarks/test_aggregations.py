"""What rules do under attack, on other data than the stored ones, and that a stopped run goes on."""

import json
import sys

import pytest

from benchmarks import aggregations

SEED = 7


@pytest.fixture(scope="module")
def rows():
    """Accuracies and refused shares of two methods without attackers and with 30 % of them."""
    cells = aggregations.list_cells(
        [SEED], ["fedavg", "random"], [("none", 0.0), ("sign-flip", 0.3)],
        [("mean", False), ("mean", True), ("median", False)],
    )  # fmt: skip
    found = aggregations.measure(cells, 8)
    return {aggregations.find_cell(one)[1:]: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "defense"),
    [("fedavg", ("mean", True)), ("fedavg", ("median", False)), ("random", ("mean", True))],
)
def test_a_median_of_many_and_acceptance_keep_what_a_mean_loses(rows, method, defense):
    """6 of 20 publish -5 times their model. A median of a client's own and three other models is too few for that."""
    clean = rows[method, "none", 0.0, "mean", False]["accuracy"]
    lost = clean - rows[method, "sign-flip", 0.3, "mean", False]["accuracy"]
    assert lost > 0.1  # 10 points; a seed more or less is worth 2
    assert clean - rows[method, "sign-flip", 0.3, *defense]["accuracy"] < 0.7 * lost


@pytest.mark.slow
def test_a_server_refuses_what_attackers_send_and_counts_it(rows):
    """6 of 20 messages in each of 8 rounds; nothing is refused where nothing is tested."""
    tested = rows["fedavg", "sign-flip", 0.3, "mean", True]
    assert tested["refused share of reads"] == pytest.approx(6 / 20)
    assert rows["fedavg", "none", 0.0, "mean", True]["refused share of reads"] == 0
    assert rows["random", "sign-flip", 0.3, "mean", True]["refused share of reads"] > 0.02
    for (_, _, _, _, accepts), one in rows.items():
        if not accepts:
            assert one["refused share of reads"] == 0


def run_main(monkeypatch, path, *words, stop_after=None):
    """Run the program, or stop it when it has measured some cells; return those."""
    measured = []

    def run_cell(data, cell, rounds, run=aggregations.run_cell):
        if len(measured) == stop_after:
            raise KeyboardInterrupt
        measured.append(cell)
        return run(data, cell, rounds)

    with monkeypatch.context() as patch:
        patch.setattr(aggregations, "run_cell", run_cell)
        patch.setattr(sys, "argv", ["aggregations", "--out", str(path), *SMALL, *words])
        try:
            aggregations.main()
        except KeyboardInterrupt:
            assert stop_after is not None
    return measured


SMALL = ("--methods", "random", "--attacks", "none", "--rounds", "1", "--seeds", "1")
CELLS = aggregations.list_cells([1], ["random"], [("none", 0.0)])


@pytest.mark.full
def test_a_run_that_was_stopped_measures_only_what_is_left(monkeypatch, tmp_path):
    path = tmp_path / "rows.json"
    assert run_main(monkeypatch, path, stop_after=3) == CELLS[:3]
    assert run_main(monkeypatch, path) == CELLS[3:]
    stored = json.loads(path.read_text())
    assert [aggregations.find_cell(one) for one in stored["results"]] == CELLS
    assert all(0 < one["accuracy"] < 1 for one in stored["results"])
    assert run_main(monkeypatch, path) == []


@pytest.mark.full
def test_rows_of_another_table_or_commit_are_refused_and_kept(monkeypatch, tmp_path):
    """The head names one commit and one table for all rows."""
    path = tmp_path / "rows.json"
    run_main(monkeypatch, path, stop_after=1)
    before = path.read_bytes()
    for words in (("--rounds", "2"), ("--seeds", "2")):
        with pytest.raises(SystemExit, match="rows of another table"):
            run_main(monkeypatch, path, *words)
    other = {"commit": "0" * 40, "dirty": False}
    monkeypatch.setattr(aggregations, "describe_code", lambda: other)
    with pytest.raises(SystemExit, match="rows of another table"):
        run_main(monkeypatch, path)
    assert path.read_bytes() == before
