"""Run folders as a study leaves them, made up: small tables with known numbers."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from coterie._util import manifest
from coterie.runtime.record import EDGE_COLUMNS, METRIC_COLUMNS


def write_run(
    folder: Path,
    *,
    kind,
    label,
    seed,
    metrics,
    edges=(),
    rounds=2,
    study="small",
    done=True,
    **config,
):
    """Write one run folder from rows of the two tables."""
    folder.mkdir(parents=True)
    head = {"name": study, "rounds": rounds, "seeds": [seed], **config}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    lines += [
        "",
        "[data]",
        'dataset = "digits"',
        "num_clients = 4",
        "",
        "[model]",
        'kind = "cnn-b"',
    ]
    lines += [
        "",
        "[[methods]]",
        f'kind = "{kind}"',
        f"label = {json.dumps(label, ensure_ascii=False)}",
    ]
    (folder / "config.toml").write_text("\n".join(lines) + "\n", "utf-8")
    pd.DataFrame(metrics, columns=METRIC_COLUMNS).to_parquet(folder / "metrics.parquet")
    pd.DataFrame(edges, columns=EDGE_COLUMNS).to_parquet(folder / "edges.parquet")
    timing = {"wall_s": 2.0 + seed, "train_s": 1.5, "train_samples": 960}
    packages = {"coterie": "0.1.0", "torch": "2.13.0"}
    provenance = {
        "done": done,
        "seed": seed,
        "config_hash": "0123456789abcdef",
        "packages": packages,
        "timing": timing,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance), "utf-8")
    return listed(folder)


def listed(folder: Path) -> Path:
    """Take the files that are in a folder for whole: write its manifest anew."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != manifest.FILE]
    manifest.replace_files(folder, {path.name: path.read_bytes() for path in files})
    return folder


def final_rows(values, clusters, *, metric="accuracy", round=1, model="best"):
    """The rows of a final test evaluation."""
    return [(round, i, clusters[i], "test", model, metric, value) for i, value in enumerate(values)]


@pytest.fixture
def loss_table():
    """The mean loss of each model of a table on the training data of each client of a task: clients x models."""

    def measure(task, table):
        clients = range(len(task))
        return torch.stack(
            [
                task.select_clients(torch.full((len(table),), i)).loss(table, "train")
                for i in clients
            ]
        )

    return measure


@pytest.fixture(name="write_run")
def write_run_fixture():
    """`write_run`, for tests that make a folder of their own."""
    return write_run


@pytest.fixture(name="listed")
def listed_fixture():
    """`listed`, for tests that change the files of a run and mean it."""
    return listed


@pytest.fixture(name="final_rows")
def final_rows_fixture():
    """`final_rows`, for tests that make a folder of their own."""
    return final_rows


@pytest.fixture(name="population_study")
def population_study_fixture():
    """`population_study`, for tests that need another size."""
    return population_study


@pytest.fixture
def small(tmp_path):
    """Two methods, two seeds, four clients in clusters of three and one, with numbers that can be worked by hand."""
    clusters = [0, 0, 0, 1]
    values = {
        ("local", "Local", 0): [0.5, 0.5, 0.5, 0.5],
        ("local", "Local", 1): [0.4, 0.4, 0.4, 0.8],
        ("dac", "DAC", 0): [0.7, 0.6, 0.8, 0.4],
        ("dac", "DAC", 1): [0.6, 0.6, 0.6, 0.8],
    }
    for (kind, label, seed), accuracy in values.items():
        metrics = final_rows(accuracy, clusters) + final_rows(
            [1 - a for a in accuracy], clusters, metric="loss"
        )
        write_run(
            tmp_path / "small" / label / f"seed-{seed}",
            kind=kind,
            label=label,
            seed=seed,
            metrics=metrics,
        )
    return tmp_path / "small"


