"""A model that diverged: no mean, curve, figure or ranking may hide it, nor confuse it with what the data leave undefined.

One hand-made study of three clients and rounds 0 to 2. With "Bad" the model of client 2 diverges in
round 1. Client 1 has test samples of one class, so its AUROC is undefined with every method, and
client 0 has no validation data.
"""

import math

import numpy as np
import pandas as pd
import pytest

from coterie.report import plots, trackers
from coterie.report.data import build_payload
from coterie.report.data.curves import compute_mean_curve
from coterie.report.data.packing import build_dense_table
from coterie.report.page import render_client_table
from coterie.results.equal_budget import rank_at_equal_budget
from coterie.results.gains import compute_client_gains, compute_study_gains
from coterie.results.stored_runs import compute_test_curve, load_runs
from coterie.runtime.final_metrics import compute_maxima, find_diverged

NAN = math.nan
AUROC = {"Local": [0.5, NAN, 0.5], "Good": [0.75, NAN, 1.0], "Bad": [0.75, NAN, NAN]}
KINDS = {"Local": "local", "Good": "dac", "Bad": "pens"}


def rows_of(label):
    """The rows of a run."""
    rows = []
    for index in range(3):
        for split, model in (("validation", "current"), ("test", "current"), ("test", "best")):
            for client in range(3):
                lost = label == "Bad" and client == 2 and index >= 1
                empty = split == "validation" and client == 0
                loss = NAN if lost or empty else 1.0 + client
                auroc = NAN if empty or lost else AUROC[label][client]
                accuracy = NAN if empty or lost else 0.25 * client
                if model == "best" and index < 2:
                    continue
                head = (index, client, 0, split, model)
                rows += [(*head, "loss", loss), (*head, "auroc", auroc)]
                rows.append((*head, "accuracy", accuracy))
    if label == "Bad":
        rows += [(index, 2, 0, "train", "current", "diverged", 1.0) for index in (1, 2)]
    return rows


@pytest.fixture
def study(tmp_path, write_run):
    """The folder."""
    for label, kind in KINDS.items():
        for seed in (0, 1):
            write_run(
                tmp_path / "s" / label / f"seed-{seed}",
                kind=kind,
                label=label,
                seed=seed,
                # only seed 0 of "Bad" diverges
                metrics=rows_of("Good" if seed else label),
                rounds=3,
                study="s",
            )
    return tmp_path / "s"


def load(study, label, seed=0):
    """One run."""
    (run,), _ = load_runs([study / label / f"seed-{seed}"])
    return run


def test_a_row_is_of_a_diverged_model_where_its_loss_is_not_finite_and_there_are_data(study):
    """Neither the AUROC of client 1 nor the validation data that client 0 lacks."""
    table = load(study, "Bad").metrics
    lost = table.loc[find_diverged(table), ["round", "client"]].drop_duplicates()
    assert sorted(map(tuple, lost.to_numpy().tolist())) == [(1, 2), (2, 2)]
    # validation and test in round 1, and "best" too in round 2; three metrics each
    assert int(find_diverged(table).sum()) == 3 * (2 + 3)
    assert not find_diverged(load(study, "Good").metrics).any()


def test_a_client_that_diverges_from_the_start_is_known_by_its_training(study):
    """Its validation loss is never finite, as if it had no data: `diverged` tells the difference."""
    table = load(study, "Good").metrics
    table.loc[((table["client"] == 1) & (table["split"] == "validation")).to_numpy(), "value"] = NAN
    assert not find_diverged(table).any()
    extra = table.iloc[:1].assign(client=1, split="train", metric="diverged", value=1.0)
    both = pd.concat([table.astype({"split": str, "metric": str}), extra], ignore_index=True)
    lost = both.loc[find_diverged(both)]
    assert set(lost["client"]) == {1}
    assert set(lost["split"]) == {"validation"}


def test_gains_leave_out_whom_the_data_leave_undefined_and_keep_whom_diverged(study):
    """AUROC: 0.25 for client 0 and 0.5 for client 2 with "Good"; with "Bad" client 2 has none."""
    runs, _ = load_runs([study])
    found = compute_client_gains(runs, "Local", "auroc")
    assert found["Good"][0].to_dict() == {0: 0.25, 2: 0.5}
    assert found["Bad"][0].loc[0] == 0.25
    assert found["Bad"][0].index.tolist() == [0, 2]
    assert math.isnan(found["Bad"][0].loc[2])
    rows = {row["label"]: row for row in compute_study_gains(study)["rows"]}
    assert rows["Good"]["mean"] == 0.0  # by accuracy, the main metric
    assert math.isnan(rows["Bad"]["mean"])


