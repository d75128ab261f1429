"""Augmentation of image batches: random crops and flips, drawn from each client's own stream."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.models.layout import splitmix


@dataclass(frozen=True)
class CropFlip:
    """Pad each image, crop it to its size at a random position, and mirror it with probability 1/2.

    Args:
        keys: key of each client's draws in one local training, where the images are.
        padding: pixels added on each side.
        fill: value of the added pixels, per channel, as the model takes it (black).
    """

    keys: Int[Tensor, " clients"]
    padding: int
    fill: Float[Tensor, " channels"]

    def __call__(
        self,
        x: Float[Tensor, "members samples channels height width"],
        members: Int[Tensor, " members"],
        step: int,
    ) -> Float[Tensor, "members samples channels height width"]:
        """Augment the batches of some clients in a step.

        A draw depends on the client, the step and the sample's position in the batch, and on
        nothing else.
        """
        height, width = x.shape[-2:]
        places = torch.arange(x.shape[1], device=x.device)
        # bits: members x samples. The key is mixed once for the step and once for the sample, so
        # that neighbors share no draws. native/steps.h makes the same draws: change both together.
        bits = splitmix(splitmix(self.keys[members, None] + step) + places)
        span = 2 * self.padding + 1
        # remainder is never negative, although the bits are signed.
        down, right = bits.remainder(span), splitmix(bits).remainder(span)
        mirror = (splitmix(splitmix(bits)) & 1).bool()
        line, along = (torch.arange(size, device=x.device) for size in (height, width))
        rows = line + (down - self.padding)[..., None]
        # A mirrored image reads its columns backwards, so that crop and mirror are one gather.
        along = torch.where(mirror[..., None], along.flip(0), along)
        columns = along + (right - self.padding)[..., None]
        inside = ((rows >= 0) & (rows < height))[..., :, None] & (
            (columns >= 0) & (columns < width)
        )[..., None, :]
        # Clamped places keep the gather in range; `inside` then replaces what lies in the padding.
        index = (
            rows.clamp(0, height - 1)[..., :, None] * width
            + columns.clamp(0, width - 1)[..., None, :]
        )
        # Members x samples x pixels, the same for all channels.
        index, inside = index.flatten(2), inside[:, :, None]
        moved = (
            x.flatten(3)
            .gather(3, index[:, :, None].expand(-1, -1, x.shape[2], -1))
            .reshape(x.shape)
        )
        return torch.where(inside, moved, self.fill.to(x)[:, None, None])
