import base64
import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from coterie.report import page as report_page
from coterie.report.data import build_payload
from coterie.report.data.packing import (
    MOST_CLIENTS,
    build_dense_table,
    nan_mean_std,
    pack_array,
    sample_clients,
    thin_indices,
)
from coterie.report.data.reads import assign_cells
from coterie.report.page import render_overview
from coterie.results.equal_budget import rank_at_equal_budget
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.stored_runs import load_runs


def unpack(packed):
    """The inverse of `pack`, as the page does it."""
    raw = zlib.decompress(base64.b64decode(packed["text"]))
    kind = {"u8": "u1", "u16": "<u2", "q16": "<u2", "f32": "<f4"}[packed["kind"]]
    values = np.frombuffer(raw, dtype=kind).reshape(packed["shape"])
    if packed["kind"] == "q16":
        return np.where(values == 65535, np.nan, packed["low"] + values * packed["step"])
    return values


@pytest.fixture(scope="module")
def data(population):
    return build_payload(*load_runs([population]))


def test_counts_are_packed_exactly():
    """Whole numbers come back as they were."""
    values = np.array([[0, 255], [7, 1]])
    np.testing.assert_array_equal(unpack(pack_array(values, "u8")), values)
    np.testing.assert_array_equal(unpack(pack_array(values * 200, "u16")), values * 200)


def test_floats_are_packed_within_half_a_step_and_nan_survives():
    """A range of 2 in 65,534 steps: no value moves by more than 2e-5."""
    values = np.array([-1.0, 0.123456, np.nan, 1.0])
    np.testing.assert_allclose(unpack(pack_array(values, "q16")), values, atol=1.6e-5)


def test_floats_that_are_all_the_same_or_all_missing_are_packed():
    """No division by a range of zero."""
    np.testing.assert_array_equal(unpack(pack_array(np.array([3.0, 3.0]), "q16")), [3.0, 3.0])
    assert np.isnan(unpack(pack_array(np.array([np.nan]), "q16"))).all()


def test_thinning_keeps_the_first_and_the_last_point():
    """Of 1,000 rounds five are kept, evenly spread; of three all."""
    np.testing.assert_array_equal(thin_indices(1001, 5), [0, 250, 500, 750, 1000])
    np.testing.assert_array_equal(thin_indices(3, 5), [0, 1, 2])


def test_a_mean_over_seeds_is_over_those_that_have_a_value():
    """1 and 3; 4 alone, which has no deviation; none."""
    mean, spread = nan_mean_std(np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan]]))
    np.testing.assert_array_equal(mean, [2.0, 4.0, np.nan])
    np.testing.assert_array_equal(spread, [1.0, np.nan, np.nan])


def test_a_client_that_sat_out_keeps_its_last_value(write_run, tmp_path):
    """Client 1 is active in rounds 0 and 2 only; before its first value there is none."""
    rows = [
        (r, c, 0, "validation", "current", "loss", v)
        for r, c, v in [(0, 0, 1.0), (1, 0, 2.0), (1, 1, 5.0), (2, 0, 3.0)]
    ]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    (run,), _ = load_runs([tmp_path])
    rounds, values = build_dense_table(run, "validation", "loss")
    assert rounds.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(values, [[1, np.nan], [2, 5], [3, 5]])


def test_what_is_not_a_number_in_any_round_is_no_curve_of_the_page(tmp_path, write_run, final_rows):
    """Clients without validation data; a metric that is lost on the way keeps its rounds."""
    nan = np.nan
    values = {"validation": [nan, nan, nan], "test": [0.5, nan, 0.75], "train": [0.5, 0.25, nan]}
    rows = [
        (r, 0, 0, split, "current", "accuracy", v)
        for split, own in values.items()
        for r, v in enumerate(own)
    ]
    run = tmp_path / "s" / "A" / "seed-0"
    write_run(
        run, kind="dac", label="A", seed=0, metrics=[*rows, *final_rows([0.75], [0], round=2)]
    )
    page = build_payload(*load_runs([tmp_path / "s"]))
    assert [one["split"] for one in page["curves"]] == ["train", "test"]
    assert [list(one["rounds"]) for one in page["curves"]] == [[0, 1, 2]] * 2


