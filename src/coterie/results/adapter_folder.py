"""The adapter of a client as a folder that `peft.PeftModel.from_pretrained` loads."""

import importlib
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie._util import extras
from coterie._util.files import prepare_folder, replace_folder, resolve_path, show_path
from coterie.errors import ConfigError, RunExistsError, TranslationError
from coterie.models.given import copy_deeply
from coterie.results._exported import draw_samples
from coterie.runtime.models import Models, Which

CONFIG = "adapter_config.json"
"""The file by which peft knows a folder of an adapter."""


def export_adapter_folder(
    models: Models,
    client: int | str,
    path: str | Path,
    *,
    which: Which = "evaluated",
    force: bool = False,
    samples: Tensor | None = None,
) -> Path:
    """Write the adapter of a client as a folder of peft, and check it.

    The folder is loaded again before it takes its place, onto the model without what was trained:
    it has the same tensors, and the same outputs. A folder that is there is removed only after that
    (see `replace_folder`).

    Args:
        models: the models of a run.
        client: its name, or its number.
        path: the folder.
        which: which of the client's models, see `Models.model`.
        force: replace a folder with an adapter.
        samples: inputs as the federation holds them, on which outputs are compared; drawn ones when
            None.

    Raises:
        ConfigError: when peft is missing, or the model has no adapter of peft.
        RunExistsError: when the folder exists and `force` is not set, or it has no adapter.
        TranslationError: when the folder is another model than that of the run.
    """
    path = Path(path)
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"format peft needs the package peft: {extras.install_command('adapters')}; format "
            "safetensors needs nothing"
        ) from error
    if path.exists() and not (force and (path / CONFIG).is_file()):
        advice = "choose another folder with --out, or replace it with --force"
        if force:
            advice = f"and has no {CONFIG}, so it is not replaced: choose another with --out"
        raise RunExistsError(f"{show_path(path)} exists; {advice}")
    module: Any = models.model(client, which)
    if not isinstance(module, peft.PeftModel):
        raise ConfigError(
            f"format peft writes adapters of peft; the model of this run is a "
            f"{type(module).__name__}: take safetensors, or train with [model.adapter]"
        )
    prepare_folder(path.parent)
    # Cut, because names of files have at most 255 bytes.
    place = resolve_path(path)
    temporary = place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with warnings.catch_warnings():
            # peft warns of names that transformers deprecates
            warnings.simplefilter("ignore")
            _save_active_adapter(module, temporary)
            _check_folder(models, module, temporary, peft, samples)
        replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _save_active_adapter(module: Any, folder: Path) -> None:
    """Write the adapter that is in use; peft writes one of another name than "default" below."""
    name = module.active_adapter
    module.save_pretrained(str(folder), selected_adapters=[name])
    inner = folder / name
    if name != "default" and inner.is_dir():
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()


def _check_folder(
    models: Models, module: Any, folder: Path, peft: Any, samples: Tensor | None
) -> None:
    """Load a folder onto the model without what was trained, and compare the two."""
    blank = copy_deeply(module)
    trained = {one.name for one in models.spec.state if one.start >= 0}
    with torch.no_grad():
        for name, tensor in blank.state_dict().items():
            # Zeros, so that nothing but the folder can bring the trained values back.
            if name in trained:
                tensor.zero_()
    # Under its name, which is part of the names of its tensors.
    loaded = peft.PeftModel.from_pretrained(
        blank.unload(), str(folder), adapter_name=module.active_adapter
    ).eval()
    found = loaded.state_dict()
    for name, tensor in module.state_dict().items():
        # What peft keeps of a layer that is trained whole, and does not use.
        if ".original_module." in name:
            continue
        if name not in found or not torch.equal(tensor, found[name]):
            raise TranslationError(
                f"the folder of peft has another {name!r} than the model of the run; peft keeps "
                "adapters and layers named in `trained` alone: take format safetensors with "
                "--adapter"
            )
    args, named = models.make_forward_arguments(
        draw_samples(models) if samples is None else samples, module
    )
    # Bit by bit: the same code runs with the same tensors.
    if not torch.equal(_read_outputs(module, args, named), _read_outputs(loaded, args, named)):
        raise TranslationError(
            "the folder of peft has other outputs than the model of the run; take format "
            "safetensors with --adapter"
        )


def _read_outputs(module: nn.Module, args: Any, named: Any) -> Tensor:
    with torch.no_grad():
        found = module(*args, **named)
    return getattr(found, "logits", found)
