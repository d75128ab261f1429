"""The content of summary.json: the results, costs and comparisons of the runs of a study."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie._util import manifest
from coterie._util.claims import claim_folder
from coterie.functional import metrics
from coterie.results import by_phase, pairs
from coterie.results.coverage import MARKED_ROUNDS
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.selection import select_compared_runs, summarize_coverage
from coterie.results.stored_runs import (
    OVERALL,
    StoredRun,
    UnreadableRun,
    can_compare,
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
from coterie.runtime.final_metrics import find_diverged
from coterie.runtime.settings import Settings

SUMMARY = "summary.json"
# A process that died in the middle holds no claim, so that this is for one that still writes.
STUDY_WAIT = 60.0
"""Seconds to wait for another process that writes files of the study, which takes milliseconds."""
MEANS = dict(zip(OVERALL, ("mean over clients", "mean over clusters"), strict=True))
"""What the means in a summary are over."""


def summarize_study(study: str | Path, seeds: Iterable[int] | None = None) -> dict[str, Any]:
    """Reduce the finished runs of a study to the content of summary.json.

    Args:
        study: the study's folder.
        seeds: average over no others than these.

    Returns:
        `study`: its name.
        `seeds`: the seeds that every mean is over, the same for each method (see
            `selection.select_compared_runs`).
        `left_out`: the status of each other run.
        `rows`: the final test value of one metric of one method: the mean over the clients of one
            planted cluster, over all clients ("all"), or the unweighted mean over clusters
            ("clusters"); then mean and population standard deviation over seeds. A single seed has
            no deviation. `needs` is there for a method that declares some.
            `undefined` is there and true where a mean is not known although no model diverged: with
            some seed the test samples of all its clients, or of all those of a cluster, leave the
            metric undefined.
        `pairs`: the fields of `pairs.Pair` (see `compare_methods`); `about` describes what their
            intervals generalize to.
        `timing`: seconds and training samples of each run.
        `participation`, `spent`, `time_to_accuracy`, `undefined` and, when a node left out rounds,
            `skipped`: see the functions below.
        `phases` where the data change over the rounds: see `by_phase.summarize_phases`.
        `metrics` when methods declared some, and `scale` when the rounds were scaled.

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
    """Summarize runs that were already loaded; see `summarize_study`."""
    home = Path(study)
    name = home.name
    if runs:
        name = runs[0].study_name
        # Of a single run, the names of clusters are in the folder of its study.
        if runs[0].folder == home:
            home = home.parent.parent
    planted = set()
    for run in runs:
        planted |= run.known_clusters
    names = load_cluster_names(home, planted)
    chosen = select_compared_runs(runs, problems, seeds)
    compared = compare_methods(chosen, names)
    content: dict[str, Any] = {"study": name}
    content |= summarize_coverage(runs, problems, study, seeds=seeds)
    content["rows"] = _build_rows(chosen, names)
    content["pairs"] = pairs.pairs_to_json(compared)
    if compared:
        client_names = merge_client_names(chosen)
        content["about"] = pairs.describe_interval_scope(chosen[0].config, client_names)
    # The times are of all runs: they are not averaged.
    content["timing"] = _list_timing(runs)
    content["participation"] = list_participation(chosen)
    content["spent"] = compute_spending(chosen)
    content["time_to_accuracy"] = compute_time_to_accuracy(chosen)
    content["undefined"] = list_undefined_metrics(chosen)
    for key in MARKED_ROUNDS:
        if marked := list_marked_rounds(chosen, key):
            content[key] = marked
    if declared := metrics.metrics_to_store(collect_metrics(runs).values()):
        content["metrics"] = declared
    if chosen and (phases := by_phase.summarize_phases(chosen, main_metric(chosen))):
        content["phases"] = phases
    if joined := summarize_new_clients(chosen):
        content["new_clients"] = joined
    # The smallest: it says how far these runs are from those of the study at most.
    if scales := {float(run.config.get("scale", 1.0)) for run in runs} - {1.0}:
        content["scale"] = min(scales)
    return content