def test_cells_hold_neighbors_of_one_cluster():
    """Five clients in at most three cells: two a cell, but never of two clusters."""
    np.testing.assert_array_equal(assign_cells(np.array([0, 1, 0, 0, 1]), most=3), [0, 2, 0, 1, 2])
    np.testing.assert_array_equal(assign_cells(np.array([1, 0, 1])), [1, 0, 2])


def test_heatmap_frames_add_up_to_every_read(data):
    """Ten rounds, twelve clients, three reads, two seeds: 720 for each method that reads."""
    assert [data["methods"][one["method"]]["label"] for one in data["reads"]["methods"]] == [
        "DAC",
        "Oracle",
        "Random",
    ]
    for one in data["reads"]["methods"]:
        counts = unpack(one["counts"])
        assert counts.shape == (10, 12, 12)
        np.testing.assert_array_equal(counts.sum((1, 2)), 72)
        assert np.trace(counts.sum(0)) == 0


def test_frames_are_merged_when_a_run_is_long(population_study, tmp_path):
    """130 rounds in 60 frames: none is lost, and the last ends with the run."""
    study = population_study(tmp_path / "long", clusters=[0, 0, 1, 1], rounds=130, seeds=1, reads=2)
    reads = build_payload(*load_runs([study]))["reads"]
    assert len(reads["ends"]) == 60
    assert reads["ends"][-1] == 130
    assert unpack(reads["methods"][0]["counts"]).sum() == 130 * 4 * 2


def test_curves_are_means_over_clients_and_over_clusters(population):
    """Against the table itself, at the last round, with clusters of 6, 4 and 2."""
    runs, _ = load_runs([population])
    data = build_payload(runs)
    (curve,) = [
        c
        for c in data["curves"]
        if (c["method"], c["split"], c["metric"]) == (0, "validation", "accuracy")
    ]
    expected = []
    for run in runs[:2]:
        table = run.metrics
        rows = table[
            (table["round"] == 9)
            & (table["split"] == "validation")
            & (table["metric"] == "accuracy")
        ]
        per_cluster = rows.groupby("cluster")["value"].mean()
        expected.append([rows["value"].mean(), per_cluster.mean(), *per_cluster])
    np.testing.assert_allclose(unpack(curve["mean"])[:, -1], np.mean(expected, axis=0), atol=2e-5)
    np.testing.assert_allclose(unpack(curve["std"])[:, -1], np.std(expected, axis=0), atol=2e-5)


def test_gain_of_a_client_is_its_mean_over_seeds(small):
    """DAC against Local: (.2 + .2) / 2, (.1 + .2) / 2, (.3 + .2) / 2, (-.1 + 0) / 2."""
    data = build_payload(*load_runs([small]))
    gain = unpack(data["clients"]["gain"])
    np.testing.assert_allclose(gain[0], [0.2, 0.15, 0.25, -0.05], atol=1e-6)
    assert np.isnan(gain[1]).all()


def test_a_study_without_any_read_has_no_heatmaps(small):
    """Local alone never reads."""
    assert build_payload(*load_runs([small]))["reads"] is None


def test_the_peers_of_a_client_are_those_that_it_read_most(write_run, tmp_path):
    """Client 0 reads 2 three times and 1 once; nobody reads 0, and 2 reads nobody. Lost messages do not count."""
    metrics = [(0, c, 0, "validation", "current", "loss", 1.0) for c in range(4)]
    times = {(0, 2): 3, (0, 1): 1, (1, 2): 1, (3, 1): 2}
    edges = [(0, i, j, "mix", 0.5, 8) for (i, j), count in times.items() for _ in range(count)]
    edges += [(0, 0, 3, "missing", 0.0, 0)] * 9
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges
    )
    (reads,) = build_payload(*load_runs([tmp_path]))["reads"]["methods"]
    peers, read = unpack(reads["peers"]), unpack(reads["times"])
    most = [
        {int(j): int(n) for j, n in zip(*row, strict=True) if n}
        for row in zip(peers, read, strict=True)
    ]
    assert most == [{2: 3, 1: 1}, {2: 1}, {}, {1: 2}]
    assert (peers[0, 0], peers[3, 0]) == (2, 1), "the one that is read most comes first"


