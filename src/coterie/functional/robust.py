"""Aggregation rules that bound what one member can do, whatever model and samples it claims.

All models count alike: a claimed number of samples cannot be checked. Each rule is a frozen
dataclass whose fields a study file sets, `aggregation = { kind = "trimmed-mean", share = 0.2 }`,
and a function of `aggregation.ReceivedModels`. Sums are in float64, in the order of the models.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.importing import find_import_path, import_function, parse_kind
from coterie._util.settings import Configurable, CustomFunction, PositiveFloat, parse_settings
from coterie.errors import ConfigError
from coterie.functional.adapters import NormWeighted, ProductMean
from coterie.functional.aggregation import AggregationRule, ReceivedModels, average_models
from coterie.functional.variance import VarianceCorrected

_CHUNK = 1 << 22  # entries that are worked on at once in float64 (32 MB)
# Steps of the geometric median; each brings it nearer, and it ends once nothing changes.
_STEPS = 200

MinorityShare = Annotated[float, Ge(0), Lt(0.5)]

RuleName = Literal[
    "median",
    "trimmed-mean",
    "norm-clipping",
    "krum",
    "multi-krum",
    "geometric-median",
    "product-mean",
    "norm-weighted",
    "variance-corrected",
]
Aggregation = RuleName | Mapping[str, Any] | CustomFunction
"""A rule of RULES by its name, or a table with it as `kind` and the rule's settings; or a custom
function or its import path."""


def _split_columns(models: Float[Tensor, "models params"]) -> Iterator[Float[Tensor, "models _"]]:
    for part in models.split(max(1, _CHUNK // max(1, len(models))), dim=1):
        yield part.double()


@dataclass(frozen=True)
class Median(Configurable):
    """The median of each number: of an even count, the mean of the two in the middle.

    Yin, Chen, Ramchandran, Bartlett, Byzantine-robust distributed learning: towards optimal
    statistical rates, 2018, https://arxiv.org/abs/1803.01498.
    """

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> models = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 4.0], [3.0, 5.0]])
            >>> Median()(ReceivedModels(models, torch.ones(4), None, models[0]))
            tensor([2.5000, 2.5000])
        """
        models, low = received.models, (len(received.models) - 1) // 2
        parts = []
        for part in _split_columns(models):
            ordered = part.sort(dim=0).values
            parts.append((ordered[low] + ordered[len(models) // 2]) / 2)
        return torch.cat(parts).to(models)


@dataclass(frozen=True)
class TrimmedMean(Configurable):
    """The mean of each number without its smallest and its largest values.

    Yin, Chen, Ramchandran, Bartlett, 2018, https://arxiv.org/abs/1803.01498.

    Args:
        share: of the models that is cut off at each end, rounded down to whole models, but not
            below one where three or more came.
    """

    share: MinorityShare = 0.2

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> models = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]])
            >>> TrimmedMean(0.2)(ReceivedModels(models, torch.ones(5), None, models[0]))
            tensor([2.])
        """
        models, count = received.models, len(received.models)
        cut = _count_suspects(self.share, count)
        if 2 * cut >= count:
            cut = 0
        parts = []
        # Column by column, so that the sorted copy of a part alone is in memory.
        for part in _split_columns(models):
            parts.append(part.sort(dim=0).values[cut : count - cut].mean(0))
        return torch.cat(parts).to(models)


@dataclass(frozen=True)
class NormClipping(Configurable):
    """The mean of the updates, each shortened to at most a multiple of their median length.

    Updates are from the model that stays in use where nothing is merged. Sun, Kairouz, Suresh,
    McMahan, Can you really backdoor federated learning?, 2019, https://arxiv.org/abs/1911.07963,
    who give the length itself.

    Args:
        times: the multiple.
    """

    times: PositiveFloat = 1.0

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> models = torch.tensor([[1.0], [-1.0], [3.0]])
            >>> NormClipping()(ReceivedModels(models, torch.ones(3), None, torch.zeros(1)))
            tensor([0.3333])
        """
        models, before = received.models, received.before
        lengths = _inner_products(models, before).diagonal().clamp(min=0).sqrt()
        moved = lengths[lengths > 0]  # a client's own model has not moved from itself
        if not len(moved):
            return before.clone()
        ordered = moved.sort().values
        median = (ordered[(len(moved) - 1) // 2] + ordered[len(moved) // 2]) / 2
        factor = (self.times * median / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(
            max=1
        )
        share = (factor / len(models)).to(models.device)
        width, parts = max(1, _CHUNK // max(1, len(models))), []
        for part, start in zip(models.split(width, dim=1), before.split(width), strict=True):
            wide = start.double()
            parts.append(wide + share @ (part.double() - wide))
        return torch.cat(parts).to(models)


@dataclass(frozen=True)
class Krum(Configurable):
    """The model with the least sum of squared distances to its nearest neighbors.

    Of n models, f of them suspect, each is compared with its n - f - 2 nearest, one at least.
    Blanchard, El Mhamdi, Guerraoui, Stainer, Machine learning with adversaries: Byzantine tolerant
    gradient descent, 2017, https://arxiv.org/abs/1703.02757.

    Args:
        share: f as a share of the models, rounded down, but not below one where three or more came.
    """

    share: MinorityShare = 0.2

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> models = torch.tensor([[0.0], [1.0], [1.5], [2.0], [9.0]])
            >>> Krum()(ReceivedModels(models, torch.ones(5), None, models[0]))
            tensor([1.5000])
        """
        return received.models[_order_by_krum(received, self.share)[0]]


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the n - f models that `Krum` would choose first."""

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> models = torch.tensor([[0.0], [1.0], [1.5], [2.0], [9.0]])
            >>> MultiKrum()(ReceivedModels(models, torch.ones(5), None, models[0]))
            tensor([1.1250])
        """
        count = len(received.models)
        chosen = _order_by_krum(received, self.share)[: count - _count_suspects(self.share, count)]
        weights = torch.zeros(count, dtype=torch.float64).index_fill(0, chosen.cpu(), 1.0)
        return average_models(received.models, weights)


@dataclass(frozen=True)
class GeometricMedian(Configurable):
    """The point with the least sum of distances to the models, by Weiszfeld's steps.

    Pillutla, Kakade, Harchaoui, Robust aggregation for federated learning, 2019,
    https://arxiv.org/abs/1912.13445.
    """

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`.

        Example:
            >>> corners = [[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]]
            >>> models = torch.tensor([*corners, [0.0, 0.0]])
            >>> found = GeometricMedian()(ReceivedModels(models, torch.ones(5), None, models[0]))
            >>> bool(found.abs().max() < 1e-6)
            True
        """
        models = received.models
        distances = _squared_distances(models).sqrt()
        # The model that is nearest to all others: a far one in the sums would cost digits.
        start = int(distances.sum(1).argmin())
        typical = distances[start].median()
        # Half of the models are equal: their sum of distances is the least there is.
        if float(typical) == 0:
            return models[start].clone()
        products = _inner_products(models, models[start])
        squares = products.diagonal()
        # A point on a model has no distance to it: the step would divide by zero.
        least = torch.clamp(1e-9 * typical, min=torch.finfo(torch.float64).tiny)
        weights = torch.zeros(len(models), dtype=torch.float64)
        weights[start] = 1.0
        # The middle of the models is a mean of them, so its weights are all that is moved.
        for _ in range(_STEPS):
            around = squares - 2 * products @ weights + weights @ products @ weights
            new = 1 / around.clamp(min=0).sqrt().clamp(min=least)
            new = new / new.sum()
            # Weights add to 1, and numbers of float32 do not show a change of 1e-12 of them.
            if float((new - weights).abs().max()) < 1e-12:
                break
            # From a model itself its weight would stay 1: the first step is among the others.
            weights = new if float(weights.max()) < 1 else torch.full_like(new, 1 / len(new))
        return average_models(models, weights)


def _count_suspects(share: float, count: int) -> int:
    # 1e-9: 0.3 * 10 is 2.9999999999999996 in some orders of products
    return max(int(share * count + 1e-9), int(count >= 3 and share > 0))


def _inner_products(
    models: Float[Tensor, "models params"], center: Float[Tensor, " params"]
) -> Float[Tensor, "models models"]:
    """Return the inner products of the models' differences from a center, on the CPU."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    width = max(1, _CHUNK // max(1, len(models)))
    for part, middle in zip(models.split(width, dim=1), center.split(width), strict=True):
        away = part.double() - middle.double()
        total += away @ away.T
    return total.cpu()


def _squared_distances(models: Float[Tensor, "models params"]) -> Float[Tensor, "models models"]:
    """Return squared distances, from the differences: inner products of large models lose them."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for part in _split_columns(models):
        for row in range(len(models)):
            total[row] += (part - part[row]).square().sum(1)
    return total.cpu()


def _order_by_krum(received: ReceivedModels, share: float) -> Int[Tensor, " models"]:
    """Return the places of the models, that with the least sum of distances first."""
    count = len(received.models)
    near = min(max(count - _count_suspects(share, count) - 2, 1), max(count - 1, 1))
    # The first of each row is the model itself, at 0.
    ordered = _squared_distances(received.models).sort(dim=1).values
    scores = ordered[:, 1 : 1 + near].sum(1)
    return torch.argsort(scores, stable=True)


RULES: dict[str, type[Configurable]] = {
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "norm-clipping": NormClipping,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric-median": GeometricMedian,
    "product-mean": ProductMean,
    "norm-weighted": NormWeighted,
    "variance-corrected": VarianceCorrected,
}
"""The rules by name, with their settings."""


def make_rule(given: str | Mapping[str, Any] | Callable[..., Any]) -> AggregationRule:
    """Make an aggregation rule.

    Args:
        given: a name of RULES; a table with one as `kind` and the rule's settings; or a function or
            its import path.

    Raises:
        ConfigError: on an unknown name or key, or a value that does not fit.

    Example:
        >>> make_rule({"kind": "krum", "share": 0.1})
        Krum(share=0.1)
    """
    if isinstance(given, Mapping) or given in RULES:
        return make_table_rule(given)  # type: ignore[arg-type]
    path = given if isinstance(given, str) else find_import_path(given, "aggregation")
    return import_function(path, f"aggregation {path!r}", ("received",))


def make_table_rule(given: str | Mapping[str, Any]) -> AggregationRule:
    """Make a rule of RULES from its name or table; see `make_rule`."""
    kind, table = parse_kind(given, RULES, "rule", "aggregation")
    if kind not in RULES:
        raise ConfigError(
            f"aggregation: kind is {kind!r}; a custom rule has no settings: give its import path alone"
        )
    return parse_settings(RULES[kind], table, "aggregation")  # type: ignore[return-value]
