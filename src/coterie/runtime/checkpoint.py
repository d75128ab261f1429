"""Checkpoints: everything that a later round depends on, in one safetensors file.

A run that is killed at any moment continues from its last checkpoint and ends with the same bytes.
The previous checkpoint is retained as well. A checkpoint whose digest differs from the one in the
folder's manifest is never used.
"""

import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from coterie._util import manifest, origin
from coterie._util.mappings import drop_empty, drop_keys, map_values, prefix_keys, select_prefix
from coterie.data.federation import Federation
from coterie.engine.task import Task
from coterie.errors import CheckpointError
from coterie.functional.metrics import metrics_to_store
from coterie.methods.base import Method, State
from coterie.methods.registry import all_settings
from coterie.runtime import _compact
from coterie.runtime.record import EDGES, METRICS

if TYPE_CHECKING:
    from coterie.runtime.loop import Loop
    from coterie.runtime.settings import Settings

FILE, BEFORE = "checkpoint.safetensors", "checkpoint-before.safetensors"
PROVENANCE = "provenance.json"
# A continued run may change these: more rounds, another speed. Results do not depend on the rest.
_NOT_IDENTITY = ("rounds", "checkpoint_seconds", "block", "engine", "cuda_graphs")
# Left out where they are unset, so that identities from before they existed still count.
_OPTIONAL = (
    "loss",
    "metrics",
    "shared",
    "output",
    "similarity_on",
    "acceptance",
    "secure_aggregation",
    "attacks",
    "record_similarities",
    "portable",
    "time",
)
# Fields of methods that older checkpoints do not have; there they are unset.
_NEWER_FIELDS = ("aggregation", "selection")


def has_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return any((folder / name).exists() for name in (FILE, BEFORE, METRICS))


