"""Comparisons of stored studies: beside the paper, beside each other, at equal bytes."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie._util.files import write_atomically
from coterie.cli import _tables
from coterie.cli.app import app
from coterie.errors import ConfigError, DataError
from coterie.functional import metrics
from coterie.papers import compare, counting, numbers
from coterie.papers.compare import TRIALS_UNKNOWN
from coterie.results import tables
from coterie.studies import config
from coterie.studies.sweep import expand_sweep

STUDY = """
name = "mine"
paper = "similarity/synthetic_concept_3c"
seeds = 2
[data]
dataset = "synthetic-regression"
[[methods]]
kind = "oracle"
label = "Oracle"
paper = "oracle/fedavg"
[[methods]]
kind = "local"
label = "Alone"
paper = "local/none"
[[methods]]
kind = "random"
label = "Random"
paper = "random/fedavg"
"""


def write_study(folder, text=STUDY, **means):
    """A stored study with these means over clients, each ± 1 over two seeds."""
    folder.mkdir(parents=True)
    study = config.parse_study_text(text)
    write_atomically(folder / "config.toml", config.format_study(study).encode())
    rows = [
        {
            "method": label,
            "label": label,
            "cluster": "all",
            "metric": "mse",
            "mean": mean,
            "std": 1.0,
            "seeds": 2,
        }
        for label, mean in means.items()
    ]
    (folder / "summary.json").write_text(json.dumps({"study": "mine", "rows": rows, "timing": []}))
    return folder


def test_the_rule_is_twice_the_deviation_of_the_difference_or_one_point():
    assert compare.allowed_difference("accuracy", 0.003, 0.004) == pytest.approx(0.01)
    assert compare.allowed_difference("accuracy", 0.03, 0.04) == pytest.approx(0.1)
    assert compare.allowed_difference("mse", 0.3, None) == pytest.approx(0.6)


def test_numbers_stand_beside_the_published_ones(tmp_path):
    folder = write_study(tmp_path / "mine", Oracle=9.5, Alone=35.0, Random=100.0)
    found = compare.compare_with_paper(compare.load_result(folder))
    lines = {(line.label, line.cluster): line for line in found.lines}
    oracle, alone = lines["Oracle", "all"], lines["Alone", "all"]
    assert (oracle.paper, oracle.paper_std, oracle.within) == (9.43, 0.33, True)
    assert oracle.difference == pytest.approx(0.07)
    assert (alone.paper, alone.within) == (30.26, False)  # 4.74 > 2 sqrt(1 + 1.73^2) = 4.0
    assert lines["Random", "all"].within is None, "1494.84 ± 1973 is an order of magnitude"
    assert found.notes == numbers.find_notes("similarity/synthetic_concept_3c")


@pytest.mark.parametrize("mean", [None, float("nan"), float("inf")])
def test_a_method_without_a_finite_mean_is_in_no_comparison_and_no_ordering(tmp_path, mean):
    """Not a best of errors (NaN sorts anywhere) nor a worst: it is named, and others are judged."""
    folder = write_study(tmp_path / "mine", Oracle=9.5, Alone=mean, Random=100.0)
    found = compare.compare_with_paper(compare.load_result(folder))
    assert [line.label for line in found.lines if line.cluster == "all"] == ["Oracle", "Random"]
    assert [(one.better, one.worse, one.kept) for one in found.chain] == [
        ("oracle", "random", True)
    ]
    assert found.pairs == []
    said = "Alone is not compared by mean squared error: in some seed {}."
    why = "a client of it has no finite mean squared error (it diverged)"
    assert said.format(why) in found.missing
    # The same without a model that diverged, as an index of clusters where there is one cluster.
    content = json.loads((folder / "summary.json").read_text())
    for row in content["rows"]:
        if row["label"] == "Alone":
            row["undefined"] = True
    (folder / "summary.json").write_text(json.dumps(content))
    found = compare.compare_with_paper(compare.load_result(folder))
    assert said.format("mean squared error is undefined") in found.missing


@pytest.mark.parametrize(
    ("means", "expected"), [([0.5, 0.7], 0.1), ([0.5, None], None), ([0.5, float("nan")], None)]
)
def test_the_deviation_over_clusters_needs_the_mean_of_each(tmp_path, means, expected):
    """Of 0.5 and 0.7 it is 0.1; a cluster in which a client diverged leaves it undefined."""
    text = STUDY.replace("similarity/synthetic_concept_3c", "dac/cifar10_covariate_70_20_5_5")
    folder = write_study(tmp_path / "mine", text.replace("oracle/fedavg", "dac/fedavg"), Oracle=1.0)
    content = json.loads((folder / "summary.json").read_text())
    for place, mean in enumerate(means):
        content["rows"].append(
            {
                "method": "oracle",
                "label": "Oracle",
                "cluster": str(place),
                "metric": "accuracy",
                "mean": mean,
                "std": None,
                "seeds": 2,
            }
        )
    (folder / "summary.json").write_text(json.dumps(content))
    found = compare.compare_with_paper(compare.load_result(folder))
    lines = [line.ours for line in found.lines if line.metric == "std_over_clusters"]
    assert lines == ([] if expected is None else [pytest.approx(expected)])


def test_the_orderings_of_the_paper_are_checked(tmp_path):
    """The paper: oracle 9.43 below local 30.26 below random 1494.84 (which is not above local, so not in the chain)."""
    good = compare.compare_with_paper(
        compare.load_result(write_study(tmp_path / "a", Oracle=9, Alone=30, Random=100))
    )
    assert [(o.better, o.worse, o.kept) for o in good.chain] == [("oracle", "random", True)]
    assert [(o.better, o.worse, o.kept) for o in good.pairs] == [
        ("oracle/fedavg", "local/none", True)
    ]
    bad = compare.compare_with_paper(
        compare.load_result(write_study(tmp_path / "b", Oracle=40, Alone=30, Random=20))
    )
    assert [o.kept for o in bad.chain] == [False]
    assert [o.kept for o in bad.pairs] == [False]
    last_good, last_bad = _tables.build_paper_tables(good)[-1], _tables.build_paper_tables(bad)[-1]
    assert (
        last_good.foot
        == "1 of the 1 pairs that are clearly apart in the paper are in its order here."
    )
    assert last_good.title == "Orderings of the paper", "no table without a row"
    assert (len(last_bad.rows), last_bad.foot[:13]) == (1, "0 of the 1 pa")


def test_a_study_without_published_numbers_says_so(tmp_path):
    text = STUDY.replace('paper = "similarity/synthetic_concept_3c"', "")
    with pytest.raises(ConfigError, match="'mine' names no published experiment"):
        compare.compare_with_paper(
            compare.load_result(write_study(tmp_path / "mine", text, Oracle=9))
        )


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no study"):
        compare.load_result(tmp_path)
    with pytest.raises(DataError, match="no finished run"):
        compare.load_result(write_study(tmp_path / "mine"))


def test_studies_side_by_side_keep_their_gaps(tmp_path):
    a = compare.load_result(write_study(tmp_path / "a", Oracle=9, Random=100))
    b = compare.load_result(write_study(tmp_path / "b", Oracle=8))
    (sheet,) = _tables.build_side_by_side([a, b])
    assert sheet.rows[0] == ("Oracle", "9.00 ± 1.00", "2", "8.00 ± 1.00", "2")
    assert sheet.rows[2] == ("Random", "100.00 ± 1.00", "2", "", "")
    assert str(b.folder) in sheet.head, "two studies of one name are told apart by their folders"


def values(label, folder):
    return [
        row["mean"]
        for row in folder.rows
        if (row["label"], row["cluster"], row["metric"]) == (label, "all", "accuracy")
    ]


def of_methods(folder, *labels, seeds=(0, 1)):
    """Write the study's file of a folder of made-up runs."""
    study = config.parse_study_text(
        f"name = {json.dumps(folder.name)}\nseeds = {list(seeds)}\n[data]\ndataset = 'digits'\n"
        + "".join(f'[[methods]]\nkind = "{label.lower()}"\nlabel = "{label}"\n' for label in labels)
    )
    write_atomically(folder / "config.toml", config.format_study(study).encode())
    return folder


