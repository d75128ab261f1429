"""What the pages say of bounded tables is what the stored runs say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs/reference/runs/performance/tables.json").read_text())["results"]


def find_values(clusters: int, table: object, name: str) -> dict[int, float]:
    """A value of each seed."""
    return {r["seed"]: r[name] for r in ROWS if (r["clusters"], r["table"]) == (clusters, table)}


@pytest.mark.parametrize(("clusters", "is_better"), [(4, True), (20, True), (200, False)])
def test_a_table_is_better_with_large_clusters_and_worse_with_clusters_of_five(clusters, is_better):
    bounded, whole = (find_values(clusters, of, "accuracy") for of in (64, "all pairs"))
    assert bounded.keys() == whole.keys() == {1, 2, 3}, "not seed 0, with which the rule was chosen"
    assert all((bounded[seed] > whole[seed]) is is_better for seed in bounded)
    reads, of_all = (
        find_values(clusters, of, "own cluster, last rounds") for of in (64, "all pairs")
    )
    assert all(reads[seed] > of_all[seed] for seed in reads)
