r"""The last layer of a model, and models with a simplex of endpoints in it or in all layers.

A simplex model has $M$ endpoints $\Theta_1 .. \Theta_M$ of some of its tensors and computes with
$\sum_m \alpha_m \Theta_m$; $\alpha$ is an input buffer, set in every step. Endpoints are
ordinary parameters: they are trained, averaged and sent like all others.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from coterie._util import pages
from coterie.errors import ModelError
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout, ModelFactory, Slot, join_path, layer_of, module_of
from coterie.rng import Rng

_MODELS_AT_ONCE = 256  # of which the mixtures are computed


def last_layer_mask(layout: Layout) -> Bool[Tensor, " params"]:
    """Return the entries of a row that are trained parameters of the last layer with any."""
    trained = layout.trained_slots
    path = layer_of(trained[-1].name)
    out = torch.zeros(layout.size, dtype=torch.bool)
    for slot in trained:
        if layer_of(slot.name) == path:
            out[slot.start : slot.stop] = True
    return out


class SimplexHead(nn.Module):
    r"""A linear or convolution layer with $M$ endpoints.

    Args:
        layer: the layer of each endpoint; all endpoints start at its values.
        endpoints: number of endpoints $M$.
        bias: whether the bias has endpoints too, or is shared by all.
        gain: factor of the composed layer's parameters; its square multiplies the endpoints'
            effective step size.
        ensemble: in evaluation, average the endpoints' predicted probabilities instead of their
            parameters.
    """

    input_buffers = ("alpha",)
    alpha: Tensor

    def __init__(
        self,
        layer: nn.Linear | nn.Conv2d,
        endpoints: int,
        *,
        bias: bool = True,
        gain: float = 1.0,
        ensemble: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or ensemble):
            raise ModelError(
                "a simplex head takes convolutions without groups, and without test samples"
            )
        self._layer = [copy_deeply(layer)]  # a prototype, no part of the module
        self.endpoints, self.shared_bias = endpoints, not bias
        self.gain, self.ensemble = gain, ensemble
        self.weight = nn.Parameter(self._stack_endpoints(layer.weight.detach()))
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(self._stack_bias(layer.bias.detach()))
        self.register_buffer("alpha", torch.full((endpoints,), 1 / endpoints), persistent=False)

    def _stack_endpoints(self, value: Tensor) -> Tensor:
        # The composed layer is multiplied by the gain: it starts at the layer's own values.
        return (value / self.gain).expand(self.endpoints, *value.shape).clone()

    def _stack_bias(self, bias: Tensor) -> Tensor:
        if self.shared_bias:
            return bias.clone()
        return self._stack_endpoints(bias)

    def reset_parameters(self) -> None:
        """Draw the parameters of one layer and set all endpoints to them."""
        layer = self._layer[0]
        layer.reset_parameters()
        with torch.no_grad():
            self.weight.copy_(self._stack_endpoints(layer.weight))
            if self.bias is not None and layer.bias is not None:
                self.bias.copy_(self._stack_bias(layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the composed layer; rows of `alpha` give each sample its own mixture."""
        if self.ensemble and not self.training:
            every = functional.log_softmax(self._outputs_of_endpoints(x), dim=2)
            # The log of the mean of the endpoints' probabilities.
            return torch.logsumexp(every, dim=1) - math.log(self.endpoints)
        # A last batch may have fewer samples than positions.
        if self.alpha.ndim == 2:
            # b: samples, m: endpoints.
            return torch.einsum(
                "bm,bm...->b...", self.alpha[: len(x)], self._outputs_of_endpoints(x)
            )
        weight = self.gain * torch.tensordot(self.alpha, self.weight, dims=1)
        return self._apply_layer(x, weight, self._compose_bias())

    def _compose_bias(self) -> Tensor | None:
        if self.bias is None or self.shared_bias:
            return self.bias
        return self.gain * torch.tensordot(self.alpha, self.bias, dims=1)

    def _outputs_of_endpoints(self, x: Tensor) -> Tensor:
        """Return the outputs of all endpoints: samples x endpoints x outputs ..."""
        bias = self.bias
        # The endpoints are one wide layer: its outputs are endpoint by endpoint.
        if bias is not None and self.shared_bias:
            bias = bias.repeat(self.endpoints)
        elif bias is not None:
            bias = self.gain * bias.flatten(0, 1)
        out = self._apply_layer(x, self.gain * self.weight.flatten(0, 1), bias)
        return out.unflatten(1, (self.endpoints, self.weight.shape[1]))

    def _apply_layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = self._layer[0]
        if isinstance(layer, nn.Linear):
            return functional.linear(x, weight, bias)
        return functional.conv2d(
            x,
            weight,
            bias,
            layer.stride,
            layer.padding,
            layer.dilation,  # type: ignore[arg-type]
        )


