import json
import math
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from coterie.errors import DataError
from coterie.functional.metrics import ACCURACY
from coterie.report import page
from coterie.report.page import describe_privacy
from coterie.results.gains import compute_study_gains
from coterie.results.stored_runs import StoredRun, load_runs
from coterie.results.summary import summarize_study

HOSTILE = '</script><script>alert("x")</script><b>&'


class Tables(HTMLParser):
    """The cells of the tables of a page: (table class, metric) -> row label -> exact values and texts."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.row, self.texts = {}, None, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "table" and "data-metric" in found:
            self.current = self.tables.setdefault((found["class"], found["data-metric"]), {})
        if tag == "tr" and "data-label" in found:
            self.row = self.current.setdefault(found["data-label"], [])
        if tag == "td" and "data-value" in found:
            self.row.append(float(found["data-value"]))


def test_accessibility_attributes_exist():
    """A misspelled one, such as aria-labeledby, is ignored by every browser."""
    known = {
        "controls",
        "hidden",
        "keyshortcuts",
        "label",
        "labelledby",
        "live",
        "pressed",
        "selected",
        "sort",
    }
    text = "".join(page.load_asset(name) for name in (*page.SCRIPTS, "report.html"))
    assert set(re.findall(r"aria-([a-z]+)", text)) <= known | {"valuetext"}


@pytest.mark.full
def test_numbers_of_the_page_are_those_of_the_summary(population):
    """Every mean, in its row and in the order of the columns, for both metrics."""
    tables = Tables(page.write_report(population).read_text()).tables
    for metric in ("accuracy", "loss"):
        expected: dict[str, list[float]] = {}
        for row in summarize_study(population)["rows"]:
            if row["metric"] == metric:
                expected.setdefault(row["label"], []).append(row["mean"])
        assert tables["results", metric] == expected
    gained = {
        row["label"]: [row["mean"], row["worst_tenth"], row["lost"]]
        for row in compute_study_gains(population)["rows"]
    }
    assert tables["gains", "accuracy"] == gained


def test_the_text_of_a_cell_is_its_value_rounded(small):
    """DAC over all clients: 63.75 ± 1.25 per cent."""
    assert "63.75 <small>± 1.25</small>" in page.write_report(small).read_text()


def test_one_seed_has_no_deviation(tmp_path, write_run, final_rows):
    """Its mean stands alone, where two seeds that agree show a zero; clusters without names are told by number."""
    rows = final_rows([0.5, 0.5, 0.25, 1.0], [0, 0, 0, 1])
    write_run(tmp_path / "one" / "DAC" / "seed-0", kind="dac", label="DAC", seed=0, metrics=rows)
    text = page.write_report(tmp_path / "one").read_text()
    assert ">56.25</td>" in text
    assert "<small>±" not in text
    assert "<dd>cluster 0 (3 clients), cluster 1 (1 client)</dd>" in text
    write_run(tmp_path / "one" / "DAC" / "seed-1", kind="dac", label="DAC", seed=1, metrics=rows)
    assert "56.25 <small>± 0.00</small>" in page.write_report(tmp_path / "one").read_text()


def test_a_cluster_that_one_of_two_seeds_plants_says_so(tmp_path, write_run, final_rows):
    """Cluster 1 is in seed 0 alone: its mean is that of one seed, in a row of two."""
    for seed, clusters in ((0, [0, 0, 0, 1]), (1, [0, 0, 0, 0])):
        rows = final_rows([0.5, 0.5, 0.25, 1.0], clusters)
        folder = tmp_path / "one" / "DAC" / f"seed-{seed}"
        write_run(folder, kind="dac", label="DAC", seed=seed, metrics=rows)
    text = page.write_report(tmp_path / "one").read_text()
    assert "100.00 <small>(n 1)</small></td>" in text
    assert text.count("<small>(n ") == 1
    assert '<th scope="row">DAC</th><td>2</td>' in text


def test_names_from_outside_are_escaped_everywhere(small, write_run, final_rows):
    """Study, label and cluster names that try to end a script or open an element stay text."""
    (small / "federation.json").write_text(json.dumps({"clusters": [HOSTILE, "plain"]}))
    rows = final_rows([0.5] * 4, [0, 0, 0, 1])
    write_run(
        small / "x" / "seed-0", kind="dac", label=HOSTILE, seed=0, metrics=rows, study=HOSTILE
    )
    runs, problems = load_runs([small / "x", small / "Local"])
    content = page.build_data(runs, problems, small)
    text = page.render_page(content, page.render_overview(content, runs))
    assert "alert(" in text
    assert '<script>alert("x")' not in text
    assert text.count("<script") == 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["study"] == HOSTILE


def test_the_page_asks_for_nothing_from_outside(small):
    """One file: no element loads anything, and the content security policy forbids connections."""
    text = page.write_report(small).read_text()
    markup = text[: text.index("<script>")]
    assert not re.search(r"(src|href)=\"(?!#)", markup)
    assert "default-src 'none'" in markup
    assert "connect-src 'none'" in markup


def data_of(text):
    """The data that a page holds for its scripts."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def planned(folder, seeds, labels):
    """Write the file of a study: which methods and seeds it should have."""
    methods = "".join(
        f'[[methods]]\nkind = "{label.lower()}"\nlabel = "{label}"\n' for label in labels
    )
    (folder / "config.toml").write_text(f"seeds = {seeds}\n{methods}")


