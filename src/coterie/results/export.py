"""Export the model of a client as a file for other programs: named weights, or ONNX."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from coterie._util import extras
from coterie._util.files import prepare_file, replace_atomically, show_path
from coterie._util.mappings import map_values
from coterie.errors import ConfigError, ModelError, RunExistsError
from coterie.models.outputs import OutputConversion
from coterie.results._exported import check_exported
from coterie.runtime.models import Models, Which

Format = Literal["safetensors", "pt", "onnx"]
FORMATS: Mapping[Format, str] = {"safetensors": ".safetensors", "pt": ".pt", "onnx": ".onnx"}
"""The ending of a file of each format."""
_FORMAT_OF_ENDING: dict[str, Format] = {ending: name for name, ending in FORMATS.items()}
_FORMAT_OF_ENDING[".pth"] = "pt"


def choose_format(path: str | Path | None, format: Format | None = None) -> Format:
    """Return the format of a file: the given one, else that of its ending, else safetensors.

    Args:
        path: the file; None for one whose name is made from its format.
        format: the given one.

    Raises:
        ConfigError: when the ending is that of another format than the given one.

    Example:
        >>> choose_format("north.onnx"), choose_format("north"), choose_format("north", "pt")
        ('onnx', 'safetensors', 'pt')
    """
    of_ending = None if path is None else _FORMAT_OF_ENDING.get(Path(path).suffix.lower())
    if format is not None and of_ending not in (None, format):
        raise ConfigError(
            f"{show_path(path or '')} has the ending of {of_ending}, and the format is {format}; "
            "leave out one of them"
        )
    return format or of_ending or "safetensors"


def export_model(
    models: Models,
    client: int | str,
    path: str | Path,
    *,
    format: Format | None = None,
    which: Which = "evaluated",
    study: str = "",
    force: bool = False,
    adapter: bool = False,
    samples: Tensor | None = None,
) -> Path:
    """Write the model of a client to one file, atomically, and check the file.

    The file is read again before it takes its place: it has the tensors of the run's model, and the
    same outputs.

    Args:
        models: the models of a run.
        client: its name, or its number.
        path: the file.
        format: "safetensors": a state dict with a description as metadata; "pt": a state dict
            alone, as `torch.load(path, weights_only=True)` reads it; "onnx": the module in
            evaluation mode, for batches of any size of prepared inputs. None: that of the file's
            ending, else "safetensors".
        which: which of the client's models, see `Models.model`.
        study: the name of the study, for the metadata.
        force: replace an existing file.
        adapter: leave out the weights that are the same for all clients, which `export_frozen`
            writes; `module.load_state_dict(tensors, strict=False)` takes the rest.
        samples: inputs as the federation holds them, on which the file is checked; drawn ones when
            None.

    Raises:
        TranslationError: when the file is another model than that of the run.
        RunExistsError: when the file exists and `force` is not set.
        ConfigError: when ONNX is asked for an adapter, the client or the model does not exist, or
            packages that ONNX needs are missing.
        ModelError: when the module is needed and was not stored, or ONNX cannot express it.
    """
    path, format = Path(path), choose_format(path, format)
    if path.exists() and not force:
        raise RunExistsError(
            f"{show_path(path)} exists; choose another file with --out, or replace it with --force"
        )
    if adapter and format == "onnx":
        raise ConfigError("onnx holds a whole model; expected safetensors or pt for an adapter")
    prepare_file(path)
    tensors = models.state_dict(client, which)
    if adapter:
        tensors = {one.name: tensors[one.name] for one in models.spec.state if one.start >= 0}
    # Whole numbers, such as a count of batches, have no NaN.
    floats = filter(Tensor.is_floating_point, tensors.values())
    if not all(bool(torch.isfinite(tensor).all()) for tensor in floats):
        warnings.warn(
            f"the model of {models.client_name(client)} has NaN or infinity: it diverged",
            stacklevel=2,
        )
    description = describe_model(models, client, which, study)
    # Metadata of safetensors and ONNX are text alone.
    known = map_values(_to_text, description)
    program = _build_onnx_program(models, client, which) if format == "onnx" else None
    if program is not None:
        for name, value in known.items():
            # ONNX files hold metadata of several programs: the prefix keeps them apart.
            program.model.metadata_props[f"coterie.{name}"] = value
    # A reader never sees half a file.
    with replace_atomically(path) as temporary:
        if program is not None:
            # One file: weights in a second file could be lost on the way.
            program.save(temporary, external_data=False)
        elif format == "pt":
            torch.save(tensors, temporary)
        else:
            save_file(tensors, temporary, metadata={"format": "pt", **known})
        # Before it has its name: a file that does not compute what the run did never appears.
        check_exported(models, client, which, tensors, temporary, format, samples)
    return path


def export_frozen(
    models: Models, path: str | Path, *, format: Format | None = None, force: bool = False
) -> Path:
    """Write the weights that are the same for all clients to one file, atomically.

    Args:
        models: the models of a run.
        path: the file.
        format: "safetensors" or "pt"; see `export_model`.
        force: replace an existing file.

    Raises:
        RunExistsError: when the file exists and `force` is not set.
    """
    path, format = Path(path), choose_format(path, format)
    if path.exists() and not force:
        raise RunExistsError(
            f"{show_path(path)} exists; choose another folder with --out, or replace it with "
            "--force"
        )
    prepare_file(path)
    tensors = map_values(Tensor.clone, models.fixed)
    with replace_atomically(path) as temporary:
        if format == "pt":
            torch.save(tensors, temporary)
        else:
            save_file(tensors, temporary, metadata={"format": "pt"})
    return path


def describe_model(
    models: Models, client: int | str, which: Which, study: str = ""
) -> dict[str, Any]:
    """Describe a model: its client, its origin, its inputs and its outputs.

    Args:
        models: of a run.
        client: its name, or its number.
        which: which of the client's models.
        study: the name of the study.
    """
    recipe, row = models.spec, models.find_row(client)
    inputs, known = recipe.inputs, recipe.model
    preparation = []
    for column in inputs.table:
        settings = asdict(column).items()
        preparation.append({name: value for name, value in settings if value is not None})
    fitted = models.fitted[row] if models.fitted else None
    normalization = None
    if inputs.images:
        normalization = {"scale": 255, "mean": inputs.mean, "std": inputs.std}
    name = recipe.names[row] if recipe.names else recipe.ids[row]
    if known is None:  # a module that was given as an object
        known = {"kind": recipe.module, "options": {}}
    return {
        "study": study,
        "method": recipe.label,
        "seed": recipe.seed,
        "rounds": recipe.rounds,
        "client": name,
        "model": recipe.evaluated if which == "evaluated" else which,
        "kind": known["kind"],
        "options": known["options"],
        "module": recipe.module,
        "features": inputs.features,
        "feature_names": inputs.names,
        "normalization": normalization,
        "parts": list(map(asdict, inputs.parts)),
        "columns": preparation,
        "fill": _to_list(fitted and fitted.fill),
        "subtract": _to_list(fitted and fitted.center),
        "divide": _to_list(fitted and fitted.spread),
        "outputs": recipe.form,
        "class_names": recipe.class_names,
        "coterie": recipe.version,
    }


def _to_list(values: Float[Tensor, " entries"] | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_onnx_packages() -> None:
    """Check that the packages that ONNX needs are installed.

    Raises:
        ConfigError: when one is missing; the message says what to install.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}: "
            f"{extras.install_command('onnx')}; "
            "--format safetensors needs nothing"
        )