class Endpoints(nn.Module):
    r"""One tensor as a mixture of $M$ endpoints, for any layer (a parametrization)."""

    input_buffers = ("alpha",)
    alpha: Tensor

    def __init__(self, endpoints: int) -> None:
        super().__init__()
        self.endpoints = endpoints
        self.register_buffer("alpha", torch.full((endpoints,), 1 / endpoints), persistent=False)

    def forward(self, endpoints: Tensor) -> Tensor:
        """Return the mixture of the endpoints."""
        return torch.tensordot(self.alpha, endpoints, dims=1)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Start all endpoints at one value."""
        return value.expand(self.endpoints, *value.shape).clone()


def simplex_head(
    source: ModelFactory,
    endpoints: int,
    *,
    bias: bool = True,
    gain: float = 1.0,
    ensemble: bool = False,
) -> ModelFactory:
    """Return a model whose last layer has endpoints; see `SimplexHead`.

    Raises:
        ModelError: when the last layer is neither linear nor a convolution.
    """

    def replace_last_layer(module: nn.Module) -> nn.Module:
        # The last layer is the owner of the last trained parameter.
        names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
        path = module_of(names[-1])
        layer = module.get_submodule(path)
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            raise ModelError(
                f"the last layer is a {type(layer).__name__}; a simplex head takes Linear or Conv2d"
            )
        head = SimplexHead(layer, endpoints, bias=bias, gain=gain, ensemble=ensemble)
        if not path:
            return head
        module.get_submodule(module_of(path)).add_module(path.rpartition(".")[2], head)
        return module

    return _apply_to_model(source, replace_last_layer)


def simplex_all(source: ModelFactory, endpoints: int) -> ModelFactory:
    """Return a model with endpoints for all trained tensors and one set of running statistics.

    All endpoints of a module, instead of a factory, start at its weights.
    """

    def add_endpoints(module: nn.Module) -> nn.Module:
        # A list: a parametrization adds modules and changes parameters during the walk.
        for part in list(module.modules()):
            for name, tensor in list(part.named_parameters(recurse=False)):
                if tensor.requires_grad:
                    parametrize.register_parametrization(part, name, Endpoints(endpoints))
        return module

    return _apply_to_model(source, add_endpoints)


def _apply_to_model(source: ModelFactory, change: Callable[[nn.Module], nn.Module]) -> ModelFactory:
    if isinstance(source, nn.Module):
        return change(copy_deeply(source))
    return lambda: change(source())


def endpoint_slots(layout: Layout) -> list[Slot]:
    """Return the slots that hold endpoints, one after another along their first axis."""
    names = set()
    for path, part in layout.train_module.named_modules():
        if isinstance(part, SimplexHead):
            names.add(join_path(path, "weight"))
            if not part.shared_bias:
                names.add(join_path(path, "bias"))
        elif isinstance(part, Endpoints):
            names.add(f"{module_of(path)}.original")
    return [slot for slot in layout.slots if slot.name in names]


def _find_heads(layout: Layout) -> dict[str, SimplexHead]:
    modules = layout.train_module.named_modules()
    return {path: part for path, part in modules if isinstance(part, SimplexHead)}


def compose_last_layer(
    layout: Layout, updates: Float[Tensor, "clients params"]
) -> Float[Tensor, "clients entries"]:
    """Return a model's last-layer updates, composed at the barycenter if it has endpoints."""
    endpoints, last = {slot.name for slot in endpoint_slots(layout)}, last_layer_mask(layout)
    gains, parts = {path: head.gain for path, head in _find_heads(layout).items()}, []
    for slot in layout.slots:
        if slot.start < layout.trainable and bool(last[slot.start]):
            update = updates[:, slot.start : slot.stop]
            if slot.name in endpoints:
                # At the barycenter every endpoint has the same weight.
                update = gains.get(module_of(slot.name), 1.0) * update.unflatten(
                    1, (slot.shape[0], -1)
                ).mean(1)
            parts.append(update)
    return torch.cat(parts, dim=1)


