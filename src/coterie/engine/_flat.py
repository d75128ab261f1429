"""A stock module whose parameters and running statistics are views of one flat vector.

PyTorch's own kernels then train the module as they would train it anywhere: gradients accumulate in
one flat vector, and a step of the optimizer is one fused operation on two vectors. A model is
copied in before, and out afterwards, so that no bit of a result depends on where its row lies, or
which other clients are hosted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from coterie._util.tensors import index_optional
from coterie.engine._own_optimizer import make_custom_optimizer
from coterie.engine.optim import LocalTraining, RowOptimizer
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout, Slot, copy_module, join_path


class FlatModel:
    """One model of a layout, in training and in evaluation mode.

    Args:
        layout: of the module.
        device: where it is.
        channels_last: keep weights of two-dimensional convolutions with their input channels last,
            which a CPU's convolutions prefer; what the convolutions return is then laid out so too.

    Attributes:
        trained: the trained parameters.
        gradient: their gradient, to which each backward pass adds.
        train_module, eval_module: the modules that compute with them.
    """

    def __init__(self, layout: Layout, device: torch.device, channels_last: bool = False) -> None:
        self.layout = layout
        self.train_module = copy_to_device(layout.train_module, device)
        self.eval_module = copy_to_device(layout.eval_module, device)
        self._channels_last: frozenset[str] = frozenset()
        if channels_last:
            self._channels_last = self._conv_weight_names()
        self._row = torch.zeros(layout.size, dtype=layout.dtype, device=device)
        self.trained = self._row[: layout.trainable]
        self.gradient = torch.zeros_like(self.trained)
        # running statistics, each a view of the row: layers write into them in place
        self._running_stats: list[tuple[dict, str, Tensor]] = []
        # buffers of whole numbers of each of the two modules, with their places in the row
        self._counts: dict[nn.Module, list[tuple[dict, str, Tensor, Tensor]]] = {}
        # buffers that are set, with the module's own values
        self._input_buffers: list[tuple[dict, str, str, Tensor]] = []
        # buffers that are neither, with a copy of each
        self._fixed_buffers: list[tuple[dict, str, str, Tensor, Tensor]] = []
        # Both modules share one row, so that evaluation needs no copy of what was trained.
        for module in (self.train_module, self.eval_module):
            self._bind_tensors(module)

    def _conv_weight_names(self) -> frozenset[str]:
        """Return the names of the weights of two-dimensional convolutions."""
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        found = {id(part.weight) for part in self.train_module.modules() if isinstance(part, kinds)}
        named = self.train_module.named_parameters()
        return frozenset(name for name, tensor in named if id(tensor) in found)

    def _bind_tensors(self, module: nn.Module) -> None:
        """Put the tensors of a module into the row."""
        views, gradients = self._split_vector(self._row), self._split_vector(self.gradient)
        for name, parameter in list(module.named_parameters()):
            if name not in views:  # frozen: of all models alike
                continue
            own = _bind_parameter(module, parameter, views[name])
            if name in gradients and module is self.train_module:
                # A backward pass adds to a gradient that is there, in place: all of them land in
                # one vector.
                own.grad = gradients[name]
        shared: dict[int, Tensor] = {}
        counts = self._counts[module] = []
        count_views: dict[int, Tensor] = {}
        for path, part in module.named_modules():
            for name, buffer in part._buffers.items():
                if buffer is None:
                    continue
                full = join_path(path, name)
                if full in self.layout.inputs:
                    self._input_buffers.append((part._buffers, name, full, buffer))
                elif full in self.layout.whole:
                    count_views[id(buffer)] = views[full]
                    counts.append((part._buffers, name, buffer, views[full]))
                elif id(buffer) in count_views:  # under a second name
                    counts.append((part._buffers, name, buffer, count_views[id(buffer)]))
                elif full in views:
                    # which counts its changes apart from other views
                    shared[id(buffer)] = views[full].data
                    self._running_stats.append((part._buffers, name, shared[id(buffer)]))
                elif id(buffer) in shared:  # under a second name
                    self._running_stats.append((part._buffers, name, shared[id(buffer)]))
                else:
                    fixed = (part._buffers, name, full, buffer, buffer.clone())
                    self._fixed_buffers.append(fixed)

    def _split_vector(self, vector: Tensor, turned: bool = True) -> dict[str, Tensor]:
        """Return the tensors in a vector of the length of a row or of its trained part, by name.

        Args:
            vector: one after another.
            turned: whether it has the order of this model, or that of a row.
        """

        def view_slot(slot: Slot) -> Tensor:
            part = vector[slot.start : slot.stop]
            if turned and slot.name in self._channels_last:
                # Input channels are innermost in memory; the view has PyTorch's order of axes.
                outputs, inputs, height, width = slot.shape
                return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
            return part.view(slot.shape)

        # A vector of the trained part ends where the untrained slots begin.
        slots = [slot for slot in self.layout.slots if slot.stop <= len(vector)]
        return {slot.name: view_slot(slot) for slot in slots}

    def copy_from_row(self, own: Tensor, other: Tensor) -> None:
        """Copy a vector in the order of a row into one in the order of this model."""
        self._copy_vector(own, other, True)

    def copy_to_row(self, own: Tensor, other: Tensor) -> None:
        """Copy a vector in the order of this model into one in the order of a row."""
        self._copy_vector(other, own, False)

    def _copy_vector(self, target: Tensor, source: Tensor, turned: bool) -> None:
        # The two orders are the same then: one copy moves the whole vector.
        if not self._channels_last:
            target.copy_(source)
            return
        values = self._split_vector(source, not turned)
        for name, view in self._split_vector(target, turned).items():
            view.copy_(values[name])

    def load_row(self, row: Float[Tensor, " params"]) -> None:
        """Take over a model; what else the module keeps is as it was at first."""
        self.copy_from_row(self._row, row)
        for buffers, name, view in self._running_stats:
            buffers[name] = view
        for buffers, name, _, buffer, value in self._fixed_buffers:
            # What a module has changed for one client must not reach the next one.
            buffers[name] = buffer.copy_(value)
        for counts in self._counts.values():
            for buffers, name, buffer, view in counts:
                # The average of several clients' counts is no whole number.
                buffers[name] = buffer.copy_(view.round())

    def store_row(self, row: Float[Tensor, " params"]) -> None:
        """Write the model into a row."""
        for buffers, name, _, view in self._counts[self.train_module]:
            found = buffers[name]
            # A count that did not change keeps the fraction that an average has left it.
            same = found == view.round().to(found.dtype)
            view.copy_(torch.where(same, view, found.to(view.dtype)))
        self.copy_to_row(self._row, row)

    def set_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Set the input buffers of the modules; others have the module's own values."""
        for buffers, name, path, value in self._input_buffers:
            buffers[name] = inputs.get(path, value)

    def changed_buffers(self) -> list[str]:
        """Return the names of buffers in no row that a forward pass has changed."""
        changed = []
        for buffers, name, path, _, value in self._fixed_buffers:
            if not torch.equal(buffers[name], value) and path not in changed:
                changed.append(path)
        return changed

    def sync_running_stats(self) -> None:
        """Copy running statistics that a module replaced, instead of writing into them."""
        for buffers, name, view in self._running_stats:
            found = buffers[name]
            if found is not view:
                view.copy_(found.detach())
                buffers[name] = view