def _build_rows(runs: Sequence[StoredRun], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Build the rows of a summary: each metric of each method in each cluster.

    Of more than `MOST_CLUSTERS` planted clusters, over all clients and over clusters alone.
    """
    rows = []
    for group in group_by_label(runs).values():
        for metric in _list_result_metrics(group):
            comparable = can_compare(runs, metric)
            reduced: dict[Any, list[float]] = {}
            for run in group:
                for cluster, value in compute_cluster_means(run, metric).items():
                    # Where data change over the rounds, a cluster may be empty with some seeds.
                    reduced.setdefault(cluster, []).append(value)
            planted = sorted(cluster for cluster in reduced if isinstance(cluster, int))
            if len(planted) > MOST_CLUSTERS:
                planted = []
            # The means over all clients and over clusters come after the clusters.
            for cluster in (*planted, *(key for key in reduced if key in OVERALL)):
                values = reduced[cluster]
                mean, deviation = mean_std_over_seeds(np.array(values))
                row = describe_method(group[0])
                row |= {"cluster": names.get(cluster, str(cluster)), "metric": metric}
                row |= {"mean": mean, "std": deviation, "seeds": len(values)}
                if not comparable:
                    row["comparable"] = False
                if math.isnan(mean) and not any(_has_diverged(run, cluster) for run in group):
                    row["undefined"] = True
                rows.append(row)
    return rows


def _has_diverged(run: StoredRun, cluster: int | str) -> bool:
    """Return whether the model of a client that a mean is over diverged."""
    losses = run.final_values(metrics.LOSS.name)
    if isinstance(cluster, int):
        losses = losses.loc[run.client_clusters.reindex(losses.index).to_numpy() == cluster]
    return not bool(np.isfinite(losses.to_numpy()).all())


def _list_result_metrics(runs: Sequence[StoredRun]) -> list[str]:
    """List the metrics of the results of some runs, each once, in the order of the runs."""
    return list(dict.fromkeys(chain.from_iterable(run.result_metrics for run in runs)))


def _list_timing(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """List how long each run took, if it recorded that."""
    rows = []
    for run in runs:
        if times := run.provenance.get("timing"):
            row = {"label": run.label, "seed": run.seed}
            row["wall_s"] = float(times.get("wall_s", math.nan))
            row["train_s"] = float(times.get("train_s", math.nan))
            row["train_samples"] = int(times.get("train_samples", 0))
            rows.append(row)
    return rows


def describe_method(run: StoredRun) -> dict[str, Any]:
    """Return the part of a row about its method: kind, label, and declared `needs`."""
    row: dict[str, Any] = {"method": run.method_kind, "label": run.label}
    if needs := sorted(find_declared_value(run, "needs")):
        row["needs"] = needs
    return row


def compare_methods(runs: Sequence[StoredRun], names: Mapping[int, str]) -> list[pairs.Pair]:
    """Compare methods in pairs by the main metrics per cluster, by others over all clients.

    Args:
        runs: the compared runs of a study.
        names: of the planted clusters.
    """
    if not runs:
        return []
    known, measured = collect_metrics(runs), _list_result_metrics(runs)
    # The terminal's tables are of the first main metric that was tested, which need not have been
    # validated, as the concordance.
    main = {main_metric(runs), known.choose_main(measured)}
    overlap = compute_seed_overlap(runs[0])
    planted = join_clusters(runs)
    # Other metrics are compared over all clients alone: more pairs would weaken the correction.
    unknown = forget_clusters(planted)
    out = []
    for metric in dict.fromkeys([main_metric(runs), *measured]):
        if not can_compare(runs, metric):
            continue
        if known[metric].sign:
            groups = planted if metric in main else unknown
            values = _collect_values(runs, metric)
            out += pairs.compare_pairs(values, groups, known[metric], names, overlap)
    return out


def join_clusters(runs: Sequence[StoredRun]) -> dict[int, pd.Series]:
    """Return the planted cluster of each client with a result, by seed."""
    planted: dict[int, pd.Series] = {}
    for run in runs:
        # Clients that joined at the end are in no mean: a cluster of them alone is none here.
        clusters = run.client_clusters.reindex(np.unique(run.final_rows["client"].to_numpy()))
        # Methods of one seed may have tables of different clients: join them.
        if run.seed in planted:
            clusters = clusters.combine_first(planted[run.seed])
        planted[run.seed] = clusters
    return planted


def forget_clusters(planted: Mapping[int, pd.Series]) -> dict[int, pd.Series]:
    """Return the same clients in no cluster, so that methods are compared over all of them."""
    return {seed: clusters * 0 - 1 for seed, clusters in planted.items()}


def _collect_values(runs: Sequence[StoredRun], metric: str) -> dict[str, dict[int, pd.Series]]:
    """Collect the final values of clients with a defined metric, by label and seed."""
    values: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        values.setdefault(run.label, {})[run.seed] = run.defined_values(metric)
    return values


def mean_std_over_seeds(values: Float[np.ndarray, " seeds"]) -> tuple[float, float | None]:
    """Return mean and population standard deviation over seeds; None for a single one.

    Example:
        >>> mean_std_over_seeds(np.array([0.25, 0.75])), mean_std_over_seeds(np.array([0.5]))
        ((0.5, 0.25), (0.5, None))
    """
    return float(values.mean()), float(values.std()) if len(values) > 1 else None


def compute_cluster_means(run: StoredRun, metric: str) -> dict[int | str, float]:
    """Return the final value of a run per cluster, over all clients, and over clusters.

    Clients whose test samples leave a metric undefined are left out; see `final_metrics`.
    """
    clusters = run.client_clusters
    values = run.defined_values(metric)
    # Clusters of all clients, and of those with a defined metric: a cluster without any of the
    # latter is NaN, not left out.
    planted = clusters.reindex(run.final_values(metric).index).to_numpy()
    found = clusters.reindex(values.index).to_numpy()
    out: dict[int | str, float] = {}
    # In the order of clusters, and in each that of ids: every cluster is one slice.
    order = np.argsort(found, kind="stable")
    ordered, sorted_clusters = values.to_numpy()[order], found[order]
    known = np.unique(planted[planted >= 0])
    first = np.searchsorted(sorted_clusters, known, side="left")
    last = np.searchsorted(sorted_clusters, known, side="right")
    for cluster, start, end in zip(known, first, last, strict=True):
        own = ordered[start:end]
        out[int(cluster)] = float(own.mean()) if len(own) else math.nan
    over = float(np.mean(list(out.values()))) if out else None
    # skipna=False: one diverged client makes the mean NaN, so that it is not averaged away.
    out["all"] = float(values.mean(skipna=False))
    if over is not None:
        out["clusters"] = over
    return out


def replace_nonfinite(value: Any) -> Any:
    """Replace the numbers that JSON cannot express (NaN and infinity) by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(replace_nonfinite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(study: str | Path) -> Path:
    """Write summary.json into a study's folder, and return its path."""
    content = replace_nonfinite(summarize_study(study))
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_study_files(Path(study), {SUMMARY: text})
    return Path(study) / SUMMARY


def write_study_files(study: Path, texts: Mapping[str, str]) -> None:
    """Write files of a study by name, while no other process writes files of the same study."""
    # Two commands on one study would mix their files and manifests.
    with claim_folder(study, wait=STUDY_WAIT):
        for name, text in texts.items():
            manifest.replace_files(study, {name: text.encode()})


TIMED_METRICS = (metrics.ACCURACY.name, metrics.GLOBAL_ACCURACY.name)


def count_client_rounds(table: pd.DataFrame) -> int:
    """Return the total participation: local trainings in all rounds, over all clients.

    Args:
        table: the metrics table of a run.
    """
    # In virtual time a client does several rounds in one of the table, or none; it counts them.
    own = table.loc[(table["metric"] == metrics.OWN_ROUNDS.name).to_numpy()]
    if len(own):
        return int(own.loc[(own["round"] == own["round"].max()).to_numpy(), "value"].sum())
    # One row of the training loss for each client and round; a warm-up has round -1.
    trained = (
        (table["split"] == "train") & (table["metric"] == metrics.LOSS.name) & (table["round"] >= 0)
    )
    return int(trained.to_numpy().sum())


def compute_mean_rounds(runs: Sequence[StoredRun]) -> float:
    """Return in how many rounds a client trained, mean over clients and runs.

    Fewer than all rounds where clients stop early, or some of them act in a round.
    """
    total = sum(count_client_rounds(run.metrics) for run in runs)
    return total / sum(run.num_counted for run in runs)


def list_participation(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the total participation of each run: `label`, `seed`, `client_rounds`."""
    rows = []
    for run in runs:
        count = count_client_rounds(run.metrics)
        rows.append({"label": run.label, "seed": run.seed, "client_rounds": count})
    return rows


def compute_spending(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return what each method spent, mean over runs.

    Returns:
        A row for each method: `label`, `bytes` (of a client, received and sent to a server),
        `client_rounds` (of training, over all clients) and, where its runs have times, `seconds`.
    """
    rows = []
    for label, group in group_by_label(runs).items():
        per_client, trained, known = [], [], []
        for run in group:
            # At least one round: a run may have measured only the warm-up.
            received, sent = count_traffic(run.metrics, run.counted_edges, max(1, run.num_rounds))
            per_client.append((received.sum() + sent.sum()) / run.num_counted)
            trained.append(count_client_rounds(run.metrics))
            ends = run.elapsed_seconds
            if ends is not None:
                known.append(float(ends[-1]))
        row = {"label": label, "bytes": float(np.mean(per_client))}
        row["client_rounds"] = float(np.mean(trained))
        # All runs or none: a mean over the runs with times would be of other seeds than the rest.
        if len(known) == len(group):
            row["seconds"] = float(np.mean(known))
        rows.append(row)
    return rows


def compute_time_to_accuracy(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return how much sooner each method reaches its baseline's largest accuracy.

    The method declares its baseline (`Method.timed_against`): Ditto for SosicFL+, FedAvg for most
    others. Both need evaluations during the rounds (`eval_every`).

    Args:
        runs: finished runs of one study, in its order; of several methods that are a baseline the
            first one is.

    Returns:
        A row for each method and metric ("accuracy" over the clients' own test sets,
        "global_accuracy"): `label`, `base`, `metric`, `ratio` (the baseline's time over the
        method's, mean over seeds; 0 in a seed in which the method never gets there), `std`,
        `seeds`, `reached` (in how many of them it got there), `tta` (the method's first round with
        that accuracy, mean over the seeds in which it got there) and `reason` (why the ratio is
        NaN). Of runs with times also `seconds_ratio` and `seconds`, the same in their time; then a
        ratio of rounds says little where rounds differ in length.
    """
    # Times are compared within a seed: methods then have the same clients and first models.
    bases: dict[tuple[str, int], StoredRun] = {}
    for run in runs:
        bases.setdefault((run.method_kind, run.seed), run)
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    in_seconds: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    for run in runs:
        base = bases.get((find_declared_value(run, "timed_against"), run.seed))
        # A method is not timed against itself.
        if base is None or base.label == run.label:
            continue
        for metric in TIMED_METRICS:
            own, theirs = run.test_curve(metric), base.test_curve(metric)
            if own[0] and theirs[0]:
                key = run.label, base.label, metric
                found.setdefault(key, []).append(_compute_time_ratio(own, theirs))
                timed, base_timed = _put_on_time(run, own), _put_on_time(base, theirs)
                if timed is not None and base_timed is not None:
                    in_seconds.setdefault(key, []).append(_compute_time_ratio(timed, base_timed))
    rows = []
    for (label, name, metric), entries in found.items():
        ratios, times, reasons = zip(*entries, strict=True)
        mean, deviation = mean_std_over_seeds(np.array(ratios))
        row: dict[str, Any]
        row = {"label": label, "base": name, "metric": metric, "ratio": mean, "std": deviation}
        row |= {"seeds": len(entries), "reached": sum(map(math.isfinite, times))}
        row["tta"] = _mean_reached(times)
        timed = in_seconds.get((label, name, metric), [])
        # As above: rounds and seconds are of the same seeds.
        if len(timed) == len(entries):
            ratios, times, _ = zip(*timed, strict=True)
            row["seconds_ratio"] = float(np.mean(ratios))
            row["seconds"] = _mean_reached(times)
        row["reason"] = next(filter(None, reasons), "")
        rows.append(row)
    return rows


def summarize_new_clients(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the final tests of clients that were in no round and joined at the end.

    See `runtime.newcomers`.

    Returns:
        A row for each method, metric and `model`: "joined" (after they trained), or "received"
        (with a server: before they trained). It has `mean` and `std` over seeds of the mean over
        these clients, the number of `seeds`, of `clients` in the first of them, and of the `rounds`
        that each trained; and `others`, "training", when the other clients kept training.
    """
    rows = []
    for label, group in group_by_label(runs).items():
        found: dict[tuple[str, str], list[float]] = {}
        for run in group:
            own = _select_newcomers(run.metrics).reset_index(drop=True)
            lost = find_diverged(own)
            received = (own["model"] == newcomers.RECEIVED).to_numpy()
            # Whichever of its models a client kept after it trained, it counts as joined.
            model = own["model"].astype(str).where(received, "joined")
            for key, table in own.groupby([own["metric"].astype(str), model], sort=False):
                # A newcomer's model that diverged leaves the mean undefined, as among the others.
                mean, values = math.nan, table["value"].to_numpy(float)
                # Data may leave a metric undefined for a client: it is then no part of the mean.
                known = values[~np.isnan(values)]
                if len(known) and not lost[table.index].any():
                    mean = float(known.mean())
                found.setdefault(key, []).append(mean)  # type: ignore[arg-type]
        config = group[0].config
        clients = len(_select_newcomers(group[0].metrics)["client"].unique())
        rounds = int(config.get("new_client_rounds", Settings.new_client_rounds))
        others = str(config.get("new_client_others", Settings.new_client_others))
        for (metric, model), values in found.items():
            mean, deviation = mean_std_over_seeds(np.array(values))
            row = {"label": label, "metric": metric, "model": model, "mean": mean, "std": deviation}
            row |= {"seeds": len(values), "clients": clients, "rounds": rounds}
            if others != Settings.new_client_others:
                row["others"] = others
            rows.append(row)
    return rows


def _select_newcomers(table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of a metrics table about clients that joined at the end."""
    return table.loc[(table["split"] == newcomers.SPLIT).to_numpy()]


def describe_new_clients(content: Mapping[str, Any], metric: str) -> list[str]:
    """Describe the clients that joined at the end, in one line; none when a study has none.

    Args:
        content: the summary.
        metric: the metric to show.
    """
    rows = [row for row in content.get("new_clients", ()) if row["metric"] == metric]
    if not rows:
        return []
    known = metrics.REGISTRY.add_stored(content.get("metrics") or {})[metric]
    received = {}
    for row in rows:
        if row["model"] == newcomers.RECEIVED:
            received[row["label"]] = row["mean"]
    parts = []
    for row in rows:
        if row["model"] != "joined":
            continue
        part = f"{row['label']} {known.format_value(row['mean'], brief=True)}"
        if row["std"] is not None:
            part += f" ± {known.format_value(row['std'], brief=True)}"
        # Without a server there is no received model.
        before = received.get(row["label"])
        if before is not None:
            part += f" ({known.format_value(before, brief=True)} as received)"
        parts.append(part)
    clients, rounds = rows[0]["clients"], rows[0]["rounds"]
    training = rows[0].get("others") == "training"
    meanwhile = " while the other clients kept training" if training else ""
    return [
        f"New clients: {clients} client{'s' * (clients > 1)} took part in no round, joined at the "
        f"end and trained {rounds} rounds{meanwhile}; "
        f"{known.heading('test')}: {', '.join(parts)}"
    ]


def _mean_reached(times: Sequence[float]) -> float:
    """Return the mean over the seeds in which a method got there; infinity where it never did."""
    reached = [time for time in times if math.isfinite(time)]
    return float(np.mean(reached)) if reached else math.inf


def _put_on_time(
    run: StoredRun, curve: tuple[list[int], list[float]]
) -> tuple[list[float], list[float]] | None:
    """Return a curve over seconds in place of rounds; None for a run without times."""
    ends = run.elapsed_seconds
    if ends is None:
        return None
    rounds, values = curve
    seconds = []
    for round in rounds:
        # Round -1 is the warm-up, at whose end time begins.
        seconds.append(float(ends[round]) if round >= 0 else 0.0)
    return seconds, values


def _compute_time_ratio(
    own: tuple[Sequence[float], Sequence[float]], base: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float, str]:
    """Return the ratio of one seed, the method's time, and why there is no ratio."""
    # The reason of an undefined ratio arrives as a warning: it is caught to be stored.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", metrics.Undefined)
        ratio = metrics.time_to_accuracy_ratio(*own, *base)
        time = metrics.time_to_accuracy(*own, metrics.max_accuracy(base[1]))
    reason = str(caught[0].message) if caught and math.isnan(ratio) else ""
    return ratio, time, reason


def list_undefined_metrics(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """List why final metrics are NaN: `label`, `metric` and `reason`, each once."""
    rows = []
    for run in runs:
        for metric, reason in (run.provenance.get("undefined") or {}).items():
            row = {"label": run.label, "metric": metric, "reason": reason}
            if row not in rows:
                rows.append(row)
    return rows


def list_marked_rounds(runs: Sequence[StoredRun], key: str) -> list[dict[str, Any]]:
    """List the rounds that nodes skipped ("skipped") or did without any message ("alone").

    Each entry has `label`, `seed` and `rounds`, pairs of a first and a last one.
    """
    rows = []
    for run in runs:
        if marked := run.provenance.get(key):
            rows.append({"label": run.label, "seed": run.seed, "rounds": marked})
    return rows
