"""Figures of papers that are drawn from analyses, and as small multiples."""

import json

import numpy as np
import pandas as pd
import pytest

from coterie.errors import DataError
from coterie.papers import figures
from coterie.report.plots import find_setting, make_single_figure
from coterie.results.coverage import IncompleteStudyWarning
from coterie.results.stored_runs import StoredRun
from coterie.results.varied import strip_settings


def numbers(path):
    return pd.read_csv(path.with_suffix(".csv"))


@pytest.fixture
def gwc(tmp_path, write_run, final_rows):
    """FedGWC with two found clusters of two clients; its matrix, classes and change per round are known."""
    rows = []
    for number in range(3):
        for client in range(4):
            for metric, value in (
                ("label", client % 2),
                ("interaction_change", 0.1**number),
                ("gradient_variance", 2.0),
            ):
                rows.append((number, client, 0, "train", "current", metric, float(value)))
    rows += final_rows([0.5] * 4, [0] * 4, round=2, model="current")
    folder = write_run(
        tmp_path / "gwc" / "FedGWC" / "seed-0", kind="fedgwc", label="FedGWC", seed=0, metrics=rows
    )
    pairs = pd.DataFrame([(i, j, i % 2, j % 2) for i in range(4) for j in range(4)])
    pairs.columns = ["client", "other", "label", "other_label"]
    pairs["interaction"] = (pairs["label"] == pairs["other_label"]).astype(float)
    (folder / "analyses").mkdir()
    pairs.to_parquet(folder / "analyses" / "interaction.parquet")
    told = {
        "clusters": ["all"],
        "classes": ["cat", "dog"],
        "labels": [[9, 1], [0, 10], [7, 3], [1, 9]],
    }
    (tmp_path / "gwc" / "federation.json").write_text(json.dumps(told))
    return tmp_path / "gwc"


def test_the_change_of_the_interaction_matrix_is_a_curve(gwc, tmp_path):
    """FedGWC's figure 4: 1, .1, .01; SosicFL's figure 7a: the variance of every round."""
    table = numbers(figures.plot([gwc], "fedgwc-4", out=tmp_path / "f.svg"))
    assert table["mean"].tolist() == pytest.approx([1, 0.1, 0.01])
    table = numbers(figures.plot([gwc], "sosicfl-7a", out=tmp_path / "v.svg"))
    assert table["mean"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("figure", ["fedgwc-5", "fedgwc-6"])
def test_the_interaction_matrix_is_drawn(gwc, tmp_path, figure):
    """Every pair is in the numbers behind it."""
    path = figures.plot([gwc], figure, out=tmp_path / "m.svg")
    assert numbers(path)["interaction"].to_numpy().sum() == 8
    assert "2 clusters found" in path.read_text()


def test_classes_have_a_panel_for_each_found_cluster(gwc, tmp_path):
    """FedGWC's figure 7: cluster 0 holds clients 0 and 2, so 16 cats and 4 dogs; cluster 1 one cat and 19 dogs."""
    path = figures.plot([gwc], "fedgwc-7", out=tmp_path / "c.svg")
    assert numbers(path)["count"].tolist() == [16, 4, 1, 19]
    assert "found cluster 1, 2 clients" in path.read_text()


@pytest.mark.parametrize("endpoints", [2, 3, 5])
def test_points_of_a_simplex_have_a_panel_for_each_test_set(
    tmp_path, write_run, final_rows, endpoints
):
    """SosicFL's figure 5: all test sets together, and two clients."""
    folder = write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="sosicfl",
        label="A",
        seed=0,
        metrics=final_rows([0.5], [0]),
    )
    rng = np.random.default_rng(0)
    tables = []
    for client in (-1, 0, 3):
        alpha = rng.dirichlet(np.ones(endpoints), 21)
        table = pd.DataFrame(alpha, columns=[f"alpha_{m}" for m in range(endpoints)])
        tables.append(table.assign(client=client, point=range(-1, 20), accuracy=alpha[:, 0]))
    (folder / "analyses").mkdir()
    pd.concat(tables).to_parquet(folder / "analyses" / "simplex.parquet")
    path = figures.plot([tmp_path / "s"], "sosicfl-5", out=tmp_path / "p.svg")
    assert len(numbers(path)) == 63
    text = path.read_text()
    assert all(title in text for title in (">all test sets<", ">client 0<", ">client 3<"))