def test_a_broken_run_is_named_in_the_page(small):
    """DAC has seed 1 alone (.6 .6 .6 .8, mean .65), so Local is averaged over seed 1 too (.4 .4 .4 .8, mean .5)."""
    (small / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"PAR1 cut off")
    text = page.write_report(small).read_text()
    data = data_of(text)
    damaged, seeds = data["notes"]
    assert damaged.startswith("DAC: seed 0 damaged (")
    assert seeds == "Means are over the seeds that all have: 1; left out: Local 0."
    assert f"<li>{seeds}</li>" in text
    means = {
        (row["label"], row["cluster"]): row["mean"]
        for row in data["results"]["rows"]
        if row["metric"] == "accuracy"
    }
    assert means["DAC", "all"] == pytest.approx(0.65)
    assert means["Local", "all"] == pytest.approx(0.5)
    assert all((row["seeds"], row["std"]) == (1, None) for row in data["results"]["rows"])
    assert data["gains"]["rows"][0]["mean"] == pytest.approx(0.15)
    assert "<small>±" not in text
    assert text.count('<th scope="row">DAC</th><td>1</td>') == 3, (
        "n stands in the tables of accuracy, gains and loss"
    )
    assert "4 clients, 2 planted clusters, 2 methods, 1 of 2 seeds" in text


def test_a_study_of_broken_runs_gets_a_page_that_says_so(small):
    """Nothing could be read: a page all the same."""
    for path in small.rglob("metrics.parquet"):
        path.unlink()
    text = page.write_report(small).read_text()
    assert "Nothing to show yet" in text
    assert data_of(text)["notes"] == [
        "DAC, Local: seeds 0, 1 damaged (metrics.parquet is not there (yet))",
        "No run is finished: there is nothing to compare.",
    ]


def test_a_run_on_its_way_is_named_and_left_out_of_the_tables(small, write_run, final_rows):
    """Its test values so far are no result; the others are compared as before."""
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
    text = page.write_report(small).read_text()
    assert data_of(text)["notes"] == [
        "Late: seed 0 unfinished (round 2 of 10)",
        "Means are over the seeds that all have: 0, 1; no finished run: Late.",
    ]
    assert "63.75 <small>± 1.25</small>" in text


def test_runs_that_the_study_should_have_are_named(small):
    """Three seeds of three methods were planned: seed 2 of two of them and all of Random are missing."""
    planned(small, [0, 1, 2], ["Local", "DAC", "Random"])
    assert data_of(page.write_report(small).read_text())["notes"] == [
        "Local, DAC: seed 2 missing",
        "Random: seeds 0-2 missing",
        "Means are over the seeds that all have: 0, 1; no finished run: Random.",
    ]


def test_the_page_of_one_run_misses_no_other(small):
    """Its own file plans this run alone; clusters have the names that the study gave them."""
    planned(small, [0, 1, 2], ["Local", "DAC", "Random"])
    (small / "federation.json").write_text(json.dumps({"clusters": ["upright", "turned"]}))
    data = data_of(page.write_report(small / "DAC" / "seed-1", small / "one.html").read_text())
    assert data["notes"] == []
    assert [cluster["name"] for cluster in data["clusters"]] == ["upright", "turned"]
    assert {row["cluster"] for row in data["results"]["rows"]} == {
        "upright",
        "turned",
        "all",
        "clusters",
    }


def test_several_studies_are_no_page(small, write_run, final_rows):
    """Their methods have the same names, and would be averaged together."""
    rows = final_rows([0.5] * 4, [0, 0, 0, 1])
    write_run(
        small.parent / "other" / "DAC" / "seed-7",
        kind="dac",
        label="DAC",
        seed=7,
        metrics=rows,
        study="other",
    )
    with pytest.raises(
        DataError, match=r"are of several studies, such as .*; give the folder of one"
    ):
        page.write_report(small.parent)


def test_a_study_without_local_says_that_there_is_nothing_to_compare_with(
    tmp_path, write_run, final_rows
):
    """No gain is invented."""
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=final_rows([0.2], [0]),
    )
    assert "no finished run of Local" in page.write_report(tmp_path / "s").read_text()