def remove_endpoints(
    layout: Layout, rows: Float[Tensor, "clients params"]
) -> tuple[list[Slot], Float[Tensor, "clients plain"]]:
    """Return models without endpoints, as rows of the plain module, and its tensors' places.

    The endpoints of each model are mixed evenly, which is no loss where they are equal, as
    `compose_endpoints` makes them. Rows of a model that has no endpoints come back as they are.

    Args:
        layout: of any model.
        rows: the models.

    Raises:
        ModelError: when the head averages predictions of its endpoints: then there is no such
            module.
    """
    endpoints = {slot.name for slot in endpoint_slots(layout)}
    if not endpoints:
        return layout.slots, rows
    heads = _find_heads(layout)
    if any(head.ensemble for head in heads.values()):
        raise ModelError(
            "with test_samples above 1 a client is served by several models at once, not by one "
            "module"
        )
    slots, parts, position = [], [], 0
    for slot in layout.slots:
        name, shape, values = slot.name, slot.shape, rows[:, slot.start : slot.stop]
        if name in endpoints:
            path, gain = module_of(name), 1.0
            if path in heads:
                gain = heads[path].gain
            # The plain module stands at the barycenter of its endpoints; it has no gain, so the
            # factor goes into its values.
            values, shape = gain * values.unflatten(1, (shape[0], -1)).mean(1), shape[1:]
            if path not in heads:  # "0.parametrizations.weight.original" is the layer's weight
                # The last one: a tensor that was parametrized already has endpoints too.
                owner, _, tensor = path.rpartition("parametrizations.")
                name = owner + tensor
        slots.append(Slot(name, shape, position, position + values.shape[1]))
        parts.append(values)
        position += values.shape[1]
    return slots, torch.cat(parts, dim=1)


def alpha_inputs(layout: Layout, alpha: Float[Tensor, "*shape topics"]) -> dict[str, Tensor]:
    """Return the input buffers for mixtures `alpha`, which may have axes for clients and steps."""
    return {name: alpha for name in layout.inputs if name.rpartition(".")[2] == "alpha"}


def compose_endpoints(
    layout: Layout,
    rows: Float[Tensor, "clients params"],
    alpha: Float[Tensor, "clients draws topics"],
) -> Float[Tensor, "clients params"]:
    """Return models with endpoints that are mixtures of the old endpoints.

    With one mixture all endpoints become that mixture, and the model no longer depends on its
    position; with more, endpoint m becomes mixture m modulo their number.

    Args:
        layout: layout of a simplex model.
        rows: the models.
        alpha: the mixtures, for each model.
    """
    out, weights = pages.copy(rows), alpha.to(rows)
    # A few models at a time: the endpoints of all are as large as the models.
    for part in torch.arange(len(rows)).split(_MODELS_AT_ONCE):
        at = slice(int(part[0]), int(part[-1]) + 1)
        for slot in endpoint_slots(layout):
            endpoints = rows[at, slot.start : slot.stop].unflatten(1, (slot.shape[0], -1))
            # c: clients, d: mixtures, m: endpoints, p: entries of an endpoint.
            mixed = torch.einsum("cdm,cmp->cdp", weights[at], endpoints)
            chosen = mixed[:, torch.arange(slot.shape[0]) % mixed.shape[1]]
            out[at, slot.start : slot.stop] = chosen.flatten(1)
    return out


def independent_endpoints(
    layout: Layout,
    rows: Float[Tensor, "endpoints params"],
    rng: Rng,
    *,
    xavier: bool,
    gain: float = 1.0,
) -> Float[Tensor, " params"]:
    """Return the first row, with endpoint m taken from row m.

    Args:
        layout: layout of a simplex model.
        rows: independently drawn models; in each of them all endpoints are equal.
        rng: the run's streams.
        xavier: draw weights with two or more axes from Xavier's normal distribution instead, and
            set those with one axis (biases of the head) to 0.
        gain: see `SimplexHead`.
    """
    out = rows[0].clone()
    for slot in endpoint_slots(layout):
        every = rows[:, slot.start : slot.stop].reshape(-1, *slot.shape)
        # In row m all endpoints are equal, so any would do.
        places = torch.arange(len(every), device=every.device)
        endpoints = every[places, places]
        if xavier:
            endpoints = endpoints.cpu()  # whose generator the stream seeds
            with rng.at_round(-1).temporary_torch_seed(f"endpoints.{slot.name}"):
                for endpoint in endpoints:
                    if endpoint.ndim > 1:
                        nn.init.xavier_normal_(endpoint).div_(gain)
                    else:
                        endpoint.zero_()
        out[slot.start : slot.stop] = endpoints.flatten()
    return out