def test_a_sample_has_clients_of_every_cluster_in_its_share():
    """Of 40 and 10 clients a tenth: four and one or so, and always the first and the last in order of cluster."""
    cluster = np.array([0, 0, 0, 0, 1] * 10)
    chosen = sample_clients(cluster, 5)
    assert np.bincount(cluster[chosen]).tolist() == [4, 1]
    assert {0, 49} <= set(chosen.tolist())
    np.testing.assert_array_equal(chosen, np.sort(chosen))
    np.testing.assert_array_equal(sample_clients(cluster, 50), np.arange(50))


def test_of_a_large_population_a_sample_is_shown_and_means_are_over_all(write_run, tmp_path):
    """2,500 clients in two clusters; client i has the value i, and read client i + 1 once."""
    clients = 2500
    ids = np.arange(clients)
    metrics = [
        (round, int(i), int(i % 2), split, model, "accuracy", float(i))
        for round, split, model in [
            (0, "validation", "current"),
            (1, "validation", "current"),
            (1, "test", "best"),
        ]
        for i in ids
    ]
    edges = [(0, int(i), int((i + 1) % clients), "mix", 0.5, 8) for i in ids]
    write_run(
        tmp_path / "small" / "Random" / "seed-0",
        kind="random",
        label="Random",
        seed=0,
        metrics=metrics,
        edges=edges,
    )
    told = {"labels": [[1, int(i)] for i in ids], "classes": ["a", "b"], "train": ids.tolist()}
    told |= {"shift": [], "validation": ids.tolist(), "name": "made up", "fingerprint": "0"}
    (tmp_path / "small" / "federation.json").write_text(json.dumps(told))
    page = build_payload(*load_runs([tmp_path / "small"]))
    shown = np.array(page["clients"]["shown"])
    assert len(shown) == MOST_CLIENTS < clients
    np.testing.assert_array_equal(unpack(page["clients"]["final"])[0], shown)
    assert page["clients"]["means"]["final"] == [ids.mean()]
    np.testing.assert_allclose(unpack(page["clients"]["curves"][0]["values"])[1], shown, atol=0.02)
    reads = page["reads"]["methods"][0]
    np.testing.assert_array_equal(unpack(reads["peers"])[:, 0], (shown + 1) % clients)
    np.testing.assert_array_equal(unpack(reads["times"]), [[1, 0, 0, 0, 0, 0, 0, 0]] * len(shown))
    assert len(reads["communities"]) == len(page["cluster"]) == clients
    assert page["data"]["train"] == shown.tolist()
    assert page["data"]["sums"] == {
        "0": {"clients": 1250, "labels": [1250, int(ids[::2].sum())]},
        "1": {"clients": 1250, "labels": [1250, int(ids[1::2].sum())]},
    }


@pytest.fixture
def many_clusters(write_run, tmp_path):
    """1,200 clients in 300 clusters, client i in i modulo 300; it has accuracy i / 1200 and read i + 1 twice, i + 2 once."""
    clients, ids = 1200, np.arange(1200)
    metrics = [
        (round, int(i), int(i % 300), split, model, "accuracy", i / clients)
        for round, split, model in [
            (0, "validation", "current"),
            (1, "validation", "current"),
            (1, "test", "best"),
        ]
        for i in ids
    ]
    edges = [
        (round, int(i), int((i + step) % clients), "mix", 0.5, 8)
        for i in ids
        for round, step in ((0, 1), (1, 1), (1, 2))
    ]
    write_run(
        tmp_path / "many" / "Random" / "seed-0",
        kind="random",
        label="Random",
        seed=0,
        metrics=metrics,
        edges=edges,
    )
    told = {"labels": [[1, int(i)] for i in ids], "classes": ["a", "b"], "train": ids.tolist()}
    told |= {"shift": [], "validation": ids.tolist(), "name": "made up", "fingerprint": "0"}
    told["images"] = [["data:,"]] * 300
    (tmp_path / "many" / "federation.json").write_text(json.dumps(told))
    return tmp_path / "many"