def _build_onnx_program(models: Models, client: int | str, which: Which) -> torch.onnx.ONNXProgram:
    """Return the module as a graph that takes batches of any size."""
    check_onnx_packages()
    module, recipe = models.model(client, which), models.spec
    # A module may return more than its output; the graph has the output alone.
    module.register_forward_hook(OutputConversion(recipe.output))
    kind = torch.uint8 if recipe.inputs.images else torch.float32
    # 2 samples: torch.export takes a size of 1 for a constant.
    args, named = models.make_forward_arguments(
        torch.zeros(2, *recipe.inputs.features, dtype=kind), module
    )
    batch = torch.export.Dim("batch")
    # Axis 0 of each input is the batch, of any size.
    shapes: Any = tuple({0: batch} for _ in args)
    if named and not args:
        shapes = {name: {0: batch} for name in named}
    names = ["input"]
    if len(args) != 1:
        names = [f"input_{place}" for place in range(len(args))]
    try:
        with warnings.catch_warnings():
            # The exporter warns about itself, which its caller can do nothing about.
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                args,
                kwargs=named,
                # The exporter of newer PyTorch: the older one records the one path that its example
                # takes.
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=[*names, *named],
                output_names=["output"],
                verbose=False,
            )
    # A module can fail in any way under the tracer; one line must say that it did.
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"{recipe.module} cannot be written as ONNX ({type(error).__name__}: {text:.300}); "
            "--format safetensors writes its weights"
        ) from error
    assert program is not None
    return program
