"""Rewrites of layers that keep results: faster, or independent of other hosted clients.

The engines apply them; users write stock layers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.models.layout import copy_module

_ALIGNMENT = 64  # bytes; where PyTorch itself puts a tensor
# entries of the windows of a client's batch above which a device convolves without them
_MAX_WINDOW_ENTRIES = 1 << 22


def align_memory(tensor: Tensor) -> Tensor:
    """Return a tensor aligned like a new one, since some products round by alignment.

    Without this a client's last bits would depend on its row, and so on the other hosted clients.
    """
    return (
        tensor.clone() if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT else tensor
    )


class UnbatchedProducts(TorchDispatchMode):
    """While active, batched matrix products are computed matrix by matrix.

    On some processors, the batched products of CPU libraries round by a matrix's position in the
    batch. Factors lie row by row: whether PyTorch hands over a transposed one as it is or as a copy
    depends on the size of the batch, and how a product rounds depends on that.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under the mode, so PyTorch need not load its compiler (a second)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        if func is torch.ops.aten.bmm.default:
            factors = zip(*args, strict=True)
            return torch.stack(
                [
                    torch.mm(align_memory(a.contiguous()), align_memory(b.contiguous()))
                    for a, b in factors
                ]
            )
        return func(*args, **(kwargs or {}))


def grad_and_value(
    function: Callable[..., tuple[Tensor, Any]],
) -> Callable[..., tuple[Any, tuple[Tensor, Any]]]:
    """Like `torch.func.grad_and_value(function, has_aux=True)`, for a dict of tensors.

    PyTorch's own loads its compiler (a second) to switch off what is not on.
    """
    import torch._functorch.eager_transforms as steps

    def compute(trained: dict[str, Tensor], *rest: Any) -> tuple[Any, tuple[Tensor, Any]]:
        with steps.grad_increment_nesting() as level, torch.enable_grad():
            wrapped: dict[str, Tensor]
            wrapped, others = steps._wrap_all_tensors((trained, rest), level)
            steps._create_differentiable(wrapped)
            loss, aux = function(wrapped, *others)
            # A tensor that the loss does not depend on has a gradient of zero.
            found = {name: torch.zeros_like(leaf) for name, leaf in wrapped.items()}
            if loss.requires_grad:
                grads = torch.autograd.grad(
                    loss, list(wrapped.values()), create_graph=True, allow_unused=True
                )
                found |= {
                    name: grad
                    for name, grad in zip(wrapped, grads, strict=True)
                    if grad is not None
                }
            whole: Any = (found, (loss, aux))
            return steps._undo_create_differentiable(whole, level)

    return compute


