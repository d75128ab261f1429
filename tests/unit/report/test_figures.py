import json
import re
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, DataError
from coterie.papers import figures as _published  # noqa: F401 (adds those of the papers)
from coterie.report import figures, plots
from coterie.results.coverage import IncompleteStudyWarning
from coterie.results.stored_runs import load_runs


def numbers(path):
    return pd.read_csv(path.with_suffix(".csv"))


@pytest.mark.full
@pytest.mark.parametrize("figure", ["curves", "heatmap", "bars", "clients", "graph"])
@pytest.mark.parametrize("format", figures.FORMATS)
def test_every_kind_is_drawn_in_every_format(population, tmp_path, figure, format):
    """The file is of its format, and the numbers lie beside it."""
    path = figures.plot([population], figure, out=tmp_path / f"{figure}.{format}")
    start = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}[format]
    assert path.read_bytes().startswith(start)
    assert len(numbers(path)) > 0


@pytest.mark.full
def test_the_same_runs_give_the_same_bytes(population, tmp_path):
    """No time of day and no random id: figures can be kept under version control."""
    for format in figures.FORMATS:
        first = figures.plot([population], "curves", out=tmp_path / f"a.{format}").read_bytes()
        assert (
            figures.plot([population], "curves", out=tmp_path / f"b.{format}").read_bytes() == first
        )


def test_text_of_a_vector_figure_stays_text(population, tmp_path):
    """Labels can be searched and edited."""
    assert ">Oracle<" in figures.plot(
        [population], "curves", out=tmp_path / "c.svg"
    ).read_text().replace("\n", "")


def test_bars_are_the_means_of_the_summary(small, tmp_path):
    """DAC over clients .6375 ± .0125; over clusters .625 ± .075; in the cluster named 1 .6 ± .2."""
    for cluster, expected in {
        "all": [0.6375, 0.0125],
        "clusters": [0.625, 0.075],
        "1": [0.6, 0.2],
    }.items():
        table = numbers(figures.plot([small], "bars", out=tmp_path / "b.svg", cluster=cluster))
        assert table.loc[table["method"] == "DAC", ["mean", "std"]].to_numpy()[0] == pytest.approx(
            expected
        )


def test_numbers_of_a_heatmap_are_the_reads(population, tmp_path):
    """Twelve clients x three reads x ten rounds x two seeds for each of the three methods that read."""
    table = numbers(figures.plot([population], "heatmap", out=tmp_path / "h.svg"))
    assert table.groupby("method")["times"].sum().to_dict() == {
        "DAC": 720,
        "Oracle": 720,
        "Random": 720,
    }


@pytest.fixture
def crowd(tmp_path, write_run):
    """2,500 clients in five clusters; client i has accuracy i / 2500, and read i + 1 twice and i + 7 once."""
    clients = 2500
    metrics = [(1, i, i % 5, "test", "best", "accuracy", i / clients) for i in range(clients)]
    edges = [
        (round, i, (i + step) % clients, "mix", 0.5, 8)
        for i in range(clients)
        for round, step in ((0, 1), (1, 1), (1, 7))
    ]
    folder = tmp_path / "crowd" / "DAC" / "seed-0"
    write_run(folder, kind="dac", label="DAC", seed=0, metrics=metrics, edges=edges)
    return tmp_path / "crowd"


def test_a_heatmap_of_many_clients_has_cells_of_several(crowd, tmp_path):
    """2,500 clients by three, cluster by cluster of 500: 167 cells each, the last of two; all 7,500 reads are in it."""
    table = numbers(figures.plot([crowd], "heatmap", out=tmp_path / "h.svg"))
    assert list(table) == ["method", "reader_cell", "read_cell", "times"]
    assert table["times"].sum() == 7500
    assert table[["reader_cell", "read_cell"]].to_numpy().max() == 5 * 167 - 1
    # Cell 0 has clients 0, 5, 10 of cluster 0: they read 1, 6, 11 of cluster 1 twice each, which
    # are its first three, and 7, 12, 17 of cluster 2 once, its places 1, 2, 3: cells 0, 0 and 1.
    own = table.loc[table["reader_cell"] == 0].set_index("read_cell")["times"].to_dict()
    assert own == {167: 6, 334: 2, 335: 1}
    text = (tmp_path / "h.svg").read_text()
    assert "of 2,500 clients" in text
    assert "cell of 3 clients or fewer" in text


