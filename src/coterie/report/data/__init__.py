"""The data of the report and the live page: stored runs reduced to one JSON document of bounded size.

Long arrays are quantized, compressed and written as text (`packing.pack`). Arrays that would grow
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
from coterie.report.data.cost import COUNTED, cost
from coterie.report.data.curves import clients, curves
from coterie.report.data.packing import sampled
from coterie.report.data.reads import labels, reads
from coterie.results import pairs, tables
from coterie.results.coverage import notes, rounds_left_out
from coterie.results.equal_bytes import of_runs
from coterie.results.summary import (
    CONFIG,
    FEDERATION,
    MEANS,
    Problem,
    StoredRun,
    by_label,
    charted,
    client_names,
    cluster_names,
    gains_of,
    json_ready,
    main_metric,
    metrics_of,
    summary_of,
)


def payload(
    runs: Sequence[StoredRun], problems: Sequence[Problem] = (), folder: Path | None = None
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
    truth = runs[0].clients
    population = max(run.population for run in runs)
    cluster = np.full(population, -1)
    cluster[: runs[0].population] = runs[0].planted
    home = home if folder == runs[0].folder else folder
    if len(np.unique(cluster[cluster >= 0])) < 2:  # then there is nothing to say of clusters
        cluster[:] = -1
    names = cluster_names(home, (int(c) for c in np.unique(cluster) if c >= 0))
    groups, called = by_label(runs), client_names(runs)
    drawn = charted(runs, problems)
    alike = {
        label: [run for run in drawn if run.label == label and run.clients.equals(truth)]
        for label in groups
    }
    results = summary_of(runs, folder, problems)
    ranking = of_runs(runs, problems, folder, whole=results)
    if not names:
        results["rows"], results["pairs"] = (
            _without_clusters(results["rows"]),
            _without_clusters(results["pairs"]),
        )
    compared = _pairs(results, metrics_of(runs), metric)
    results = {
        name: value for name, value in results.items() if name not in ("pairs", "about")
    }  # the page has them once
    path, config = home / FEDERATION, home / CONFIG
    return json_ready(
        {
            "study": runs[0].study,
            "metric": metric,
            "metrics": _metrics(runs),
            "methods": [_method(label, group) for label, group in groups.items()],
            "clusters": [
                {"id": c, "name": name, "size": int((cluster == c).sum())}
                for c, name in names.items()
            ],
            "cluster": cluster.tolist(),
            "names": [called.get(client) for client in range(population)] if called else None,
            "results": results,
            "notes": [*notes(results), *rounds_left_out(results)],
            "pairs": compared,
            "gains": gains_of(runs, problems),
            "curves": curves(alike, cluster, list(names)),
            "reads": reads(alike, cluster),
            "labels": labels(alike, cluster),
            "cost": cost(alike, metric),
            "equal_bytes": {
                **asdict(ranking),
                "heading": ranking.heading,
                "caveat": ranking.caveat,
            },
            "provenance": [_provenance(run) for run in runs],
            "clients": clients(alike, metric, cluster),
            "data": _told(json.loads(path.read_text("utf-8")), cluster) if path.is_file() else None,
            "command": f"coterie run {shlex.quote(f'{_place(runs[0].study, home)}/{CONFIG}')} --out again",
            "study_config": config.read_text("utf-8") if config.is_file() else None,
        }
    )


def _without_clusters(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["cluster"] == "all"]


def _pairs(results: dict[str, Any], known: Metrics, main: str) -> dict[str, Any]:
    """The pairs of methods as the page shows them: in words and numbers, by metric and group of clients.

    Returns:
        `families`: of each group `metric`, `cluster`, `standing` (which method is best, in words),
        `leaders` and `pairs`, those with the difference and its interval as `text` and the
        `verdict` in words. `tables`: LaTeX and Markdown of the main metric.
    """
    content = json_ready(results)
    every, rows = pairs.read(content), content["rows"]
    keys = dict.fromkeys((pair.metric, pair.cluster) for pair in every)
    families = []
    for metric, cluster in keys:
        entry, own = (
            known[metric],
            [pair for pair in every if (pair.metric, pair.cluster) == (metric, cluster)],
        )
        told = [
            {"text": pairs.shown(pair, entry), "verdict": pairs.verdict(pair, entry)}
            for pair in own
        ]
        families.append(
            {
                "metric": metric,
                "cluster": cluster,
                "standing": pairs.standing(rows, every, entry, cluster),
                "leaders": pairs.leaders(rows, every, entry, cluster),
                "pairs": [
                    {**one, **words} for one, words in zip(pairs.as_json(own), told, strict=True)
                ],
            }
        )
    written = {}
    if (main, "all") in keys:
        title = f"{content['study']}: {known[main].heading('test')}, 95 % intervals over n seeds in brackets"
        found = [
            tables.means(rows, every, known[main], title, MEANS),
            tables.of_pairs(pairs.chosen(every, metric=main), known[main]),
        ]
        for name, write in (("LaTeX", tables.latex), ("Markdown", tables.markdown)):
            written[name] = "\n".join(write(table) for table in found)
    return {"families": families, "tables": written, "about": content.get("about", "")}


def blank(folder: Path, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return the data of a page of which no run can be shown yet: what is missing."""
    results = summary_of([], folder, problems)
    return json_ready(
        {"study": folder.name, "methods": [], "results": results, "notes": notes(results)}
    )


def _told(description: dict[str, Any], cluster: np.ndarray) -> dict[str, Any]:
    """What federation.json tells, of a large population of the clients that the page shows by themselves.

    The labels of each planted cluster are added up in `sums`, with the number of their clients.
    """
    description = {name: value for name, value in description.items() if name != "client_names"}
    chosen = sampled(cluster)
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


def _place(study: str, home: Path) -> str:
    """Where a study's folder lies below the folder that its runs were written to; it may have been renamed."""
    whole, parts = home.resolve(), Path(study).parts
    return study if whole.parts[-len(parts) :] == parts else whole.name


def _method(label: str, group: Sequence[StoredRun]) -> dict[str, Any]:
    return {
        "label": label,
        "kind": group[0].kind,
        "settings": group[0].method,
        "runs": [
            {
                "seed": run.seed,
                "rounds": run.rounds,
                "of": run.config.get("rounds"),
                "finished": run.finished,
            }
            for run in group
        ],
    }


def _metrics(runs: Sequence[StoredRun]) -> dict[str, dict[str, Any]]:
    """The metrics of some runs, by name: what the page needs to show them."""
    known = metrics_of(runs)
    names = dict.fromkeys(str(name) for run in runs for name in run.metrics["metric"].unique())
    return {
        name: {**asdict(known[name]), "heading": known[name].heading()}
        for name in [*names, *COUNTED]
    }


def _provenance(run: StoredRun) -> dict[str, Any]:
    # the page has them once
    stored = {name: value for name, value in run.provenance.items() if name != "client_names"}
    return {"label": run.label, "seed": run.seed, "stored": stored}
