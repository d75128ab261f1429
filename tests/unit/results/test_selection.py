"""Which stored runs are compared, and how the others are listed."""

import shutil

import pytest

from coterie.errors import DataError
from coterie.results import gains, summary


def row(result, **wanted):
    """The one row with these entries."""
    (found,) = [r for r in result["rows"] if all(r[k] == v for k, v in wanted.items())]
    return found


def planned(folder, seeds, *labels):
    """Write the file of a study: which methods and seeds it should have."""
    methods = "".join(
        f'[[methods]]\nkind = "{label.lower()}"\nlabel = "{label}"\n' for label in labels
    )
    (folder / "config.toml").write_text(f"seeds = {seeds}\n{methods}")


def states(found):
    return [(one["label"], one["seed"], one["state"]) for one in found["left_out"]]


def test_a_run_that_is_still_going_is_left_out_of_the_summary(small, write_run, final_rows):
    """Two of ten rounds are there: test values on the way are no result."""
    rows = final_rows([0.1] * 4, [0, 0, 0, 1], model="current")
    write_run(
        small / "Late" / "seed-0",
        kind="dac",
        label="Late",
        seed=0,
        metrics=rows,
        rounds=10,
        done=False,
    )
    assert "Late" not in {r["label"] for r in summary.summarize_study(small)["rows"]}


def test_means_are_over_the_seeds_that_all_methods_finished(small):
    """Local has seed 1 left (.4 .4 .4 .8, mean .5), so DAC is its seed 1 too (.6 .6 .6 .8, mean .65), not .6375."""
    shutil.rmtree(small / "Local" / "seed-0")
    planned(small, [0, 1, 2], "Local", "DAC", "Random")
    result = summary.summarize_study(small)
    assert result["seeds"] == [1]
    assert states(result) == [
        ("Local", 0, "missing"), ("Local", 2, "missing"), ("DAC", 0, "finished"), ("DAC", 2, "missing"),
        ("Random", 0, "missing"), ("Random", 1, "missing"), ("Random", 2, "missing"),
    ]  # fmt: skip
    for label, mean in (("Local", 0.5), ("DAC", 0.65)):
        found = row(result, label=label, cluster="all", metric="accuracy")
        assert (found["mean"], found["std"], found["seeds"]) == (pytest.approx(mean), None, 1)
    (gain,) = gains.compute_study_gains(small)["rows"]
    assert (gain["mean"], gain["seeds"], gain["mean_low"]) == (pytest.approx(0.15), 1, None)


def test_a_method_that_finished_nothing_does_not_empty_the_tables(small, write_run, final_rows):
    """Late has measured two of ten rounds: the others keep both seeds, and Late is named."""
    rows = final_rows([0.1] * 4, [0, 0, 0, 1], model="current")
    write_run(
        small / "Late" / "seed-0",
        kind="dac",
        label="Late",
        seed=0,
        metrics=rows,
        rounds=10,
        done=False,
    )
    result = summary.summarize_study(small)
    assert result["seeds"] == [0, 1]
    assert result["left_out"] == [
        {"label": "Late", "seed": 0, "state": "unfinished", "reason": "round 2 of 10"}
    ]


def test_without_a_common_seed_there_are_no_rows(small):
    """DAC has seed 0 alone and Local seed 1: nothing is averaged, and both are named."""
    shutil.rmtree(small / "DAC" / "seed-1")
    shutil.rmtree(small / "Local" / "seed-0")
    result = summary.summarize_study(small)
    assert (result["seeds"], result["rows"]) == ([], [])
    assert states(result) == [("DAC", 0, "finished"), ("Local", 1, "finished")]
    assert gains.compute_study_gains(small)["rows"] == []


def test_participation_and_times_are_of_the_compared_seeds(small):
    """The times of all runs stay: they are no means."""
    shutil.rmtree(small / "Local" / "seed-0")
    result = summary.summarize_study(small)
    assert [(one["label"], one["seed"]) for one in result["participation"]] == [
        ("DAC", 1),
        ("Local", 1),
    ]
    assert len(result["timing"]) == 3


def test_a_run_of_which_a_node_is_damaged_is_not_compared(tmp_path, write_run, final_rows):
    """North's client has 0.9; without South's it is not the run's mean. Seed 1 is whole: (.5 + .7) / 2."""
    for seed, (north, south) in enumerate([(0.9, 0.1), (0.5, 0.7)]):
        for node, client, value in (("north", 0, north), ("south", 1, south)):
            folder = tmp_path / node / "real" / "DAC" / f"seed-{seed}"
            rows = [(1, client, 0, "test", "best", "accuracy", value)]
            write_run(folder, kind="dac", label="DAC", seed=seed, study="real", metrics=rows)
    (tmp_path / "south/real/DAC/seed-0/metrics.parquet").write_bytes(b"PAR1 cut off")
    result = summary.summarize_study(tmp_path)
    assert row(result, cluster="all", metric="accuracy")["mean"] == pytest.approx(0.6)
    assert states(result) == [("DAC", 0, "damaged")]


@pytest.mark.parametrize("point", ["tau=1", "tau=2"])
def test_several_studies_are_not_averaged_together(tmp_path, write_run, final_rows, point):
    """The points of a sweep have methods of the same names; one that is given alone is read."""
    for number, name in enumerate(("tau=1", "tau=2")):
        folder = tmp_path / name / "DAC" / f"seed-{number}"
        write_run(
            folder,
            kind="dac",
            label="DAC",
            seed=number,
            metrics=final_rows([0.5], [0]),
            study=f"sweep/{name}",
        )
    for read in (summary.summarize_study, gains.compute_study_gains):
        with pytest.raises(DataError, match="several studies"):
            read(tmp_path)
    assert len(summary.summarize_study(tmp_path / point)["rows"]) > 0


def test_the_same_run_twice_is_not_two_seeds(tmp_path, write_run, final_rows):
    """A copy of a study beside it: its seed 0 would count twice."""
    for name in ("a", "b"):
        write_run(
            tmp_path / name / "DAC" / "seed-0",
            kind="dac",
            label="DAC",
            seed=0,
            metrics=final_rows([0.5], [0]),
        )
    with pytest.raises(DataError, match="several studies"):
        summary.summarize_study(tmp_path)
