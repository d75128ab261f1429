"""The page with the papers' tables is the one that the stored summaries make."""

import csv
import json
import math
import re
import tomllib
import types
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import reproduction
import stored

from coterie.papers import compare
from coterie.studies import config, sweep
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

ROOT = Path(__file__).resolve().parents[3]


HEAD = ROOT / "docs/reference/reproduction.md"
PAPERS = ("similarity", "dac", "panm", "fedgwc", "sosicfl")


@pytest.mark.slow
def test_the_pages_are_up_to_date():
    made = reproduction.pages()
    there = {HEAD, *(ROOT / "docs/reference/reproduction").glob("*.md")}
    assert set(made) == there
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run make docs"


def test_each_stored_study_stands_on_one_page_that_of_its_paper():
    titles = {}
    for path in (ROOT / "docs/reference/reproduction").glob("*.md"):
        for title in re.findall(r"^## (\S+/\S+)$", path.read_text(), re.MULTILINE):
            assert title not in titles
            titles[title] = path.stem
    stored_ones = {}
    for path in (ROOT / "docs/reference/runs").glob("*/*/origin.json"):
        name = f"{path.parent.parent.name}/{path.parent.name}"
        if not name.endswith("-trials"):
            stored_ones[name] = name.split("/")[0] if name.split("/")[0] in PAPERS else "others"
    assert titles == stored_ones


def test_a_stored_study_is_told_with_what_its_tables_hold_though_it_was_not_asked_for(
    tmp_path, monkeypatch
):
    """The clusters that IFCA ended with and its best round, of a study that repeats no paper."""
    study = config.parse_study_text("""
        name = "small"
        rounds = 2
        seeds = [0]
        eval_every = 1
        evaluate = "final"
        model = { kind = "linear" }
        data = { dataset = "digits" }
        local = { batch_size = 5, optimizer = "sgd", lr = 0.1 }
        methods = [{ kind = "ifca", clusters = 2 }]
    """)
    run = run_study(study, out=tmp_path / "runs", federation=tiny_federation())
    kept = stored.keep(run.folder, where=tmp_path / "kept")
    rows = {
        row["metric"]: row["mean"]
        for row in json.loads((kept / "summary.json").read_text())["rows"]
    }
    assert rows["accuracy_max"] >= rows["accuracy"]
    assert rows["n_clusters"] in (1.0, 2.0)
    assert 0 <= rows["rand"] <= 1
    monkeypatch.setattr(reproduction, "STORED", tmp_path / "kept")
    page = reproduction.section(kept)
    head = next(line for line in page.splitlines() if line.startswith("| method |"))
    names = [name.strip() for name in head.strip("|").split("|")]
    row = next(line for line in page.splitlines() if line.startswith("| ifca |"))
    shown = dict(zip(names, map(str.strip, row.strip("|").split("|")), strict=True))
    assert shown["n clusters"] == f"{rows['n_clusters']:.4g}"
    assert shown["accuracy max"] == f"{rows['accuracy_max']:.4g}"
    assert page.endswith("Means over clients; 1 seed.\n")
    # A method whose models diverged is named beside the others.
    content = json.loads((kept / "summary.json").read_text())
    content["rows"].append(
        content["rows"][0]
        | {
            "label": "lost",
            "cluster": "all",
            "metric": "accuracy",
            "mean": None,
            "undefined": False,
        }
    )
    (kept / "summary.json").write_text(json.dumps(content))
    assert re.search(r"^\| lost \|[ |]*$", reproduction.section(kept), re.MULTILINE)


