"""Functions of PyTorch, computed otherwise: faster, or independent of other hosted clients.

The engines apply them while a module runs; the module and its layers stay what they are.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from coterie._util.mappings import map_values
from coterie.models.draws import DispatchMode
from coterie.models.layout import copy_module

ALIGNMENT = 64  # bytes; where PyTorch itself puts a tensor
# entries of the windows of a client's batch above which a device convolves without them
_MAX_WINDOW_ENTRIES = 1 << 22


def align_memory(tensor: Tensor) -> Tensor:
    """Return a tensor aligned like a new one, since some products round by alignment.

    Without this a client's last bits would depend on its row, and so on the other hosted clients.
    """
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor


class UnbatchedProducts(DispatchMode):
    """While active, batched matrix products are computed matrix by matrix.

    On some processors, the batched products of CPU libraries round by a matrix's position in the
    batch. Factors lie row by row: whether PyTorch hands over a transposed one as it is or as a copy
    depends on the size of the batch, and how a product rounds depends on that.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        if func is torch.ops.aten.bmm.default:
            products = []
            for a, b in zip(*(factor.contiguous() for factor in args), strict=True):
                products.append(torch.mm(align_memory(a), align_memory(b)))
            return torch.stack(products)
        return func(*args, **(kwargs or {}))


def grad_and_value(
    function: Callable[..., tuple[Tensor, Any]],
) -> Callable[..., tuple[Any, tuple[Tensor, Any]]]:
    """Like `torch.func.grad_and_value(function, has_aux=True)`, for a dict of tensors.

    PyTorch's own loads its compiler, which takes a second, only to switch it off.
    """
    import torch._functorch.eager_transforms as steps

    def compute(trained: dict[str, Tensor], *rest: Any) -> tuple[Any, tuple[Tensor, Any]]:
        with steps.grad_increment_nesting() as level, torch.enable_grad():
            wrapped: dict[str, Tensor]
            wrapped, others = steps._wrap_all_tensors((trained, rest), level)
            steps._create_differentiable(wrapped)
            loss, aux = function(wrapped, *others)
            # A tensor that the loss does not depend on has a gradient of zero.
            found = map_values(torch.zeros_like, wrapped)
            if loss.requires_grad:
                grads = torch.autograd.grad(
                    loss, list(wrapped.values()), create_graph=True, allow_unused=True
                )
                for name, grad in zip(wrapped, grads, strict=True):
                    if grad is not None:
                        found[name] = grad
            whole: Any = (found, (loss, aux))
            return steps._undo_create_differentiable(whole, level)

    return compute


