"""SosicFL with the options of its authors' code, where it differs from `methods.sosicfl`.

A study file sets these options on a SosicFL kind; `methods.registry` then takes a class of this
module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import WithPresets
from coterie.errors import require
from coterie.functional import simplex
from coterie.methods.sosicfl import SimplexClusters, SimplexMethod, SosicFl, SosicFlAll, SosicFlPlus

PRESETS: dict[str, dict[str, Any]] = {
    "coterie": {},
    "paper": {},
    "released": {
        "warmup_rounds": 250, "assignment": "gradient", "radius_rule": "absolute", "radius": 0.1,
        "sampler": "released", "simplex_bias": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class PublishedSimplex(SimplexMethod, WithPresets):
    r"""The options of the published code; see `SimplexMethod` for the other settings.

    Args:
        preset: "coterie" and "paper" (label counts, exact draws) or "released" (gradients, draws as
            in the public code); a field that is given wins over it.
        radius_rule: "relative": $r = \rho \bar d$ with the mean distance of the simplex to the
            centers; "absolute": $r = \rho$.
        sampler: uniform draws ("exact"), or those of the public code ("released").
        simplex_bias: whether the head's bias has endpoints too.
        topics: mixtures by latent Dirichlet allocation ("lda") or, with as many endpoints as
            classes, the class frequencies themselves ("classes").
        metric: distance of mixtures, "l1" or "hilbert".
        center: of a group, "medoid" or "mean".
        endpoint_start: endpoints from Xavier's normal law with zero bias ("xavier"), or drawn as
            the model draws its own head ("model").
    """

    presets: ClassVar = PRESETS
    preset: Literal["coterie", "paper", "released"] = "coterie"
    radius_rule: Literal["relative", "absolute"] = "relative"
    sampler: Literal["exact", "released"] = "exact"
    simplex_bias: bool = True
    topics: Literal["lda", "classes"] = "lda"
    metric: simplex.Distance = "l1"
    center: simplex.Center = "medoid"
    endpoint_start: Literal["xavier", "model"] = "xavier"

    def _bias_has_endpoints(self) -> bool:
        return self.simplex_bias

    def _draws_xavier(self) -> bool:
        # SosicFL-All never draws by Xavier's law.
        return self.endpoint_start == "xavier" and super()._draws_xavier()

    def _label_mixtures(
        self, shared: SimplexClusters, stream: np.random.Generator
    ) -> Float[Tensor, "population topics"]:
        if self.topics == "lda":
            return super()._label_mixtures(shared, stream)
        classes = shared.counts.shape[1]
        # A mixture has one entry for each endpoint; class frequencies have one for each class.
        fits = self.endpoints == classes
        require(
            fits, f"{self.kind}.topics", "classes", f"endpoints = {classes}, as many as classes"
        )
        # clamp: a client that has not enrolled has no samples, and 0 / 1 instead of NaN.
        return shared.counts.double() / shared.counts.sum(1, keepdim=True).clamp(min=1)

    def _cluster_mixtures(
        self, mixtures: Float[Tensor, "population topics"], stream: np.random.Generator
    ) -> tuple[Int[Tensor, " population"], Float[Tensor, "regions topics"]]:
        return simplex.cluster_points(
            mixtures, self.regions, stream, distance=self.metric, center=self.center
        )

    def _radius_scale(self, centers: Float[Tensor, "regions topics"]) -> float | Tensor:
        # With scale 1 the radius is the setting itself.
        return super()._radius_scale(centers) if self.radius_rule == "relative" else 1.0

    def _region_sampler(self) -> Callable[..., Tensor]:
        return super()._region_sampler() if self.sampler == "exact" else simplex.sample_released


@final
@dataclass(frozen=True)
class PublishedSosicFl(PublishedSimplex, SosicFl):
    """SosicFL with the options of the published code."""


@final
@dataclass(frozen=True)
class PublishedSosicFlAll(PublishedSimplex, SosicFlAll):
    """SosicFL-All with the options of the published code."""


@final
@dataclass(frozen=True)
class PublishedSosicFlPlus(PublishedSimplex, SosicFlPlus):
    """SosicFL+ with the options of the published code."""
