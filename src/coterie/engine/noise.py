"""Noise on inputs, drawn again at every access from each client's own stream."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.models.draws import splitmix

# One half of 64 random bits: the Box-Muller transform takes a radius and an angle.
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class InputNoise:
    """Gaussian noise on prepared inputs.

    A draw depends on the client's key, the step, the sample's number within its client's data (or
    test set) and the entry of the input, and on nothing else: not on which clients are hosted, not
    on the order of work. Draws are made by the Box-Muller transform from the bits of a counter, so
    nothing is stored.

    Args:
        keys: key of each client's draws, in one training or evaluation; where the inputs are, as is
            `sigma`.
        sigma: standard deviation, for each client; 0 for none.
        samples_per_row: samples in each client's row of the padded data, or in the test set.
            Samples are addressed by their index in the flattened table, so a sample's number within
            its row is that index modulo `samples_per_row`.
    """

    keys: Int[Tensor, " clients"]
    sigma: Float[Tensor, " clients"]
    samples_per_row: int

    def select_clients(self, rows: slice) -> "InputNoise":
        """Return the noise of some of the clients."""
        return InputNoise(self.keys[rows], self.sigma[rows], self.samples_per_row)

    def to(self, device: torch.device) -> "InputNoise":
        """Return the same noise for inputs on a device."""
        return InputNoise(self.keys.to(device), self.sigma.to(device), self.samples_per_row)

    def add_to(
        self,
        x: Float[Tensor, "members samples *features"],
        members: Int[Tensor, " members"],
        step: int,
        places: Int[Tensor, "members samples"],
    ) -> Float[Tensor, "members samples *features"]:
        """Add noise to inputs in place, and return them.

        Args:
            x: the inputs of some clients.
            members: the rows of these clients in `keys` and `sigma`.
            step: the step of their training; 0 in evaluation.
            places: index of each sample in the flattened table.
        """
        # on a device, a check for sigma = 0 would wait for its result
        loud: Tensor | slice = slice(None)
        if x.device.type == "cpu":
            loud = (self.sigma[members] > 0).nonzero().flatten()
            if not len(loud):
                return x
        who = members[loud]
        start = splitmix(self.keys[who] + step)[:, None]
        # By the place in the client's row, not in the batch: a sample's noise depends on its step
        # alone, and not on who is in the batch with it.
        normal = draw_gaussian(
            splitmix(start + places[loud] % self.samples_per_row), math.prod(x.shape[2:])
        )
        # One axis for each of x, so that a client's sigma meets all of its entries.
        scale = self.sigma[who].reshape(-1, *[1] * (x.ndim - 1))
        x[loud] += (scale * normal.reshape(len(who), *x.shape[1:])).to(x.dtype)
        return x


def draw_gaussian(keys: Int[Tensor, "*batch"], size: int) -> Float[Tensor, "*batch size"]:
    """Return standard normal draws, `size` of them for each key, in float64.

    Each 64 bits give two draws, so none is beyond 6.7. Keys must be well mixed: adjacent keys would
    share draws.
    """
    bits = splitmix(keys[..., None] + torch.arange((size + 1) // 2, device=keys.device))
    # Plus 1 makes a number in (0, 1], whose logarithm is finite: sqrt(-2 ln 2^-32) is 6.66.
    radius = ((bits & _WORD) + 1).double().mul_(2.0**-32).log_().mul_(-2).sqrt_()
    # The shift of a signed number copies the sign, which the mask drops.
    angle = ((bits >> 32) & _WORD).double().mul_(2 * math.pi * 2.0**-32)
    # All cosines come before all sines: native/steps.h has the same order.
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :size]
