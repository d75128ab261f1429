"""The content of summary.json: the results, costs and comparisons of the runs of a study."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie._util import manifest
from coterie._util.claims import claim_folder
from coterie.functional import metrics
from coterie.results import pairs
from coterie.results.selection import select_compared_runs, summarize_coverage
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    collect_metrics,
    compute_seed_overlap,
    find_declared_value,
    group_by_label,
    load_cluster_names,
    load_runs,
    main_metric,
    merge_client_names,
)
from coterie.results.traffic import count_traffic
from coterie.runtime import newcomers
from coterie.runtime.final_metrics import select_defined
from coterie.runtime.settings import Settings

SUMMARY = "summary.json"


STUDY_WAIT = 60.0
"""Seconds to wait for another process that writes the files of the same study: it takes milliseconds."""


MEANS = {"all": "mean over clients", "clusters": "mean over clusters"}
"""What the means in a summary are over."""


def summarize_study(study: str | Path, seeds: Iterable[int] | None = None) -> dict[str, Any]:
    """Reduce the finished runs of a study to the content of summary.json.

    Args:
        study: the study's folder.
        seeds: average over no others than these.

    Returns:
        `study_name`, `seeds`, `left_out`, `rows`, `pairs` and `timing`. A row is the final test value of
        one metric of one
        method: the mean over the clients of one planted cluster, over all clients ("all"), or the
            unweighted mean over
        clusters ("clusters"); then mean and population standard deviation over seeds, the same
        `seeds` for every method (see `select_compared_runs`); a single seed has no deviation; `needs` is there
        for a method that declares some. `left_out` tells how each run stands that is not among
        them. A pair has the fields of `pairs.Pair` (see `compare_methods`); `about` says what their
        intervals speak of. `list_participation`, `compute_spending`, `compute_time_to_accuracy`, `list_undefined_metrics` and, where a
        node left out rounds, `list_skipped_rounds` are those of the functions below. `metrics` is there when
        methods declared some, and `scale` when the rounds were scaled.

    Raises:
        DataError: when the folder holds no run, or several studies.
    """
    runs, problems = load_runs([study])
    return summarize_runs(runs, study, problems, seeds)


def summarize_runs(
    runs: Sequence[StoredRun],
    study: str | Path,
    problems: Sequence[UnreadableRun] = (),
    seeds: Iterable[int] | None = None,
) -> dict[str, Any]:
    """As `summarize_study`, of runs that were read already, and of the folders that could not be read."""
    home = runs[0].folder.parent.parent if runs and runs[0].folder == Path(study) else study
    names = load_cluster_names(
        home, (int(c) for run in runs for c in run.client_clusters.unique() if c >= 0)
    )
    chosen = select_compared_runs(runs, problems, seeds)
    rows: list[dict[str, Any]] = []
    for group in group_by_label(chosen).values():
        for metric in dict.fromkeys(name for run in group for name in run.result_metrics):
            reduced = pd.DataFrame([compute_cluster_means(run, metric) for run in group])
            for cluster in reduced.columns:
                mean, deviation = mean_std_over_seeds(reduced[cluster].to_numpy(float))
                rows.append(
                    {
                        **describe_method(group[0]),
                        "cluster": names.get(cluster, str(cluster)),
                        "metric": metric,
                        "mean": mean,
                        "std": deviation,
                        "seeds": len(reduced),
                    }
                )
    timing = [
        {
            "label": run.label,
            "seed": run.seed,
            "wall_s": float(times.get("wall_s", math.nan)),
            "train_s": float(times.get("train_s", math.nan)),
            "train_samples": int(times.get("train_samples", 0)),
        }
        for run in runs
        if (times := run.provenance.get("timing"))
    ]
    name = runs[0].study_name if runs else Path(study).name
    content: dict[str, Any] = {
        "study": name,
        **summarize_coverage(runs, problems, study, seeds=seeds),
    }
    found = pairs.pairs_to_json(compare_methods(chosen, names))
    about = (
        {"about": pairs.describe_interval_scope(chosen[0].config, merge_client_names(chosen))}
        if found
        else {}
    )
    content |= {"rows": rows, "pairs": found, **about, "timing": timing}
    content |= {
        "participation": list_participation(chosen),
        "spent": compute_spending(chosen),
        "time_to_accuracy": compute_time_to_accuracy(chosen),
        "undefined": list_undefined_metrics(chosen),
    }
    content |= {"skipped": rows} if (rows := list_skipped_rounds(chosen)) else {}
    if declared := metrics.metrics_to_store(collect_metrics(runs).values()):
        content["metrics"] = declared
    if joined := summarize_new_clients(chosen):
        content["new_clients"] = joined
    scales = {float(run.config.get("scale", 1.0)) for run in runs} - {1.0}
    return {**content, "scale": min(scales)} if scales else content


def describe_method(run: StoredRun) -> dict[str, Any]:
    """Return what a row of a summary says of its method: kind and label, and `needs` where it declares some."""
    needs = sorted(find_declared_value(run, "needs"))
    return {"method": run.method_kind, "label": run.label, **({"needs": needs} if needs else {})}


def compare_methods(runs: Sequence[StoredRun], names: Mapping[int, str]) -> list[pairs.Pair]:
    """Compare the methods of a study in pairs: by the main metric in each cluster, by others over all clients.

    Args:
        runs: those that are `select_compared_runs`.
        names: of the planted clusters.
    """
    if not runs:
        return []
    known, main = collect_metrics(runs), main_metric(runs)
    overlap = compute_seed_overlap(runs[0])
    planted: dict[int, pd.Series] = {}
    for run in runs:
        planted[run.seed] = (
            run.client_clusters.combine_first(planted[run.seed])
            if run.seed in planted
            else run.client_clusters
        )
    nowhere = {seed: clusters * 0 - 1 for seed, clusters in planted.items()}
    out = []
    for metric in dict.fromkeys([main, *(name for run in runs for name in run.result_metrics)]):
        if known[metric].sign:
            values: dict[str, dict[int, pd.Series]] = {}
            for run in runs:
                counted = select_defined(
                    run.final_values(metric),
                    run.final_values(metrics.LOSS.name),
                    run.known_metrics[metric],
                )
                values.setdefault(run.label, {})[run.seed] = counted
            groups = planted if metric == main else nowhere
            out += pairs.compare_pairs(values, groups, known[metric], names, overlap)
    return out


def mean_std_over_seeds(values: Float[np.ndarray, " seeds"]) -> tuple[float, float | None]:
    """Return mean and population standard deviation over seeds; None for the deviation of a single seed.

    Example:
        >>> over_seeds(np.array([0.25, 0.75])), over_seeds(np.array([0.5]))
        ((0.5, 0.25), (0.5, None))
    """
    return float(values.mean()), float(values.std()) if len(values) > 1 else None


def compute_cluster_means(run: StoredRun, metric: str) -> dict[int | str, float]:
    """The final test value of a run: per planted cluster, over all clients, and over clusters.

    Clients whose test samples leave a metric undefined are left out; see
    `final_metrics.select_defined`.
    """
    every, cluster = run.final_values(metric), run.client_clusters
    values = select_defined(every, run.final_values(metrics.LOSS.name), run.known_metrics[metric])
    planted, found = (cluster.reindex(one.index).to_numpy() for one in (every, values))
    out: dict[int | str, float] = {
        int(c): float(values.to_numpy()[found == c].mean()) if (found == c).any() else math.nan
        for c in np.unique(planted)
        if c >= 0
    }
    over = float(np.mean(list(out.values()))) if out else None
    out["all"] = float(values.mean(skipna=False))
    if over is not None:
        out["clusters"] = over
    return out


def replace_nonfinite(value: Any) -> Any:
    """Replace what JSON cannot say (NaN and infinity) by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(study: str | Path) -> Path:
    """Write summary.json into a study's folder, and return its path."""
    write_study_files(
        Path(study),
        {
            SUMMARY: json.dumps(
                replace_nonfinite(summarize_study(study)), indent=1, ensure_ascii=False
            )
        },
    )
    return Path(study) / SUMMARY