@pytest.mark.parametrize("lost", [1, 4])
def test_models_of_a_simplex_that_are_not_finite_have_no_color(
    tmp_path, write_run, final_rows, lost
):
    """They are counted in the title, and the scale is that of the others."""
    folder = write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="sosicfl",
        label="A",
        seed=0,
        metrics=final_rows([0.5], [0]),
    )
    accuracy = np.array([0.2, 0.4, 0.6, 0.8])
    accuracy[:lost] = np.nan
    alpha = np.linspace(0, 1, 4)
    table = pd.DataFrame({"alpha_0": alpha, "alpha_1": 1 - alpha, "accuracy": accuracy})
    (folder / "analyses").mkdir()
    path = folder / "analyses" / "simplex.parquet"
    table.assign(client=-1, point=range(-1, 3)).to_parquet(path)
    if lost == 4:
        with pytest.raises(DataError, match="no model of the simplex has finite outputs"):
            figures.plot([tmp_path / "s"], "sosicfl-5", out=tmp_path / "p.svg")
        return
    text = figures.plot([tmp_path / "s"], "sosicfl-5", out=tmp_path / "p.svg").read_text()
    assert "1 of 4 not defined" in text
    # Ticks of the color scale, in per cent: without the scale of the others there are none.
    assert ">40<" in text
    assert ">80<" in text


@pytest.fixture
def swept(tmp_path, write_run, final_rows, listed):
    """Sweeps over tau of three studies: two similarities, two ways of averaging, as a sweep labels them."""
    for name, lift in {
        "tau-cifar10-label-2": 0.1,
        "tau-cifar10-label-5": 0.2,
        "tau-domain-cnn": 0.3,
    }.items():
        for tau in (1, 10):
            for label, way in (
                ("Inverse loss", "fedavg"),
                ("Cosine", "fedavg"),
                ("Inverse loss FedSim", "fedsim"),
            ):
                rows = final_rows([lift + 0.01 * len(str(tau)) + 0.1 * (label == "Cosine")], [0])
                text = f"{label} tau={tau}"
                folder = tmp_path / name / text / "seed-0"
                write_run(
                    folder, kind="dac", label=text, seed=0, metrics=rows, study=f"similarity/{name}"
                )
                path = folder / "config.toml"
                path.write_text(path.read_text() + f'tau = {tau}\naggregation = "{way}"\n')
                listed(folder)
    return tmp_path


@pytest.mark.full
def test_sensitivities_have_a_panel_for_each_study_and_way_of_averaging(swept, tmp_path):
    """Figure 8 is the label shifts, figure 9 the others: different studies, different panels."""
    table = numbers(figures.plot([swept], "similarity-8", out=tmp_path / "8.svg"))
    assert sorted(set(table["panel"])) == [
        f"tau-cifar10-label-{n}, {way}" for n in (2, 5) for way in ("fedavg", "fedsim")
    ]
    first = (table["panel"] == "tau-cifar10-label-2, fedavg") & (table["method"] == "Cosine")
    assert table.loc[first.to_numpy(), ["tau", "mean"]].to_numpy().tolist() == [
        [1, pytest.approx(0.21)],
        [10, pytest.approx(0.22)],
    ]
    table = numbers(figures.plot([swept], "similarity-9", out=tmp_path / "9.svg"))
    assert set(table["panel"]) == {"tau-domain-cnn, fedavg", "tau-domain-cnn, fedsim"}