@pytest.mark.full
def test_a_stored_sweep_is_one_table_with_a_column_for_each_point(tmp_path, monkeypatch):
    """A row for a method, however many points it has."""
    (tmp_path / "small.toml").write_text(
        'rounds = 1\nseeds = [0, 1]\nmodel.kind = "linear"\nmethods = [{ kind = "local", label = "Alone, one" }]\n'
        'data = { dataset = "digits", num_clients = 2, train = 5, validation = 5 }\nsweep = { "data.train" = [5, 8] }\n'
    )
    sweep.run_sweep(tmp_path / "small.toml", out=tmp_path)
    kept = stored.keep(tmp_path / "small", where=tmp_path / "kept")
    rows = json.loads((kept / "summary.json").read_text())["rows"]
    means = {
        row["label"]: row for row in rows if (row["cluster"], row["metric"]) == ("all", "accuracy")
    }
    cells = [
        f"{100 * means[f'Alone, one, train={n}'][k]:.2f}" for n in (5, 8) for k in ("mean", "std")
    ]
    monkeypatch.setattr(reproduction, "STORED", tmp_path / "kept")
    page = reproduction.section(kept)
    assert "| method | train=5 | train=8 |" in page
    assert "| Alone, one | {} ± {} | {} ± {} |".format(*cells) in page
    assert page.count("Alone, one") == 1
    assert page.endswith("The test accuracy in %, mean over clients; 2 seeds.\n")


# What follows counts the page's numbers again, from the papers' tables and the stored summaries as
# they are, without the package.
PERCENT = {
    "accuracy", "balanced_accuracy", "accuracy_max", "global_accuracy_max", "std_over_clusters",
}  # fmt: skip
RATIOS = {"tta_ratio": "accuracy", "global_tta_ratio": "global_accuracy"}
MEANS = {"all_clients": "all", "mean_over_clusters": "clusters", "all_clusters": "clusters"}


def cluster_here(name: str) -> str:
    """The name that a study gives to a cluster of a paper's table."""
    if found := re.match(r"rot(\d+)", name):
        return f"rotation {found[1]}"
    if found := re.match(r"labels_(\d)_(\d)", name):
        return f"labels {found[1]}-{found[2]}"
    if found := re.match(r"cluster(\d)", name):
        return f"targets {int(found[1]) - 1}"
    known = {**MEANS, "animals_n60": "labels 2-7", "vehicles_n40": "labels 0-1,8-9"}
    return known.get(name, name)


def find_ours(summary: dict, label: str, cluster: str, metric: str) -> dict | None:
    """A stored mean with its deviation and seeds; None where nothing finite is stored."""
    if metric in RATIOS:
        for one in summary.get("time_to_accuracy", ()):
            found = one["label"] == label and one["metric"] == RATIOS[metric]
            # 0 is of a method that never got there, None of a curve that is not there.
            if found and one["ratio"] is not None:
                return {**one, "mean": one["ratio"]}
    rows = [one for one in summary["rows"] if one["label"] == label]
    if metric == "std_over_clusters":
        own = [
            one for one in rows
            if one["metric"] == "accuracy" and one["cluster"] not in ("all", "clusters")
        ]  # fmt: skip
        means = [one["mean"] for one in own]
        return None if not means else {"mean": np.std(means), "std": None, "seeds": own[0]["seeds"]}
    for one in rows:
        if (one["cluster"], one["metric"]) == (cluster, metric):
            return None if one["mean"] is None else one
    return None


def judge(row: list[dict]) -> None:
    """Write the verdict into each number of a published row."""
    for one in row:
        alike = [other for other in row if other["metric"] == one["metric"]]
        ours = one["std"] or 0.0
        # Of the paper, or ours: the root of the mean square of clusters, or of means.
        theirs = one["paper_std"]
        if theirs is None:
            pool = [
                other["std"] ** 2 for other in alike
                if other["std"] is not None and other["is_mean"] == one["is_mean"]
            ]  # fmt: skip
            theirs = math.sqrt(sum(pool) / len(pool)) if pool else 0.0
        point = 0.01 if one["metric"] in PERCENT else 0.0
        distance = abs(one["difference"])
        wide = [one] if one["paper_std"] is not None else alike
        if any(
            other["paper_std"] is not None and other["metric"] != "was"
            and 0 < abs(other["paper"]) <= 2 * other["paper_std"]
            for other in wide
        ):  # fmt: skip
            one["verdict"] = "undecided"
        elif one["paper_std"] is not None and distance <= 2 * one["paper_std"]:
            one["verdict"] = "paper"
        elif distance <= point:
            one["verdict"] = "point"
        elif distance <= 2 * math.hypot(ours, theirs):
            one["verdict"] = "ours"
        else:
            one["verdict"] = "outside"


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def withdrawn(folder: Path) -> str:
    return json.loads((folder / "origin.json").read_text()).get("withdrawn", "")