def write_study_files(study: Path, texts: Mapping[str, str]) -> None:
    """Write files of a study by name, one after the other, while no other process writes some of the same study."""
    with claim_folder(study, wait=STUDY_WAIT):
        for name, text in texts.items():
            manifest.replace_files(study, {name: text.encode()})


TIMED_METRICS = (metrics.ACCURACY.name, metrics.GLOBAL_ACCURACY.name)


def count_client_rounds(table: pd.DataFrame) -> int:
    """Return the total participation: how many local trainings there were in all rounds, over all clients.

    Args:
        table: the metrics table of a run.
    """
    trained = (
        (table["split"] == "train") & (table["metric"] == metrics.LOSS.name) & (table["round"] >= 0)
    )
    return int(trained.to_numpy().sum())


def list_participation(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the total participation of each run: `label`, `seed`, `count_client_rounds`."""
    return [
        {"label": run.label, "seed": run.seed, "client_rounds": count_client_rounds(run.metrics)}
        for run in runs
    ]


def compute_spending(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return what each method spent, mean over runs.

    Returns:
        A row for each method: `label`, `bytes` (of a client, received and sent to a server) and
        `count_client_rounds` (of training, over all clients).
    """
    rows = []
    for label, group in group_by_label(runs).items():
        used = [
            sum(
                part.sum() for part in count_traffic(run.metrics, run.edges, max(1, run.num_rounds))
            )
            for run in group
        ]
        per_client = np.mean(
            [total / len(run.client_clusters) for total, run in zip(used, group, strict=True)]
        )
        trained = np.mean([count_client_rounds(run.metrics) for run in group])
        rows.append({"label": label, "bytes": float(per_client), "client_rounds": float(trained)})
    return rows


def compute_time_to_accuracy(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    r"""Return how much sooner each method reaches the largest accuracy of a baseline than the baseline did.

    The baseline is what the method declares (`Method.timed_against`): Ditto for SosicFL+, FedAvg
    for most others. Both need evaluations over the rounds (`eval_every`).

    Args:
        runs: finished runs of one study.

    Returns:
        A row for each method and metric ("accuracy" over the clients' own test sets,
        "global_accuracy"): `label`, `base`, `metric`, `ratio` (the baseline's time over the
        method's, mean over seeds; 0 in a seed in which the method never gets there), `std`,
        `seeds`, `reached` (in how many of them it got there), `tta` (the method's first round with
        that accuracy, mean over the seeds in which it got there) and `reason` (why the ratio is
        NaN).
    """
    bases: dict[tuple[str, int], StoredRun] = {(run.method_kind, run.seed): run for run in runs}
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    for run in runs:
        base = bases.get((find_declared_value(run, "timed_against"), run.seed))
        for metric in TIMED_METRICS if base is not None and base.label != run.label else ():
            own, theirs = run.test_curve(metric), base.test_curve(metric)  # type: ignore[union-attr]
            if own[0] and theirs[0]:
                entry = _compute_time_ratio(own, theirs)
                found.setdefault((run.label, base.label, metric), []).append(entry)  # type: ignore[union-attr]
    rows = []
    for (label, name, metric), entries in found.items():
        ratios = np.array([ratio for ratio, _, _ in entries])
        times = [time for _, time, _ in entries if math.isfinite(time)]
        mean, deviation = mean_std_over_seeds(ratios)
        row = {"label": label, "base": name, "metric": metric, "ratio": mean, "std": deviation}
        more = {
            "seeds": len(entries),
            "reached": len(times),
            "tta": float(np.mean(times)) if times else math.inf,
        }
        rows.append(
            {**row, **more, "reason": next((reason for _, _, reason in entries if reason), "")}
        )
    return rows


def summarize_new_clients(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the final tests of clients that were in no round and joined at the end; see `runtime.newcomers`.

    A row for each method, metric and `model`: "joined" (after they trained), or "received" (with a
    server: before). It has `mean` and `std` over seeds of the mean over these clients, the number
    of `seeds`, of `client_clusters` in the first of them, and of the `num_rounds` that each trained; and
    `others` where the others did not stay as they were: "training".
    """
    rows = []
    for label, group in group_by_label(runs).items():
        found: dict[tuple[str, str], list[float]] = {}
        for run in group:
            own = run.metrics.loc[(run.metrics["split"] == newcomers.SPLIT).to_numpy()]
            joined = (
                own["model"]
                .astype(str)
                .where((own["model"] == newcomers.RECEIVED).to_numpy(), "joined")
            )
            for (metric, model), table in own.groupby(
                [own["metric"].astype(str), joined], sort=False
            ):
                found.setdefault((str(metric), str(model)), []).append(float(table["value"].mean()))
        for (metric, model), values in found.items():
            mean, deviation = mean_std_over_seeds(np.array(values))
            first = group[0].metrics
            new = first.loc[(first["split"] == newcomers.SPLIT).to_numpy(), "client"].nunique()
            rounds = int(group[0].config.get("new_client_rounds", _ROUNDS))
            others = str(group[0].config.get("new_client_others", _OTHERS))
            rows.append(
                {
                    "label": label, "metric": metric, "model": model, "mean": mean, "std": deviation,
                    "seeds": len(values), "clients": int(new), "rounds": rounds,
                    **({} if others == _OTHERS else {"others": others}),
                }
            )  # fmt: skip
    return rows


_ROUNDS, _OTHERS = Settings.new_client_rounds, Settings.new_client_others


def describe_new_clients(content: Mapping[str, Any], metric: str) -> list[str]:
    """Say what a summary has on clients that joined at the end, in a line; none where nobody did.

    Args:
        content: the summary.
        metric: the one to name.
    """
    rows = [row for row in content.get("new_clients", ()) if row["metric"] == metric]
    if not rows:
        return []
    known = metrics.REGISTRY.add_stored(content.get("metrics") or {})[metric]
    received = {row["label"]: row["mean"] for row in rows if row["model"] == newcomers.RECEIVED}
    parts = []
    for row in rows:
        if row["model"] == "joined":
            spread = (
                f" ± {known.format_value(row['std'], brief=True)}" if row["std"] is not None else ""
            )
            before = received.get(row["label"])
            was = (
                "" if before is None else f" ({known.format_value(before, brief=True)} as received)"
            )
            parts.append(
                f"{row['label']} {known.format_value(row['mean'], brief=True)}{spread}{was}"
            )
    many = f"{rows[0]['clients']} client{'s' * (rows[0]['clients'] > 1)}"
    beside = " while the others trained on" if rows[0].get("others") == "training" else ""
    return [
        f"New clients: {many} took part in no round, joined at the end and trained {rows[0]['rounds']} rounds{beside}; "
        f"{known.heading('test')}: {', '.join(parts)}"
    ]


def _compute_time_ratio(
    own: tuple[list[int], list[float]], base: tuple[list[int], list[float]]
) -> tuple[float, float, str]:
    """The ratio of one seed, the method's time, and why there is no ratio."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", metrics.Undefined)
        ratio = metrics.time_to_accuracy_ratio(*own, *base)
        time = metrics.time_to_accuracy(*own, metrics.max_accuracy(base[1]))
    return ratio, time, str(said[0].message) if said and math.isnan(ratio) else ""


def list_undefined_metrics(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return why final metrics are NaN: `label`, `metric` and `reason`, each once."""
    rows = []
    for run in runs:
        for metric, reason in (run.provenance.get("undefined") or {}).items():
            row = {"label": run.label, "metric": metric, "reason": reason}
            if row not in rows:
                rows.append(row)
    return rows


def list_skipped_rounds(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the rounds that nodes left out: `label`, `seed` and `num_rounds`, pairs of the first and last of each gap."""
    return [
        {"label": run.label, "seed": run.seed, "rounds": left_out}
        for run in runs
        if (left_out := run.provenance.get("skipped"))
    ]