def test_an_old_summary_is_not_believed_where_the_runs_are(small):
    """It says 0.9 of three seeds; DAC has seed 1 alone, .65, and Local's seed 0 is left out beside it."""
    of_methods(small, "DAC", "Local", seeds=(0, 1, 2))
    old = {
        "method": "dac",
        "label": "DAC",
        "cluster": "all",
        "metric": "accuracy",
        "mean": 0.9,
        "std": 0.1,
        "seeds": 3,
    }
    (small / "summary.json").write_text(json.dumps({"study": "small", "rows": [old], "timing": []}))
    shutil.rmtree(small / "DAC" / "seed-0")
    found = compare.load_result(small)
    assert values("DAC", found) == [pytest.approx(0.65)]
    assert found.describe_gaps() == [
        "DAC: seeds 0, 2 missing",
        "Local: seed 2 missing",
        "Means are over the seeds that all have: 1; left out: Local 0.",
    ]
    (sheet,) = _tables.build_side_by_side([found])
    assert sheet.rows == [("DAC", "65.00", "1"), ("Local", "50.00", "1")]


def test_a_summary_without_its_runs_is_compared_and_called_so(tmp_path):
    """Two seeds of two were stored for Oracle; Alone and Random have no numbers."""
    found = compare.load_result(write_study(tmp_path / "mine", Oracle=9))
    assert found.describe_gaps() == [
        "No run is there: the numbers are from summary.json.",
        "Alone: 0 of 2 seeds.",
        "Random: 0 of 2 seeds.",
    ]
    assert compare.to_json(found)["archived"] is True


