"""Faster products at lower precision; all else keeps the precision of the run."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Literal, cast, get_args

import torch

from coterie.errors import ConfigError, require

Precision = Literal["full", "tf32", "bf16"]
# Reentrant: the loop engine sets the precision of a forward pass within that of a whole step.
_LOCK = RLock()


def check_portable(device: str) -> None:
    """Refuse `portable` where PyTorch would compute by what this processor has more than others.

    Its kernels for AVX-512 round otherwise than those for AVX2, which every x86-64 processor of the
    last ten years has. PyTorch decides once in a process; it is asked for AVX2 here.

    Args:
        device: where models and data are.

    Raises:
        ConfigError: with what was found and what to do.
    """
    if device != "cpu":
        raise ConfigError(f"portable = true is for a CPU; found device {device!r}: leave it out")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    found = torch.backends.cpu.get_cpu_capability()
    if found != "AVX2":
        raise ConfigError(
            f"portable = true takes PyTorch's kernels for AVX2; found {found}, as PyTorch computed "
            "before this setting was read: set ATEN_CPU_CAPABILITY=avx2 in the environment"
        )


def check_precision(precision: str, cuda_graphs: bool, device: str, dtype: torch.dtype) -> None:
    """Refuse a precision that a device does not support.

    Args:
        precision: see `product_precision`.
        cuda_graphs: whether steps are to be captured and replayed.
        device: where models live.
        dtype: of the models.

    Raises:
        ConfigError: with what was found and what to use instead.
    """
    require(
        precision in get_args(Precision),
        "precision",
        precision,
        f"one of {', '.join(get_args(Precision))}",
    )
    cuda = torch.device(device).type == "cuda"
    if precision != "full" and dtype != torch.float32:
        raise ConfigError(
            f"precision = {precision!r} is for dtype = 'float32'; found {dtype}: leave precision "
            "'full'"
        )
    if precision == "tf32" and not cuda:
        raise ConfigError(
            f"precision = 'tf32' is for a CUDA device; found device {device!r}: take 'full' or "
            "'bf16'"
        )
    if cuda_graphs and not cuda:
        raise ConfigError(
            f"cuda_graphs is for a CUDA device; found device {device!r}: leave it out"
        )


@contextmanager
def product_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Compute products at a precision, and restore PyTorch's settings afterwards.

    Threads take turns: settings are those of the process, and modules are lent the tensors of one
    model at a time.

    Args:
        precision: "full": that of the models, even where PyTorch would use TF32; "tf32": float32
            with mantissas of 10 bits; "bf16": bfloat16 by `torch.autocast`.
        device: the device of the products.
    """
    with _LOCK, _set_precision(precision, device):
        yield


@contextmanager
def _set_precision(precision: str, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        matmul, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
        before = matmul.allow_tf32, cudnn.allow_tf32
        # PyTorch lets cuDNN use TF32 by default, which "full" has to switch off.
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
        try:
            with _make_autocast(precision, device):
                yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
    elif precision == "bf16" or torch.is_autocast_enabled(device.type):
        with _make_autocast(precision, device):
            yield
    else:  # entered once a client: what is off already need not be switched off
        yield


def _make_autocast(precision: str, device: torch.device) -> torch.autocast:
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