def test_a_page_of_many_planted_clusters_has_their_mean_alone(many_clusters):
    runs, problems = load_runs([many_clusters])
    page = build_payload(runs, problems)
    rows = page["results"]["rows"]
    assert {row["cluster"] for row in rows} == {"all", "clusters"}
    assert [row["mean"] for row in rows] == pytest.approx([np.arange(1200).mean() / 1200] * 2)
    (curve,) = [one for one in page["curves"] if one["metric"] == "accuracy"]
    assert curve["mean"]["shape"] == [2, 2]
    assert "images" not in page["data"]
    assert max(page["reads"]["cell"]) + 1 == 240, "five clients in each cell"
    assert set(np.bincount(page["reads"]["cell"])) == {5}
    first = render_overview(page, runs)
    assert "<dd>300, each of 4 clients</dd>" in first
    assert "cluster 7" not in first
    # In the order of clusters: 0, 300, 600, 900, 1, ... so that a cell has neighbors of two.
    assert np.flatnonzero(np.array(page["reads"]["cell"]) == 0).tolist() == [0, 1, 300, 600, 900]


def test_the_page_and_the_results_agree_on_how_many_clusters_are_many():
    script = (Path(report_page.__file__).parent / "assets" / "core.js").read_text()
    assert f"const MOST_CLUSTERS = {MOST_CLUSTERS};" in script


def test_labels_of_many_clusters_are_added_up_over_all_clients(monkeypatch, many_clusters):
    """1,200 clients, of which a page shows 100."""
    from coterie.report import data

    monkeypatch.setattr(data, "sample_clients", lambda cluster: np.arange(0, 1200, 12))
    found = build_payload(*load_runs([many_clusters]))["data"]
    assert found["sums"] == {"-1": {"clients": 1200, "labels": [1200, 1200 * 1199 // 2]}}
    assert len(found["train"]) == 100


def test_a_window_holds_its_own_reads_alone(write_run, tmp_path):
    """Eight clients in clusters of four: in round 0 they read five times those of their own parity, in round 1 once
    those of their cluster.

    Groups by parity hold two clients of each cluster: 4 pairs agree, of 12 in each grouping and 28
    in all, so the adjusted Rand index is (4 - 144/28) / (12 - 144/28) = -1/6. Were round 0 counted
    in the second window, its reads would outweigh those of round 1.
    """
    cluster = [0] * 4 + [1] * 4
    metrics = [
        (r, c, cluster[c], "validation", "current", "loss", 1.0) for r in (0, 1) for c in range(8)
    ]
    pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
    edges = [(0, i, j, "mix", 0.5, 8) for i, j in pairs if i % 2 == j % 2] * 5
    edges += [(1, i, j, "mix", 0.5, 8) for i, j in pairs if cluster[i] == cluster[j]]
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges
    )
    (reads,) = build_payload(*load_runs([tmp_path]))["reads"]["methods"]
    windows = [(one["round"], one["groups"], pytest.approx(one["ari"])) for one in reads["windows"]]
    assert windows == [(0, 2, -1 / 6), (1, 2, 1.0)]
    # The same run without planted clusters: nothing to compare with, and so no windows.
    alone = [(*row[:2], 0, *row[3:]) for row in metrics]
    write_run(
        tmp_path / "t" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=alone, edges=edges
    )
    (reads,) = build_payload(*load_runs([tmp_path / "t"]))["reads"]["methods"]
    assert reads["windows"] == []
    assert len(reads["communities"]) == 8


def curve_of(data, label):
    (found,) = [c for c in data["curves"] if data["methods"][c["method"]]["label"] == label]
    return (
        found["rounds"],
        unpack(found["mean"])[0].tolist(),
        unpack(found["std"])[0].tolist(),
        found["seeds"],
    )


def losses(values, last):
    """The validation losses of one client by round, and the final test of a finished run."""
    rows = [(r, 0, 0, "validation", "current", "loss", value) for r, value in enumerate(values)]
    return [*rows, (len(values) - 1, 0, 0, "test", "best", "loss", last)]


def test_every_round_of_a_curve_is_a_mean_over_the_same_seeds(write_run, tmp_path):
    """Seed 1 stopped after two rounds with 2.0 and keeps it: (4 + 6) / 2, (3 + 2) / 2, (1 + 2) / 2.

    Where B has finished seed 0 alone, A's curve beside it is that of seed 0 as well.
    """
    for seed, values in enumerate([[4.0, 3.0, 1.0], [6.0, 2.0]]):
        rows = losses(values, 1.0)
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}",
            kind="dac",
            label="A",
            seed=seed,
            metrics=rows,
            rounds=3,
        )
    rounds, mean, deviation, seeds = curve_of(build_payload(*load_runs([tmp_path])), "A")
    assert (rounds, seeds) == ([0, 1, 2], 2)
    assert mean == pytest.approx([5.0, 2.5, 1.5], abs=1e-3)
    assert deviation == pytest.approx([1.0, 0.5, 0.5], abs=1e-3)
    rows = losses([7.0, 7.0, 7.0], 1.0)
    write_run(
        tmp_path / "s" / "B" / "seed-0", kind="dac", label="B", seed=0, metrics=rows, rounds=3
    )
    data = build_payload(*load_runs([tmp_path]))
    rounds, mean, deviation, seeds = curve_of(data, "A")
    assert (mean, seeds) == (pytest.approx([4.0, 3.0, 1.0], abs=1e-3), 1)
    assert np.isnan(deviation).all(), "a single seed has no deviation"
    assert [one["seeds"] for one in data["cost"]] == [1, 1]