def test_studies_are_compared_over_the_seeds_that_both_have(small, write_run, final_rows):
    """DAC has .625 and .65 in seeds 0 and 1 of one study; the other has seeds 1 and 2: seed 1 stands beside seed 1."""
    other = small.parent / "other"
    for seed, value in ((1, 0.5), (2, 0.9)):
        rows = final_rows([value] * 4, [0, 0, 0, 1])
        write_run(
            other / "DAC" / f"seed-{seed}",
            kind="dac",
            label="DAC",
            seed=seed,
            metrics=rows,
            study="other",
        )
    results = [of_methods(small, "DAC", "Local"), of_methods(other, "DAC", seeds=(1, 2))]
    found, notes = compare.restrict_to_common_seeds(
        [compare.load_result(folder) for folder in results]
    )
    assert notes == [
        "Means are over the seeds that all studies have: 1; they have: small 0, 1; other 1, 2."
    ]
    assert [values("DAC", one) for one in found] == [[pytest.approx(0.65)], [pytest.approx(0.5)]]
    (sheet,) = _tables.build_side_by_side(found)
    assert sheet.rows == [("DAC", "65.00", "1", "50.00", "1"), ("Local", "50.00", "1", "", "")]


def test_studies_without_a_common_seed_keep_their_own_and_it_is_said(small, write_run, final_rows):
    """Seeds 0 and 1 against seed 7; and a summary without runs whose seeds nobody knows."""
    other = small.parent / "other"
    write_run(
        other / "DAC" / "seed-7",
        kind="dac",
        label="DAC",
        seed=7,
        metrics=final_rows([0.5] * 4, [0] * 4),
        study="other",
    )
    results = [
        compare.load_result(of_methods(small, "DAC", "Local")),
        compare.load_result(of_methods(other, "DAC", seeds=(7,))),
    ]
    found, notes = compare.restrict_to_common_seeds(results)
    assert found == results
    assert notes == ["Each study is averaged over seeds of its own: small 0, 1; other 7."]
    stored = compare.load_result(write_study(small.parent / "mine", Oracle=9, Alone=9, Random=9))
    _, notes = compare.restrict_to_common_seeds([results[0], stored])
    assert notes[-1] == "Each study is averaged over seeds of its own: small 0, 1; mine unknown."