def cross_entropy_by_gather(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute `_base.cross_entropy` as PyTorch does under vmap, without loading sympy."""
    return -torch.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)


class StridedMaxPool(nn.Module):
    """Max-pooling over windows that do not overlap, as the maximum of strided slices of the input.

    The value and the gradient are those of `nn.MaxPool2d`: where several entries of a window are
    equal, all of the gradient goes to the first of them in row-major order, and a NaN wins over
    every number.

    Args:
        height: of a window.
        width: of a window.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each window; rows and columns that fill no window are left out."""
        rows, columns = (
            x.shape[-2] // self.height * self.height,
            x.shape[-1] // self.width * self.width,
        )
        best: Tensor | None = None
        for i in range(self.height):
            for j in range(self.width):
                # Entry (i, j) of every window.
                part = x[..., i : rows : self.height, j : columns : self.width]
                best = part if best is None else self._elementwise_max(best, part)
        assert best is not None
        return best

    @staticmethod
    def _elementwise_max(best: Tensor, part: Tensor) -> Tensor:
        # torch.maximum shares the gradient between equal entries; without gradients its value is
        # enough.
        if not torch.is_grad_enabled():
            return torch.maximum(best, part)
        return torch.where((part > best) | part.isnan(), part, best)


class UnfoldedConv2d(nn.Module):
    """A two-dimensional convolution as a matrix product over unfolded windows.

    Many clients at once are then one batched matrix product, in which no client's result depends on
    how many there are; the grouped convolution that PyTorch would make of them depends on it in the
    last bits.

    Args:
        conv: the layer it stands for, without groups; its parameters are taken over.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        # The only text that comes here is "valid": `unfold_convolution` refuses "same".
        self.padding = (0, 0) if isinstance(conv.padding, str) else conv.padding

    def output_sides(self, x: Tensor) -> tuple[int, int]:
        """Return the height and the width of the result."""
        each = zip(x.shape[-2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        height, width = (
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, pad, gap, kernel, step in each
        )
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        # Samples x (channels * kernel) x places become (channels * kernel) x (samples * places), so
        # that the weights multiply the whole batch at once.
        windows = functional.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        return self.multiply_windows(windows.transpose(0, 1).flatten(1), x)

    def multiply_windows(self, windows: Tensor, x: Tensor) -> Tensor:
        """Return the product with the windows of a batch of images: one for the whole batch."""
        y = torch.mm(self.weight.flatten(1), windows)
        if self.bias is not None:
            y = y + self.bias[:, None]
        # Outputs x (samples * places) become samples x outputs x rows x columns.
        return y.unflatten(1, (len(x), *self.output_sides(x))).transpose(0, 1)


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
        sides.append(
            [slice(dilation * entry, dilation * entry + reach, stride) for entry in range(kernel)]
        )
    return [(row, column) for row in sides[0] for column in sides[1]]


class _ExtractWindows(torch.autograd.Function):
    """All windows of a batch of images, [channels, places in the kernel, samples, rows, columns].

    PyTorch's own unfolding launches a kernel for every sample.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, windows: tuple[int, ...]) -> Tensor:
        """Take the windows of images that lie channel by channel."""
        return torch.stack(
            [x[..., rows, columns] for rows, columns in _window_slices(x.shape, windows)], 1
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...]], output: Tensor) -> None:
        """Keep what the gradient needs: shapes."""
        ctx.size, ctx.windows = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add up what the windows say of each pixel."""
        # Places in the slice of one kernel entry are distinct; the entries come in a fixed order,
        # so that the sums always round alike.
        found = grads[0].new_zeros(ctx.size)
        for number, (rows, columns) in enumerate(_window_slices(ctx.size, ctx.windows)):
            found[..., rows, columns] += grads[0][:, number]
        return found, None


class WindowedConv2d(UnfoldedConv2d):
    """A two-dimensional convolution as a matrix product, with few launches: for a device.

    Many clients at once are one batched product. cuDNN makes a grouped convolution of them, which
    it computes group by group, and whose last bits may differ between two calls. Where windows
    would take too much memory, it is used.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        if (
            len(x) * math.prod(self.output_sides(x)) * math.prod(self.weight.shape[1:])
            > _MAX_WINDOW_ENTRIES
        ):
            return functional.conv2d(
                x, self.weight, self.bias, self.stride, self.padding, self.dilation
            )
        # pad takes the last axis first.
        padded = functional.pad(
            x, (self.padding[1], self.padding[1], self.padding[0], self.padding[0])
        )
        windows: Tensor = _ExtractWindows.apply(  # type: ignore[no-untyped-call]
            padded.transpose(0, 1), (*self.kernel, *self.dilation, *self.stride)
        )
        return self.multiply_windows(windows.flatten(0, 1).flatten(1), x)


def unfold_convolution(
    conv: nn.Module, as_product: type[UnfoldedConv2d] = UnfoldedConv2d
) -> UnfoldedConv2d | None:
    """Return a convolution as a matrix product; None for groups or another kind of padding."""
    # A subclass may compute something else.
    plain = type(conv) is nn.Conv2d and conv.groups == 1 and conv.padding_mode == "zeros"
    if not plain or not isinstance(conv, nn.Conv2d) or conv.padding == "same":
        return None
    return as_product(conv)


def _as_pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def make_strided_pool(pool: nn.MaxPool2d) -> StridedMaxPool | None:
    """Return the same pooling over strided slices, or None where windows overlap or are padded."""
    # See `unfold_convolution`: a subclass may compute something else.
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices:
        return None
    kernel, stride = _as_pair(pool.kernel_size), _as_pair(pool.stride)
    if kernel != stride or _as_pair(pool.padding) != (0, 0) or _as_pair(pool.dilation) != (1, 1):
        return None
    return StridedMaxPool(*kernel)


def with_strided_pools(module: nn.Module) -> nn.Module:
    """Return a copy of a module with faster max-pooling; its tensors keep their names."""
    return _replace_layers(
        module, lambda part: make_strided_pool(part) if isinstance(part, nn.MaxPool2d) else None
    )


def with_unfolded_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy whose results for a client do not depend on others, to the last bit."""
    return _replace_layers(module, unfold_convolution)


def with_windowed_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy with layers that a device computes for many clients at once in a faster way."""
    return _replace_layers(module, lambda part: unfold_convolution(part, WindowedConv2d))


def _replace_layers(
    module: nn.Module, better: Callable[[nn.Module], nn.Module | None]
) -> nn.Module:
    def visit(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            new = better(child)
            if new is None:
                visit(child)
            else:
                setattr(parent, name, new)

    # The module itself may be such a layer: as a child it can be replaced.
    holder = nn.ModuleList([copy_module(module)])
    visit(holder)
    return holder[0].train(module.training)