def test_a_sweep_keeps_its_methods_apart(swept, tmp_path):
    """Three methods of one kind at two values each are three lines, not one."""
    table = numbers(figures.plot([swept / "tau-domain-cnn"], "tau", out=tmp_path / "t.svg"))
    assert set(table["method"]) == {"Inverse loss", "Cosine", "Inverse loss FedSim"}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("DAC tau=30", "DAC"),
        ("DAC tau=0.1 rho=2", "DAC rho=2"),
        ("tau=3", "tau"),
        ("DAC, tau=1", "DAC"),
    ],
)
def test_the_value_on_the_axis_is_no_part_of_a_line_s_name(label, expected):
    assert strip_settings(label, ["tau"]) == expected
    assert strip_settings(label, ["methods.dac.tau"]) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data.shift.0.alpha", 0.1),
        ("data.shift.1.alpha", None),  # there is one shift
        ("data.shift.alpha", None),
        ("methods.dac.tau", 30),
        ("methods.DAC.tau", 30),  # by the label, which has the value of the point
        ("methods.random.tau", None),
        ("local.lr", 0.5),
        ("rounds", 7),
        ("data.test", None),  # no number
    ],
)
def test_a_setting_is_found_by_its_path(tmp_path, path, expected):
    config = {
        "rounds": 7,
        "local": {"lr": 0.5},
        "data": {"shift": [{"kind": "dirichlet", "alpha": 0.1}], "test": True},
        "methods": [{"kind": "dac", "label": "DAC tau=30", "tau": 30}],
    }
    run = StoredRun(tmp_path, config, {}, pd.DataFrame(), pd.DataFrame())
    assert find_setting(run, path) == expected