def population_run(
    folder,
    *,
    kind,
    label,
    seed,
    clusters,
    rounds,
    reads=3,
    lift=0.3,
    study="population",
    regression=False,
):
    """A made-up run of a population: learning curves that rise, and reads that drift towards the own cluster."""
    rng = np.random.default_rng([seed, len(label)])
    size, cluster = len(clusters), np.asarray(clusters)
    steps = np.arange(rounds)
    rise = (1 - np.exp(-(steps + 1) / (rounds / 4)))[:, None]
    level = 0.4 + lift + 0.05 * rng.standard_normal(size)
    accuracy = np.clip(0.1 + level * rise + 0.02 * rng.standard_normal((rounds, size)), 0, 1)
    columns = {"accuracy": accuracy, "loss": 2.3 * (1 - accuracy)}
    if regression:
        columns = {"loss": 2.3 * (1 - accuracy)}
    frames = []
    for split in ("train", "validation"):
        for metric, value in columns.items():
            if (split, metric) != ("train", "accuracy"):
                frames.append(
                    _long(
                        steps,
                        cluster,
                        split,
                        "current",
                        metric,
                        value - 0.02 * (split == "validation"),
                    )
                )
    for metric, value in columns.items():
        frames.append(_long(steps[-1:], cluster, "test", "best", metric, value[-1:]))
    edges = pd.DataFrame(columns=EDGE_COLUMNS)
    if reads:
        focus = {"dac": 6.0, "oracle": 99.0}.get(kind, 0.0) * steps / max(1, rounds - 1)
        logits = (cluster[:, None] == cluster)[None] * focus[:, None, None] + rng.gumbel(
            size=(rounds, size, size)
        )
        logits[:, np.arange(size), np.arange(size)] = -np.inf
        chosen = np.argpartition(-logits, reads, axis=2)[:, :, :reads]
        index, reader, _ = np.indices(chosen.shape)
        edges = pd.DataFrame(
            {
                "round": index.ravel(), "reader": reader.ravel(), "read": chosen.ravel(), "purpose": "mix",
                "weight": 1 / (reads + 1), "bytes": 226856,
            }
        )  # fmt: skip
    return write_run(
        folder,
        kind=kind,
        label=label,
        seed=seed,
        metrics=pd.concat(frames),
        edges=edges,
        rounds=rounds,
        study=study,
    )


def _long(rounds, cluster, split, model, metric, value):
    index, client = np.indices(value.shape)
    return pd.DataFrame(
        {
            "round": rounds[index.ravel()], "client": client.ravel(), "cluster": cluster[client.ravel()],
            "split": split, "model": model, "metric": metric, "value": value.ravel(),
        }
    )  # fmt: skip


METHODS = {
    "DAC": ("dac", 0.4),
    "Random": ("random", 0.25),
    "Local": ("local", 0.1),
    "Oracle": ("oracle", 0.45),
}


def population_study(folder, *, clusters, rounds, seeds, study="population", reads=3):
    """A whole made-up study: four methods that differ in how well they learn and whom they read."""
    for label, (kind, lift) in METHODS.items():
        for seed in range(seeds):
            population_run(
                folder / label / f"seed-{seed}", kind=kind, label=label, seed=seed, clusters=clusters, rounds=rounds,
                lift=lift, study=study, reads=0 if kind == "local" else reads,
            )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def population(tmp_path_factory):
    """Twelve clients in three clusters, ten rounds, four methods, two seeds; tests leave its runs as they are."""
    folder = tmp_path_factory.mktemp("studies") / "population"
    return population_study(folder, clusters=[0] * 6 + [1] * 4 + [2] * 2, rounds=10, seeds=2)


NAMES = ('Oslo "A"', "<script>document.title=1</script>", "مستشفى الملك")


@pytest.fixture
def named(small):
    """The study `small`, whose first three clients have names and whose fourth has none; and the names."""
    names = dict(enumerate(NAMES))
    for path in small.glob("*/seed-*/provenance.json"):
        stored = json.loads(path.read_text("utf-8"))
        path.write_text(
            json.dumps(
                {**stored, "client_names": {str(client): name for client, name in names.items()}}
            )
        )
        listed(path.parent)
    return small, names