def copy_to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module on a device; frozen weights are shared where they are there."""
    if all(one.device == device for one in module.parameters()):
        return copy_module(module)
    return copy_deeply(module).to(device)


def _bind_parameter(module: nn.Module, parameter: nn.Parameter, view: Tensor) -> nn.Parameter:
    """Let a parameter of a module have the memory of a view; return it."""
    if type(view) is Tensor:
        parameter.data = view
        return parameter
    # a tensor that wraps another one cannot be given away as data
    own = nn.Parameter(view, parameter.requires_grad)
    for part in module.modules():
        for name, old in list(part._parameters.items()):
            if old is parameter:
                setattr(part, name, own)
    return own


class FlatOptimizer:
    """An optimizer on one model's trained parameters, by fused kernels or a custom class.

    Args:
        model: the model.
        local: which optimizer and its settings.
    """

    def __init__(self, model: FlatModel, local: LocalTraining) -> None:
        self.model, self.local, self.arguments = model, local, local.optimizer_arguments
        self.moments = [torch.zeros_like(model.trained) for _ in range(local.num_moments)]
        # The fused kernels take the number of steps as a tensor of this type.
        self.taken = torch.zeros((), dtype=torch.float32, device=model.trained.device)
        self._number = 0  # of the last step of this training
        self._row_optimizer: RowOptimizer | None = None  # of what has no fused kernel
        self._custom: torch.optim.Optimizer | None = None

    @contextmanager
    def use_state(
        self, moments: Float[Tensor, "moments trainable"] | None, taken: Tensor | None
    ) -> Iterator[None]:
        """Begin a training and end it.

        Args:
            moments: the state to go on from, changed at the end; a fresh one when None.
            taken: steps taken before, one number; none when None.
        """
        given = [] if moments is None else list(moments)
        self.taken.zero_()
        if taken is not None:
            self.taken.copy_(taken)
        for own in self.moments:
            own.fill_(self.local.initial_accumulator_value)
        for own, kept in zip(self.moments, given, strict=False):
            self.model.copy_from_row(own, kept)
        self._begin_training(taken)
        yield
        for own, kept in zip(self.moments, given, strict=False):
            self.model.copy_to_row(own, kept)

    def _begin_training(self, taken: Tensor | None) -> None:
        local, kind = self.local, self.local.optimizer
        self._number = 0
        if local.custom_optimizer:
            # A new object in each training: the state of a foreign class has no known form that
            # could be kept between rounds.
            parameter = nn.Parameter(self.model.trained)
            parameter.grad = self.model.gradient
            self._custom = make_custom_optimizer(
                local.custom_optimizer, self.arguments, local.lr, [parameter]
            )
        elif kind in ("rmsprop", "adagrad"):
            self._row_optimizer = RowOptimizer(
                local, self.model.trained[None], taken=index_optional(taken, None)
            )
            # Views of the moments, which are stored at the end of the training.
            self._row_optimizer.state = [one[None] for one in self.moments]
        elif kind == "sgd" and taken is not None and self.arguments["dampening"]:
            self._number = int(taken)  # only the first gradient of all is not dampened

    def step(self, lr: float | None = None) -> None:
        """Update the parameters by their gradient; `lr` is that of the settings when None."""
        rate = self.local.lr if lr is None else lr
        self._number += 1
        if self._custom is not None:
            # Set from outside, since an optimizer that is made in each training knows no rounds.
            for group in self._custom.param_groups:
                group["lr"] = rate
            self._custom.step()
        elif self._row_optimizer is not None:
            self._row_optimizer.step(
                self.model.trained[None], self.model.gradient[None], self._number, rate
            )
        else:
            self._step_fused(rate)

    def _step_fused(self, rate: float) -> None:
        given, parameters, gradients = self.arguments, [self.model.trained], [self.model.gradient]
        if self.local.optimizer == "sgd":
            # In its first step PyTorch takes the whole gradient as momentum. Without dampening a
            # momentum that starts at zero becomes the same.
            torch._fused_sgd_(
                parameters, gradients, self.moments, weight_decay=given["weight_decay"],
                momentum=given["momentum"],
                lr=rate, dampening=given["dampening"], nesterov=given["nesterov"], maximize=False,
                is_first_step=given["dampening"] > 0 and self._number == 1,
            )  # fmt: skip
            return
        self.taken.add_(1)
        (first, second), (beta1, beta2) = self.moments, given["betas"]
        step = torch._fused_adamw_ if self.local.optimizer == "adamw" else torch._fused_adam_
        step(
            parameters, gradients, [first], [second], [], [self.taken], lr=rate, beta1=beta1,
            beta2=beta2,
            weight_decay=given["weight_decay"], eps=given["eps"], amsgrad=False, maximize=False,
        )  # fmt: skip