def recount() -> list[dict]:
    """Every number of a paper that is beside a stored one, with its verdict."""
    found = []
    for path in sorted((ROOT / "docs/reference/runs").glob("*/*/summary.json")):
        if path.parent.name.endswith("-trials") or withdrawn(path.parent):
            continue
        study = tomllib.loads((path.parent / "config.toml").read_text())
        source, _, experiment = study.get("paper", study["name"]).partition("/")
        tables = ROOT / "src/coterie/papers" / f"{source}.csv"
        if not tables.exists():
            continue
        printed = [row for row in read_csv(tables) if row["experiment"] == experiment]
        summary, seen = json.loads(path.read_text()), set()
        for method in study["methods"]:
            name = method.get("paper", "")
            label = method.get("label", method["kind"])
            row = []
            for one in printed:
                metric = one["metric"].removeprefix("test_")
                cluster = cluster_here(one["cluster"])
                if f"{one['method']}/{one['aggregation']}" != name or name in seen:
                    continue
                if (ours := find_ours(summary, label, cluster, metric)) is None:
                    continue
                unit = 100 if metric in PERCENT else 1
                paper = float(one["mean"]) / unit
                row.append({
                    "source": source, "study": study["name"], "metric": metric, "paper": paper,
                    "paper_std": float(one["std"]) / unit if one["std"] else None,
                    "ours": ours["mean"], "label": label, "cluster": cluster,
                    "seeds": ours["seeds"], "std": ours["std"] if ours["seeds"] > 1 else None,
                    "difference": ours["mean"] - paper, "is_mean": cluster in ("all", "clusters"),
                })  # fmt: skip
            judge(row)
            # A later method of the same row was chosen here.
            if row:
                seen.add(name)
            found += row
    return found


def mark_few_seeds(found: list[dict]) -> None:
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for one in found:
        if one["seeds"] >= 3 and one["std"] is not None:
            key = one["source"], one["metric"]
            largest[key] = max(largest[key], one["std"])
    for one in found:
        source, metric = one["source"], one["metric"]
        moved = largest.get((source, metric))
        if moved is None:
            moved = max((v for (_, m), v in largest.items() if m == metric), default=None)
        if moved is None and metric in PERCENT:
            moved = max(v for (_, m), v in largest.items() if m in PERCENT)
        enough = one["seeds"] >= 3 or (moved is not None and abs(one["difference"]) > 3 * moved)
        one["few"] = one["verdict"] != "undecided" and not enough


def read_table(title: str) -> list[dict[str, str]]:
    """The first table of a part of the page."""
    # A name may be a link to the page of its paper.
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", HEAD.read_text())
    part = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


@pytest.fixture(scope="module")
def counted() -> list[dict]:
    found = recount()
    mark_few_seeds(found)
    return found


VERDICTS = {
    "paper": "paper's deviation", "point": "one point", "ours": "ours alone", "outside": "outside",
    "undecided": "undecided",
}  # fmt: skip