def test_n_stands_beside_the_paper_and_one_seed_has_no_deviation(tmp_path):
    """± 1 over two seeds; of a single seed the deviation that was stored is none."""
    folder = write_study(tmp_path / "mine", Oracle=9.5)
    (sheet,) = _tables.build_paper_tables(compare.compare_with_paper(compare.load_result(folder)))
    place = sheet.head.index("n")
    assert (sheet.rows[0][place - 1], sheet.rows[0][place]) == ("9.50 ± 1.00", "2")
    text = (folder / "summary.json").read_text().replace('"seeds": 2', '"seeds": 1')
    (folder / "summary.json").write_text(text)
    comparison = compare.compare_with_paper(compare.load_result(folder))
    (sheet,) = _tables.build_paper_tables(comparison)
    assert (sheet.rows[0][place - 1], sheet.rows[0][place]) == ("9.50", "1")
    assert comparison.missing[0].startswith("No run is there")


def test_the_command_prints_tables_and_json(tmp_path):
    folder = write_study(tmp_path / "mine", Oracle=9.5, Alone=35.0, Random=100.0)
    shown = CliRunner().invoke(app, ["compare", str(folder), "--paper"])
    assert shown.exit_code == 0, shown.output
    assert "Oracle" in shown.output
    assert "9.43 ± 0.33" in shown.output
    told = CliRunner().invoke(app, ["compare", str(folder), "--paper", "--json"])
    content = json.loads(told.output)[0]
    assert content["lines"][0]["paper"] == 9.43
    assert np.isclose(content["lines"][0]["difference"], 0.07)
    beside = CliRunner().invoke(app, ["compare", str(folder), str(folder)])
    assert beside.exit_code == 0, beside.output


def test_a_markdown_table_has_one_line_a_row():
    sheet = tables.TextTable("t", ("a", "b"), [("x|y", "1")], "foot")
    assert tables.format_markdown(sheet) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\nfoot\n"


@pytest.fixture
def five(tmp_path, write_run, final_rows):
    """A study of five seeds: DAC is far better than Local, and like Random; of two clusters."""
    rng = np.random.default_rng(0)
    for seed in range(5):
        level = 0.05 * rng.standard_normal(4)
        for label, mean in (("DAC", 0.8), ("Random", 0.795), ("Local", 0.6)):
            values = mean + level + 0.02 * rng.standard_normal(4)
            rows = final_rows(list(values), [0, 0, 1, 1]) + final_rows(
                list(1 - values), [0, 0, 1, 1], metric="loss"
            )
            folder = tmp_path / "five" / label / f"seed-{seed}"
            write_run(
                folder, kind=label.lower(), label=label, seed=seed, metrics=rows, study="five"
            )
    return of_methods(tmp_path / "five", "DAC", "Random", "Local", seeds=range(5))


