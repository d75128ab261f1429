"""The model that clients train: its rows, first values, and what merges leave alone."""

import functools
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from coterie.data.federation import Federation
from coterie.data.rows import read_inputs
from coterie.data.source import is_images
from coterie.engine._base import MODULE_ERRORS
from coterie.engine.options import EngineOptions, InitMode, ModelSpec
from coterie.errors import ConfigError, ModelError
from coterie.functional.ranks import ClientRanks
from coterie.models.given import InputConversion, list_kept_tensors
from coterie.models.layout import Layout, draw_initial_params, make_template, resolve_model
from coterie.models.outputs import OutputConversion
from coterie.models.part import ParameterSharing
from coterie.models.pretrained import AdapterConfig
from coterie.rng import EVERYONE, Rng


@dataclass(frozen=True, eq=False)
class ClientModel:
    """The model that clients train.

    Args:
        make: the module, or a function that makes one.
        layout: how its tensors lie in a row.
        sharing: which columns of a row are shared, stay with the client, and are compared.
        init: the first models; see `Settings.init`.
        buffers: what a merge does with BatchNorm statistics; see `ModelSpec`.
        device: where rows are.
        first_models: the first models that all clients share, by seed.
        ranks: of the clients' adapters; None where they have the same.
    """

    make: Callable[[], nn.Module] | nn.Module
    layout: Layout
    sharing: ParameterSharing
    init: InitMode
    buffers: str
    device: str
    first_models: dict[int, Tensor] = field(default_factory=dict)
    ranks: ClientRanks | None = None

    @staticmethod
    def from_spec(spec: ModelSpec, federation: Federation, options: EngineOptions) -> "ClientModel":
        """Lay out a model for the data of a federation.

        Raises:
            ConfigError: for an unknown model, or patterns that match nothing.
            ModelError: for a model that cannot be made.
        """
        make = resolve_model(spec.source, federation.features, federation.outputs, federation.parts)
        _check_init(spec.init, make)
        module, output = make_template(make), OutputConversion(spec.output)
        conversion = _find_input_conversion(module, federation, options.dtype, output)
        layout = Layout(module, options.dtype, conversion, output).to(options.device)
        local = () if spec.local_tensors is None else spec.local_tensors(layout)
        sharing = ParameterSharing.from_patterns(
            layout, spec.shared, spec.similarity_on, local, spec.owner
        )
        _check_buffers(spec.buffers, make, module, layout)
        ranks = None
        if spec.adapter is not None and not spec.adapter.has_one_rank:
            ranks = ClientRanks.build(layout, _list_ranks(spec.adapter, federation))
        return ClientModel(
            make, layout, sharing, spec.init, spec.buffers, options.device, ranks=ranks
        )

    def initial_models(
        self, ids: Int[Tensor, " clients"], rng: Rng
    ) -> Float[Tensor, "clients params"]:
        """Return the first model of each client; with a shared start, a view of one row.

        Args:
            ids: the clients.
            rng: the streams of the run; its round does not matter.
        """
        # Round -1 comes before the first: a first model does not depend on the round that asks for
        # it.
        if self.init == "per_client":
            return torch.stack([self._draw(rng.at_round(-1), client) for client in ids.tolist()])
        return self._shared_first_model(rng).expand(len(ids), -1)

    def _shared_first_model(self, rng: Rng) -> Float[Tensor, " params"]:
        """Return the first model that all clients share, drawn once for each seed."""
        # The stream of EVERYONE is the same in each process, so all of them start from one model.
        if rng.seed not in self.first_models:
            self.first_models[rng.seed] = self._draw(rng.at_round(-1), EVERYONE)
        return self.first_models[rng.seed]

    def draw_models(
        self, rng: Rng, count: int, different: bool = False
    ) -> Float[Tensor, "clusters params"]:
        """Return first models, the same in every process; see `Task.draw_models`."""
        rows = [self._shared_first_model(rng)]
        for number in range(1, count):
            if self.keeps_given:
                rows.append(rows[0])
                continue
            purpose = f"init.{number}"
            row = draw_initial_params(self.make, self.layout, rng.at_round(-1), purpose=purpose)
            rows.append(row.to(self.device))
        models = torch.stack(rows)
        trained = models[:, : self.layout.trainable]
        if different and len(trained.unique(dim=0)) < len(trained):
            given, redraw = "a function that draws none", ""
            if isinstance(self.make, nn.Module):
                given = "a module"
                redraw = ", or set init = 'redrawn', which draws those of the module again"
            raise ModelError(
                f"this method starts from {count} different models, and {given} has one set of "
                "weights, which stays: equal models would stay equal; give the class of the module "
                f"or a function that draws other weights in each call{redraw}"
            )
        return models

    @property
    def keeps_given(self) -> bool:
        """Whether the first models are the weights of the module that was given."""
        return isinstance(self.make, nn.Module) and self.init != "redrawn"

    @functools.cached_property
    def given_digest(self) -> str:
        """The digest of the weights that were given; "" where they are drawn."""
        if not self.keeps_given:
            return ""
        values = self.module_values().cpu().numpy()
        return hashlib.sha256(values.tobytes()).hexdigest()[:16]

    @functools.cached_property
    def common_digest(self) -> str:
        """The digest of the shared first weights that do not depend on a seed; "" for none.

        These are the weights of a given module, or weights which a factory does not draw: it loads
        them from a file, say. All members of a run must begin with the same ones.
        """
        if self.init in ("per_client", "redrawn"):
            return ""
        row, fixed = self._find_undrawn()
        fixed[self.layout.trainable :] = False
        if not self.sharing.shares_all:
            fixed &= self.sharing.shared.mask.cpu()
        return _hash_entries(row, fixed)

    @functools.cached_property
    def undrawn_digest(self) -> str:
        """The digest of all first weights and buffers that do not depend on a seed; "" for none.

        They are frozen, or of a given module, or loaded from a file by a factory. No setting shows
        them, and all runs of a study must begin with the same ones.
        """
        return self.layout.frozen_digest[:16] + _hash_entries(*self._find_undrawn())

    def _find_undrawn(self) -> tuple[Float[Tensor, " params"], Bool[Tensor, " params"]]:
        """Return a first model, on the CPU, and which of its entries no seed draws."""
        if self.keeps_given:
            row = self.module_values().cpu()
            return row, torch.ones(len(row), dtype=torch.bool)
        # What two seeds agree on, no seed draws.
        row = draw_initial_params(self.make, self.layout, Rng(0), EVERYONE).cpu()
        other = draw_initial_params(self.make, self.layout, Rng(1), EVERYONE).cpu()
        return row, row == other

    def _draw(self, rng: Rng, client: int) -> Float[Tensor, " params"]:
        if self.keeps_given or self.init == "given":
            return self.module_values()
        return draw_initial_params(self.make, self.layout, rng, client).to(self.device)

    def module_values(self) -> Float[Tensor, " params"]:
        """Return the module's own values as a row."""
        return self.layout.own_values().to(self.device)

    def apply_buffer_policy(
        self, before: Float[Tensor, "clients params"], merged: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients params"]:
        """Apply the policy for BatchNorm statistics to a merge that led from `before` to `merged`.

        Columns that clients do not share, of statistics or parameters, are as before.
        """
        start = self.layout.trainable
        # The merge has averaged the statistics already, or there are none.
        if self.buffers == "average" or start == self.layout.size:
            return self.sharing.keep_local(before, merged)
        own = before[:, start:]
        if self.buffers == "reset":
            # the template's are those of every first model: `_check_buffers`
            initial = self.layout.own_values()[start:]
            own = initial.to(merged).expand(len(merged), -1)
        return self.sharing.keep_local(before, torch.cat([merged[:, :start], own], dim=1))


def _list_ranks(adapter: AdapterConfig, federation: Federation) -> list[int]:
    """Return the rank of each client's adapter."""
    names, ranks = federation.names_by_id, []
    for client in federation.ids.tolist():
        ranks.append(adapter.for_client(client, names.get(client, "")).largest_rank)
    return ranks


def _hash_entries(row: Float[Tensor, " params"], chosen: Bool[Tensor, " params"]) -> str:
    """Return a digest of some entries of a row; "" for none."""
    if not bool(chosen.any()):
        return ""
    text = chosen.numpy().tobytes() + row[chosen].numpy().tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


def _check_init(init: InitMode, make: Callable[[], nn.Module] | nn.Module) -> None:
    """Refuse first models that the model cannot have, and say where given weights go."""
    given = isinstance(make, nn.Module)
    if init == "per_client" and given:
        raise ConfigError(
            "init is 'per_client', and the model is a module, which has one set of weights; give "
            "its class or a function that makes it, which is called for each client, or leave init "
            "out: all clients start from the weights that were given"
        )
    if init == "redrawn":
        if not isinstance(make, nn.Module):
            raise ConfigError(
                "init is 'redrawn', which draws the weights of a given module again; this model is "
                "made by a function, which draws its own: leave init out"
            )
        kept = list_kept_tensors(make)
        names = ", ".join(kept[:3]) + ", ..." * (len(kept) > 3)
        stay = ""
        if kept:
            stay = f"; as given stay {names}, whose layers have no reset_parameters"
        if not all(tensor.requires_grad for tensor in make.parameters()):
            stay += "; frozen weights stay as given"
        warnings.warn(
            "init = 'redrawn': the weights of the module that was given are not used; its layers "
            f"draw new ones by reset_parameters{stay}",
            stacklevel=2,
        )


def _check_buffers(
    buffers: str, make: Callable[[], nn.Module] | nn.Module, module: nn.Module, layout: Layout
) -> None:
    """Refuse to restore buffers that a factory draws, and say what depends on batches.

    Raises:
        ConfigError: when the initial buffers differ from model to model.
    """
    start = layout.trainable
    if buffers == "reset" and start < layout.size and not isinstance(make, nn.Module):
        one = draw_initial_params(make, layout, Rng(0))[start:]
        other = draw_initial_params(make, layout, Rng(1))[start:]
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            raise ConfigError(
                "buffers is 'reset', and the model draws values of its buffers: there are no "
                "initial ones to restore; use 'local', which keeps each client's own"
            )
    batched = []
    for name, part in module.named_modules():
        if not isinstance(part, nn.modules.batchnorm._NormBase):
            continue
        # An instance norm takes the statistics of each sample alone, whatever the batch.
        per_sample = isinstance(part, nn.modules.instancenorm._InstanceNorm)
        if not per_sample and part.running_mean is None:
            batched.append(name)
    if batched:
        warnings.warn(
            f"{', '.join(batched[:3])}{', ...' * (len(batched) > 3)}: batch normalization without "
            "running statistics takes those of the batch in evaluation too, so that what is "
            "measured depends on how many samples are measured at once; set track_running_stats = "
            "True, or use GroupNorm",
            stacklevel=2,
        )


def _find_input_conversion(
    module: nn.Module, federation: Federation, dtype: torch.dtype, output: OutputConversion
) -> InputConversion:
    """Return how an input is converted before the module takes it.

    Whole numbers stay whole for a module that can take them (an embedding needs them), and are
    numbers of `dtype` for others, such as a linear layer.
    """
    # Two samples are enough to try the module.
    x = read_inputs(federation.x[0, :2])
    if federation.parts or x.is_floating_point() or is_images(x[0]):
        return InputConversion(federation.parts)
    layout = Layout(module, dtype, InputConversion(whole=True), output)
    try:
        layout.try_module(x)
    except ModelError:  # of what the module returned
        raise
    # The module refuses whole numbers, as a linear layer does.
    except MODULE_ERRORS:
        return InputConversion()
    return layout.arguments