def test_a_graph_of_many_clients_has_the_lines_of_a_sample(crowd, tmp_path):
    table = numbers(figures.plot([crowd], "graph", out=tmp_path / "g.svg"))
    assert table["reader"].nunique() == 200
    assert table.groupby(table["reader"] % 5)["reader"].nunique().tolist() == [40] * 5
    assert len(table) == 400
    assert ((table["read"] - table["reader"]) % 2500).tolist() == [1, 7] * 200
    assert table["times"].tolist() == [2, 1] * 200
    assert "200 of 2,500 clients" in (tmp_path / "g.svg").read_text()


def test_strips_of_many_clients_have_points_of_a_sample_and_numbers_of_all(crowd, monkeypatch):
    figure, table = plots.draw_client_strips([("DAC", run) for run in load_runs([crowd])[0]])
    assert len(table) == 2500
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() != "None"]
    assert [len(line.get_xdata()) for line in lines] == [400] * 5
    monkeypatch.setattr(plots, "MOST_CLIENTS", 2500)
    figure, _ = plots.draw_client_strips([("DAC", run) for run in load_runs([crowd])[0]])
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() != "None"]
    assert [len(line.get_xdata()) for line in lines] == [500] * 5


def test_strips_hold_the_mean_over_seeds_of_each_client(small, tmp_path):
    """Client 0 under DAC: (.7 + .6) / 2."""
    table = numbers(figures.plot([small], "clients", out=tmp_path / "s.svg"))
    assert table.loc[
        (table["method"] == "DAC") & (table["client"] == 0), "accuracy"
    ].item() == pytest.approx(0.65)


@pytest.fixture
def swept(tmp_path, write_run, final_rows, listed):
    """Three points of a sweep over tau, each a study of its own with two seeds."""
    for tau in (1, 10, 100):
        for seed in (0, 1):
            folder = tmp_path / "sweep" / f"tau={tau}" / "DAC" / f"seed-{seed}"
            rows = final_rows([0.1 * len(str(tau)) + 0.02 * seed] * 2, [0, 0])
            write_run(folder, kind="dac", label="DAC", seed=seed, metrics=rows)
            (folder / "config.toml").write_text(
                (folder / "config.toml").read_text() + f"tau = {tau}\nrho = {2 * tau}\n"
            )
            listed(folder)
    return tmp_path / "sweep"


def test_a_sweep_has_a_point_for_each_value(swept, tmp_path):
    """Means .11 .21 .31 with a deviation of .01 over the two seeds."""
    table = numbers(figures.plot([swept], "tau", out=tmp_path / "t.svg"))
    assert table["tau"].tolist() == [1, 10, 100]
    assert table["mean"].tolist() == pytest.approx([0.11, 0.21, 0.31])
    assert table["std"].tolist() == pytest.approx([0.01] * 3)


def test_the_table_of_a_figure_replaces_no_other(swept, tmp_path):
    mine = tmp_path / "mine.csv"
    mine.write_text("age,y\n61,1\n")
    with pytest.raises(ConfigError, match=r"mine\.csv exists without its figure"):
        figures.plot([swept], "tau", out=tmp_path / "mine.svg")
    assert mine.read_text() == "age,y\n61,1\n"
    for _ in range(2):
        figures.plot([swept], "tau", out=tmp_path / "again.svg")


@pytest.fixture
def diverged(tmp_path, write_run, final_rows, listed):
    """Two points of a sweep; at the second a client of seed 1 has no finite value."""
    for tau, seeds in {1: [0.5, 0.7], 10: [0.9, np.nan]}.items():
        for seed, mean in enumerate(seeds):
            folder = tmp_path / "sweep" / f"tau={tau}" / "DAC" / f"seed-{seed}"
            rows = final_rows([0.9, mean], [0, 0])
            lost = final_rows([1.0, mean], [0, 0], metric="loss")
            write_run(folder, kind="dac", label="DAC", seed=seed, metrics=rows + lost)
            (folder / "config.toml").write_text(
                (folder / "config.toml").read_text() + f"tau = {tau}\nrho = {2 * tau}\n"
            )
            listed(folder)
    return tmp_path / "sweep"


def test_a_seed_that_diverged_leaves_a_point_of_a_sweep_undefined(diverged, tmp_path):
    """The mean of the other seed, 0.9, would be the best point; it is said instead that there is none."""
    for setting in ("tau", "tau,rho"):
        path = figures.plot([diverged], "sweep", out=tmp_path / "d.svg", setting=setting)
        table = numbers(path)
        assert table["mean"].tolist() == [pytest.approx(0.75), pytest.approx(np.nan, nan_ok=True)]
        assert table["seeds"].tolist() == [2, 2]
        assert path.read_text().count("not defined") == 1


