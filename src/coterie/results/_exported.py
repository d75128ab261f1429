"""The check of an exported file: it is read again, and computes what the model of the run does."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from coterie.errors import ModelError, TranslationError
from coterie.models.given import copy_deeply
from coterie.models.outputs import OutputConversion
from coterie.rng import Rng
from coterie.runtime.models import Models, Which
from coterie.runtime.rounding import LIMITS, UNITS, Rounding
from coterie.runtime.translation import find_gaps, shake_module

_PURPOSE = "export"
_DRAWN = 3  # samples: another number than the two that an exporter sees


def check_exported(
    models: Models,
    client: int | str,
    which: Which,
    tensors: Mapping[str, Tensor],
    path: Path,
    format: str,
    samples: Tensor | None,
) -> None:
    """Compare a file with the model that it was written from.

    Tensors are compared bit for bit, and outputs as at the start of a run. They are not compared
    where they are random or not finite, or where the module is not here.

    Args:
        models: of a run.
        client: whose model it is.
        which: which of the client's models.
        tensors: of it that were written; not of an ONNX file.
        path: the file.
        format: of the file.
        samples: inputs as the federation holds them; drawn ones when None.

    Raises:
        TranslationError: when the file is another model.
    """
    found: dict[str, Tensor] = {}
    if format != "onnx":
        found = load_file(path) if format == "safetensors" else torch.load(path, weights_only=True)
        _compare_tensors(tensors, found)
    try:
        module = models.model(client, which)
    except ModelError:  # the module was given from Python and is not here: its weights are right
        return
    if samples is None:
        samples = draw_samples(models)
    args, named = models.make_forward_arguments(samples, module)
    select = OutputConversion(models.spec.output)

    def run(module: nn.Module, seed: int = 0) -> Tensor:
        with torch.no_grad(), Rng(seed).temporary_torch_seed(_PURPOSE):
            return select(module, args, module(*args, **named))

    expected = run(module)
    # Two seeds show whether outputs are drawn: then no two passes agree.
    if not torch.equal(expected, run(module, seed=1)) or not bool(expected.isfinite().all()):
        return
    if format == "onnx":
        outputs = _run_onnx(path, args, named)
    else:
        blank = copy_deeply(module)
        with torch.no_grad():
            for name, tensor in blank.state_dict().items():
                # Zeros, so that nothing but the file can bring these tensors back.
                if name in found:
                    tensor.zero_()
        # Not strict: the file of an adapter has none of the frozen weights.
        blank.load_state_dict(found, strict=False)
        outputs = run(blank)
    kind = expected.dtype if expected.dtype in LIMITS else "bf16"
    wanted = {"outputs": expected}
    rounding = Rounding()
    rounding.add([wanted], [{"outputs": run(shake_module(copy_deeply(module), UNITS[kind], 0))}])
    gaps = find_gaps({"outputs": outputs}, wanted, LIMITS[kind], rounding, {})
    if gaps:
        raise TranslationError(
            f"the exported file is another model than that of {models.client_name(client)}, "
            f"{gaps[0]}; it is not kept"
        )


def _compare_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in {**wanted, **found}:
        one, other = wanted.get(name), found.get(name)
        same = one is not None and other is not None and one.dtype == other.dtype
        # NaN is not equal to itself, and the model of a diverged client has some.
        if not same or not torch.equal(
            one.nan_to_num(),  # type: ignore[union-attr]
            other.nan_to_num(),  # type: ignore[union-attr]
        ):
            raise TranslationError(
                f"the exported file is another model than that of the run: its tensor {name!r} is "
                "not the run's; it is not kept"
            )


def draw_samples(models: Models) -> Tensor:
    """Draw inputs: bytes of images, codes 0 of whole numbers, and normal numbers."""
    inputs, stream = models.spec.inputs, Rng(0).generator(_PURPOSE)
    shape = (_DRAWN, *inputs.features)
    if inputs.images:
        return torch.from_numpy(stream.integers(256, size=shape)).to(torch.uint8)
    if models.spec.whole:
        return torch.zeros(shape, dtype=torch.int64)
    drawn = torch.from_numpy(stream.normal(size=shape)).float()
    start = 0
    for part in inputs.parts:
        stop = start + math.prod(part.shape)
        if part.whole:
            drawn[:, start:stop] = 0
        start = stop
    return drawn


def _run_onnx(path: Path, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return the outputs of a file by ONNX Runtime, or by ONNX's own reference without it."""
    values = [one.numpy() for one in (*args, *named.values())]
    session: Any
    try:
        from onnxruntime import InferenceSession  # type: ignore[import-not-found]

        session = InferenceSession(str(path))
        names = [one.name for one in session.get_inputs()]
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(path))
        names = session.input_names
    return torch.from_numpy(session.run(None, dict(zip(names, values, strict=True)))[0])
