"""The data of the report and the live page: stored runs reduced to one bounded JSON document.

Long arrays are quantized, compressed and written as text (`packing.pack_array`). Arrays that would
grow with clients² x rounds are binned in time and, for large populations, over neighboring clients
of one cluster. A page therefore stays small for long runs; the parquet files keep every value.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from coterie._util.files import resolve_path
from coterie._util.mappings import drop_keys
from coterie.functional.metrics import Metrics
from coterie.report.data.cost import COUNTED_METRICS, compute_costs
from coterie.report.data.curves import build_client_data, build_curves
from coterie.report.data.packing import sample_clients
from coterie.report.data.reads import build_labels, build_reads
from coterie.results import pairs, tables
from coterie.results.coverage import describe_coverage, describe_skipped_rounds, format_seed_ranges
from coterie.results.equal_budget import EqualBudget, rank_runs
from coterie.results.gains import compute_gains
from coterie.results.pairs import Pair
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.selection import select_charted_runs
from coterie.results.stored_runs import (
    CONFIG,
    FEDERATION,
    StoredRun,
    UnreadableRun,
    collect_metrics,
    group_by_label,
    load_cluster_names,
    main_metric,
    merge_client_names,
)
from coterie.results.summary import MEANS, replace_nonfinite, summarize_runs


def build_payload(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = (), folder: Path | None = None
) -> dict[str, Any]:
    """Reduce the runs of one study to the data of the page.

    Args:
        runs: at least one run.
        problems: folders that could not be read; the page names them.
        folder: the folder of the study, or of the run that the page is about.

    Returns:
        Plain values for JSON, without NaN.

    Raises:
        DataError: when the runs are of several studies.
    """
    home = runs[0].folder.parent.parent
    folder = folder or home
    # The page may be about a single run, whose study has the files.
    if folder != runs[0].folder:
        home = folder
    metric = main_metric(runs)
    groups, drawn = group_by_label(runs), select_charted_runs(runs, problems)
    charted = group_by_label(drawn)
    alike, unlike = _select_alike_runs(groups, drawn)
    # Seeds that are not drawn may have more clients, which no chart has a place for.
    population = max(run.population for run in chain.from_iterable(alike.values()))
    cluster = np.full(population, -1)
    # Tables of other runs may name more clients, whose clusters are not known.
    cluster[: drawn[0].population] = drawn[0].planted_clusters
    # A single cluster is the same as none.
    if len(np.unique(cluster[cluster >= 0])) < 2:
        cluster[:] = -1
    names = load_cluster_names(home, np.unique(cluster[cluster >= 0]).tolist())
    clusters = []
    for c, name in names.items():
        clusters.append({"id": c, "name": name, "size": int((cluster == c).sum())})
    client_names = merge_client_names(chain.from_iterable(alike.values()))
    called = list(map(client_names.get, range(population)))
    results = summarize_runs(runs, folder, problems)
    rankings = [rank_runs(runs, problems, folder, whole=results)]
    if all(run.elapsed_seconds is not None for run in runs):
        rankings.append(rank_runs(runs, problems, folder, unit="seconds", whole=results))
    # Without clusters a mean over clusters is the mean over clients.
    if not names:
        for part in ("rows", "pairs"):
            results[part] = [row for row in results[part] if row["cluster"] == "all"]
    compared = _build_pairs(results, collect_metrics(runs), metric)
    # The page has the pairs once, under their own key.
    results = drop_keys(results, ("pairs", "about"))
    description = None
    if (home / FEDERATION).is_file():
        content = json.loads((home / FEDERATION).read_text("utf-8"))
        description = _reduce_description(content, cluster)
    config = home / CONFIG
    study_config = config.read_text("utf-8") if config.is_file() else None
    place = shlex.quote(f"{_find_study_place(runs[0].study_name, home)}/{CONFIG}")
    return replace_nonfinite(
        {
            "study": runs[0].study_name,
            "metric": metric,
            "metrics": _describe_metrics(runs),
            "methods": [_describe_method(label, group) for label, group in groups.items()],
            "clusters": clusters,
            "cluster": cluster.tolist(),
            "names": called if client_names else None,
            "results": results,
            "notes": [*describe_coverage(results), *describe_skipped_rounds(results), *unlike],
            "pairs": compared,
            "gains": compute_gains(runs, problems),
            "curves": build_curves(alike, cluster, list(names)),
            "reads": build_reads(alike, cluster),
            "labels": build_labels(alike, cluster),
            # Over clients alone, whatever their clusters.
            "cost": compute_costs({label: charted.get(label, []) for label in groups}, metric),
            "equal": list(map(_describe_ranking, rankings)),
            "provenance": list(map(_describe_provenance, runs)),
            "clients": build_client_data(alike, metric, cluster),
            "data": description,
            "command": f"coterie run {place} --out again",
            "study_config": study_config,
        }
    )


def _select_alike_runs(
    groups: Mapping[str, Sequence[StoredRun]], drawn: Sequence[StoredRun]
) -> tuple[dict[str, list[StoredRun]], list[str]]:
    """Select the drawn runs of each method whose clients have the clusters of the first of them.

    Only these can share a picture of single clients, or one that is drawn by cluster.

    Returns:
        The runs by label, and a note on the seeds that are left out, if there are any.
    """
    truth = drawn[0].client_clusters
    alike: dict[str, list[StoredRun]] = {label: [] for label in groups}
    shown, left = set[int](), set[int]()
    for run in drawn:
        # Curves by cluster of runs with other clusters would be means over other clients.
        if run.client_clusters.equals(truth):
            alike[run.label].append(run)
            shown.add(run.seed)
        else:
            left.add(run.seed)
    if not left:
        return alike, []
    here, there = (
        f"seed{'s' * (len(seeds) > 1)} {format_seed_ranges(seeds)}" for seeds in (shown, left)
    )
    note = (
        f"Curves, models used and single clients are those of {here}: with {there} other clients "
        "take part, or clusters are planted at other clients. Tables of results are over all seeds."
    )
    return alike, [note]


def _build_pairs(results: dict[str, Any], known: Metrics, main: str) -> dict[str, Any]:
    """Build the pairs of methods in words and numbers, by metric and group of clients.

    Returns:
        `families`: of each group `metric`, `cluster`, `standing` (which method is best, in words),
        `leaders` and `pairs`, each with the difference and its interval as `text` and the `verdict`
        in words. `tables`: LaTeX and Markdown of the main metric.
    """
    content = replace_nonfinite(results)
    every, rows = pairs.parse_pairs(content), content["rows"]
    # p values are corrected within such a family: the pairs of one column of the results.
    by_family: dict[tuple[str, str], list[Pair]] = {}
    for pair in every:
        by_family.setdefault((pair.metric, pair.cluster), []).append(pair)
    families = []
    for (name, cluster), own in by_family.items():
        metric, described = known[name], []
        for pair, plain in zip(own, pairs.pairs_to_json(own), strict=True):
            text = pairs.format_difference(pair, metric)
            described.append({**plain, "text": text, "verdict": pairs.describe_pair(pair, metric)})
        families.append(
            {
                "metric": name,
                "cluster": cluster,
                "standing": pairs.describe_leaders(rows, every, metric, cluster),
                "leaders": pairs.find_leaders(rows, every, metric, cluster),
                "pairs": described,
            }
        )
    written = {}
    if (main, "all") in by_family:
        metric = known[main]
        title = f"{content['study']}: {metric.heading('test')}, 95 % intervals over n seeds "
        means = tables.build_means_table(rows, every, metric, title + "in brackets", MEANS)
        compared = tables.build_pairs_table(pairs.select_pairs(every, metric=main), metric)
        for form, write in (("LaTeX", tables.format_latex), ("Markdown", tables.format_markdown)):
            written[form] = f"{write(means)}\n{write(compared)}"
    return {"families": families, "tables": written, "about": content.get("about", "")}


def build_empty_payload(folder: Path, problems: Sequence[UnreadableRun] = ()) -> dict[str, Any]:
    """Return the data of a page without any run that can be shown: which runs are missing."""
    results = summarize_runs([], folder, problems)
    content = {"study": folder.name, "methods": [], "results": results}
    return replace_nonfinite({**content, "notes": describe_coverage(results)})


def _reduce_description(description: dict[str, Any], cluster: np.ndarray) -> dict[str, Any]:
    """Reduce the content of federation.json to the clients that the page shows one by one.

    The labels of each planted cluster are added up in `sums`, with the number of their clients; of
    more than `MOST_CLUSTERS` those of all clients, as cluster -1, and no images are shown.
    """
    description = drop_keys(description, {"client_names"})
    many = len(np.unique(cluster)) > MOST_CLUSTERS
    if many:
        description = drop_keys(description, {"images"})
    chosen = sample_clients(cluster)
    # Short descriptions, and older ones without labels, stay whole.
    if len(chosen) == len(cluster) or len(description.get("labels", [])) != len(cluster):
        return description
    labels = np.array(description["labels"])
    sums = {}
    groups = np.full_like(cluster, -1) if many else cluster
    for c in np.unique(groups):
        members = groups == c
        sums[int(c)] = {"clients": int(members.sum()), "labels": labels[members].sum(0).tolist()}
    for name in ("shift", "train", "validation", "labels"):
        if len(description[name]) == len(cluster):
            description[name] = [description[name][i] for i in chosen]
    return {**description, "sums": sums}


def _find_study_place(study: str, home: Path) -> str:
    """Return the path of a study's folder below the output folder; it may be renamed."""
    whole, parts = resolve_path(home), Path(study).parts
    # A name may have several parts, "paper/study"; only the tail of the path must match it.
    return study if whole.parts[-len(parts) :] == parts else whole.name


