"""The trained models of a run's clients, as modules of the class that was given.

A finished run leaves `models.safetensors` in its folder: how a row of the checkpoint becomes the
module that was trained, what inputs it takes and what its outputs mean. The file also has the
models that the checkpoint does not hold.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie import __version__
from coterie._util import manifest
from coterie._util.facts import Described
from coterie._util.mappings import index_by_name, map_values, select_prefix
from coterie._util.names import format_client, format_clients
from coterie._util.settings import to_plain
from coterie.data.inputs import InputForm
from coterie.data.preparation import FittedPreparation, stack_fitted, unstack_fitted
from coterie.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    describe_unknown,
    require,
)
from coterie.functional.adapters import find_pairs
from coterie.functional.losses import to_probabilities
from coterie.functional.ranks import cut_tensors
from coterie.functional.scores import Form
from coterie.models.given import InputConversion, copy_deeply
from coterie.models.layout import (
    ModelSource,
    NamedModel,
    Slot,
    fill_module,
    find_adapter,
    make_template,
    resolve_model,
)
from coterie.models.outputs import OutputConversion
from coterie.models.pretrained import AdapterConfig
from coterie.models.simplex_layers import remove_endpoints
from coterie.runtime import _frozen, checkpoint
from coterie.runtime.loop import Loop

FILE = "models.safetensors"
Which = Literal["evaluated", "best_val", "final"]
Kind = Literal["outputs", "probabilities", "classes"]
_ROWS, _ROW_OF, _FIXED = "rows", "row_of", "fixed."


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the module, and where its values are.

    Args:
        name: its name in the module's `state_dict`.
        dtype: its type, such as "float32".
        shape: its shape.
        start: its first place in a row; -1 where it is in no row, but the same for all clients.
        stop: the place behind its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = -1
    stop: int = -1


@dataclass(frozen=True)
class SavedModelSpec:
    """How the rows of a run become modules, and what their inputs and outputs are; stored as JSON.

    Args:
        label: of the method.
        method: its kind.
        seed: of the run.
        rounds: of the run.
        evaluated: which models the final test was of: "best_val" or "final".
        tensors: where the rows are: a file of the folder and the name of a tensor in it, for each
            choice that was stored.
        model: kind and options of the model; None where it was given from Python.
        module: the class of the module.
        outputs: number of outputs that a built-in network is made with.
        state: the entries of the module's `state_dict`, in order.
        hidden: further buffers that belong to a model and are in no `state_dict`.
        whole: whether the module takes inputs as whole numbers.
        inputs: what an input is.
        form: what outputs are, see `functional.scores`.
        class_axis: the axis of the classes among those of the outputs.
        class_names: a name for each class, when known.
        ids: the clients that are here.
        names: a name for each of them; empty where clients are numbers.
        missing: why there is no module; empty where there is one.
        output: which entry of what the module returns is its output.
        version: of Coterie, which wrote this.
        frozen: the file of the folder with the tensors that are the same for all clients; empty
            where they are small, and in the file of models.
    """

    label: str
    method: str
    seed: int
    rounds: int
    evaluated: Which
    tensors: Mapping[str, tuple[str, str]]
    model: Mapping[str, Any] | None
    module: str
    outputs: int
    state: tuple[TensorEntry, ...]
    hidden: tuple[TensorEntry, ...]
    whole: bool
    inputs: InputForm
    form: Form
    class_axis: int
    class_names: tuple[str, ...]
    ids: tuple[int, ...]
    names: tuple[str, ...] = ()
    missing: str = ""
    output: str = ""
    version: str = __version__
    frozen: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the plain values that `from_json` reads."""
        described = {**asdict(self), "inputs": self.inputs.to_json()}
        if not self.frozen:
            del described["frozen"]
        return described

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "SavedModelSpec":
        """Return the specification that `as_json` returned as plain values."""

        # JSON has lists only, and the specification compares tuples.
        def parse_entries(name: str) -> tuple[TensorEntry, ...]:
            entries = []
            for one in stored[name]:
                entries.append(TensorEntry(**{**one, "shape": tuple(one["shape"])}))
            return tuple(entries)

        kept = {
            **stored,
            "tensors": map_values(tuple, stored["tensors"]),
            "state": parse_entries("state"),
            "hidden": parse_entries("hidden"),
            "inputs": InputForm.from_json(stored["inputs"]),
            "class_names": tuple(stored["class_names"]),
            "ids": tuple(stored["ids"]),
            "names": tuple(stored["names"]),
        }
        return SavedModelSpec(**kept)