def cross_entropy_by_gather(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute `_base.cross_entropy` as PyTorch does under vmap, without loading sympy."""
    return -torch.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)


def pool_by_slices(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Max-pool over windows that do not overlap, as the maximum of strided slices of the input.

    The value and the gradient are those of `functional.max_pool2d`: where several entries of a
    window are equal, all of the gradient goes to the first of them in row-major order, and a NaN
    wins over every number. Rows and columns that fill no window are left out. Pooling of another
    kind returns NotImplemented.
    """
    kernel, pad = _as_pair(kernel_size), _as_pair(padding)
    overlaps = stride is not None and stride != [] and _as_pair(stride) != kernel
    if overlaps or ceil_mode or return_indices or pad != (0, 0) or _as_pair(dilation) != (1, 1):
        return NotImplemented
    height, width = kernel
    rows, columns = x.shape[-2] // height * height, x.shape[-1] // width * width
    # Entry (i, j) of every window, in row-major order.
    places = itertools.product(range(height), range(width))
    entries = [x[..., i:rows:height, j:columns:width] for i, j in places]
    return functools.reduce(_elementwise_max, entries)


def _elementwise_max(best: Tensor, part: Tensor) -> Tensor:
    # torch.maximum shares the gradient between equal entries; without gradients its value is
    # enough.
    if not torch.is_grad_enabled():
        return torch.maximum(best, part)
    return torch.where((part > best) | part.isnan(), part, best)


@dataclass(frozen=True)
class _ConvolutionGeometry:
    """A two-dimensional convolution without groups, with zeros around the images.

    Args:
        kernel: of rows and columns, as all others.
        padding: on each side.
        dilation: between the entries of the kernel.
        stride: between the windows.
    """

    kernel: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    stride: tuple[int, int]

    @staticmethod
    def read(
        x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> "_ConvolutionGeometry | None":
        """Return a convolution, or None for one with groups, one image or "same" padding."""
        if groups != 1 or padding == "same" or x.ndim != 4:
            return None
        kernel = (int(weight.shape[2]), int(weight.shape[3]))
        # The only other text is "valid".
        pad = (0, 0) if isinstance(padding, str) else _as_pair(padding)
        return _ConvolutionGeometry(kernel, pad, _as_pair(dilation), _as_pair(stride))

    def output_sides(self, x: Tensor) -> tuple[int, int]:
        """Return the height and the width of the result."""
        sides = []
        for size, pad, gap, kernel, step in zip(
            x.shape[-2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
        ):
            # The first window takes gap * (kernel - 1) + 1 places, each further one `step` more.
            sides.append((size + 2 * pad - gap * (kernel - 1) - 1) // step + 1)
        return sides[0], sides[1]

    def multiply_windows(
        self, windows: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the product with the windows of a batch of images: one for the whole batch."""
        y = torch.mm(weight.flatten(1), windows)
        if bias is not None:
            y = y + bias[:, None]
        # Outputs x (samples * places) become samples x outputs x rows x columns.
        return y.unflatten(1, (len(x), *self.output_sides(x))).transpose(0, 1)


def convolve_unfolded(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve images by a matrix product over unfolded windows.

    Many clients at once are then one batched matrix product, in which no client's result depends on
    how many there are; the grouped convolution that PyTorch would make of them depends on it in the
    last bits. A convolution of another kind returns NotImplemented.
    """
    kind = _ConvolutionGeometry.read(x, weight, stride, padding, dilation, groups)
    if kind is None:
        return NotImplemented
    # Samples x (channels * kernel) x places become (channels * kernel) x (samples * places), so
    # that the weights multiply the whole batch at once.
    windows = functional.unfold(x, kind.kernel, kind.dilation, kind.padding, kind.stride)
    return kind.multiply_windows(windows.transpose(0, 1).flatten(1), x, weight, bias)


def _window_slices(size: torch.Size, windows: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Return the slices of an image that each entry of a kernel meets.

    Args:
        size: of the padded images.
        windows: kernel, dilation and stride, each of rows and of columns.
    """
    sides = []
    for length, kernel, dilation, stride in zip(
        size[-2:], windows[:2], windows[2:4], windows[4:], strict=True
    ):
        reach = length - dilation * (kernel - 1)  # places that the kernel's first entry can be at
        starts = range(0, dilation * kernel, dilation)
        sides.append([slice(start, start + reach, stride) for start in starts])
    return list(itertools.product(*sides))


class _ExtractWindows(torch.autograd.Function):
    """All windows of a batch of images, [channels, places in the kernel, samples, rows, columns].

    PyTorch's own unfolding launches a kernel for every sample.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, windows: tuple[int, ...]) -> Tensor:
        """Take the windows of images that lie channel by channel."""
        return torch.stack([x[..., *place] for place in _window_slices(x.shape, windows)], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Keep what the gradient needs: shapes."""
        ctx.size, ctx.windows = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of each pixel over the windows that it is in."""
        # Places in the slice of one kernel entry are distinct; the entries come in a fixed order,
        # so that the sums always round alike.
        found = grads[0].new_zeros(ctx.size)
        for number, (rows, columns) in enumerate(_window_slices(ctx.size, ctx.windows)):
            found[..., rows, columns] += grads[0][:, number]
        return found, None


def convolve_windowed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve images by a matrix product, with few launches: for a device.

    Many clients at once are one batched product. cuDNN makes a grouped convolution of them, which
    it computes group by group, and whose last bits may differ between two calls. Where windows
    would take too much memory, and for a convolution of another kind, it is used: NotImplemented.
    """
    kind = _ConvolutionGeometry.read(x, weight, stride, padding, dilation, groups)
    if kind is None:
        return NotImplemented
    entries = len(x) * math.prod(kind.output_sides(x)) * math.prod(weight.shape[1:])
    if entries > _MAX_WINDOW_ENTRIES:
        return NotImplemented
    # pad takes the last axis first.
    rows, columns = kind.padding
    padded = functional.pad(x, (columns, columns, rows, rows))
    windows: Tensor = _ExtractWindows.apply(  # type: ignore[no-untyped-call]
        padded.transpose(0, 1), (*kind.kernel, *kind.dilation, *kind.stride)
    )
    return kind.multiply_windows(windows.flatten(0, 1).flatten(1), x, weight, bias)


def _as_pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])


Moments = Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""(inputs, eps) -> inputs normalized by the batch, its mean and biased variance, by channel."""


def _batch_moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = [0, *range(2, x.ndim)]
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    # Written out: the last bits of the fused kernel depend on the other rows.
    return (x - mean) * torch.rsqrt(variance + eps), mean.flatten(), variance.flatten()


def normalize_batch(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    moments: Moments = _batch_moments,
) -> Tensor:
    """Compute `functional.batch_norm` with simple operations, of many models at once too.

    Args:
        input: samples, channels, places.
        running_mean: written in place in training.
        running_var: written in place in training.
        weight: factor of each channel.
        bias: added to each channel.
        training: whether to normalize by the batch.
        momentum: share of the batch in the new running statistics.
        eps: added to the variance.
        moments: how to normalize by the batch.
    """
    x = input
    if x.dtype == torch.bfloat16:  # mean and variance need more digits
        x = x.float()
    shape = (1, -1, *[1] * (x.ndim - 2))
    if training:
        functional._verify_batch_size(x.size())  # type: ignore[attr-defined]
        places = x.numel() // x.shape[1]  # values of a channel: samples times places
        y, mean, variance = moments(x, eps)
        if running_mean is not None and running_var is not None:
            # PyTorch normalizes by the biased variance and tracks the unbiased one.
            unbiased = variance.detach() * (places / (places - 1))
            running_mean.copy_(running_mean + momentum * (mean.detach() - running_mean))
            running_var.copy_(running_var + momentum * (unbiased - running_var))
    else:
        assert running_mean is not None
        assert running_var is not None
        y = (x - running_mean.reshape(shape)) * torch.rsqrt(running_var + eps).reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y


def _normalize_by_mean_statistics(norm: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """Run a batch normalization whose running statistics are the plain mean over batches.

    PyTorch's own reads the number of batches as a number, which many models at once do not have.
    """
    norm._check_input_dim(x)
    rate: Any = 0.0  # a tensor is what `normalize_batch` takes as well
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        rate = 1 / norm.num_batches_tracked.to(x.dtype)
    by_batch = norm.training or norm.running_mean is None
    return functional.batch_norm(
        x,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        by_batch,
        rate,
        norm.eps,  # type: ignore[arg-type]
    )


def with_counted_batches(module: nn.Module) -> nn.Module:
    """Return a copy whose batch normalizations without a momentum can run for many models at once.

    It is the module itself where there are none.
    Layers keep their type, name and attributes: the copy's layers have a `forward` of their own.
    """

    def counts(part: nn.Module) -> bool:
        stock = type(part).forward is nn.modules.batchnorm._BatchNorm.forward
        return bool(stock and part.momentum is None and part.track_running_stats)

    if not any(map(counts, module.modules())):
        return module
    module = copy_module(module)
    for part in module.modules():
        if counts(part):
            part.forward = functools.partial(_normalize_by_mean_statistics, part)  # type: ignore[method-assign]
    return module


class ReplacedFunctions(TorchFunctionMode):
    """While active, functions of PyTorch are computed otherwise, wherever a module calls them.

    Args:
        functions: what computes a function; it takes its arguments, and returns NotImplemented for
            what it leaves to PyTorch.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function; what it calls in turn is PyTorch's."""
        other = self.functions.get(func)
        if other is not None:
            found = other(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


def attend_plainly(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention by simple operations: the fused ones cannot be run over many models."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **kwargs)

    return attend


def plain_attention(device: torch.device) -> AbstractContextManager[Any]:
    """While active, attention on a device draws its dropout by operations that can be keyed."""
    if device.type == "cpu":  # whose fused attention has no dropout
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