def test_the_verdicts_of_the_page_are_those_of_the_stored_runs(counted):
    rows = {row["paper"]: row for row in read_table("Coverage")}
    total: Counter[str] = Counter()
    for source in PAPERS:
        own = [one for one in counted if one["source"] == source]
        expected = Counter(VERDICTS[one["verdict"]] for one in own)
        # The poster prints 16 costs, of which 8 follow from its settings; PANM's own do not.
        if source == "panm":
            expected.update({"one point": 8, "outside": 8})
        expected["few seeds"] = sum(one["few"] for one in own)
        for name in (*VERDICTS.values(), "few seeds"):
            assert int(rows[source][name]) == expected[name], (source, name)
        assert int(rows[source]["full"]) + int(rows[source]["reduced"]) == len(own)
        total += expected
    assert {name: int(rows["all"][name]) for name in total} == total
    page = HEAD.read_text()
    strict = total["paper's deviation"] + total["one point"]
    within = strict + total["ours alone"]
    judged = within + total["outside"]
    assert (
        f"Of {judged} that are compared with any result and can be judged, {within} are within the "
        f"rule: {strict} by the paper's own deviation or one point, {within - strict} by ours "
        f"alone. {total['few seeds']} of the {judged} verdicts rest on few seeds.**"
    ) in page
    published = sum(len(read_csv(path)) for path in (ROOT / "src/coterie/papers").glob("*.csv"))
    full = sum(int(row["full"]) for name, row in rows.items() if name != "all")
    assert (
        f"**{full} of {published} published numbers are compared with a run of full size." in page
    )


def test_the_sides_of_the_page_are_those_of_the_stored_runs(counted):
    tables = defaultdict(list)
    for one in counted:
        if one["verdict"] != "undecided":
            tables[one["study"], one["metric"]].append(one)
    words = {
        "accuracy": "accuracy in %", "std_over_clusters": "deviation over clusters in %",
        "mse": "mean squared error", "accuracy_max": "largest accuracy in %",
        "global_accuracy_max": "largest global accuracy in %",
    }  # fmt: skip
    shown = {(row["study"].strip("`"), row["metric"]): row for row in read_table("To one side")}
    many = {key: own for key, own in tables.items() if len(own) >= 3}
    assert {(study, words[metric]) for study, metric in many} == set(shown)
    for (study, metric), own in many.items():
        row, size = shown[study, words[metric]], len(own)
        differences = [one["difference"] for one in own]
        scale = 100 if metric in PERCENT else 1
        assert float(row["mean difference"]) == pytest.approx(
            scale * sum(differences) / size, abs=0.0051
        )
        below = sum(one < 0 for one in differences)
        above = sum(one > 0 for one in differences)
        side = "above" if above > below else "below"
        assert row["of one sign"] == f"{100 * max(below, above) / size:.0f} % {side}"
        assert int(row["compared"]) == size
        assert int(row["seeds"]) == min(one["seeds"] for one in own)
        assert int(row["few seeds"]) == sum(one["few"] for one in own)
        for verdict, name in VERDICTS.items():
            if verdict != "undecided":
                assert int(row[name]) == sum(one["verdict"] == verdict for one in own)
        assert (row["one-sided"] == "yes") == (size >= 6 and max(below, above) / size >= 0.9)


def test_how_far_seeds_move_a_table_is_what_its_runs_say():
    """By hand for the two clusters of labels: 33 numbers of three seeds, and one mean of each seed."""
    study = "similarity/cifar10-label-2"
    runs = json.loads((ROOT / "docs/reference/runs" / study / "runs.json").read_text())
    means = []
    for seed in (0, 1, 2):
        own = [run["values"]["accuracy"] for run in runs if run["seed"] == seed]
        assert len(own) == 11
        numbers = [one[key] for one in own for key in ("all", "labels 2-7", "labels 0-1,8-9")]
        means.append(100 * sum(numbers) / 33)
    shown = {row["study"].strip("`"): row for row in read_table("To one side")}
    moved = shown[study]["seeds move it by"]
    assert moved == f"{math.sqrt(sum((one - sum(means) / 3) ** 2 for one in means) / 3):.2f}"
    assert {row["seeds move it by"] != "" for row in shown.values() if int(row["seeds"]) == 1} == {
        False
    }
    several = [row for row in shown.values() if int(row["seeds"]) > 1]
    assert all(row["seeds move it by"] for row in several if "over clusters" not in row["metric"])