def compute_identity(
    method: Method,
    settings: "Settings",
    seed: int,
    federation: Federation,
    task: Task,
    model: str = "",
) -> str:
    """Return a hash of all settings and data that a continued run must share with its checkpoint.

    Args:
        method: of the run.
        settings: of the run.
        seed: of the run.
        federation: the data.
        task: the model with the data.
        model: what `own_name` says of the model.
    """
    kept = drop_keys(settings.to_identity(), _NOT_IDENTITY)
    if settings.precision == "full":  # older checkpoints do not have it, nor the next ones
        del kept["precision"]
    if settings.new_clients is None or settings.new_client_others == "frozen":
        del kept["new_client_others"]
    if settings.new_clients is None:
        del kept["new_clients"], kept["new_client_rounds"]
    kept = {name: value for name, value in kept.items() if name not in _OPTIONAL or value}
    kept["local"] = settings.local.result_settings()
    # Only then does a longer run take other steps in the rounds that it has done.
    if settings.local.needs_rounds:
        kept["rounds"] = settings.rounds
    own = {k: v for k, v in all_settings(method).items() if v is not None or k not in _NEWER_FIELDS}
    # Order and form of this list are part of every stored identity: changing them orphans
    # checkpoints.
    what = [
        method.kind,
        own,
        kept,
        seed,
        federation.compute_fingerprint(),
        str(task.layout.eval_module),
    ]
    # Each is "" where there is none.
    what += filter(None, (model, task.layout.frozen_digest, task.model.given_digest))
    # 64 bits: enough to keep the runs of a folder apart.
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def save(folder: Path, loop: "Loop", run: str, timing: dict[str, Any]) -> None:
    """Write the checkpoint, and the tables and provenance as they are now.

    Args:
        folder: the run's folder; created if missing.
        loop: the run between two rounds.
        run: its identity.
        timing: seconds so far; stored in provenance.json, outside the checkpoint, since they differ
            between runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Before anything of the state is read: blocks hold it elsewhere.
    loop.gather_state()
    tensors, compact = {}, {}
    for name, tensor in list_state_tensors(loop).items():
        parts, header = {name: tensor}, None
        # Memory and shared state can be tables of the whole population that are mostly zeros.
        if name.startswith(("state.memory.", "state.shared.")):
            parts, header = _compact.pack_table(name, tensor)
        tensors |= parts
        if header is not None:
            compact[name] = header
    record, names = loop.record.snapshot()
    owners = {
        "validation": loop.validation,
        "privacy": loop.task.trainer.totals.privacy.snapshot(),
        "exchange": getattr(loop.exchange, "snapshot", dict)(),
        "loop": loop.snapshot(),
        "record": record,
    }
    # A tensor's name begins with what it belongs to, which `load` selects by.
    for owner, found in owners.items():
        tensors |= prefix_keys(f"{owner}.", found)
    meta = {
        "round": loop.next_round,
        "identity": run,
        "names": names,
        "samples": loop.train_samples,
        "engine": _describe_engine(loop),
        # Most runs have none of them.
        **drop_empty(
            {"compact": compact, "skipped": loop.skipped_rounds, "alone": loop.alone_rounds}
        ),
    }
    files = {
        FILE: partial(_write_tensors, tensors, meta),
        **_make_result_files(loop, run, timing, done=False),
    }
    # In one replacement, so that the folder is whole at every moment; see `manifest`.
    manifest.replace_files(folder, files, rotate={FILE: BEFORE})


def finish_run(
    folder: Path,
    loop: "Loop",
    run: str,
    timing: dict[str, Any],
    models: Mapping[str, Callable[[Path], None]],
) -> None:
    """Write the tables with the final evaluation, and mark the run as finished; see `save`.

    Args:
        folder: the run's folder.
        loop: the run after its final evaluation.
        run: its identity.
        timing: seconds in all.
        models: the file that its trained models can be loaded from, see `runtime.models`.
    """
    manifest.replace_files(folder, {**models, **_make_result_files(loop, run, timing, done=True)})


def _make_result_files(
    loop: "Loop", run: str, timing: dict[str, Any], *, done: bool
) -> dict[str, bytes]:
    what = {"done": done, **collect_provenance(loop, run, timing)}
    return {**loop.record.encode_files(), PROVENANCE: json.dumps(what, indent=2).encode()}


def load(folder: Path, loop: "Loop", run: str) -> dict[str, Any]:
    """Restore a loop from the newest undamaged checkpoint; do nothing when the run has not begun.

    A warning names damaged files: they are written again. What a killed process left half-written
    is removed.

    Returns:
        The timing so far.

    Raises:
        CheckpointError: when every checkpoint is damaged, or it belongs to another run.
    """
    # A killed process may have left temporary files, which are hidden and never read.
    for unfinished in folder.glob(".*.tmp"):
        unfinished.unlink()
    if not has_run(folder):
        return {}
    # Before a checkpoint is chosen, so that the warning names all damaged files.
    faults = {}
    for name in (FILE, METRICS, EDGES, PROVENANCE):
        faults[name] = manifest.describe_fault(folder, name)
    # The previous checkpoint serves where the newest is damaged.
    name, found = _find_newest(folder)
    if found["identity"] != run:
        raise CheckpointError(
            f"{folder / name} belongs to a run with other settings or data (found "
            f"{found['identity']}, expected "
            f"{run}); choose another folder or overwrite it"
        )
    check_weights(folder, loop.task.model.undrawn_digest)
    if found["round"] > loop.settings.rounds:
        raise CheckpointError(
            f"{folder / name} is that of round {found['round']}; expected at most rounds = "
            f"{loop.settings.rounds}: "
            "a run can be made longer, not shorter"
        )
    for fault in filter(None, faults.values()):
        warnings.warn(
            f"{folder}: {fault}; the run goes on from {name}, round {found['round']}", stacklevel=3
        )
    # `_fill_fields` moves each to its place
    tensors = _load_tensors(folder / name, found.get("compact", {}))
    # The times are lost with a damaged provenance file; results do not depend on them.
    stored = {}
    if not faults[PROVENANCE]:
        stored = json.loads((folder / PROVENANCE).read_text("utf-8"))
    earlier = stored.get("timing", {})
    # A run is checked once; one without a result is checked now.
    loop.translation = stored.get("check", {})

    def select_tensors(prefix: str) -> dict[str, Tensor]:
        return select_prefix(prefix, tensors)

    # The loop's first state gives the names, the classes and the devices.
    state = loop.state
    memory = _fill_fields(state.memory, select_tensors("state.memory."))
    shared = _fill_fields(state.shared, select_tensors("state.shared."))
    moments = _fill_fields(state.moments, select_tensors("state.moments."))
    for one in loop.extensions:
        one.state = _fill_fields(one.state, select_tensors(f"state.{one.name}."))
    loop.state = State(tensors["state.params"].to(state.params.device), memory, shared, moments)
    loop.tracker = _fill_fields(loop.tracker, select_tensors("tracker."))
    loop.validation = select_tensors("validation.")
    loop.task.trainer.totals.privacy.restore(select_tensors("privacy."))
    loop.record.restore(select_tensors("record."), found["names"])
    restore = getattr(loop.exchange, "restore", None)
    if restore is not None:
        restore(select_tensors("exchange."))
    loop.next_round, loop.train_samples = found["round"], found["samples"]
    loop.restore(select_tensors("loop."))
    loop.skipped_rounds = [(first, last) for first, last in found.get("skipped", ())]
    loop.alone_rounds = [(first, last) for first, last in found.get("alone", ())]
    # The last step, when everything is in place: blocks receive their parts.
    loop.scatter_state()
    return earlier


def check_weights(folder: Path, digest: str) -> None:
    """Refuse a stored run that began with other given, loaded or frozen weights.

    Args:
        folder: the run's folder.
        digest: `ClientModel.undrawn_digest` of the weights that are here now.

    Raises:
        CheckpointError: when the run has noted other weights.
    """
    if load_provenance(folder).get("weights", digest) != digest:
        raise CheckpointError(
            f"{folder} was run with other weights than the model is given or loads now; take the "
            "earlier ones, or start again in another folder (--out) or with --overwrite"
        )


def list_state_tensors(loop: "Loop") -> dict[str, Tensor]:
    """Return what a loop's later rounds depend on, by the names of checkpoints."""
    owners = {
        "state.memory": loop.state.memory,
        "state.shared": loop.state.shared,
        "state.moments": loop.state.moments,
        "tracker": loop.tracker,
    }
    for one in loop.extensions:
        owners[f"state.{one.name}"] = one.state
    found = {"state.params": loop.state.params}
    for owner, value in owners.items():
        found |= prefix_keys(f"{owner}.", _list_tensors(value))
    return found


