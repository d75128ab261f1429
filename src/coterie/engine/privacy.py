r"""Differential privacy of local training: DP-SGD, and what each client has spent.

A step takes each training sample of a client with probability $q$ on its own (Poisson sampling),
clips the gradient of each to a norm $C$, adds Gaussian noise of standard deviation $\sigma C$ to
their sum, and divides by the expected size of the batch: a number that does not depend on the draw.
What an optimizer does with such a gradient needs no more privacy.

Abadi et al., Deep learning with differential privacy, CCS 2016, https://arxiv.org/abs/1607.00133.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt, Lt
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util import extras
from coterie._util.mappings import number_items
from coterie._util.settings import (
    NONE,
    Configurable,
    NonNegativeFloat,
    PositiveFloat,
    parse_settings,
    to_plain,
)
from coterie.errors import ConfigError

# of Rényi divergences: small epsilons have their best order there
_EXTRA_ORDERS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class DPSGD(Configurable):
    r"""The settings of DP-SGD; see `engine.privacy`.

    Args:
        clip: largest norm of a sample's gradient ($C$); a longer one is shortened to it.
        noise_multiplier: standard deviation of the noise on the sum of a batch's gradients, in
            units of `clip` ($\sigma$). 0 only clips: there is no privacy, and epsilon is infinite.
        delta: the $\delta$ for which epsilon is stated; below 1 / training samples of every client.
    """

    clip: PositiveFloat
    noise_multiplier: NonNegativeFloat
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5


def dp_table(given: Any) -> Any:
    """Return settings of DP-SGD as study files keep them: a table with every key, or None.

    Raises:
        ConfigError: when they are no such settings.

    Example:
        >>> dp_table({"clip": 1, "noise_multiplier": 1.1})
        {'clip': 1.0, 'noise_multiplier': 1.1, 'delta': 1e-05}
    """
    if given is None or given == NONE:
        return None
    if isinstance(given, DPSGD):
        return to_plain(given)
    if not isinstance(given, Mapping):
        return given  # which the field's declaration refuses
    return to_plain(parse_settings(DPSGD, given, "dp"))


DrawNormal = Callable[[int, int, int], Float[np.ndarray, " trainable"]]
"""(row of the client, step, number of the query) -> a standard normal draw for each parameter."""


@dataclass(frozen=True)
class PrivateSteps:
    """What an engine needs to make the gradients of a local training private.

    Args:
        dp: clipping and noise.
        expected: the expected size of a batch of each client, in float64 and on the CPU.
        step_counts: steps of each client, on the CPU; its batch may be empty in some.
        normal: draws the noise.
        query: which gradient of its batch each step asks for, from 0.
    """

    dp: DPSGD
    expected: Float[Tensor, " clients"]
    step_counts: Int[Tensor, " clients"]
    normal: DrawNormal
    query: int = 0

    def select_clients(self, rows: slice) -> "PrivateSteps":
        """Return those of some of the clients."""
        first = rows.start or 0
        return replace(
            self,
            expected=self.expected[rows],
            step_counts=self.step_counts[rows],
            normal=lambda row, step, query: self.normal(first + row, step, query),
        )

    def single_step(self, step: int, query: int) -> "PrivateSteps":
        """Return those of one step, as a training of its own."""
        return replace(
            self,
            # 1 for a client that takes the step, which is number 0 here.
            step_counts=(self.step_counts > step).to(torch.int64),
            normal=lambda row, _step, number: self.normal(row, step, number),
            query=query,
        )

    def active_clients(self, step: int) -> Int[Tensor, " active_clients"]:
        """Return who takes a step."""
        return (self.step_counts > step).nonzero().flatten()

    def add_noise(
        self,
        sums: Float[Tensor, "members trainable"],
        members: Int[Tensor, " active_clients"],
        step: int,
    ) -> Float[Tensor, "members trainable"]:
        """Return the private gradient of each member's batch.

        Args:
            sums: of the clipped gradients of each batch; may be overwritten.
            members: whose they are, on the CPU.
            step: the step.
        """
        scale = self.dp.noise_multiplier * self.dp.clip
        if scale:
            for row, client in enumerate(members.tolist()):
                # One client at a time from a stream of its own: the noise does not depend on who
                # else trains.
                noise = torch.from_numpy(self.normal(client, step, self.query)) * scale
                sums[row] += noise.to(sums)
        return sums.div_(self.expected[members, None].to(sums))


def clip_factors(
    gradients: Float[Tensor, "samples trainable"], clip: float
) -> Float[Tensor, "samples 1"]:
    """Return the factor of each sample's gradient that shortens it to a norm of at most `clip`.

    A gradient that is not finite counts nothing: no sample may move a model by more than the clip.
    Such entries are set to 0 in place.

    Example:
        >>> clip_factors(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).flatten().tolist()
        [0.20000000298023224, 1.0]
    """
    if gradients.device.type == "cpu" and len(gradients):
        # by row: the same bits whichever other clients are hosted
        norms = torch.stack([row.norm() for row in gradients])
    else:
        norms = gradients.norm(dim=1)
    lost = ~torch.isfinite(norms)
    gradients.masked_fill_(lost[:, None], 0)
    # A norm of 0 gives infinity, and so a factor of 1.
    factor = (clip / norms).clamp(max=1)
    return torch.where(lost, 0, factor)[:, None]


# ---------------------------------------------------------------- accounting


@dataclass(frozen=True, order=True)
class PrivateQuery:
    """A kind of use of a client's training data.

    Args:
        rate: the probability with which each sample is in the batch ($q$).
        noise: the noise multiplier.
        gradients: how many gradients of one batch are released, each with noise of its own.
    """

    rate: float
    noise: float
    gradients: int = 1


@dataclass
class PrivacyLedger:
    """How often each client's data were asked for a private gradient: epsilon depends on it.

    Args:
        uses: by client and kind of query, how often.
    """

    uses: dict[tuple[int, PrivateQuery], int] = field(default_factory=dict)

    def add_uses(self, client: int, query: PrivateQuery, times: int) -> None:
        """Count uses of a client's data; a negative number takes back."""
        if times:
            self.uses[client, query] = self.uses.get((client, query), 0) + times

    def charge_clients(self, other: "PrivacyLedger", clients: Iterable[int]) -> None:
        """Charge each of some clients with all uses of another ledger, and empty that ledger."""
        for client in clients:
            for (_, query), times in other.uses.items():
                self.add_uses(client, query, times)
        other.uses.clear()

    def compute_epsilon(
        self, ids: Int[Tensor, " clients"], delta: float
    ) -> Float[Tensor, " clients"]:
        r"""Return the $\varepsilon$ of each client for a $\delta$, in float64; 0 for unused data.

        By Rényi divergences of the subsampled Gaussian mechanism (Mironov, Talwar, Zhang, 2019,
        https://arxiv.org/abs/1908.10530), which opacus computes. Several gradients of one batch,
        $k$ of them, are one query with noise $\sigma / \sqrt{k}$.
        """
        wanted = number_items(ids.tolist())
        found = torch.zeros(len(ids), dtype=torch.float64)
        divergence: dict[int, np.ndarray] = {}
        # In a fixed order, so that a resumed run adds up the same floating-point sum.
        for (client, query), times in sorted(self.uses.items()):
            if client in wanted and times > 0:
                divergence[client] = divergence.get(client, 0.0) + times * _renyi_divergences(query)
        for client, values in divergence.items():
            found[wanted[client]] = _smallest_epsilon(values, delta)
        return found

    def snapshot(self) -> dict[str, Tensor]:
        """Return it as tensors, for a checkpoint; none where nothing was used."""
        # Sorted: the order of uses depends on who trained first, and a checkpoint has fixed bytes.
        rows = []
        for (client, query), times in sorted(self.uses.items()):
            if times:
                rows.append((client, query, times))
        if not rows:
            return {}
        whole = torch.tensor([[client, query.gradients, times] for client, query, times in rows])
        return {
            "client": whole[:, 0].clone(),
            "gradients": whole[:, 1].clone(),
            "times": whole[:, 2].clone(),
            "rate": torch.tensor([query.rate for _, query, _ in rows], dtype=torch.float64),
            "noise": torch.tensor([query.noise for _, query, _ in rows], dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        self.uses.clear()
        if tensors:
            names = ("client", "rate", "noise", "gradients", "times")
            columns = [tensors[name].tolist() for name in names]
            for client, rate, noise, gradients, times in zip(*columns, strict=True):
                self.uses[client, PrivateQuery(rate, noise, gradients)] = times


def check_accountant() -> None:
    """Refuse private training where the package that computes epsilon is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    try:
        _load_accountant()
    except ImportError as error:
        raise ConfigError(
            f"dp needs an accountant, opacus, which cannot be imported ({error}); "
            f"{extras.install_command('privacy')}"
        ) from None


@lru_cache(maxsize=1)
def _load_accountant() -> tuple[Any, tuple[float, ...]]:
    """Return opacus's formulas, and the orders of the divergences."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    return rdp, tuple(map(float, (*RDPAccountant.DEFAULT_ALPHAS, *_EXTRA_ORDERS)))


# Clients with as many samples ask the same question in every round.
@lru_cache(maxsize=4096)
def _renyi_divergences(query: PrivateQuery) -> Float[np.ndarray, " orders"]:
    """Return the Rényi divergence of each order."""
    rdp, orders = _load_accountant()
    # k releases with noise sigma each compose to one with sigma / sqrt(k): the subsample is the
    # same.
    noise = query.noise / query.gradients**0.5
    if not noise:
        return np.full(len(orders), np.inf)
    return np.asarray(
        rdp.compute_rdp(q=query.rate, noise_multiplier=noise, steps=1, orders=orders), dtype=float
    )


def _smallest_epsilon(divergences: Float[np.ndarray, " orders"], delta: float) -> float:
    """Return the smallest epsilon that any order gives."""
    rdp, orders = _load_accountant()
    # Without noise no order has a finite divergence.
    if not np.isfinite(divergences).any():
        return float("inf")
    with warnings.catch_warnings():
        # the best order is the first or the last: a bound all the same
        warnings.simplefilter("ignore")
        # The conversion to epsilon can give a negative bound, which says no more than 0.
        return max(
            0.0, float(rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=delta)[0])
        )