def test_a_seed_that_lacks_a_row_does_not_count_in_how_far_seeds_move_a_table(tmp_path):
    line = types.SimpleNamespace(label="a", cluster="all", metric="accuracy")
    lines = [line, types.SimpleNamespace(label="b", cluster="all", metric="accuracy")]

    def write(*runs):
        text = json.dumps([
            {"label": label, "seed": seed, "values": {"accuracy": {"all": value}}}
            for label, seed, value in runs
        ])  # fmt: skip
        (tmp_path / "runs.json").write_text(text)

    assert reproduction.deviation_over_seeds(tmp_path, lines) == ""
    write(("a", 0, 0.5), ("b", 0, 0.7), ("a", 1, 0.6), ("b", 1, 0.8), ("a", 2, 0.1))
    assert reproduction.deviation_over_seeds(tmp_path, lines) == "5.00"  # 60 and 70 %
    write(("a", 0, 0.5), ("b", 0, 0.7), ("a", 1, 0.6))
    assert reproduction.deviation_over_seeds(tmp_path, lines) == ""


def test_a_page_of_a_paper_says_its_counts_and_each_number_that_is_compared(counted):
    for source in PAPERS:
        page = (ROOT / f"docs/reference/reproduction/{source}.md").read_text()
        own = [one for one in counted if one["source"] == source]
        verdicts = Counter(one["verdict"] for one in own)
        if source == "panm":
            verdicts.update(point=8, outside=8)
        strict = verdicts["paper"] + verdicts["point"]
        within = strict + verdicts["ours"]
        judged = within + verdicts["outside"]
        few = sum(one["few"] for one in own)
        assert (
            f"Of {judged} that can be judged {within} are within the rule: {strict} by the paper's "
            f"own deviation or one point, {verdicts['ours']} by ours alone; {few} rest on few seeds."
        ) in page
        for one in own:
            if one["metric"] not in PERCENT:
                continue
            part = page.split(f"\n## {one['study']}\n")[1].split("\n## ")[0]
            rows = [line for line in part.splitlines() if line.startswith(f"| {one['label']} | ")]
            number = rf"{100 * one['ours']:.2f}( ± [\d.]+)? / {100 * one['paper']:.2f}"
            assert any(re.search(number, row) for row in rows), (one["study"], one["label"])


def make_comparison(*orders):
    """Accuracies of two rows, and which of their orders are kept."""
    line = compare.ComparedNumber("A", "a/fedavg", "all", "accuracy", 0.5, None, 1, 0.6, None, -0.1, False, "outside")  # fmt: skip
    pairs = [compare.Ordering(better, worse, (0.6, 0.4), (0.5, ours), ours < 0.5) for better, worse, ours in orders]  # fmt: skip
    return compare.PaperComparison("dac/x", "dac/x", "", 1.0, [line], [], pairs, [])


def test_orders_that_are_not_the_paper_s_are_named_with_their_numbers():
    said = reproduction.describe_orders(make_comparison(("a", "b", 0.3), ("c", "d", 0.7)))
    assert said == (
        "1 of the 2 pairs that are clearly apart in the paper are in its order here. "
        "Not in its order: c above d (60.00 / 40.00; here 50.00 / 70.00)."
    )
    assert "Not in" not in reproduction.describe_orders(make_comparison(("a", "b", 0.3)))
    assert reproduction.describe_orders(make_comparison()) == ""


def test_a_study_that_is_withdrawn_is_not_counted_and_its_part_says_why(counted):
    """FedGWC's that repeat its tables and have not run again: clients were tested on classes that they never train on."""
    folders = [path.parent for path in (ROOT / "docs/reference/runs").glob("*/*/origin.json")]
    found = {f"{one.parent.name}/{one.name}": withdrawn(one) for one in folders if withdrawn(one)}
    assert len(found) == 4
    assert {name.split("/")[0] for name in found} == {"fedgwc"}
    assert not {one["study"] for one in counted} & set(found)
    page = (ROOT / "docs/reference/reproduction/fedgwc.md").read_text()
    for name, why in found.items():
        part = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"**Withdrawn: not compared with the paper until it runs again.** {why}" in part
        assert " / " not in " ".join(line for line in part.splitlines() if line.startswith("|"))