def load_state_tensors(folder: Path) -> dict[str, Tensor]:
    """Load what `list_state_tensors` returns, and more, from the newest undamaged checkpoint.

    Raises:
        CheckpointError: when there is none.
    """
    name, found = _find_newest(folder)
    return _load_tensors(folder / name, found.get("compact", {}))


def _load_tensors(path: Path, compact: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; compact tables are unpacked."""
    # "#" marks the parts of compact tables, which need other tensors to be read.
    stored = load_file(str(path))
    tensors = {name: tensor for name, tensor in stored.items() if "#" not in name}
    for name, header in compact.items():
        tensors[name] = _compact.unpack_table(name, header, stored)
    # Older versions did not note whose model had changed since the last evaluation.
    if (stopped := tensors.get("tracker.stopped")) is not None:
        tensors.setdefault("tracker.changed", torch.zeros_like(stopped))
    return tensors


def _find_newest(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the metadata of the newest undamaged checkpoint in a folder."""
    for name in (FILE, BEFORE):
        if not manifest.describe_fault(folder, name):
            with safe_open(str(folder / name), framework="pt") as file:
                return name, json.loads((file.metadata() or {})["coterie"])
    raise CheckpointError(
        f"{folder}: {manifest.describe_fault(folder, FILE)}; "
        f"{manifest.describe_fault(folder, BEFORE)}; delete the folder to start again"
    )


def load_engine(folder: Path) -> dict[str, Any]:
    """Return the engine and the block of a stored run as settings; nothing without a stored run.

    Engines agree up to rounding only, so a run continues with the engine it began with.

    Raises:
        CheckpointError: when every checkpoint is damaged.
    """
    if not has_run(folder):
        return {}
    found = _find_newest(folder)[1]["engine"]
    return {"engine": found["name"], "block": found["block"]}


def load_engine_reason(folder: Path) -> str:
    """Return why a stored run has its engine; "" where it did not note that."""
    return _load_engine_note(folder, "reason")


def load_engine_name(folder: Path) -> str:
    """Return the engine that trained a stored run; "" where it did not note that."""
    return _load_engine_note(folder, "name")


def _load_engine_note(folder: Path, key: str) -> str:
    try:
        return str(json.loads((folder / PROVENANCE).read_text("utf-8"))["engine"][key])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def find_faults(folder: Path) -> list[str]:
    """Describe which result files of a run are missing or damaged."""
    faults = (manifest.describe_fault(folder, name) for name in (METRICS, EDGES, PROVENANCE))
    return list(filter(None, faults))


def is_done(folder: Path) -> bool:
    """Return whether a run has ended, even if its files have been damaged since."""
    return bool(load_provenance(folder).get("done"))


def is_finished(folder: Path) -> bool:
    """Return whether a run has ended and its results are undamaged."""
    return is_done(folder) and not find_faults(folder)


def count_stored_rounds(folder: Path) -> int | None:
    """Return the number of stored rounds of the run in a folder; None without any."""
    return load_provenance(folder).get("round")


def load_provenance(folder: Path) -> dict[str, Any]:
    """Load what a run noted of itself; nothing when the file is missing or damaged."""
    # A damaged file must not claim that a run is done.
    if manifest.describe_fault(folder, PROVENANCE):
        return {}
    return json.loads((folder / PROVENANCE).read_text("utf-8"))


def _describe_engine(loop: "Loop") -> dict[str, Any]:
    return {"name": loop.task.engine.name, "block": loop.task.block}


def collect_provenance(loop: "Loop", run: str, timing: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance of a run: code, command, versions, hardware, settings hash, time."""
    own = metrics_to_store([*loop.recorded_metrics.values(), *loop.task.evaluator.metrics])
    return {
        "seed": loop.rng.seed,
        "round": loop.next_round,
        "config_hash": run,
        "method": {"kind": loop.method.kind, **map_values(str, all_settings(loop.method))},
        "server": loop.method.server,
        "needs": sorted(loop.method.needs),
        "timed_against": loop.method.timed_against,
        "engine": {
            **_describe_engine(loop),
            "reason": loop.task.engine.reason,
            "compile_s": round(loop.task.engine.compile_seconds, 3),
        },
        "device": loop.task.device,
        "python": sys.version.split()[0],
        "packages": origin.get_versions(
            "coterie", "torch", "numpy", "safetensors", "pandas", "pyarrow"
        ),
        **origin.describe_code(),
        "code": origin.compute_code_digest(),
        "command": origin.format_command(),
        "hardware": origin.describe_hardware(),
        "threads": torch.get_num_threads(),
        # Times that are not known are left out.
        "timing": {name: value for name, value in timing.items() if value == value},
        "undefined": loop.undefined_reasons,
        **drop_empty(
            {
                "check": loop.translation,
                "skipped": loop.skipped_rounds,
                "alone": loop.alone_rounds,
                "metrics": own,
                "client_names": loop.record.client_names,
                "data": loop.record.data,
                "weights": loop.task.model.undrawn_digest,
            }
        ),
    }


def _list_tensors(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a dataclass by name; none for None."""
    if value is None:
        return {}
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def _fill_fields(like: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a dataclass like another, with stored tensors on the same devices."""
    if like is None:
        return None
    expected = _list_tensors(like)
    for name, value in expected.items():
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no {name!r}; it was written by another version"
            )
        found = tensors[name]
        # Sizes may grow in a run. Another type or number of axes is another meaning of the numbers.
        if (found.dtype, found.ndim) != (value.dtype, value.ndim):
            said = [f"{one.dtype} with {one.ndim} axes" for one in (found, value)]
            raise CheckpointError(
                f"the checkpoint has {name!r} as {said[0]}; expected {said[1]}: it was written by "
                "another version"
            )
    places = {name: value.device for name, value in expected.items()}
    return dataclasses.replace(
        like, **{name: tensors[name].to(place) for name, place in places.items()}
    )


def _write_tensors(tensors: dict[str, Tensor], meta: dict[str, Any], path: Path) -> None:
    # safetensors.torch leaks memory here: it keeps a ctypes type for each size it has seen
    arrays = {k: v.detach().cpu().contiguous().numpy() for k, v in tensors.items()}
    try:
        save_file(arrays, path, metadata={"coterie": json.dumps(meta)})
    except SafetensorError as error:  # the library hides the system's error in its text
        raise OSError(f"{path}: {error}") from error