def test_while_runs_go_on_a_curve_ends_where_all_seeds_have_come(write_run, tmp_path):
    """Seed 0 has three rounds and seed 1 two, neither is over: (4 + 6) / 2 and (3 + 2) / 2, and no third round."""
    for seed, values in enumerate([[4.0, 3.0, 1.0], [6.0, 2.0]]):
        rows, folder = losses(values, 1.0)[:-1], tmp_path / "s" / "A" / f"seed-{seed}"
        write_run(folder, kind="dac", label="A", seed=seed, metrics=rows, rounds=9, done=False)
    rounds, mean, _, _ = curve_of(build_payload(*load_runs([tmp_path])), "A")
    assert (rounds, mean) == ([0, 1], pytest.approx([5.0, 2.5], abs=1e-3))


def test_the_page_ranks_at_equal_bytes_as_the_command_does(population):
    """The same rows, metric and split, from the same definition."""
    found, ranking = (
        build_payload(*load_runs([population]))["equal"][0],
        rank_at_equal_budget(population),
    )
    assert found["rows"] == json.loads(json.dumps([asdict(row) for row in ranking.rows]))
    assert (found["metric"], found["split"], found["heading"]) == (
        ranking.metric,
        ranking.split,
        ranking.heading,
    )


def test_the_payload_is_json_without_nan(data):
    """Browsers refuse NaN."""
    assert json.loads(json.dumps(data, allow_nan=False))["study"] == "population"