def test_what_was_not_analyzed_is_said_with_the_command(tmp_path, write_run, final_rows):
    """One line, with what to do."""
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="sosicfl",
        label="A",
        seed=0,
        metrics=final_rows([0.5], [0]),
    )
    with pytest.raises(DataError, match=r"first say: coterie analyze .*s --what simplex"):
        figures.plot([tmp_path / "s"], "sosicfl-5", out=tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.fixture
def recorded(tmp_path, write_run, final_rows, listed):
    """Four clients in two clusters; in three rounds everybody reads everybody, own cluster 0.8 and 0.9, others 0.1."""
    rows = [
        (number, client, client // 2, "validation", "current", "accuracy", 0.1 * number)
        for number in range(4)
        for client in range(4)
    ]
    rows += final_rows([0.5] * 4, [0, 0, 1, 1], round=3, model="current")
    folder = write_run(
        tmp_path / "p" / "PANMGrad" / "seed-0",
        kind="panm-grad",
        label="PANMGrad",
        seed=0,
        metrics=rows,
    )
    write_run(
        tmp_path / "p" / "Local" / "seed-0", kind="local", label="Local", seed=0, metrics=rows
    )
    edges = []
    for number in (0, 1, 3):
        for i in range(4):
            for j in {0, 1, 2, 3} - {i}:
                own = i // 2 == j // 2
                value = np.nan if number == 1 else (0.8 + 0.1 * (i % 2)) if own else 0.1
                edges.append(
                    (
                        number,
                        i,
                        j,
                        "mix" if own or number == 0 else "probe",
                        0.5,
                        8,
                        value,
                        0.5 if own else 0.01,
                    )
                )
    columns = ["round", "reader", "read", "purpose", "weight", "bytes", "similarity", "probability"]
    pd.DataFrame(edges, columns=columns).to_parquet(folder / "edges.parquet")
    listed(folder)
    return tmp_path / "p"


def test_similarities_have_a_histogram_for_each_kind_of_pair(recorded, tmp_path):
    """PANM's figure 3: 4 pairs within clusters, 8 between them, in each of two rounds; round 1 has no values."""
    path = figures.plot([recorded], "panm-3", out=tmp_path / "s.svg")
    table = numbers(path)
    assert set(zip(table["method"], table["round"], strict=True)) == {
        ("PANMGrad", 0),
        ("PANMGrad", 3),
    }
    for _, part in table.groupby(["round", "pairs"]):
        own = part["pairs"].iloc[0] == "own cluster"
        assert part["count"].sum() == (4 if own else 8)
        assert part["mean"].iloc[0] == pytest.approx(0.85 if own else 0.1)
        assert part["std"].iloc[0] == pytest.approx(0.05 if own else 0.0)
        inside = part[part["count"] > 0]
        assert inside["low"].min() <= (0.8 if own else 0.1) + 1e-9
        assert inside["high"].max() >= (0.9 if own else 0.1) - 1e-9
    assert set(table["own_above_other"]) == {1.0}
    text = path.read_text()
    assert all(title in text for title in ("round 1<", "round 4<", "another cluster"))


def test_probabilities_of_draws_are_drawn_likewise(recorded, tmp_path):
    table = numbers(figures.plot([recorded], "probabilities", out=tmp_path / "p.svg"))
    assert set(table["round"]) == {1, 3}, "of three rounds with values, the middle one and the last"
    assert table.groupby("pairs")["mean"].first().to_dict() == {
        "another cluster": 0.01,
        "own cluster": 0.5,
    }


def test_similarities_that_run_away_are_drawn_on_a_logarithmic_axis():
    """1 / loss of a model that has learned its samples by heart: bins of equal ratios show the others, too."""
    value, own = (
        np.array([1e6, 2.0, 1.5, 0.5, 0.4, 0.5]),
        np.array([True, True, True, False, False, False]),
    )
    _, axes = make_single_figure()
    table = figures._plot_histograms(axes, value, own, "similarity")
    assert axes.get_xscale() == "log"
    assert np.ptp(np.log(table["high"] / table["low"])) == pytest.approx(0, abs=1e-9)
    drawn = table[table["count"] > 0].groupby("pairs")["count"].sum()
    assert drawn.to_dict() == {"another cluster": 3, "own cluster": 3}
    # the normal distribution of pairs of two clusters: nearly all near their mean
    x, share = axes.lines[1].get_data()
    assert 0.4 < x[share.argmax()] < 0.55
    assert (
        figures._plot_histograms(axes, np.minimum(value, 3.0), own, "similarity")["low"]
        .diff()
        .iloc[1:29]
        .std()
        < 1e-9
    )


def test_pairs_of_equal_values_are_not_above_one_another():
    """2 of 4 comparisons are won, 1 is a tie."""
    value, own = np.array([1.0, 3.0, 1.0, 2.0]), np.array([True, True, False, False])
    assert figures._probability_above(value, own) == pytest.approx((2 + 0.5) / 4)


def test_neighbors_of_the_own_cluster_stand_beside_the_accuracy(recorded, tmp_path):
    """PANM's figure 2: in round 0 one of three neighbors is of the own cluster, later all are; by chance a third."""
    path = figures.plot(
        [recorded], "panm-2", out=tmp_path / "n.svg", methods="*", split="validation"
    )
    table = numbers(path)
    own = table[table["metric"] == "own_cluster"]
    assert own["method"].unique().tolist() == ["PANMGrad"]
    assert own["mean"].tolist() == [pytest.approx(1 / 3), 1.0, 1.0]
    assert own["round"].tolist() == [0, 1, 3]
    curve = table[(table["metric"] == "accuracy") & (table["method"] == "Local")]
    assert curve["mean"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert "uniform draws" in path.read_text()


def test_runs_without_similarities_are_told_how_to_record_them(small, tmp_path):
    with pytest.raises(
        DataError,
        match=r"figure panm-3 needs runs of panm/similarities: .*record_similarities=true",
    ):
        figures.plot([small], "panm-3", out=tmp_path / "none.svg")
    with pytest.raises(DataError, match="no client here averaged with others"):
        figures.plot([small], "neighbors", out=tmp_path / "none.svg")


@pytest.mark.parametrize("fixed", [False, True])
def test_found_clusters_are_not_set_against_the_data_of_another_seed(gwc, tmp_path, listed, fixed):
    """The classes are those of the study's first seed, 3; of one split for all seeds they are of each."""
    (gwc / "config.toml").write_text(
        "name = 'gwc'\nseeds = [3, 0]\n[[methods]]\nkind = 'fedgwc'\nlabel = 'FedGWC'\n"
    )
    if fixed:
        folder = gwc / "FedGWC" / "seed-0"
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("[data]\n", "[data]\nfixed_seed = 1\n"))
        listed(folder)
        with pytest.warns(IncompleteStudyWarning):
            path = figures.plot([gwc], "classes", out=tmp_path / "c.svg")
        assert numbers(path)["count"].tolist() == [16, 4, 1, 19]
        return
    with pytest.warns(IncompleteStudyWarning), pytest.raises(DataError, match="with seed 3, whose"):
        figures.plot([gwc], "classes", out=tmp_path / "c.svg")