def test_two_settings_make_a_grid(swept, tmp_path):
    """A row for each pair that was run."""
    table = numbers(figures.plot([swept], "sweep", out=tmp_path / "g.svg", setting="tau,rho"))
    assert table[["tau", "rho"]].to_numpy().tolist() == [[1, 2], [10, 20], [100, 200]]


def test_published_figures_are_kinds_with_options(swept, tmp_path):
    """DAC's figure 3 is the sensitivity to tau."""
    assert len(numbers(figures.plot([swept], "dac-3", out=tmp_path / "d.svg"))) == 3
    assert {published.figure for published in figures.PUBLISHED.values()} <= set(figures.FIGURES)


def test_a_figure_shows_the_methods_that_were_asked_for(population, tmp_path):
    """By label, with a star for anything; the labels are named when none fits."""
    table = numbers(
        figures.plot([population], "heatmap", out=tmp_path / "h.svg", methods="D*, Oracle")
    )
    assert sorted(set(table["method"])) == ["DAC", "Oracle"]
    with pytest.raises(ConfigError, match="methods is 'FedAvg'; the runs here are of: DAC, "):
        figures.plot([population], "heatmap", out=tmp_path / "h.svg", methods=["FedAvg"])


def test_a_published_figure_shows_the_rows_of_its_paper(population, tmp_path):
    """Of these labels figure 3a has Local, Oracle and Random; where there is none of them, everything is drawn."""
    table = numbers(figures.plot([population], "similarity-3a", out=tmp_path / "b.svg"))
    assert sorted(table["method"]) == ["Local", "Oracle", "Random"]
    table = numbers(figures.plot([population / "DAC"], "similarity-3a", out=tmp_path / "b.svg"))
    assert table["method"].tolist() == ["DAC"]


def test_several_metrics_have_a_panel_each(tmp_path, write_run):
    """SosicFL's figure 4: accuracy on all test sets and on one's own; the CSV file tells them apart."""
    metrics = [
        (r, c, 0, "test", "current", metric, value + r / 10)
        for r in (0, 1)
        for c in (0, 1)
        for metric, value in (("accuracy", 0.5), ("global_accuracy", 0.25))
    ]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="sosicfl", label="A", seed=0, metrics=metrics)
    path = figures.plot([tmp_path / "s"], "sosicfl-4", out=tmp_path / "c.svg")
    assert numbers(path)[["metric", "round", "mean"]].to_numpy().tolist() == [
        ["global_accuracy", 0, 0.25], ["global_accuracy", 1, 0.35], ["accuracy", 0, 0.5], ["accuracy", 1, 0.6],
    ]  # fmt: skip
    assert all(
        f">test {metric} (%)<" in path.read_text() for metric in ("accuracy", "global accuracy")
    )


def test_long_names_of_methods_do_not_widen_a_figure(tmp_path, write_run):
    metrics = [(0, 0, 0, "test", "current", "accuracy", 0.5)]
    for i in range(4):
        label = f"SosicFL, warm-up of {i} rounds"
        write_run(
            tmp_path / "s" / label / "seed-0", kind="sosicfl", label=label, seed=0, metrics=metrics
        )
    text = figures.plot(
        [tmp_path / "s"], "curves", split="test", metric="accuracy", out=tmp_path / "c.svg"
    ).read_text()
    (width,) = re.findall(r'<svg [^>]*width="([0-9.]+)pt"', text)
    assert float(width) <= 72 * plots.WIDTH, "no wider than a column"


def test_a_legend_above_several_panels_takes_no_height_from_them(tmp_path, write_run):
    heights = []
    for count in (2, 9):
        for i in range(count):
            metrics = [
                (0, 0, 0, "test", "current", name, 0.5) for name in ("accuracy", "global_accuracy")
            ]
            folder = tmp_path / f"of-{count}" / f"Method {i}" / "seed-0"
            write_run(folder, kind="sosicfl", label=f"Method {i}", seed=0, metrics=metrics)
        text = figures.plot(
            [tmp_path / f"of-{count}"], "sosicfl-4", out=tmp_path / f"{count}.svg"
        ).read_text()
        heights.append(float(re.findall(r'<svg [^>]*height="([0-9.]+)pt"', text)[0]))
    assert 20 < heights[1] - heights[0] < 40, "two more lines of names"