def told(*arguments):
    """What a command prints, where it ends with status 0."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_says_what_is_established_in_words(five):
    shown = told("compare", five)
    text = " ".join(shown.split())
    assert "DAC is better than Local by " in text
    assert " seeds would settle a difference of this size" in text
    assert "cannot be distinguished from it with 5 seeds." in text
    assert "* cannot be distinguished from the best of its column." in text
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_tables_and_verdicts_of_several_studies_say_whose_they_are(
    five, tmp_path, write_run, final_rows
):
    """In one DAC is far better than Local, in the other far worse."""
    for seed in range(5):
        for label, mean in (("DAC", 0.5), ("Local", 0.6 + 0.01 * seed)):
            folder = tmp_path / "other" / label / f"seed-{seed}"
            rows = final_rows([mean] * 4, [0, 0, 1, 1])
            write_run(
                folder, kind=label.lower(), label=label, seed=seed, metrics=rows, study="other"
            )
    other = of_methods(tmp_path / "other", "DAC", "Local", seeds=range(5))
    shown = told("compare", five, other, "--metric", "accuracy")
    titles = [line.split(",")[0] for line in shown.splitlines() if line.startswith("Pairs")]
    assert titles == ["Pairs of five", "Pairs of other", "Pairs of five and other"]
    text = " ".join(shown.split())
    assert "five: DAC is better than Local by " in text
    assert "other: Local is better than DAC by " in text
    alone = told("compare", five)
    assert "five:" not in alone
    assert "\nPairs, test accuracy" in alone


@pytest.mark.parametrize("other", ["my_losses:half", "cross-entropy"])
def test_values_of_different_losses_are_not_compared(
    tmp_path, write_run, final_rows, listed, other
):
    """Half of a loss is no better. A loss by name that also follows from the targets is the same."""
    folder = tmp_path / "losses"
    for label, scale in (("Local", 1.0), ("Half", 0.5)):
        for seed in range(3):
            values = [scale * (1 + 0.01 * seed + 0.1 * client) for client in range(4)]
            run = write_run(
                folder / label / f"seed-{seed}",
                kind="local" if label == "Local" else "dac",
                label=label,
                seed=seed,
                metrics=final_rows(values, [0, 0, 1, 1], metric="loss"),
                study="losses",
            )
            if label == "Half":
                with (run / "config.toml").open("a", encoding="utf-8") as file:
                    file.write(f'loss = {{ kind = "{other}" }}\n')
                listed(run)
    of_methods(folder, "Local", seeds=range(3))
    shown, compared = (" ".join(told(name, folder).split()) for name in ("show", "compare"))
    for text in (shown, compared):
        assert ("is the best" in text) == (other == "cross-entropy")
        assert ("each in a unit of its own" in text) == (other != "cross-entropy")
    assert ("Gain over" in shown) == ("Half over Local" in compared) == (other == "cross-entropy")


@pytest.mark.full
def test_fewer_pairs_by_a_metric_and_a_baseline(five):
    (content,) = json.loads(told("compare", five, "--json"))
    whole = {frozenset((pair["method_a"], pair["method_b"])): pair for pair in content["pairs"]}
    assert len(whole) == 3
    assert len(content["verdicts"]) == 6
    assert content["verdicts"][-1] == TRIALS_UNKNOWN, "without --tuned nobody knows"
    (content,) = json.loads(
        told("compare", five, "--baseline", "Local", "--metric", "loss", "--json")
    )
    assert [(pair["method_a"], pair["method_b"], pair["metric"]) for pair in content["pairs"]] == [
        ("DAC", "Local", "loss"), ("Random", "Local", "loss"),
    ]  # fmt: skip
    for pair in content["pairs"]:
        other = whole[frozenset((pair["method_a"], pair["method_b"]))]
        assert pair["p"] == pytest.approx(other["p"])
        assert pair["p_corrected"] <= other["p_corrected"]
    (content,) = json.loads(
        told("compare", five, "--cluster", "1", "--test-share", "0.2", "--json")
    )
    (wide,) = [
        pair
        for pair in content["pairs"]
        if {pair["method_a"], pair["method_b"]} == {"DAC", "Local"}
    ]
    assert wide["cluster"] == "1"
    assert "Nadeau and Bengio" in content["verdicts"][-2]
    trials = five.parent / "five-tuned.json"
    trials.write_text(
        json.dumps([{"label": label, "lr": 0.1} for label in ("DAC", "Random", "Local")])
    )
    (content,) = json.loads(told("compare", five, "--tuned", trials, "--json"))
    assert len(content["verdicts"]) == 5
    trials.write_text(json.dumps([{"label": "DAC", "lr": lr} for lr in (0.1, 0.2)]))
    (content,) = json.loads(told("compare", five, "--tuned", trials, "--json"))
    assert "settings tried in tuning (DAC 2, Random 0, Local 0)" in content["verdicts"][-1]


@pytest.mark.full
def test_of_a_sweep_over_data_the_points_are_compared_by_their_folders(five):
    """A point is a study like any other; what stands beside each other are means."""
    swept = five.parent / "swept"
    text = (five / "config.toml").read_text() + '[sweep]\n"data.train" = [8, 16]\n'
    swept.mkdir()
    shutil.copytree(five, swept / "train=8")
    shutil.move(five, swept / "train=16")
    (swept / "config.toml").write_text(text.replace('name = "five"', 'name = "swept"'))
    (content,) = json.loads(told("compare", swept, "--json"))
    said = "swept: methods at different points of a sweep are not compared in pairs; give the folder of one, such as "
    assert content["pairs"] == []
    assert content["verdicts"] == [f"{said}swept/train=8."]
    (content,) = json.loads(told("compare", swept / "train=8", "--json"))
    assert len(content["pairs"]) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--metric", "acuracy", "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ("--baseline", "Lokal", "unknown method 'Lokal'; did you mean 'Local'?"),
        ("--cluster", "7", "unknown cluster '7'"),
    ],
)
def test_what_is_not_in_the_study_is_refused_with_what_is(five, option, value, said):
    done = CliRunner().invoke(app, ["compare", str(five), option, value])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(said)


def test_tables_for_papers(five):
    """Means with intervals by cluster, then the pairs; bold and stars as in the terminal."""
    text = told("compare", five, "--format", "latex")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert r"\textbf{" in text
    assert text.count("% * cannot be distinguished") == 1
    assert "mean over clients" in text
    text = told("compare", five, "--format", "markdown", "--baseline", "Local")
    assert text.count("| --- |") == 2
    assert "| DAC over Local | **+" in text


def test_a_summary_that_was_stored_without_pairs_is_said_to_be(tmp_path):
    text = " ".join(
        told(
            "compare", write_study(tmp_path / "mine", Oracle=9.5, Alone=35.0, Random=100.0)
        ).split()
    )
    assert "was stored without pairs" in text
    assert "\x1b" not in text


def test_a_deviation_as_large_as_its_number_tells_nothing(tmp_path):
    """1494.84 ± 1973 of Random: 100 is not called near it, and 9.43 ± 0.33 of Oracle is judged as ever."""
    found = compare.compare_with_paper(
        compare.load_result(write_study(tmp_path / "mine", Oracle=9.5, Alone=35.0, Random=100.0))
    )
    assert [line.within for line in found.lines] == [True, False, None]
    assert "1 of 3 numbers are within the rule" in (
        foot := _tables.build_paper_tables(found)[0].foot
    )
    assert "1 undecided" in foot
    assert not compare.is_too_uncertain("was", -0.8, 3.0), (
        "zero is no end of the scale of a score that may be negative"
    )


def test_where_the_paper_prints_no_deviation_ours_stands_for_it(tmp_path):
    """Clusters of 9.54, 9.29 and 9.46, without deviations; ours are ± 0.3, 0.4 and 0.5, 0.408 pooled."""
    folder = write_study(tmp_path / "mine")
    rows = [
        {"method": "o", "label": "Oracle", "cluster": f"targets {n}", "metric": "mse", "mean": 9.54 + 1.1, "std": std,
         "seeds": 2}
        for n, std in enumerate((0.3, 0.4, 0.5))
    ]  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({"study": "mine", "rows": rows, "timing": []}))
    lines = compare.compare_with_paper(compare.load_result(folder)).lines
    assert {round(line.pooled, 3) for line in lines} == {0.408}  # sqrt((0.09 + 0.16 + 0.25) / 3)
    # differences 1.10, 1.35 and 1.18; allowed 2 hypot(std, .408): 1.01, 1.14 and 1.29
    assert [line.within for line in lines] == [False, False, True]
    assert [line.verdict for line in lines] == ["outside", "outside", "ours"]


def test_ratios_of_times_stand_beside_the_papers_of_the_same_accuracy(tmp_path):
    """SosicFL on five folds: 3.8 times sooner than FedAvg locally, 1.2 globally; no ratio without both curves."""
    paper = "sosicfl/cifar10-simplecnn-5-fold"
    text = f'name = "mine"\npaper = "{paper}"\nseeds = 2\n[data]\ndataset = "digits"\n' + "".join(
        f'[[methods]]\nkind = "{kind}"\nlabel = "{label}"\npaper = "{row}/fedavg"\n'
        for kind, label, row in (
            ("sosicfl", "S", "sosicfl"),
            ("sosicfl-plus", "S+", "sosicfl_plus"),
        )
    )
    folder = write_study(tmp_path / "mine", text)
    known = {"base": "FedAvg", "std": 0.25, "seeds": 2, "reached": 2, "tta": 9.0, "reason": ""}
    times = [
        {**known, "label": "S", "metric": "accuracy", "ratio": 4.0},
        {**known, "label": "S", "metric": "global_accuracy", "ratio": 2.0},
        {**known, "label": "S+", "metric": "accuracy", "ratio": None},
    ]
    content = {"study": "mine", "rows": [], "timing": [], "time_to_accuracy": times}
    rows = [
        {
            "method": "s",
            "label": "S",
            "cluster": "0",
            "metric": "loss",
            "mean": 1.0,
            "std": 0.1,
            "seeds": 2,
        }
    ]
    (folder / "summary.json").write_text(json.dumps({**content, "rows": rows}))
    lines = compare.compare_with_paper(compare.load_result(folder)).lines
    assert [(line.metric, line.ours, line.std, line.paper, line.within) for line in lines] == [
        # 0.8 is more than twice of ours, pooled: 2 x 0.25 sqrt(2)
        ("global_tta_ratio", 2.0, 0.25, 1.2, False),
        ("tta_ratio", 4.0, 0.25, 3.8, True),
    ]


def test_rows_chosen_here_are_counted_apart(tmp_path):
    """The first method of a published row stands for it; another of the same row does not count."""
    tuned = (
        STUDY + '[[methods]]\nkind = "oracle"\nlabel = "Tuned"\npaper = "oracle/fedavg"\nlr = 0.1\n'
    )
    result = compare.load_result(write_study(tmp_path / "mine", tuned, Oracle=20.0, Tuned=9.4))
    found = compare.compare_with_paper(result)
    assert [(line.label, line.chosen) for line in found.lines] == [
        ("Oracle", False),
        ("Tuned", True),
    ]
    published, chosen = _tables.build_paper_tables(found)[:2]
    assert [row[0] for row in published.rows] == ["Oracle"]
    assert " 0 of 1 numbers are within the rule." in published.foot
    assert [row[0] for row in chosen.rows] == ["Tuned"]
    one = next(one for one in counting.count_coverage([result]) if one.source == "similarity")
    assert (one.published, one.full, one.reduced, one.none) == (271, 0, 1, 270)
    assert (one.verdicts.within, one.verdicts.outside) == (0, 1)


def test_full_size_is_that_of_the_built_in_study():
    """Fewer seeds leave the size; fewer rounds, fewer clients or a study of one's own do not."""
    assert compare.is_full_size(config.load_study("similarity/synthetic", ["seeds=1"]))
    assert not compare.is_full_size(config.load_study("similarity/synthetic", ["scale=0.5"]))
    assert not compare.is_full_size(config.load_study("similarity/synthetic", ["rounds=20"]))
    assert not compare.is_full_size(config.parse_study_text(STUDY))
    assert compare.is_full_size(config.load_study("similarity/samples", ["seeds=1"])), (
        "its paper prints no numbers"
    )
    assert not compare.is_full_size(
        config.load_study("similarity/samples", ["sweep.data.train=[50]"])
    )
    (stored,) = expand_sweep(config.load_study("dac/tau"))
    assert compare.is_full_size(stored), "as it is stored: with a method for each point"