def test_cost_is_per_client_and_cumulative(write_run, tmp_path):
    """Two clients; client 0 receives 100 bytes in round 0 and 300 in round 1, and one message is lost."""
    metrics = [
        (r, c, 0, "validation", "current", "loss", 4.0 - r - c) for r in (0, 1) for c in (0, 1)
    ]
    metrics += [(r, c, 0, "train", "current", "passes", 10.0) for r in (0, 1) for c in (0, 1)]
    edges = [(0, 0, 1, "mix", 0.5, 100), (1, 0, 1, "mix", 0.5, 300), (1, 1, 0, "missing", 0.0, 0)]
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges
    )
    (cost,) = build_payload(*load_runs([tmp_path]))["cost"]
    assert (cost["bytes"], cost["reads"], cost["missing"], cost["counted"]["passes"]) == (
        200.0,
        1.0,
        0.5,
        20.0,
    )
    assert cost["counted"]["extra_models"] is None
    assert (cost["rounds"], cost["spent"], cost["reached"]) == ([0, 1], [50.0, 200.0], [3.5, 2.5])
    assert (cost["train_samples"], cost["wall_s"]) == (480.0, 2.0)


def test_cost_is_of_the_clients_in_rounds_and_not_of_attackers(write_run, tmp_path, listed):
    """As above with a client that joined at the end, and an attacker; samples are those of all together."""
    metrics = [
        (r, c, 0, "validation", "current", "loss", 4.0 - r - c) for r in (0, 1) for c in (0, 1)
    ]
    metrics += [(r, c, 0, "train", "current", "passes", 10.0) for r in (0, 1) for c in (0, 1)]
    metrics += [(1, 2, 0, "new_clients", "joined", "loss", 1.0)]
    edges = [(0, 0, 1, "mix", 0.5, 100), (1, 0, 1, "mix", 0.5, 300), (1, 1, 0, "missing", 0.0, 0)]
    theirs = [(0, 3, 0, "mix", 0.5, 900), (1, 3, 0, "missing", 0.0, 0)]
    found = {}
    for study, more in (("new", []), ("attacked", theirs)):
        folder = tmp_path / study / "A" / "seed-0"
        write_run(folder, kind="dac", label="A", seed=0, metrics=metrics, edges=edges + more)
        if more:
            config = folder / "config.toml"
            attack = '[[attacks]]\nkind = "copy"\nclients = 1\n\n[data]'
            config.write_text(config.read_text("utf-8").replace("[data]", attack), "utf-8")
            listed(folder)
        (found[study],) = build_payload(*load_runs([tmp_path / study]))["cost"]
    for cost in found.values():
        assert (cost["bytes"], cost["reads"], cost["missing"]) == (200.0, 1.0, 0.5)
        assert (cost["counted"]["passes"], cost["spent"]) == (20.0, [50.0, 200.0])
    assert found["new"]["train_samples"] == 480.0
    assert found["attacked"]["train_samples"] is None