def test_curves_mark_the_rounds_in_which_clusters_split(tmp_path, write_run):
    """One cluster in rounds 0 and 1, two from round 2 on: FedGWC's figure 2 has a line, its table their number."""
    found = {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)}
    metrics = [
        (r, c, 0, "train", "current", "label", float(own[c]))
        for r, own in found.items()
        for c in (0, 1)
    ]
    metrics += [(r, c, 0, "test", "current", "accuracy", 0.5) for r in found for c in (0, 1)]
    write_run(
        tmp_path / "s" / "G" / "seed-0", kind="fedgwc", label="FedGWC", seed=0, metrics=metrics
    )
    table = numbers(figures.plot([tmp_path / "s"], "fedgwc-2", out=tmp_path / "g.svg"))
    assert table.loc[table["metric"] == "split", ["round", "mean"]].to_numpy().tolist() == [[2, 2]]


def test_a_topology_is_that_of_stage_two(tmp_path, write_run, final_rows, listed):
    """Client 0 reads 1 in round 0 and 2 in round 1; with a stage one of one round, only the second is drawn."""
    edges = [(0, 0, 1, "mix", 1.0, 8), (1, 0, 2, "mix", 1.0, 8)]
    folder = write_run(
        tmp_path / "s" / "P" / "seed-0", kind="pens", label="P", seed=0, metrics=final_rows([0.5] * 3, [0] * 3),
        edges=edges,
    )  # fmt: skip
    path = folder / "config.toml"
    path.write_text(path.read_text() + "stage_one_rounds = 1\n")
    listed(folder)
    for figure, read in {"panm-4": [2], "graph": [1, 2]}.items():
        assert (
            numbers(figures.plot([tmp_path / "s"], figure, out=tmp_path / "g.svg"))["read"].tolist()
            == read
        )