def test_costs_of_the_poster_are_predicted_with_a_verdict_each():
    """n = 100, l = 4, T1 = 100, T2 = 200, a correction in every tenth round; bags of the 24 others of a cluster."""
    study = config.load_study("panm/low-budget")
    lines = {
        (line.row.partition("/")[0], line.metric): line for line in compare.predict_costs(study)
    }
    assert len(lines) == 16
    moved, bandwidth = metrics.MODELS_MOVED.name, metrics.BANDWIDTH.name
    for row, models in (("fedavg", 1), ("ifca_c2", 2), ("ifca_c3", 3), ("ifca_c4", 4)):
        assert (lines[row, moved].ours, lines[row, bandwidth].ours) == (300 * (models + 1), models)
        assert lines[row, moved].within
        assert lines[row, bandwidth].within
    told = " ".join(numbers.find_notes("panm/panm_low_budget_cifar10_4c"))
    for k in (2, 3):
        printed = 4 + 99 * (4 + k) + 20 * 8 + 180 * k
        # of k members of the bag, drawn anew, those that are not among the four examined
        further = k * (1 - 4 / 24)
        for row in (f"panm_loss_k{k}", f"panm_grad_k{k}"):
            cost, width = lines[row, moved], lines[row, bandwidth]
            assert cost.paper == printed
            assert cost.ours == pytest.approx(printed + 20 * further)
            assert width.ours == pytest.approx((8 + further) / 100)
            assert (cost.within, width.within) == (False, False)
        numbers_told = (printed, round(20 * further), 4 + 99 * (4 + k) + 20 * 8)
        assert all(f" {number} " in told or f" {number}," in told for number in numbers_told)