def test_curves_end_where_a_model_diverges(study):
    """Accuracies on validation data: 0.25 and 0.5 of clients 1 and 2; client 0 has none and does not count."""
    rounds, values = build_dense_table(load(study, "Bad"), "validation", "accuracy")
    assert rounds.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(values[:, 2], [0.5, np.inf, np.inf])
    assert np.isnan(values[:, 0]).all()
    for label, expected in {"Good": [0.375] * 3, "Bad": [0.375, NAN, NAN]}.items():
        _, mean = compute_mean_curve([load(study, label)], "accuracy")
        np.testing.assert_array_equal(mean, expected)
    # the other seed of "Bad" is well: the mean over seeds is of both
    both = [load(study, "Bad"), load(study, "Bad", 1)]
    np.testing.assert_array_equal(compute_mean_curve(both, "accuracy")[1], [0.375, NAN, NAN])
    figure, table = plots.draw_curves([("Bad", load(study, "Bad"))], split="validation")
    own = table.loc[(table["metric"] == "accuracy").to_numpy(), "mean"]
    np.testing.assert_array_equal(own.to_numpy(float), [0.375, NAN, NAN])
    assert "Bad (diverged)" in figure.axes[0].get_legend_handles_labels()[1]


@pytest.mark.full
def test_the_page_has_no_mean_of_a_method_with_a_diverged_client(study):
    """Final AUROC of "Good": (0.75 + 1) / 2 over the clients that have one."""
    runs, problems = load_runs([study])
    page = build_payload(runs, problems)
    place = {method["label"]: at for at, method in enumerate(page["methods"])}
    final = page["clients"]["means"]["final"]
    assert final[place["Good"]] == 0.25  # accuracies 0, 0.25, 0.5
    shown = final[place["Bad"]]
    assert shown is None or math.isnan(shown)


def test_the_table_of_clients_has_a_dash_where_one_seed_diverged(study):
    """And a number where only the data leave a value undefined in one seed."""
    runs = [load(study, label, seed) for label in KINDS for seed in (0, 1)]
    payload = {"names": ["a", "b", "c"], "clusters": [], "results": {"seeds": [0, 1]}}
    metric = runs[0].known_metrics["accuracy"]
    text = render_client_table(payload, runs, metric)
    bad = text.partition(">Bad<")[2].partition("</tr>")[0]
    assert "25.00" in bad
    assert "50.00" not in bad
    assert "50.00" in text.partition(">Good<")[2].partition("</tr>")[0]


def test_figures_say_where_a_value_is_missing(study):
    """No mark is drawn for NaN, so a text stands in its place."""
    named = [(label, load(study, label)) for label in KINDS]
    for draw in (plots.draw_bars, plots.draw_client_strips):
        figure, _ = draw(named, metric="auroc")
        texts = [text for text in figure.axes[0].texts if text.get_text() == "not defined"]
        assert [round(text.get_position()[0]) for text in texts] == [2]


def test_rounds_in_which_a_model_diverged_have_no_test_mean(study):
    """(0 + 0.25 + 0.5) / 3 before, and nothing after: the best round of the method is its first."""
    table = load(study, "Bad").metrics
    rounds, means = compute_test_curve(table, "accuracy")
    assert rounds == [0, 1, 2]
    np.testing.assert_array_equal(means, [0.25, NAN, NAN])
    # AUROC of client 1 is undefined in every round and does not count
    np.testing.assert_array_equal(compute_test_curve(table, "auroc")[1], [0.75, NAN, NAN])
    best = compute_maxima(table, np.arange(3))["accuracy_max"]
    assert best.tolist() == [0.0, 0.25, 0.5]
    # A client that is never defined is there, and no round is the best without it.
    table.loc[((table["client"] == 2) & (table["split"] == "test")).to_numpy(), "value"] = NAN
    assert math.isnan(compute_maxima(table, np.arange(3))["accuracy_max"][2])


def test_trackers_average_whom_the_data_define_and_nobody_else(study):
    """Validation means of "Bad": 0.375, then NaN; those of client 0 do not exist."""
    logged = {}

    class Writer:
        def log(self, step, values):
            logged[step] = dict(values)

        def close(self):
            pass

    trackers.export_runs([load(study, "Bad")], lambda name, settings: Writer())
    assert logged[1]["validation/accuracy"] == 0.375
    assert logged[1]["test/auroc"] == 0.75
    assert math.isnan(logged[2]["validation/accuracy"])
    assert math.isnan(logged[2]["test/auroc"])


def test_methods_at_equal_bytes_are_not_ranked_without_whom_diverged(study):
    """ "Bad" is last, without a value."""
    ranked = rank_at_equal_budget(study)
    assert ranked.rows[-1].label == "Bad"
    assert math.isnan(ranked.rows[-1].value)
    assert all(math.isfinite(row.value) for row in ranked.rows[:-1])