def _describe_method(label: str, group: Sequence[StoredRun]) -> dict[str, Any]:
    runs = []
    for run in group:
        row = {"seed": run.seed, "rounds": run.num_rounds, "of": run.config.get("rounds")}
        runs.append({**row, "finished": run.is_finished})
    kind, settings = group[0].method_kind, group[0].method_settings
    return {"label": label, "kind": kind, "settings": settings, "runs": runs}


def _describe_metrics(runs: Sequence[StoredRun]) -> dict[str, dict[str, Any]]:
    """Describe the metrics of some runs, by name: what the page needs to show them."""
    known, out = collect_metrics(runs), {}
    names = {}
    for run in runs:
        names |= dict.fromkeys(map(str, run.metrics["metric"].unique()))
    for name in [*names, *COUNTED_METRICS]:
        out[name] = {**known[name].to_record(), "heading": known[name].heading()}
    return out


def _describe_ranking(ranking: EqualBudget) -> dict[str, Any]:
    # Properties too, which `asdict` leaves out: pages print them as they are.
    return {
        **asdict(ranking),
        "heading": ranking.heading,
        "caveat": ranking.caveat,
        "verdicts": ranking.verdicts,
    }


def _describe_provenance(run: StoredRun) -> dict[str, Any]:
    # The page has the names of clients once.
    stored = drop_keys(run.provenance, {"client_names"})
    return {"label": run.label, "seed": run.seed, "stored": stored}