def test_costs_are_those_of_the_run_and_no_results(tmp_path):
    """A tenth of the rounds moves a tenth of the models; the numbers are counted as predictions once."""
    text = config.format_study(config.load_study("panm/low-budget", ["scale=0.1", "seeds=1"]))
    result = compare.load_result(write_study(tmp_path / "mine", text, **{"FedAvg": 0.3}))
    found = compare.compare_with_paper(result)
    fedavg = next(
        line
        for line in found.lines
        if (line.label, line.metric) == ("FedAvg", metrics.MODELS_MOVED.name)
    )
    assert (fedavg.ours, fedavg.paper, fedavg.within, fedavg.predicted) == (60, 600, False, True)
    titles = [sheet.title for sheet in _tables.build_paper_tables(found)]
    assert any(title.endswith("costs compared with the paper, in models") for title in titles)
    (one,) = [one for one in counting.count_coverage([]) if one.source == "panm"]
    assert (one.published, one.predicted, one.none) == (49, 16, 33)
    assert one.verdicts == counting.VerdictCounts(0, 8, 0, 8, 0, few_seeds=0)


def test_what_is_best_is_said_of_the_widened_intervals(tmp_path, write_run, final_rows):
    """Differences of .04 .05 .06 .05: t is 12.2 of four seeds (p = .001), and 2.0 (p = .14) where each tests nine tenths.

    Neither a mean in bold nor a sentence says more than the pair.
    """
    for seed, gain in enumerate((0.04, 0.05, 0.06, 0.05)):
        for label, mean in (("DAC", 0.6 + gain), ("Local", 0.6)):
            folder = tmp_path / "four" / label / f"seed-{seed}"
            metrics = final_rows([mean] * 2, [0, 0])
            write_run(folder, kind=label.lower(), label=label, seed=seed, metrics=metrics, study="four")  # fmt: skip
    four = of_methods(tmp_path / "four", "DAC", "Local", seeds=range(4))
    text = " ".join(told("compare", four).split())
    assert "DAC is better than Local by" in text
    assert "DAC is the best" in text
    assert tables.BEST in text
    text = " ".join(told("compare", four, "--test-share", "0.9").split())
    assert "DAC over Local: not established" in text
    assert " is the best" not in text
    assert tables.BEST not in text
    assert "Local cannot be distinguished from it with 4 seeds." in text
    assert "**" not in told("compare", four, "--test-share", "0.9", "--format", "markdown")


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (("--equal-bytes",), ("--metric", "loss")),
        (("--at-bytes", "5"), ("--cluster", "1")),
        (("--equal-time",), ("--test-share", "0.2")),
        (("--setting", "tau"), ("--baseline", "Local")),
        (("--setting", "tau"), ("--test-share", "0.2")),
        (("--paper",), ("--tuned", "trials.json")),
        (("--paper",), ("--setting", "tau")),
        (("--setting", "tau"), ("--equal-time",)),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(tmp_path, kind, option):
    """It is named, before a folder is read."""
    done = CliRunner().invoke(app, ["compare", str(tmp_path), *kind, *option])
    assert isinstance(done.exception, ConfigError)
    assert option[0] in str(done.exception)
    assert "leave out" in str(done.exception) or "give one of them" in str(done.exception)


def test_it_is_said_of_whom_a_metric_is_undefined(small, listed):
    """The mean of DAC is then over other clients than that of Local."""
    of_methods(small, "DAC", "Local")
    folder = small / "DAC" / "seed-0"
    stored = json.loads((folder / "provenance.json").read_text())
    reason = "accuracy is undefined: no sample (client 3)"
    stored["undefined"] = {"accuracy": reason, "loss": "of another metric"}
    (folder / "provenance.json").write_text(json.dumps(stored))
    listed(folder)
    (found,) = compare.compare_in_pairs([compare.load_result(small)])
    assert f"DAC: {reason}." in found.verdicts
    assert not any("of another metric" in line for line in found.verdicts)
