"""Transformations of shifts: pure functions of a batch of inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image, ImageFilter
from torch import Tensor

MID_GRAY = 128
"""The fill of rotated uint8 images: zero after the papers' normalization with mean 0.5."""


def rotate_images(
    x: Shaped[Tensor, "samples *features"], degrees: float | int, fill: int = MID_GRAY
) -> Shaped[Tensor, "samples *features"]:
    """Rotate square images counter-clockwise about their center.

    Multiples of 90 degrees are exact (they move whole pixels); other angles take the nearest pixel
    and fill pixels from outside the image, as the papers do.

    Args:
        x: images, channels first.
        degrees: the angle.
        fill: value of pixels from outside a uint8 image; 0 is used for float images, which are
            normalized already.

    Example:
        >>> rotate_images(torch.tensor([[[[1, 2], [3, 4]]]]), 90)
        tensor([[[[2, 4],
                  [1, 3]]]])
    """
    # Quarter turns move whole pixels, so they are exact.
    turns, rest = divmod(degrees % 360, 90)
    if rest == 0:
        return torch.rot90(x, int(turns), (-2, -1))
    height, width = x.shape[-2:]
    # Each pixel of the result takes the nearest pixel of the image turned back, in coordinates from
    # the center.
    up = (height - 1) / 2 - np.arange(height)[:, None]
    right = np.arange(width)[None, :] - (width - 1) / 2
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    column = np.rint((width - 1) / 2 + right * cosine + up * sine).astype(np.int64)
    row = np.rint((height - 1) / 2 - (up * cosine - right * sine)).astype(np.int64)
    inside = torch.from_numpy((row >= 0) & (row < height) & (column >= 0) & (column < width))
    # The clip makes every index legal; what is outside is filled below.
    place = torch.from_numpy(row.clip(0, height - 1) * width + column.clip(0, width - 1))
    turned = x.flatten(-2)[..., place.flatten()].reshape(x.shape)
    outside = torch.tensor(0 if x.is_floating_point() else fill, dtype=x.dtype)
    return torch.where(inside, turned, outside)


def blur_images(
    x: Shaped[Tensor, "samples *features"], radius: float
) -> Shaped[Tensor, "samples *features"]:
    """Blur uint8 images, one by one, with Pillow's Gaussian filter.

    Args:
        x: uint8 images of one or three channels, channels first.
        radius: standard deviation of the filter in pixels; 0 changes nothing.
    """
    if radius == 0:
        return x
    smooth = ImageFilter.GaussianBlur(radius)
    # Pillow takes channels last, and gray images without that axis.
    images = x.movedim(1, -1).squeeze(-1).contiguous().numpy()
    out = np.empty_like(images)
    for place, image in enumerate(images):
        out[place] = np.asarray(Image.fromarray(image).filter(smooth))
    return torch.from_numpy(out).reshape(x.movedim(1, -1).shape).movedim(-1, 1)


def add_noise(
    x: Float[Tensor, "samples *features"], sigma: float, generator: np.random.Generator
) -> Float[Tensor, "samples *features"]:
    """Add Gaussian noise, drawn once for each value, to normalized inputs.

    Args:
        x: inputs after normalization.
        sigma: standard deviation of the noise, in units of the normalized inputs.
        generator: the source of the noise.
    """
    # Of float32: the type decides which numbers are drawn, and stored results have these.
    noise = torch.from_numpy(generator.standard_normal(tuple(x.shape), dtype=np.float32))
    return x + (sigma * noise).to(x.dtype)


@final
@dataclass(frozen=True)
class Rotate:
    """`rotate_images` with its angle and fill."""

    degrees: float
    fill: int = MID_GRAY

    def __call__(
        self, x: Shaped[Tensor, "samples *features"]
    ) -> Shaped[Tensor, "samples *features"]:
        """Turn a batch."""
        return rotate_images(x, self.degrees, self.fill)


@final
@dataclass(frozen=True)
class Blur:
    """`blur_images` with its radius."""

    radius: float

    def __call__(
        self, x: Shaped[Tensor, "samples *features"]
    ) -> Shaped[Tensor, "samples *features"]:
        """Blur a batch."""
        return blur_images(x, self.radius)


Transform = Callable[[Tensor], Tensor]
"""A pure function of a batch of inputs that keeps their shape and type.

It is a frozen dataclass that can be called. Clients whose transforms are equal share a test set.
"""
