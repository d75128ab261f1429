r"""Analyses of the papers, computed from the models and matrices in a run's checkpoint.

    <study>/<method>/seed-<n>/analyses/simplex.parquet       SosicFL, figure 5
    <study>/<method>/seed-<n>/analyses/interaction.parquet   FedGWC, figures 5 and 6
    <study>/<method>/seed-<n>/analyses/beta.parquet          FedGWC, how splits depend on $\beta$

Columns of simplex: `point` (from 0; -1 is the position that is used: the center of the client's
region, the barycenter for all), `client` (-1 for all test sets together), `accuracy`, and the
position `alpha_0`, `alpha_1`, ... Columns of interaction, a row for each ordered pair: `client`,
`other`, their found clusters `label` and `other_label`, `interaction` ($P_{kj}$), `affinity`
($W_{kj}$), `pairs` (how often both took part together, $N_{kj}$). Columns of beta: `beta`,
`n_clusters` (1 where the whole population would not be split), and where they are defined `rand`,
`adjusted_rand`, `was` and `wadb` of those clusters.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from annotated_types import MinLen
from jaxtyping import Float
from torch import Tensor

from coterie._util.files import prepare_file, write_atomically
from coterie._util.settings import Configurable, PositiveFloat, PositiveInt
from coterie.errors import ConfigError, describe_unknown, require
from coterie.functional import simplex
from coterie.functional.metrics import ACCURACY
from coterie.methods import METHODS
from coterie.methods.fedgwc import FedGwc
from coterie.methods.sosicfl import SimplexMethod
from coterie.models import simplex_layers
from coterie.results.coverage import IncompleteStudyWarning, format_statuses
from coterie.results.stored_runs import load_runs
from coterie.runtime import final_metrics
from coterie.runtime.loop import Loop
from coterie.studies.run import reopen_run

FOLDER = "analyses"
ALL_CLIENTS = -1
"""The client of a row for all test sets together."""
SERVED = -1
"""The point of a row for the position that is used."""


@dataclass(frozen=True)
class AnalysisOptions(Configurable):
    """The options of the analyses.

    Args:
        points: number of points of the simplex.
        clients: clients to test on, and all test sets together; one client of each of two
            regions when empty.
        betas: values of FedGWC's width.
    """

    points: PositiveInt = 2000
    clients: Sequence[int] = ()
    betas: Annotated[Sequence[PositiveFloat], MinLen(1)] = (0.1, 0.5, 1.0, 2.0, 4.0)


def evaluate_simplex(loop: Loop, options: AnalysisOptions) -> pd.DataFrame:
    """Evaluate models at uniform points of a run's simplex on all and on single clients' test sets.

    Args:
        loop: a run of SosicFL, SosicFL-All or SosicFL+ (its global simplex), with classes.
        options: the points and the clients.
    """
    method, shared, task = loop.method, loop.state.shared, loop.task
    assert isinstance(method, SimplexMethod)
    if not task.classes:
        raise ConfigError(
            "the analysis 'simplex' scores models by their accuracy; these targets are not one "
            "class a sample"
        )
    # Two clients of different regions are the least that shows whether regions differ.
    clients = list(options.clients) or _clients_of_two_regions(shared.region.tolist())
    for client in clients:
        require(0 <= client < len(task), "clients", client, f"ids from 0 to {len(task) - 1}")
    middle = torch.full((method.endpoints,), 1 / method.endpoints, dtype=torch.float64)
    # A stream of its own, outside the rounds: the analysis changes no draw of a run. Radius 2 in L1
    # is the whole simplex.
    drawn = simplex.sample_region(
        loop.rng.at_round(-1).generator("analysis.simplex"), middle, 2.0, options.points
    )
    tables = []
    for client in (ALL_CLIENTS, *clients):
        served = middle if client == ALL_CLIENTS else shared.centers[shared.region[client]]
        # Row 0 is the served position: its point is -1.
        alpha = torch.cat([served[None].cpu(), drawn])
        accuracy = torch.cat(
            [_compute_accuracy(loop, client, rows) for rows in _compose_models(loop, alpha)]
        )
        columns = {f"alpha_{m}": alpha[:, m].numpy() for m in range(alpha.shape[1])}
        head = {
            "point": range(SERVED, options.points),
            "client": client,
            ACCURACY.name: accuracy.double().numpy(),
        }
        tables.append(pd.DataFrame({**head, **columns}))
    return pd.concat(tables, ignore_index=True)


def _clients_of_two_regions(region: Sequence[int]) -> list[int]:
    """The first client and the first of another region, or else the second client."""
    # Where all clients are in one region any second one is as good.
    other = next((client for client, place in enumerate(region) if place != region[0]), 1)
    return [0, other] if len(region) > 1 else [0]


def _compose_models(
    loop: Loop, alpha: Float[Tensor, "points topics"]
) -> Iterator[Float[Tensor, "rows params"]]:
    """The models at some positions, a few at a time."""
    layout, model = loop.task.layout, loop.state.shared.models[:1]
    # At most 256 models and about 2^24 parameters (64 MiB in float32) at once; a model larger than
    # that goes alone.
    for part in alpha.split(max(1, min(256, 2**24 // layout.size))):
        yield simplex_layers.compose_endpoints(layout, model.expand(len(part), -1), part[:, None])


def _compute_accuracy(
    loop: Loop, client: int, rows: Float[Tensor, "rows params"]
) -> Float[Tensor, " rows"]:
    if client == ALL_CLIENTS:
        return loop.task.evaluator.accuracy_on_all_tests(rows)
    # The same client once for each model, so that one call evaluates all of them.
    return loop.task.select_clients(torch.full((len(rows),), client)).evaluate(rows)[ACCURACY.name]


def tabulate_interactions(loop: Loop, options: AnalysisOptions) -> pd.DataFrame:
    """Return the final interaction matrix of FedGWC, its affinity, and the clusters.

    Pairs in different clusters keep the interaction from before the split.

    Args:
        loop: a run of FedGWC.
        options: not used.
    """
    shared, size = loop.state.shared, len(loop.state.shared.label)
    label, affinity = shared.label.cpu(), _compute_affinity(loop, None)
    return pd.DataFrame(
        {
            # Row-major order of the matrices: the client changes slowly, the other one fast.
            "client": torch.arange(size).repeat_interleave(size).numpy(),
            "other": torch.arange(size).repeat(size).numpy(),
            "label": label.repeat_interleave(size).numpy(),
            "other_label": label.repeat(size).numpy(),
            "interaction": shared.matrix.cpu().flatten().numpy(),
            "affinity": affinity.flatten().numpy(),
            "pairs": shared.pairs.cpu().flatten().numpy(),
        }
    )


def evaluate_betas(loop: Loop, options: AnalysisOptions) -> pd.DataFrame:
    r"""Return the clusters into which the whole population would be split, for several $\beta$.

    Args:
        loop: a run of FedGWC.
        options: the values.
    """
    method = loop.method
    assert isinstance(method, FedGwc)
    # -1 stands for a cluster that is not known; then the scores against the truth are left out.
    planted = torch.from_numpy(
        loop.record.find_clusters(loop.next_round - 1)[loop.record.table_ids(loop.task.ids)]
    )
    truth = planted if bool((planted >= 0).all()) else None
    rows = []
    for beta in options.betas:
        found = method.propose_split(_compute_affinity(loop, beta))
        # No split: one cluster of everybody.
        label = torch.zeros(len(planted), dtype=torch.int64) if found is None else found
        scores = final_metrics.compute_cluster_metrics(label, truth, loop.task.class_counts())
        rows.append({"beta": float(beta), **scores})
    return pd.DataFrame(rows)


def _compute_affinity(loop: Loop, beta: float | None) -> Float[Tensor, "clients clients"]:
    method = loop.method
    assert isinstance(method, FedGwc)
    return method.compute_affinity(loop.state.shared.matrix.cpu(), beta or method.beta)


@dataclass(frozen=True)
class Analysis:
    """A kind of analysis.

    Args:
        measure: computes the table of a run.
        method: the class of methods it applies to.
        text: a description in one line.
    """

    measure: Callable[[Loop, AnalysisOptions], pd.DataFrame]
    method: type[Any]
    text: str


ANALYSES = {
    "simplex": Analysis(
        evaluate_simplex, SimplexMethod, "SosicFL: accuracy of models all over the simplex"
    ),
    "interaction": Analysis(
        tabulate_interactions, FedGwc, "FedGWC: interaction matrix, affinity and clusters"
    ),
    "beta": Analysis(
        evaluate_betas, FedGwc, "FedGWC: the split of the stored matrix for several beta"
    ),
}
"""Every analysis by its name."""


def analyze_runs(
    folder: str | Path, what: str, options: AnalysisOptions | None = None, **sources: Any
) -> list[Path]:
    """Analyze the runs in a folder to which the analysis applies; write a table for each.

    Args:
        folder: of a study, or of one of its runs.
        what: a name of ANALYSES.
        options: points, clients, betas.
        sources: `data_dir`, `federation` and `model` of `study.reopen_run`.

    Returns:
        The files that were written.

    Raises:
        ConfigError: for an unknown analysis, or when no run there is of such a method.
        CheckpointError: when a run has no checkpoint.
    """
    if what not in ANALYSES:
        raise ConfigError(describe_unknown("analysis", what, ANALYSES))
    analysis = ANALYSES[what]
    kinds = [kind for kind, known in METHODS.items() if issubclass(known, analysis.method)]
    runs, problems = load_runs([folder])
    # A run that cannot be read is said and skipped: the others can be analyzed.
    for problem in problems:
        (line,) = format_statuses([problem.status])
        warnings.warn(line, IncompleteStudyWarning, stacklevel=2)
    chosen = [run for run in runs if run.method_kind in kinds]
    if not chosen:
        found = ", ".join(sorted({run.method_kind for run in runs})) or "no run that could be read"
        raise ConfigError(
            f"{folder} holds {found}; the analysis {what!r} takes runs of {', '.join(kinds)}"
        )
    written = []
    for run in chosen:
        table = analysis.measure(reopen_run(run.folder, **sources), options or AnalysisOptions())
        written.append(_write_table(run.folder, what, table))
    return written


def _write_table(folder: Path, what: str, table: pd.DataFrame) -> Path:
    path, buffer = folder / FOLDER / f"{what}.parquet", io.BytesIO()
    table.to_parquet(buffer, compression="zstd", index=False)
    write_atomically(prepare_file(path), buffer.getvalue())
    return path
