"""Noise on inputs that is drawn anew at every access, from each client's own stream."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.models.layout import splitmix

_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on prepared inputs.

    A draw depends on the client, the step, the sample and the entry, and on nothing else: not on who is hosted, not on
    the order of work. It is made by the method of Box and Muller from the bits of a counter, so nothing is stored.

    Args:
        keys: of each client's draws at one time.
        sigma: standard deviation, for each client; 0 for none.
        width: places of samples are those of rows of so many, and a sample's number is its place in its row.
    """

    keys: Int[Tensor, " clients"]
    sigma: Float[Tensor, " clients"]
    width: int

    def part(self, rows: slice) -> "Noise":
        """Return the noise of some of the clients."""
        return Noise(self.keys[rows], self.sigma[rows], self.width)

    def add(
        self,
        x: Float[Tensor, "members samples *features"],
        members: Int[Tensor, " members"],
        step: int,
        places: Int[Tensor, "members samples"],
    ) -> Float[Tensor, "members samples *features"]:
        """Add noise in place, and return what came of it.

        Args:
            x: the inputs of some clients.
            members: which clients.
            step: of their training; 0 where they measure.
            places: which samples.
        """
        disturbed = (self.sigma[members] > 0).nonzero().flatten()
        if not len(disturbed):
            return x
        who = members[disturbed]
        start = splitmix(self.keys[who] + step)[:, None]
        keys = splitmix(start + places[disturbed].to(start.device) % self.width).to(x.device)
        normal = gaussian(keys, math.prod(x.shape[2:])).reshape(len(disturbed), *x.shape[1:])
        scale = self.sigma[who].to(x.device).reshape(-1, *(1 for _ in x.shape[1:]))
        x[disturbed.to(x.device)] += (scale * normal).to(x.dtype)
        return x


def gaussian(keys: Int[Tensor, "*batch"], size: int) -> Float[Tensor, "*batch size"]:
    """Return standard normal draws, `size` of them for each key, in float64.

    Two come from each 64 bits, so none is beyond 6.7. Keys are well mixed: neighboring ones would share draws.
    """
    bits = splitmix(keys[..., None] + torch.arange((size + 1) // 2, device=keys.device))
    radius = ((bits & _WORD) + 1).double().mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = ((bits >> 32) & _WORD).double().mul_(2 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :size]