def test_the_study_is_described_in_words(small, write_run, final_rows):
    """Data, shift, clients, model, training and evaluation come from the resolved configuration."""
    config = {
        "rounds": 30,
        "data": {
            "dataset": "digits",
            "train": 60,
            "validation": 15,
            "shift": [{"kind": "rotation", "degrees": [0, 90]}],
        },
        "model": {"kind": "cnn-b"},
        "local": {"epochs": 1, "optimizer": "adam", "lr": 0.001, "batch_size": 8},
    }
    data = {
        "cluster": [0, 1],
        "clusters": [{"name": "up", "size": 1}],
        "methods": [{"label": "DAC", "kind": "dac"}],
    }
    text = page.render_study_description(config, data)
    for said in (
        "rotation: degrees 0, 90",
        "2, each with 60 training and 15 validation samples",
        "30 rounds, 1 local epoch a round, adam, learning rate 0.001, batches of 8",
        "up (1 client)",
        "each client&#x27;s best model on its validation set",
    ):
        assert said in text
    config["local"]["lr_schedule"] = [{"kind": "warmup", "length": 3}, "cosine"]
    assert (
        "adam, learning rate 0.001 (warmup, cosine), batches of 8"
        in page.render_study_description(config, data)
    )


def test_a_folder_without_runs_is_refused(tmp_path):
    """Nothing is written."""
    with pytest.raises(DataError, match="holds no run"):
        page.write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_hundred_clients_three_hundred_rounds_four_methods_and_three_seeds_stay_below_five_megabytes(
    population_study, tmp_path
):
    """The size that the page promises: twelve runs, with curves of every client and the models that each used."""
    clusters = [0] * 70 + [1] * 20 + [2] * 5 + [3] * 5
    study = population_study(tmp_path / "hundred", clusters=clusters, rounds=300, seeds=3, reads=5)
    runs, _ = load_runs([study])
    assert [(run.num_rounds, run.population, run.is_finished) for run in runs] == [
        (300, 100, True)
    ] * 12
    assert page.write_report(study).stat().st_size < 5_000_000


def test_names_of_clients_are_told_in_words_and_escaped(named):
    study, _ = named
    text = page.write_report(study).read_text("utf-8")
    shown = "Oslo &quot;A&quot;, &lt;script&gt;document.title=1&lt;/script&gt;, مستشفى الملك"
    assert f"<dt>Clients</dt><dd>4 ({shown})</dd>" in text
    assert "<script>document" not in text


class Ended(StoredRun):
    """A finished run of which only the final values of clients are known."""

    label, seed, is_finished = "", 0, True

    def __init__(self, label: str, seed: int, own: list[float]) -> None:
        for name, value in {"label": label, "seed": seed, "own": own}.items():
            object.__setattr__(self, name, value)

    @property
    def client_names(self):
        return {0: "Åre", 1: "<b>"}

    def final_values(self, metric: str) -> pd.Series:
        return pd.Series(self.own)

    def defined_values(self, metric: str) -> pd.Series:
        # as of data that leave the metric undefined
        return pd.Series(self.own).dropna()


def test_a_few_clients_with_names_have_a_table_of_their_own():
    """Means over the compared seeds, each under its name; nothing with planted clusters, or where one has no name."""
    values = {
        ("A", 0): [0.25, 0.5],
        ("A", 1): [0.75, float("nan")],
        ("A", 2): [0.0, 0.0],
        ("B", 0): [1.0, 1.0],
    }
    runs = [Ended(label, seed, own) for (label, seed), own in values.items()]
    data = {"names": ["Åre", "<b>"], "clusters": [], "results": {"seeds": [0, 1]}}
    made = page.render_client_table(data, runs, ACCURACY)
    assert re.findall(r'data-value="([^"]*)"', made) == ["0.5", "0.5", "1.0", "1.0"]
    assert re.findall(r'scope="col">([^<]*)<', made) == ["Method", "Åre", "&lt;b&gt;"]
    assert page.render_client_table({**data, "clusters": ["rotated"]}, runs, ACCURACY) == ""
    assert page.render_client_table({**data, "names": ["Åre", ""]}, runs, ACCURACY) == ""
    assert page.render_client_table({**data, "names": []}, runs, ACCURACY) == ""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_largest_epsilon_is_not_known_where_one_is_not(tmp_path, write_run, final_rows, order):
    """Whatever the order of the clients: the weakest guarantee is not the largest known one."""
    values = [[2.0, math.nan][place] for place in order]
    rows = final_rows([0.5] * 2, [0] * 2) + final_rows(values, [0] * 2, metric="epsilon")
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    (line,) = describe_privacy(load_runs([tmp_path / "s"])[0])
    assert line.endswith(": A – (–)")


def test_a_mean_that_is_not_known_has_no_deviation(tmp_path, write_run, final_rows):
    for seed, value in enumerate((0.5, float("nan"))):
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}", kind="local", label="A", seed=seed,
            metrics=final_rows([value], [-1]) + final_rows([value], [-1], metric="loss"),
        )  # fmt: skip
    text = page.write_report(tmp_path / "s").read_text("utf-8")
    assert "<td>2</td><td>–</td>" in text
