"""The data of the report and the live page: stored runs reduced to one JSON document of bounded size.

Long arrays are quantized, compressed and written as text (`packing.pack_array`). Arrays that would grow
with clients² x rounds are binned in time and, for large populations, over neighboring clients of
one cluster. A page therefore stays small for long runs; the parquet files keep every value.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from coterie.functional.metrics import Metrics
from coterie.report.data.cost import COUNTED_METRICS, compute_costs
from coterie.report.data.curves import build_client_data, build_curves
from coterie.report.data.packing import sample_clients
from coterie.report.data.reads import build_labels, build_reads
from coterie.results import pairs, tables
from coterie.results.coverage import describe_coverage, describe_skipped_rounds
from coterie.results.equal_bytes import rank_runs
from coterie.results.gains import compute_gains
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
    metric = main_metric(runs)
    truth = runs[0].client_clusters
    population = max(run.population for run in runs)
    cluster = np.full(population, -1)
    cluster[: runs[0].population] = runs[0].planted_clusters
    home = home if folder == runs[0].folder else folder
    if len(np.unique(cluster[cluster >= 0])) < 2:  # then there is nothing to say of clusters
        cluster[:] = -1
    names = load_cluster_names(home, (int(c) for c in np.unique(cluster) if c >= 0))
    groups, called = group_by_label(runs), merge_client_names(runs)
    drawn = select_charted_runs(runs, problems)
    alike = {
        label: [run for run in drawn if run.label == label and run.client_clusters.equals(truth)]
        for label in groups
    }
    results = summarize_runs(runs, folder, problems)
    ranking = rank_runs(runs, problems, folder, whole=results)
    if not names:
        results["rows"], results["pairs"] = (
            _select_overall_rows(results["rows"]),
            _select_overall_rows(results["pairs"]),
        )
    compared = _build_pairs(results, collect_metrics(runs), metric)
    results = {
        name: value for name, value in results.items() if name not in ("pairs", "about")
    }  # the page has them once
    path, config = home / FEDERATION, home / CONFIG
    return replace_nonfinite(
        {
            "study": runs[0].study_name,
            "metric": metric,
            "metrics": _describe_metrics(runs),
            "methods": [_describe_method(label, group) for label, group in groups.items()],
            "clusters": [
                {"id": c, "name": name, "size": int((cluster == c).sum())}
                for c, name in names.items()
            ],
            "cluster": cluster.tolist(),
            "names": [called.get(client) for client in range(population)] if called else None,
            "results": results,
            "notes": [*describe_coverage(results), *describe_skipped_rounds(results)],
            "pairs": compared,
            "gains": compute_gains(runs, problems),
            "curves": build_curves(alike, cluster, list(names)),
            "reads": build_reads(alike, cluster),
            "labels": build_labels(alike, cluster),
            "cost": compute_costs(alike, metric),
            "equal_bytes": {
                **asdict(ranking),
                "heading": ranking.heading,
                "caveat": ranking.caveat,
            },
            "provenance": [_describe_provenance(run) for run in runs],
            "clients": build_client_data(alike, metric, cluster),
            "data": _reduce_description(json.loads(path.read_text("utf-8")), cluster)
            if path.is_file()
            else None,
            "command": f"coterie run {shlex.quote(f'{_find_study_place(runs[0].study_name, home)}/{CONFIG}')} --out again",
            "study_config": config.read_text("utf-8") if config.is_file() else None,
        }
    )


def _select_overall_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["cluster"] == "all"]


def _build_pairs(results: dict[str, Any], known: Metrics, main: str) -> dict[str, Any]:
    """The pairs of methods as the page shows them: in words and numbers, by metric and group of clients.

    Returns:
        `families`: of each group `metric`, `cluster`, `standing` (which method is best, in words),
        `leaders` and `pairs`, those with the difference and its interval as `text` and the
        `verdict` in words. `tables`: LaTeX and Markdown of the main metric.
    """
    content = replace_nonfinite(results)
    every, rows = pairs.parse_pairs(content), content["rows"]
    keys = dict.fromkeys((pair.metric, pair.cluster) for pair in every)
    families = []
    for metric, cluster in keys:
        entry, own = (
            known[metric],
            [pair for pair in every if (pair.metric, pair.cluster) == (metric, cluster)],
        )
        told = [
            {
                "text": pairs.format_difference(pair, entry),
                "verdict": pairs.describe_pair(pair, entry),
            }
            for pair in own
        ]
        families.append(
            {
                "metric": metric,
                "cluster": cluster,
                "standing": pairs.describe_leaders(rows, every, entry, cluster),
                "leaders": pairs.find_leaders(rows, every, entry, cluster),
                "pairs": [
                    {**one, **words}
                    for one, words in zip(pairs.pairs_to_json(own), told, strict=True)
                ],
            }
        )
    written = {}
    if (main, "all") in keys:
        title = f"{content['study']}: {known[main].heading('test')}, 95 % intervals over n seeds in brackets"
        found = [
            tables.build_means_table(rows, every, known[main], title, MEANS),
            tables.build_pairs_table(pairs.select_pairs(every, metric=main), known[main]),
        ]
        for name, write in (("LaTeX", tables.format_latex), ("Markdown", tables.format_markdown)):
            written[name] = "\n".join(write(table) for table in found)
    return {"families": families, "tables": written, "about": content.get("about", "")}


def build_empty_payload(folder: Path, problems: Sequence[UnreadableRun] = ()) -> dict[str, Any]:
    """Return the data of a page of which no run can be shown yet: what is missing."""
    results = summarize_runs([], folder, problems)
    return replace_nonfinite(
        {
            "study": folder.name,
            "methods": [],
            "results": results,
            "notes": describe_coverage(results),
        }
    )


def _reduce_description(description: dict[str, Any], cluster: np.ndarray) -> dict[str, Any]:
    """What federation.json tells, of a large population of the clients that the page shows by themselves.

    The labels of each planted cluster are added up in `sums`, with the number of their clients.
    """
    description = {name: value for name, value in description.items() if name != "client_names"}
    chosen = sample_clients(cluster)
    if len(chosen) == len(cluster) or len(description.get("labels", [])) != len(cluster):
        return description
    labels = np.array(description["labels"])
    sums = {
        int(c): {
            "clients": int((cluster == c).sum()),
            "labels": labels[cluster == c].sum(0).tolist(),
        }
        for c in np.unique(cluster)
    }
    own = ("shift", "train", "validation", "labels")
    few = {
        name: [description[name][i] for i in chosen]
        for name in own
        if len(description[name]) == len(cluster)
    }
    return {**description, **few, "sums": sums}


def _find_study_place(study: str, home: Path) -> str:
    """Where a study's folder lies below the folder that its runs were written to; it may have been renamed."""
    whole, parts = home.resolve(), Path(study).parts
    return study if whole.parts[-len(parts) :] == parts else whole.name


def _describe_method(label: str, group: Sequence[StoredRun]) -> dict[str, Any]:
    return {
        "label": label,
        "kind": group[0].method_kind,
        "settings": group[0].method_settings,
        "runs": [
            {
                "seed": run.seed,
                "rounds": run.num_rounds,
                "of": run.config.get("rounds"),
                "finished": run.is_finished,
            }
            for run in group
        ],
    }


def _describe_metrics(runs: Sequence[StoredRun]) -> dict[str, dict[str, Any]]:
    """The metrics of some runs, by name: what the page needs to show them."""
    known = collect_metrics(runs)
    names = dict.fromkeys(str(name) for run in runs for name in run.metrics["metric"].unique())
    return {
        name: {**known[name].to_record(), "heading": known[name].heading()}
        for name in [*names, *COUNTED_METRICS]
    }


def _describe_provenance(run: StoredRun) -> dict[str, Any]:
    # the page has them once
    stored = {name: value for name, value in run.provenance.items() if name != "client_names"}
    return {"label": run.label, "seed": run.seed, "stored": stored}