def test_stage_two_of_a_scaled_run_begins_where_the_scaled_stage_one_ended(
    tmp_path, write_run, final_rows, listed
):
    """A stage one of four rounds, scaled by a quarter, ends after round 0."""
    edges = [(0, 0, 1, "mix", 1.0, 8), (1, 0, 2, "mix", 1.0, 8)]
    folder = write_run(
        tmp_path / "s" / "P" / "seed-0", kind="pens", label="P", seed=0, metrics=final_rows([0.5] * 3, [0] * 3),
        edges=edges, scale=0.25,
    )  # fmt: skip
    path, text = folder / "config.toml", (folder / "config.toml").read_text()
    path.write_text(text + "stage_one_rounds = 4\n")
    listed(folder)
    assert numbers(figures.plot([tmp_path / "s"], "panm-4", out=tmp_path / "g.svg"))[
        "read"
    ].tolist() == [2]
    path.write_text(text + "stage_one_rounds = 8\n")
    listed(folder)
    with pytest.raises(
        DataError, match=r"no client reads another in round 2 or later \(stage_one_rounds\)"
    ):
        figures.plot([tmp_path / "s"], "panm-4", out=tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_losses_that_lie_far_apart_have_a_logarithmic_axis(tmp_path, write_run, final_rows):
    """Ten times and more; its numbers are plain, as nothing in a figure is read as mathematics."""
    for label, value in {"Near": 9.0, "Far": 90.0}.items():
        rows = final_rows([value], [0], metric="loss")
        write_run(tmp_path / "s" / label / "seed-0", kind="dac", label=label, seed=0, metrics=rows)
    runs, _ = load_runs([tmp_path / "s"])
    for methods, scale in {("Near", "Far"): "log", ("Near",): "linear"}.items():
        drawn, _ = plots.draw_bars([(run.label, run) for run in runs if run.label in methods])
        assert drawn.axes[0].get_yscale() == scale
    text = figures.plot([tmp_path / "s"], "bars", out=tmp_path / "b.svg").read_text()
    assert ">10<" in text
    assert ">100<" in text
    assert "$" not in text


def test_found_clusters_are_set_against_planted_ones(tmp_path, write_run, final_rows):
    """Labels of the last round: cluster 5 holds clients 0 and 1 of planted 0, cluster 2 one of each."""
    labels = [5, 5, 2, 2]
    metrics = [
        (0, c, planted, "train", "current", "label", float(labels[c]))
        for c, planted in enumerate([0, 0, 0, 1])
    ]
    metrics += final_rows([0.5] * 4, [0, 0, 0, 1], round=0)
    write_run(tmp_path / "s" / "A" / "seed-0", kind="ifca", label="A", seed=0, metrics=metrics)
    table = numbers(figures.plot([tmp_path / "s"], "fedgwc-8", out=tmp_path / "l.svg"))
    assert table[["found", "of", "count"]].to_numpy().tolist() == [
        [2, 0, 1],
        [5, 0, 2],
        [2, 1, 1],
        [5, 1, 0],
    ]
    with pytest.raises(DataError, match="does not have the classes"):
        figures.plot([tmp_path / "s"], "classes", out=tmp_path / "c.svg")


@pytest.mark.parametrize(
    ("figure", "options", "error", "message"),
    [
        ("curve", {}, ConfigError, "did you mean 'curves'"),
        ("curves", {"format": "jpeg"}, ConfigError, "unknown format 'jpeg'"),
        ("sosicfl-6", {}, ConfigError, "cannot be drawn from stored runs"),
        (
            "sosicfl-5",
            {},
            DataError,
            "needs runs of sosicfl/cifar10-squeezenet-dirichlet: no run here was analyzed",
        ),
        ("fedgwc-4", {}, DataError, "recorded no train interaction_change"),
        ("heatmap", {}, DataError, "no method here reads"),
        ("graph", {}, DataError, "no method here reads"),
        ("labels", {}, DataError, "no method here reports labels"),
        ("curves", {}, DataError, "recorded no validation accuracy"),
        ("tau", {}, DataError, "do not vary tau"),
        ("sweep", {}, ConfigError, "needs --setting"),
        ("bars", {"cluster": "north"}, ConfigError, "expected one of: 0, 1, all, clusters"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    small, tmp_path, monkeypatch, figure, options, error, message
):
    """Nothing is written then."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        figures.plot([small], figure, **options)
    assert set(tmp_path.iterdir()) == before


def test_curves_of_clients_that_have_no_validation_data_are_not_an_empty_picture(
    tmp_path, write_run, final_rows
):
    """They record a value for every round that is not a number."""
    rows = [
        (r, i, 0, "validation", "current", "accuracy", float("nan")) for r in (0, 1) for i in (0, 1)
    ]
    rows += final_rows([0.5, 0.5], [0, 0])
    write_run(
        tmp_path / "s" / "Local" / "seed-0", kind="local", label="Local", seed=0, metrics=rows
    )
    with pytest.raises(
        DataError, match="Local recorded no validation accuracy round by round; choose another"
    ):
        figures.plot([tmp_path / "s"], "curves", out=tmp_path / "c.svg")
    assert not (tmp_path / "c.svg").exists()


def test_the_commands_write_and_name_their_files(small, tmp_path):
    """coterie report and coterie plot print the path of what they wrote."""
    page = tmp_path / "page.html"
    told = CliRunner().invoke(app, ["report", str(small), "--out", str(page)])
    assert told.output == f"Report: {page}\n"
    assert page.is_file()
    drawn = tmp_path / "bars.svg"
    told = CliRunner().invoke(app, ["plot", str(small), "--figure", "bars", "--out", str(drawn)])
    assert told.output == f"Figure: {drawn}\nData:   {tmp_path / 'bars.csv'}\n"


def test_plot_without_a_figure_lists_them(small):
    """Kinds first, then the published ones."""
    lines = CliRunner().invoke(app, ["plot", str(small)]).output.splitlines()
    assert lines[0].split()[0] == "curves"
    assert any(line.startswith("dac-3") and "tau of dac/tau" in line for line in lines)
    assert {line.split()[0] for line in lines} == {
        *figures.FIGURES,
        *figures.PUBLISHED,
        *figures.NOT_STORED,
    }


def test_every_result_figure_of_the_papers_has_a_name():
    """Numbers of the figures that show results, paper by paper; parts of a figure have names of their own."""
    wanted = {
        "similarity": range(2, 11), "dac": range(2, 5), "panm": range(2, 6), "sosicfl": range(4, 9),
        "fedgwc": (2, *range(4, 9)),
    }  # fmt: skip
    names = [*figures.PUBLISHED, *figures.NOT_STORED]
    numbered = {(name.split("-")[0], int(name.split("-")[1].rstrip("abcd"))) for name in names}
    assert numbered == {(paper, number) for paper, some in wanted.items() for number in some}


def test_published_figures_name_studies_that_are_there():
    """Each study that the list names is a file of the package, or a family of them."""
    folder = resources.files("coterie.studies") / "builtin"
    assert figures.PUBLISHED
    for name, published in figures.PUBLISHED.items():
        study = published.study.split(",")[0]
        assert list(Path(str(folder)).glob(f"{study}.toml")), name


def test_a_published_figure_says_which_study_it_needs(small, tmp_path):
    """Runs that read nobody give no heatmap, and runs at one value of tau no sensitivity."""
    for figure, study in {"dac-4": "dac/cifar10-label-40-60", "dac-3": "dac/tau"}.items():
        with pytest.raises(DataError, match=f"figure {figure} needs runs of {study}: "):
            figures.plot([small], figure, out=tmp_path / "none.svg")
        assert not (tmp_path / "none.svg").exists()


@pytest.mark.full
def test_two_studies_make_two_reports_and_a_page_with_both(small, tmp_path):
    """The same study twice is refused."""
    other = shutil.copytree(small, tmp_path / "another")
    told = CliRunner().invoke(
        app, ["report", str(small), str(other), "--out", str(tmp_path / "x.html")]
    )
    assert told.exit_code == 0, told.output
    assert told.output.splitlines()[-1] == f"Studies: {tmp_path / 'x.html'}"
    assert (small / "report.html").exists()
    assert (other / "report.html").exists()
    told = CliRunner().invoke(
        app, ["report", str(small), str(small), "--out", str(tmp_path / "y.html")]
    )
    assert isinstance(told.exception, DataError)
    assert not (tmp_path / "y.html").exists()


@pytest.fixture
def readers(write_run, final_rows, tmp_path):
    """Five clients that all read the next; each has a name: markup, another script, too long, a formula."""
    metrics = final_rows([0.5, 0.6, 0.7, 0.8, 0.9], [-1] * 5)
    edges = [(0, client, (client + 1) % 5, "mix", 0.5, 8) for client in range(5)]
    folder = write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="random",
        label="A",
        seed=0,
        metrics=metrics,
        edges=edges,
    )
    return folder


@pytest.fixture
def names(readers, listed):
    names = ("Oslo", "<script>", "مستشفى", "St. Olavs " + "hospital " * 30 + "B", "$x$ 🏥")
    stored = json.loads((readers / "provenance.json").read_text("utf-8"))
    known = {str(client): name for client, name in enumerate(names)}
    (readers / "provenance.json").write_text(json.dumps({**stored, "client_names": known}))
    listed(readers)
    return names


@pytest.mark.full
@pytest.mark.parametrize("figure", ["heatmap", "graph"])
def test_clients_are_named_in_figures_and_whole_in_the_tables_behind(
    readers, names, tmp_path, figure
):
    path = figures.plot([readers], figure, out=tmp_path / "f.svg")
    drawn, table = path.read_text("utf-8"), numbers(path)
    for name in ("Oslo", "&lt;script&gt;", "مستشفى", "$x$ 🏥"):
        assert f">{name}<" in drawn.replace("\n", "")
    assert "St. Olavs hospi…" in drawn
    assert names[3] not in drawn
    assert dict(zip(table["reader"], table["reader_name"], strict=True)) == dict(enumerate(names))
    assert dict(zip(table["read"], table["read_name"], strict=True)) == dict(enumerate(names))


def test_strips_name_the_clients_in_their_table(readers, names, tmp_path):
    table = numbers(figures.plot([readers], "clients", out=tmp_path / "s.svg"))
    assert table["client_name"].tolist() == list(names)


def test_figures_of_numbered_clients_have_no_names(readers, tmp_path):
    path = figures.plot([readers], "heatmap", out=tmp_path / "h.svg")
    assert list(numbers(path).columns) == ["method", "reader", "read", "times"]
    assert "client 0" not in path.read_text("utf-8")


def test_studies_that_share_the_end_of_their_name_are_no_seeds_of_one_line(
    tmp_path, write_run, final_rows
):
    """Local has .5 in one study and .9 in the other; two copies of one study are told by their folders."""
    for paper, value in (("dac", 0.5), ("panm", 0.9), ("copy/dac", 0.1)):
        for seed in (0, 1):
            write_run(
                tmp_path / paper / "samples" / "Local" / f"seed-{seed}", kind="local", label="Local",
                seed=seed, study=f"{paper.removeprefix('copy/')}/samples",
                metrics=final_rows([value] * 2, (0, 0)),
            )  # fmt: skip
    first, second, copy = (tmp_path / one / "samples" for one in ("dac", "panm", "copy/dac"))
    table = numbers(figures.plot([first, second], "bars", out=tmp_path / "b.svg"))
    assert table[["method", "mean", "seeds"]].to_numpy().tolist() == [
        ["Local, dac/samples", 0.5, 2],
        ["Local, panm/samples", 0.9, 2],
    ]
    table = numbers(figures.plot([first, copy], "bars", out=tmp_path / "b.svg"))
    assert table[["method", "mean", "seeds"]].to_numpy().tolist() == [
        [f"Local, {first}", 0.5, 2],
        [f"Local, {copy}", 0.1, 2],
    ]


def write_settings(folder, listed, **settings):
    """Add settings of the method to the configuration of a run."""
    with (folder / "config.toml").open("a") as file:
        file.writelines(f"{key} = {value}\n" for key, value in settings.items())
    listed(folder)


@pytest.fixture
def same_kind(tmp_path, write_run, final_rows, listed):
    """Three methods of a kind: two have one tau, with .5 and .9, and the third another, with .6."""
    for label, tau, value in (("slow", 10, 0.5), ("fast", 30, 0.6), ("other", 10, 0.9)):
        for seed in (0, 1):
            folder = tmp_path / "s" / label / f"seed-{seed}"
            metrics = final_rows([value] * 2, (0, 0))
            write_run(folder, kind="dac", label=label, seed=seed, study="s", metrics=metrics)
            write_settings(folder, listed, tau=tau)
    return tmp_path / "s"


def test_a_point_of_a_sweep_is_never_the_mean_of_two_methods(same_kind, tmp_path):
    """Lines by kind would have (.5 + .9) / 2 over four seeds at tau = 10."""
    table = numbers(figures.plot([same_kind], "tau", out=tmp_path / "t.svg"))
    found = {
        row["method"]: (row["tau"], row["mean"], row["seeds"]) for row in table.to_dict("records")
    }
    assert found == {"slow": (10, 0.5, 2), "fast": (30, 0.6, 2), "other": (10, 0.9, 2)}


def test_methods_of_a_kind_with_one_value_each_are_one_line(same_kind, tmp_path):
    """Without the second of them the kind is a line with two points."""
    table = numbers(
        figures.plot([same_kind], "tau", out=tmp_path / "t.svg", methods=["slow", "fast"])
    )
    assert table[["method", "tau", "mean"]].to_numpy().tolist() == [
        ["dac", 10, 0.5],
        ["dac", 30, 0.6],
    ]


def test_panels_of_sensitivities_are_of_one_study_each(tmp_path, write_run, final_rows, listed):
    for paper, value in (("a", 0.5), ("b", 0.9)):
        for tau in (10, 30):
            folder = tmp_path / paper / "tau" / f"DAC tau={tau}" / "seed-0"
            metrics = final_rows([value] * 2, (0, 0))
            write_run(
                folder, kind="dac", label=f"DAC tau={tau}", seed=0, study=f"{paper}/tau", metrics=metrics
            )  # fmt: skip
            write_settings(folder, listed, tau=tau)
    studies = [tmp_path / "a" / "tau", tmp_path / "b" / "tau"]
    table = numbers(figures.plot(studies, "sensitivity", out=tmp_path / "s.svg"))
    assert table.groupby("panel")["mean"].unique().map(list).to_dict() == {
        str(studies[0]): [0.5],
        str(studies[1]): [0.9],
    }


def test_single_clients_are_not_averaged_over_seeds_that_plant_other_clusters(
    tmp_path, write_run, final_rows
):
    """Cluster 0 has .9 and cluster 1 .1 with each seed; seed 1 plants them at the other clients."""
    for seed, clusters in ((0, [0, 0, 1, 1]), (1, [1, 1, 0, 0])):
        pairs = [(0, 1), (2, 3)] if seed == 0 else [(0, 2)]
        write_run(
            tmp_path / "s" / "DAC" / f"seed-{seed}", kind="dac", label="DAC", seed=seed, study="s",
            metrics=final_rows([0.1 if cluster else 0.9 for cluster in clusters], clusters),
            edges=[(0, *pair, "mix", 0.5, 10) for pair in pairs],
        )  # fmt: skip
    said = "DAC: seed 1 plants its clusters at other clients"
    with pytest.warns(IncompleteStudyWarning, match=said):
        table = numbers(figures.plot([tmp_path / "s"], "clients", out=tmp_path / "c.svg"))
    assert table["accuracy"].tolist() == [0.9, 0.9, 0.1, 0.1]
    for figure in ("heatmap", "graph"):
        with pytest.warns(IncompleteStudyWarning, match=said):
            table = numbers(figures.plot([tmp_path / "s"], figure, out=tmp_path / "r.svg"))
        assert table[["reader", "read", "times"]].to_numpy().tolist() == [[0, 1, 1], [2, 3, 1]]
    # A mean over clients is of both.
    table = numbers(figures.plot([tmp_path / "s"], "bars", out=tmp_path / "b.svg"))
    assert table["seeds"].tolist() == [2]


def test_strips_have_the_clients_of_all_seeds(tmp_path, write_run, final_rows):
    """Client 2 is there with seed 1 alone, and counts: (.6 + .6 + .9) / 3 is the mean that is drawn."""
    for seed, values in ((0, [0.5, 0.5]), (1, [0.7, 0.7, 0.9])):
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}", kind="local", label="A", seed=seed,
            metrics=final_rows(values, [-1] * len(values)),
        )  # fmt: skip
    found = [("A", run) for run in load_runs([tmp_path / "s"])[0]]
    drawn, table = plots.draw_client_strips(found)
    assert table["accuracy"].tolist() == pytest.approx([0.6, 0.6, 0.9])
    assert drawn.axes[0].lines[-1].get_ydata() == pytest.approx([70, 70])


def test_clusters_beyond_the_colors_have_marks_of_their_own(tmp_path, write_run, final_rows):
    """Ten planted clusters and eight colors: no two look alike in the strips, nor in the bars of labels."""
    clusters = list(range(10))
    rows = final_rows([0.5] * 10, clusters)
    rows += [(1, c, c, "train", "current", "label", float(c % 3)) for c in clusters]
    rows += [(1, 9 + c, 9 + c, "train", "current", "label", 0.0) for c in (1, 2)]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="ifca", label="A", seed=0, metrics=rows)
    found = [("A", run) for run in load_runs([tmp_path / "s"])[0]]
    points = [
        one
        for one in plots.draw_client_strips(found)[0].axes[0].lines
        if one.get_marker() != "None"
    ]
    assert len(points) == len({(one.get_marker(), one.get_color()) for one in points}) == 10
    bars = plots.draw_label_bars(found)[0].axes[0].containers
    assert len(bars) == len({one.patches[0].get_facecolor() for one in bars}) == 12


def test_the_axes_of_a_heatmap_have_the_ids_of_clients(tmp_path, write_run, final_rows):
    """Clients 0 and 2 are of cluster 1, so that rows are in the order 1, 3, 0, 2."""
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0,
        metrics=final_rows([0.5] * 4, [1, 0, 1, 0]), edges=[(0, 2, 1, "mix", 0.5, 10)],
    )  # fmt: skip
    found = [("A", run) for run in load_runs([tmp_path / "s"])[0]]
    axes = plots.draw_heatmaps(found)[0].axes[0]
    # The one read is that of client 2, in the last row, of client 1, in the first column.
    assert np.argwhere(axes.images[0].get_array()).tolist() == [[3, 0]]
    for axis in (axes.xaxis, axes.yaxis):
        shown = [axis.get_major_formatter()(place) for place in (0, 1, 2, 3, 0.5, 4)]
        assert shown == ["1", "3", "0", "2", "", ""]


def test_a_second_random_is_no_band_with_the_looks_of_the_first(tmp_path, write_run, final_rows):
    for label in ("Random", "Random of 5"):
        write_run(
            tmp_path / "s" / label / "seed-0", kind="random", label=label, seed=0,
            metrics=final_rows([0.5], [-1]),
        )  # fmt: skip
    found = [(run.label, run) for run in load_runs([tmp_path / "s"])[0]]
    axes = plots.draw_bars(found)[0].axes[0]
    assert axes.get_legend_handles_labels()[1] == ["Random"]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["Random of 5"]


def test_a_random_that_diverged_is_no_band_that_nobody_sees(tmp_path, write_run, final_rows):
    for label, value in {"Random": float("nan"), "Random again": 0.5}.items():
        write_run(
            tmp_path / "s" / label / "seed-0", kind="random", label=label, seed=0,
            metrics=final_rows([value], [-1]),
        )  # fmt: skip
    found = [(run.label, run) for run in load_runs([tmp_path / "s"])[0]]
    axes = plots.draw_bars(found)[0].axes[0]
    assert axes.get_legend_handles_labels()[1] == ["Random again"]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["Random"]
    assert [one.get_text() for one in axes.texts] == ["not defined"]


def test_marks_of_an_axis_of_rounds_are_rounds(tmp_path, write_run):
    rows = [(r, 0, -1, "validation", "current", "accuracy", 0.5 + 0.1 * r) for r in (0, 1)]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="local", label="A", seed=0, metrics=rows)
    found = [("A", run) for run in load_runs([tmp_path / "s"])[0]]
    marks = plots.draw_curves(found)[0].axes[0].get_xticks()
    assert len(marks) >= 2
    assert all(float(mark).is_integer() for mark in marks)