def test_random_reads_are_of_the_clients_in_rounds(write_run, tmp_path):
    """Two clusters of two: a third of random reads is within them, whoever joins one at the end."""
    metrics = [(0, c, c // 2, "validation", "current", "loss", 1.0) for c in range(4)]
    metrics += [(0, c, 0, "new_clients", "joined", "loss", 1.0) for c in (4, 5)]
    edges = [(0, c, (c + 1) % 4, "mix", 0.5, 8) for c in range(4)]
    write_run(tmp_path / "s/A/seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges)
    reads = build_payload(*load_runs([tmp_path / "s"]))["reads"]
    assert reads["expected"] == pytest.approx(1 / 3)


def test_clusters_are_found_by_clients_in_rounds_that_have_one(write_run, tmp_path):
    """Two pairs read each other, and one client another once; an attacker reads all; a client joins at the end."""
    metrics = [
        (r, c, c // 2, "validation", "current", "loss", 1.0) for r in range(5) for c in range(4)
    ]
    metrics += [(4, 4, 0, "new_clients", "joined", "loss", 1.0)]
    edges = [(r, c, c ^ 1, "mix", 0.5, 8) for r in range(5) for c in range(4)]
    edges += [(r, 5, c, "mix", 0.5, 8) for r in range(5) for c in range(4)] + [
        (0, 0, 2, "mix", 0.5, 8)
    ]
    write_run(tmp_path / "s/A/seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges)
    reads = build_payload(*load_runs([tmp_path / "s"]))["reads"]
    (one,) = reads["methods"]
    assert (one["asked"], one["found"], reads["expected"]) == (4, [4] * 4, 0.25)
    np.testing.assert_allclose(unpack(one["share"]), [0.8, 1, 1, 1, 1], atol=1e-4)


def test_reads_without_planted_clusters_are_not_compared_with_any(write_run, tmp_path):
    """Two clients without a cluster: nothing to be found, and no share of reads."""
    metrics = [(0, c, -1, "validation", "current", "loss", 1.0) for c in range(2)]
    edges = [(0, 0, 1, "mix", 0.5, 8), (0, 1, 0, "mix", 0.5, 8)]
    write_run(tmp_path / "s/A/seed-0", kind="dac", label="A", seed=0, metrics=metrics, edges=edges)
    reads = build_payload(*load_runs([tmp_path / "s"]))["reads"]
    (one,) = reads["methods"]
    assert (reads["expected"], one["asked"], one["rounds"]) == (None, 0, [])


def test_labels_that_a_method_found_are_compared_with_the_truth(write_run, tmp_path):
    """In round 0 all four clients share a label (index 0); in round 1 the labels are the clusters under other names."""
    found = {0: [3, 3, 3, 3], 1: [5, 5, 2, 2]}
    metrics = [
        (r, c, c // 2, "train", "current", "label", float(v))
        for r, row in found.items()
        for c, v in enumerate(row)
    ]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="ifca", label="A", seed=0, metrics=metrics)
    data = build_payload(*load_runs([tmp_path]))
    (labels,) = data["labels"]
    assert (labels["ari"], labels["groups"]) == ([0.0, 1.0], [1.0, 2.0])
    np.testing.assert_array_equal(unpack(labels["label"]), [[3, 3, 3, 3], [5, 5, 2, 2]])
    assert data["curves"] == []


def test_a_node_that_hosts_one_client_has_a_page(write_run, tmp_path):
    """Its own row, and reads of clients that it does not host; no planted cluster is known."""
    metrics = [(r, 2, -1, "validation", "current", "loss", 2.0 - r) for r in (0, 1)]
    edges = [(0, 2, 5, "mix", 0.5, 100), (1, 2, 0, "missing", 0.0, 0)]
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=metrics,
        edges=edges,
        done=False,
    )
    data = build_payload(*load_runs([tmp_path / "s"]))
    assert data["cluster"] == [-1] * 6
    assert data["clusters"] == []
    assert data["reads"]["expected"] is None
    assert unpack(data["reads"]["methods"][0]["counts"]).sum() == 1


def test_names_of_clients_are_in_the_page_once(named):
    """A client without a name has none; the provenance of the runs does not repeat them."""
    study, names = named
    data = build_payload(*load_runs([study]))
    assert data["names"] == [*names.values(), None]
    assert all("client_names" not in run["stored"] for run in data["provenance"])
    assert build_payload(*load_runs([study]))["cluster"] == [0, 0, 0, 1]


def test_numbered_clients_have_no_names_in_the_page(small):
    assert build_payload(*load_runs([small]))["names"] is None


def test_feature_and_class_names_of_the_data_reach_the_page(small):
    told = {
        "classes": ["no", "<b>"],
        "features": ["age", "ضغط"],
        "labels": [[1, 1]] * 4,
        "client_names": ["a"] * 4,
    }
    (small / "federation.json").write_text(json.dumps(told))
    data = build_payload(*load_runs([small]))["data"]
    assert (data["classes"], data["features"]) == (["no", "<b>"], ["age", "ضغط"])
    assert "client_names" not in data


def test_the_command_of_a_renamed_study_is_of_its_folder(small):
    moved = small.rename(small.parent / "an other")
    assert (
        build_payload(*load_runs([moved]), moved)["command"]
        == "coterie run 'an other/config.toml' --out again"
    )


def test_rounds_that_a_node_left_out_are_said_on_the_page(small, listed):
    """As in the terminal: a model of fewer rounds is not compared without a word."""
    path = small / "DAC" / "seed-0" / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skipped": [[2, 5]]}))
    listed(path.parent)
    assert build_payload(*load_runs([small]))["notes"] == [
        "DAC, seed 0: rounds 2 to 5 were left out, not trained: the others went on."
    ]


def test_tests_of_newcomers_are_no_curve(tmp_path, write_run, final_rows):
    """A newcomer that trains no round has its newest model tested, in a split of its own."""
    rows = final_rows([0.5, 0.5], [0, 0])
    rows += [(n, 0, 0, "validation", "current", "accuracy", 0.1 * n) for n in range(3)]
    rows += [(2, 1, 0, "new_clients", "current", "accuracy", 0.9)]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="local", label="A", seed=0, metrics=rows)
    found = build_payload(*load_runs([tmp_path / "s"]))["curves"]
    assert [one["split"] for one in found] == ["validation"]
    np.testing.assert_allclose(unpack(found[0]["mean"])[0], [0, 0.1, 0.2], atol=1e-5)


def test_charts_are_of_the_seeds_with_the_clients_of_the_first(write_run, final_rows, tmp_path):
    """Seed 1 has a third client: charts have a place for two, a note says so, and costs are of both seeds."""
    for seed, clusters in ((0, [0, 1]), (1, [1, 0, 0])):
        rows = final_rows([0.5 + 0.1 * seed] * len(clusters), clusters)
        for r in (0, 1):
            for c, cluster in enumerate(clusters):
                rows.append((r, c, cluster, "train", "current", "label", float(cluster)))
                rows.append((r, c, cluster, "validation", "current", "accuracy", 0.1 * c + 0.5 * r))
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}", kind="ifca", label="A", seed=seed, metrics=rows
        )
    data = build_payload(*load_runs([tmp_path / "s"]))
    assert data["cluster"] == [0, 1]
    assert unpack(data["labels"][0]["label"]).tolist() == [[0, 1], [0, 1]]
    assert unpack(data["clients"]["curves"][0]["values"]) == pytest.approx(
        np.array([[0.0, 0.1], [0.5, 0.6]]), abs=1e-4
    )
    (note,) = data["notes"]
    assert "those of seed 0: with seed 1 other clients take part" in note
    assert data["results"]["rows"][0]["seeds"] == 2
    assert data["cost"][0]["seeds"] == 2


def test_the_curve_of_a_node_is_in_the_place_of_its_client(write_run, tmp_path):
    """Client 0 of three is hosted here, and reads client 2: the page has a place for each of them."""
    losses = [3.0, 2.0, 1.0]
    rows = [(r, 0, -1, "validation", "current", "loss", loss) for r, loss in enumerate(losses)]
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows,
        edges=[(0, 0, 2, "mix", 0.5, 100)], done=False,
    )  # fmt: skip
    data = build_payload(*load_runs([tmp_path / "s"]))
    values = unpack(data["clients"]["curves"][0]["values"])
    assert values.shape == (3, len(data["cluster"])) == (3, 3)
    assert values[:, 0] == pytest.approx(losses, abs=1e-4)
    assert np.isnan(values[:, 1:]).all()


def test_clients_whose_names_are_one_when_they_are_cut_are_columns_of_their_own(
    write_run, final_rows, listed, tmp_path
):
    folder = write_run(
        tmp_path / "s" / "A" / "seed-0", kind="local", label="A", seed=0,
        metrics=final_rows([0.25, 0.75], [-1, -1]),
    )  # fmt: skip
    stored = json.loads((folder / "provenance.json").read_text())
    names = {str(i): f"University hospital, Trondheim, ward {i}" for i in range(2)}
    (folder / "provenance.json").write_text(json.dumps({**stored, "client_names": names}))
    listed(folder)
    runs, _ = load_runs([tmp_path / "s"])
    page = render_overview(build_payload(runs), runs)
    heads = re.findall('<th scope="col">([^<]*)', page.partition("by-client")[2])
    assert heads[1:3] == ["University hospital… (0)", "University hospital… (1)"]
    assert re.findall('data-value="([^"]*)"', page.partition("by-client")[2]) == ["0.25", "0.75"]
