"""The final results of each client: what each of a few hospitals wants to know of a study."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie._util.names import distinguish_clients
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    load_runs,
    main_metric,
    merge_client_names,
)
from coterie.results.summary import mean_std_over_seeds


def load_client_rows(study: str | Path, metric: str | None = None) -> list[dict[str, Any]]:
    """Return the final test values of each client of a stored study; see `compute_client_rows`.

    Args:
        study: the study's folder.
        metric: the metric; that by which methods are compared when None.
    """
    runs, problems = load_runs([study])
    return compute_client_rows(runs, problems, metric)


def compute_client_rows(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = (), metric: str | None = None
) -> list[dict[str, Any]]:
    """Return the final test values of each client: a row for each method and client.

    Returns:
        Rows like those of a summary, over the same seeds: `method` (the kind), `label`, `client`
        (the id), `cluster` (here the client's name, with the id where several look alike;
        "client 7" without a name), `metric`, `mean` and `std` over seeds, and `seeds`: how many
        they are over. A seed without the client, or whose test samples leave its metric undefined,
        does not count; where none counts, and where its model diverged in one, the mean is None.
    """
    chosen = select_compared_runs(runs, problems)
    if not chosen:
        return []
    metric = metric or main_metric(chosen)
    names = merge_client_names(chosen)
    found = collect_client_values(chosen, metric)
    shown = distinguish_clients(names, sorted(set().union(*found.values())))
    kinds = {run.label: run.method_kind for run in chosen}
    rows = []
    for label, by_client in found.items():
        for client, values in sorted(by_client.items()):
            mean = deviation = None
            # A summary is JSON, which has no NaN.
            if values and np.isfinite(values).all():
                mean, deviation = mean_std_over_seeds(np.array(values))
            rows.append(
                {
                    "method": kinds[label],
                    "label": label,
                    "client": client,
                    "cluster": shown[client],
                    "metric": metric,
                    "mean": mean,
                    "std": deviation,
                    "seeds": len(values),
                }
            )
    return rows


def collect_client_values(
    runs: Iterable[StoredRun], metric: str
) -> dict[str, dict[int, list[float]]]:
    """Return the final values of each client with the seeds that count, by label and client.

    A seed without the client, or whose test samples leave its metric undefined, does not count; in
    one in which its model diverged the value is not finite.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        own = found.setdefault(run.label, {})
        defined = run.defined_values(metric)
        for client in run.final_values(metric).index:
            values = own.setdefault(int(client), [])
            if client in defined.index:
                values.append(float(defined.loc[client]))
    return found
