"""The final results of each client: what each of a few hospitals wants to know of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from coterie._util.names import distinguish_clients
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    group_by_label,
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
        "client 7" without a name), `metric`, `mean` and `std` over seeds, and `seeds`. The mean is
        None where the client has no finite value with some seed.
    """
    chosen = select_compared_runs(runs, problems)
    if not chosen:
        return []
    metric = metric or main_metric(chosen)
    names = merge_client_names(chosen)
    tables = {}
    for label, group in group_by_label(chosen).items():
        # Clients x seeds; a client that is missing in a run has NaN there.
        values = pd.concat([run.final_values(metric) for run in group], axis=1).sort_index()
        tables[label] = group, values
    known = set()
    for _, values in tables.values():
        known |= set(map(int, values.index))
    ids = sorted(known)
    shown = distinguish_clients(names, ids)
    rows = []
    for label, (group, table) in tables.items():
        for client, values in zip(table.index, table.to_numpy(float), strict=True):
            mean, deviation = mean_std_over_seeds(values)
            # A summary is JSON, which has no NaN.
            if not np.isfinite(mean):
                mean = deviation = None
            rows.append(
                {
                    "method": group[0].method_kind,
                    "label": label,
                    "client": int(client),
                    "cluster": shown[int(client)],
                    "metric": metric,
                    "mean": mean,
                    "std": deviation,
                    "seeds": len(group),
                }
            )
    return rows