@dataclass(frozen=True, repr=False)
class Models(Described):
    """The models of a run's clients.

    Args:
        spec: how rows become modules.
        fixed: the tensors of the module that are the same for all clients, by their names.
        fitted: the fitted preprocessing of each client's table rows; empty without any.
        network: the model; None where it was given from Python, and is not here.
        loaded_rows: the rows in memory, by choice.
        folder: the run's folder, which holds the other rows; None where nothing was written.
    """

    spec: SavedModelSpec
    fixed: Mapping[str, Tensor]
    fitted: tuple[FittedPreparation, ...] = ()
    network: ModelSource | None = None
    loaded_rows: Mapping[str, Float[Tensor, "clients params"]] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def clients(self) -> tuple[str | int, ...]:
        """The clients whose models are here: their names, or numbers where they have none."""
        return self.spec.names or self.spec.ids

    def facts(self) -> tuple[str, dict[str, Any]]:
        """Return a title and a short description by name."""
        # Not strict: names are empty where clients are numbers.
        spec, names = self.spec, dict(zip(self.spec.ids, self.spec.names, strict=False))
        return f"Models of {spec.label!r} with seed {spec.seed}", {
            "clients": f"{len(spec.ids)} ({format_clients(names, spec.ids)})",
            "module": spec.module,
            "evaluated": spec.evaluated,
            "folder": self.folder or "none: nothing was written",
        }

    def find_row(self, client: int | str) -> int:
        """Return the row of a client.

        Args:
            client: its name, or its number.

        Raises:
            ConfigError: when there is no such client here.
        """
        ids, names = self.spec.ids, self.spec.names
        # A name wins over a number: clients may be called "0" or "1".
        if isinstance(client, str) and client in names:
            return names.index(client)
        is_number = not isinstance(client, str) or client.isdecimal()
        if is_number and int(client) in ids:
            return ids.index(int(client))
        if names:
            raise ConfigError(describe_unknown("client", str(client), names))
        raise ConfigError(
            f"there is no client {client!r}; the clients are {format_clients({}, ids)}"
        )

    def client_name(self, client: int | str) -> str:
        """Return a client's name, or "client N" where clients are numbers."""
        row = self.find_row(client)
        if not self.spec.names:
            return format_client({}, self.spec.ids[row])
        return self.spec.names[row]

    # ------------------------------------------------------------------ models

    def model(self, client: int | str, which: Which = "evaluated") -> nn.Module:
        """Return a client's model: a module of the class that was given, in evaluation mode.

        It has trained weights, and the running statistics of its normalizations. It is a copy, and
        needs nothing of Coterie. Frozen weights of 64 kB or more are in memory once for the models
        of all clients: who changes them in place changes them in all.

        Args:
            client: its name, or its number.
            which: "evaluated": the model of the final test, as `Settings.evaluate` chose it;
                "best_val": the best on the client's validation data; "final": that after the last
                round.

        Raises:
            ConfigError: when the client or that model is not here.
            ModelError: when the module was given from Python and is missing here, or is a different
                one.
        """
        row, rank = self.load_row(client, which), self._find_rank(client)
        # A copy for each client, as filling one must not change another, but for shared tensors.
        if rank not in self._blank_modules:
            self._blank_modules[rank] = self._make_blank_module(client, rank)
        blank, shared = self._blank_modules[rank]
        memory: dict[int, Any] = {}
        for tensor in shared:
            # A tensor of its own on the same memory: frozen weights are not copied for each client.
            alias = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                alias = nn.Parameter(alias, requires_grad=tensor.requires_grad)
            memory[id(tensor)] = alias
        module = copy_deeply(blank, memory)
        entries = [*self.spec.state, *self.spec.hidden]
        if shared:
            # The fixed tensors are in the blank module, on memory that all models share.
            entries = [one for one in entries if one.start >= 0]
        return fill_module(module, self._cut_to_rank(self._name_tensors(row, entries), rank))

    @cached_property
    def _blank_modules(self) -> dict[int | None, tuple[nn.Module, list[Tensor]]]:
        """What `_make_blank_module` has made, by rank."""
        return {}

    def _find_rank(self, client: int | str) -> int | None:
        """Return the rank of a client's own adapter; None where all have the same."""
        adapter = self._own_adapter(client)
        return None if adapter is None else adapter.largest_rank

    def _own_adapter(self, client: int | str) -> AdapterConfig | None:
        """Return a client's own adapter, where clients have different ranks; else None."""
        adapter = find_adapter(self.network)
        if adapter is None or adapter.has_one_rank:
            return None
        place = self.find_row(client)
        name = self.spec.names[place] if self.spec.names else ""
        return adapter.for_client(self.spec.ids[place], name)

    def _cut_to_rank(self, tensors: dict[str, Tensor], rank: int | None) -> dict[str, Tensor]:
        if rank is None:
            return tensors
        slots = [Slot(one.name, one.shape, one.start, one.stop) for one in self.spec.state]
        return cut_tensors(tensors, find_pairs(slots, "the model of a client"), rank)

    def _make_blank_module(
        self, client: int | str, rank: int | None
    ) -> tuple[nn.Module, list[Tensor]]:
        """Return a module with the values that all clients share, and the tensors not copied."""
        made, own = self._make_template(), self._own_adapter(client)
        if own is not None:
            assert isinstance(self.network, NamedModel)
            made = self._make_module(replace(self.network, adapter=to_plain(own)))
        module, shared = copy_deeply(made).cpu().eval(), []
        if not self.spec.frozen:
            return module, shared
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in self.fixed:
                tensor.data = self.fixed[name].detach().cpu().to(tensor.dtype)
                shared.append(tensor)
        return module, shared

    def state_dict(self, client: int | str, which: Which = "evaluated") -> dict[str, Tensor]:
        """Return a client's `state_dict` for the original module; see `model`."""
        tensors = self._name_tensors(self.load_row(client, which), self.spec.state)
        return self._cut_to_rank(tensors, self._find_rank(client))

    def load_row(self, client: int | str, which: Which = "evaluated") -> Float[Tensor, " params"]:
        """Return the model of a client as a row of the specification's entries; see `model`."""
        spec, place = self.spec, self.find_row(client)
        require(which in get_args(Which), "which", which, "'evaluated', 'best_val' or 'final'")
        if spec.missing:
            raise ModelError(spec.missing)
        wanted = which
        if which == "evaluated":
            wanted = spec.evaluated
        # In memory after a run; from the files of a run that was loaded.
        if wanted in self.loaded_rows:
            return self.loaded_rows[wanted][place].cpu()
        if wanted not in spec.tensors:
            raise ConfigError(
                f"which is {which!r}; this run kept only {', '.join(map(repr, spec.tensors))}: "
                f"evaluate = {wanted!r} "
                "would keep it"
            )
        if self.folder is None:
            raise ConfigError(
                f"which is {which!r}; without a folder a run keeps only "
                f"{', '.join(map(repr, self.loaded_rows))}: give "
                "simulate a folder"
            )
        return _load_stored_row(self.folder, *spec.tensors[wanted], place, spec.rounds)

    def _name_tensors(
        self, row: Float[Tensor, " params"], entries: Sequence[TensorEntry]
    ) -> dict[str, Tensor]:
        found = {}
        for one in entries:
            if one.start < 0:
                value = self.fixed[one.name]
            else:
                value = row[one.start : one.stop].reshape(one.shape)
            kind = getattr(torch, one.dtype)
            # Rows hold floating-point numbers; a counter is rounded, because truncation would lose
            # 1 where a merge left 2.9999.
            if value.is_floating_point() and not kind.is_floating_point:
                value = value.round()
            value = value.to(kind)
            # A copy, which callers may change; large frozen weights are in memory once.
            if one.start >= 0 or not self.spec.frozen:
                value = value.clone()
            found[one.name] = value
        return found

    def _make_template(self) -> nn.Module:
        """Return a module of the class that was trained, with meaningless values."""
        spec = self.spec
        if self.network is None:
            raise ModelError(
                f"this run has a module of your own, a {spec.module}, which was given from "
                "Python; give it again: "
                "load_models(folder, model=...), or on the command line its import path: --model "
                "package.module:Net"
            )
        own, found = self._make_module(self.network), {}
        for name, tensor in own.state_dict().items():
            # `get_extra_state` may give entries that are no tensors.
            if isinstance(tensor, Tensor):
                found[name] = tuple(tensor.shape)
        wanted = {one.name: one.shape for one in spec.state}
        if found != wanted:
            odd = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
            raise ModelError(
                f"the module is another than in this run: {odd!r} is "
                f"{_describe_shape(found.get(odd))} in it, and "
                f"{_describe_shape(wanted.get(odd))} in the run; give the module that was trained"
            )
        return own

    def _make_module(self, network: ModelSource) -> nn.Module:
        inputs = self.spec.inputs
        return make_template(
            resolve_model(network, inputs.features, self.spec.outputs, inputs.parts)
        )

    # ------------------------------------------------------------------ use

    def convert_inputs(self, client: int | str, x: Any) -> Tensor:
        """Return inputs as the federation held them, from raw ones; see `predict`."""
        place = self.find_row(client)
        fitted = None
        if self.fitted:
            fitted = self.fitted[place]
        found = self.spec.inputs.prepare_inputs(x, fitted)
        if not len(found):
            raise DataError("x has no samples; expected one or more")
        return found

    def make_forward_arguments(
        self, x: Tensor, module: nn.Module
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the module's `forward`.

        Args:
            x: inputs, as `convert_inputs` returns them.
            module: of any of the clients.
        """
        # The input type is that of the weights; without weights there is nothing to match.
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        numbers = self.spec.inputs.to_numbers(x, dtype)
        return InputConversion(self.spec.inputs.parts, self.spec.whole)(
            nn.Identity(), (numbers,), {}
        )

    def predict(
        self,
        client: int | str,
        x: Any,
        kind: Kind = "outputs",
        *,
        which: Which = "evaluated",
        batch_size: int = 256,
    ) -> Tensor | np.ndarray:
        """Return what a client's model predicts for samples.

        Args:
            client: its name, or its number.
            x: the raw samples. For a model of a table: rows of such a table (pandas, polars, arrow,
                a file), which are filled and scaled with this client's own numbers. Otherwise
                arrays or tensors as in `from_arrays`, or as a federation holds
                them: images as bytes, which are normalized as in training; a tuple or a table of
                arrays where an input is several tensors.
            kind: "outputs" of the module, as losses take them; "probabilities" of classes or
                labels; or "classes": the most probable, by their names where they have any (of
                several labels: whether each is, 0 or 1).
            which: which of the client's models, see `model`.
            batch_size: samples at once.

        Returns:
            A tensor with a row for each sample; of "classes" an array.

        Raises:
            ConfigError: when there is no such client, the table lacks a column, or outputs have no
                probabilities.
            DataError: when the samples are of another kind or shape than those of the training.
        """
        require(kind in get_args(Kind), "kind", kind, "'outputs', 'probabilities' or 'classes'")
        require(batch_size >= 1, "batch_size", batch_size, "at least 1")
        spec, select_output = self.spec, OutputConversion(self.spec.output)
        samples, module = self.convert_inputs(client, x), self.model(client, which)
        found = []
        with torch.no_grad():
            for part in samples.split(batch_size):
                args, named = self.make_forward_arguments(part, module)
                found.append(select_output(module, args, module(*args, **named)))
        outputs = torch.cat(found)
        if kind == "outputs":
            return outputs
        chances = to_probabilities(spec.form, outputs, spec.class_axis)
        if kind == "probabilities":
            return chances
        if spec.form == "labels":
            # Each label is a choice of its own, so there is no largest one.
            return (chances > 0.5).to(torch.int64).numpy()
        axis = spec.class_axis
        if spec.form == "class":
            axis = -1
        classes = chances.argmax(axis).numpy()
        if spec.class_names:
            classes = np.array(spec.class_names)[classes]
        return classes

    # ------------------------------------------------------------------ files

    def make_files(self) -> dict[str, Callable[[Path], None]]:
        """Return the files that a run leaves: their names, and functions that write them."""
        files: dict[str, Callable[[Path], None]] = {}
        tensors: dict[str, Tensor] = {}
        frozen = self.spec.frozen
        if not frozen:
            for name, tensor in self.fixed.items():
                # Copied: safetensors refuses two tensors that share memory.
                tensors[f"{_FIXED}{name}"] = tensor.cpu().clone()
        # A whole file that is there already is not written again.
        elif self.folder is None or manifest.describe_fault(self.folder, frozen):
            files[frozen] = partial(_frozen.write_file, self.fixed, frozen, self.folder)
        tensors |= stack_fitted(self.fitted)
        kept = self.spec.tensors.get(self.spec.evaluated)
        # Rows that the checkpoint has are not stored twice.
        if kept is not None and kept[0] == FILE:
            tensors[_ROWS], tensors[_ROW_OF] = _deduplicate_rows(
                self.loaded_rows[self.spec.evaluated].cpu()
            )
        described = json.dumps(self.spec.as_json(), sort_keys=True, ensure_ascii=False)
        return {**files, FILE: partial(_write_models, tensors, described)}


def collect_models(
    loop: Loop, model: ModelSource, label: str, folder: Path | None = None
) -> Models:
    """Return the models of a run after its final evaluation.

    Args:
        loop: the run.
        model: what the clients trained.
        label: of the method.
        folder: of the run.
    """
    task, settings = loop.task, loop.settings
    federation, layout, objective = task.data.federation, task.layout, task.trainer.loss
    # One row for each sample: `y` has clients and samples as its first two axes.
    y = federation.y.flatten(0, 1)
    outputs = objective.num_outputs(y, federation.classes)
    own = make_template(resolve_model(model, federation.features, outputs, federation.parts))
    evaluated: Which = settings.evaluate
    held, slots, missing = {}, layout.slots, ""
    try:
        assert loop.evaluated_models is not None, "the final evaluation comes before"
        # Simplex layers train several endpoints; what is taken home is one model between them.
        slots, rows = remove_endpoints(layout, loop.evaluated_models)
        held = {evaluated: rows}
    # A method whose models are no modules says why; results do not need the file.
    except ModelError as error:
        missing = f"{loop.method.kind}: {error}"
    tensors = {}
    # Where the rows are the checkpoint's own columns, the file points to it.
    if slots is layout.slots and not missing:
        if len(loop.tracker.best):
            tensors["best_val"] = (checkpoint.FILE, "tracker.best")
        # With a server the clients are served models of its state.
        if not loop.method.server:
            tensors["final"] = (checkpoint.FILE, "state.params")
    if not missing:
        # Otherwise the file of models holds the rows itself.
        tensors.setdefault(evaluated, (FILE, _ROWS))
    state, hidden, fixed = _list_entries(own, slots, layout.other_tensors())
    lost = {slot.name for slot in slots} - {one.name for one in (*state, *hidden)}
    assert missing or not lost, f"trained tensors are in no model taken home: {sorted(lost)}"
    spec = SavedModelSpec(
        label=label,
        method=loop.method.kind,
        seed=loop.rng.seed,
        rounds=loop.next_round,
        evaluated=evaluated,
        tensors=tensors,
        model=_describe_named_model(model),
        module=f"{type(own).__module__}.{type(own).__qualname__}",
        outputs=outputs,
        state=state,
        hidden=hidden,
        whole=layout.arguments.whole,
        inputs=InputForm.from_federation(federation),
        form=task.evaluator.form,
        class_axis=objective.class_axis,
        class_names=federation.class_names,
        ids=tuple(loop.record.table_ids(task.ids).tolist()),
        names=federation.client_names,
        missing=missing,
        output=layout.output.name,
        frozen=_frozen.name_file(fixed),
    )
    return Models(spec, fixed, federation.fitted, model, held, folder)


def list_files(folder: Path) -> list[str]:
    """Return the names of the files that a run's models were written to; see `make_files`.

    Args:
        folder: of the run.
    """
    known = manifest.load_digests(folder)
    return [name for name in known if name == FILE or name.startswith(_frozen.PREFIX)]


def load_models(folder: str | Path, *, model: ModelSource | None = None) -> Models:
    """Return the models of a finished run from its folder; no data are needed.

    Args:
        folder: of the run, `<study>/<method>/seed-<n>`, or of a node.
        model: what was trained, where that was given from Python: the module, its class or a
            function that makes it, or its import path.

    Raises:
        ConfigError: when the folder is not that of a finished run.
        CheckpointError: when a file of it is damaged.

    Example:
        >>> load_models("runs/none/DAC/seed-0")
        Traceback (most recent call last):
        coterie.errors.ConfigError: runs/none/DAC/seed-0 has no models.safetensors; expected the \
folder of a finished run, <study>/<method>/seed-<n>
    """
    path = Path(folder)
    if not (path / FILE).exists():
        raise ConfigError(
            f"{folder} has no {FILE}; expected the folder of a finished run, "
            "<study>/<method>/seed-<n>"
        )
    _check_file(path, FILE)
    with safe_open(str(path / FILE), framework="pt") as file:
        spec = SavedModelSpec.from_json(json.loads((file.metadata() or {})["coterie"]))
        # `file` is no mapping, so it can be read by `keys` alone.
        kept = [name for name in file.keys() if name not in (_ROWS, _ROW_OF)]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in kept}
    fixed = select_prefix(_FIXED, tensors)
    if spec.frozen:
        _check_file(path, spec.frozen)
        fixed |= _frozen.load_file(path / spec.frozen)
    network = model
    if network is None and spec.model is not None:
        stored = spec.model
        network = NamedModel(stored["kind"], stored["options"], adapter=stored.get("adapter", {}))
    return Models(spec, fixed, unstack_fitted(tensors), network, folder=path)


def _describe_named_model(model: ModelSource) -> dict[str, Any] | None:
    """Return kind and options of a model by name as JSON values; None for other models."""
    if isinstance(model, str):
        model = NamedModel(model)
    if not isinstance(model, NamedModel):
        return None
    described: dict[str, Any] = {"kind": model.kind, "options": dict(model.options)}
    if model.adapter:
        described["adapter"] = dict(model.adapter)
    try:
        # As it will be read again: tuples are lists, and keys are texts.
        return json.loads(json.dumps(described))
    except TypeError:  # an option that only Python has
        return None


def _list_entries(
    own: nn.Module, slots: Sequence[Slot], rest: Mapping[str, Tensor]
) -> tuple[tuple[TensorEntry, ...], tuple[TensorEntry, ...], dict[str, Tensor]]:
    """Return a module's state entries, its further buffers in rows, and tensors in no row."""
    places, fixed = index_by_name(slots), {}
    # a tensor with two names is listed under the first
    once = [*own.named_parameters(), *own.named_buffers()]
    first = {id(tensor): name for name, tensor in once}
    state = []
    for key, tensor in own.state_dict(keep_vars=True).items():
        # `get_extra_state` may return any object; only tensors can be stored
        if not isinstance(tensor, Tensor):
            continue
        name = first.get(id(tensor), key)
        slot = places.get(name)
        state.append(_make_entry(key, tensor, slot))
        if slot is None:
            fixed[key] = rest.get(name, tensor).detach().to(tensor.dtype)
    known, hidden = {one.name for one in state}, []
    for name, tensor in once:
        if name in places and name not in known:
            hidden.append(_make_entry(name, tensor, places[name]))
    return tuple(state), tuple(hidden), fixed


def _make_entry(name: str, tensor: Tensor, slot: Slot | None) -> TensorEntry:
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if slot is None:
        return TensorEntry(name, kind, shape)
    return TensorEntry(name, kind, shape, slot.start, slot.stop)


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "missing"
    return f"of shape {shape}"


def _deduplicate_rows(
    rows: Float[Tensor, "clients params"],
) -> tuple[Float[Tensor, "models params"], Int[Tensor, " clients"]]:
    """Return the distinct models, and which of them each client has."""
    seen: dict[bytes, int] = {}
    firsts, index = [], []
    for place, row in enumerate(rows):
        # Equal models have equal bytes; a hash of them takes less memory than the bytes.
        key = hashlib.blake2b(row.contiguous().numpy().tobytes()).digest()
        if key not in seen:
            seen[key] = len(seen)
            firsts.append(place)
        index.append(seen[key])
    return rows[torch.tensor(firsts)].contiguous(), torch.tensor(index)


def _write_models(tensors: Mapping[str, Tensor], described: str, path: Path) -> None:
    contiguous = map_values(Tensor.contiguous, tensors)
    save_file(contiguous, path, metadata={"coterie": described})


def _check_file(folder: Path, name: str) -> None:
    fault = manifest.describe_fault(folder, name)
    if fault:
        raise CheckpointError(f"{folder}: {fault}; `coterie resume` writes it again")


def _load_stored_row(
    folder: Path, name: str, tensor: str, place: int, rounds: int
) -> Float[Tensor, " params"]:
    """Load one row of a tensor of a file that was written after so many rounds."""
    _check_file(folder, name)
    with safe_open(str(folder / name), framework="pt") as file:
        # The file of models is written at the end; the checkpoint may belong to a run made longer
        # since.
        found = rounds
        if name != FILE:
            found = json.loads((file.metadata() or {})["coterie"])["round"]
        if found != rounds:
            raise CheckpointError(
                f"{folder} had ended after {rounds} rounds and was made longer; it is at {found}: "
                "resume it to its end"
            )
        if tensor == _ROWS:  # which has equal models once
            place = int(file.get_tensor(_ROW_OF)[place])
        # A slice reads one row from the file, not the whole population.
        return file.get_slice(tensor)[place : place + 1][0]
