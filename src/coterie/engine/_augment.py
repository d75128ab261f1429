"""Augmentation of training batches, drawn from each client's own stream in every step.

Random crops and flips of images, or a custom function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.importing import import_function
from coterie.errors import ConfigError
from coterie.models.draws import splitmix

AugmentFunction = Callable[[Tensor, torch.Generator], Tensor]
"""(batch [samples, *features], generator) -> a batch of the same shape and type."""

_TRIED: set[tuple[str, torch.Size]] = set()
# Functions that were called twice with equal arguments and returned the same, by shape.


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
        # Each draw mixes the one before again, so that the three are independent of each other.
        down, right = bits.remainder(span), splitmix(bits).remainder(span)
        mirror = (splitmix(splitmix(bits)) & 1).bool()
        line = torch.arange(height, device=x.device)
        along = torch.arange(width, device=x.device)
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


def import_augmentation(path: str) -> AugmentFunction:
    """Return the function that an import path names.

    Raises:
        ConfigError: when there is none, or it does not take a batch and a generator.
    """
    return import_function(path, f"local.augment {path!r}", ("batch", "generator"))


@dataclass(frozen=True)
class FunctionAugmentation:
    """Calls a custom function with each client's batch and a generator of that step.

    Args:
        keys: key of each client's draws in one local training, where the inputs are.
        path: import path of the function, which messages name.
    """

    keys: Int[Tensor, " clients"]
    path: str

    def __call__(
        self,
        x: Float[Tensor, "members samples *features"],
        members: Int[Tensor, " members"],
        step: int,
    ) -> Float[Tensor, "members samples *features"]:
        """Augment the batches of some clients in a step, one client after another.

        A client's generator depends on its key and the step, and on nothing else.

        Raises:
            ConfigError: when the function fails, or changes shape or type, or makes what is not
                finite, or draws from another generator.
        """
        function = import_augmentation(self.path)
        keys = splitmix(self.keys[members] + step).tolist()
        # Called twice, once for each shape: what differs was not drawn from the generator.
        if keys and (self.path, x.shape[1:]) not in _TRIED:
            first = self._augment(function, x[0].clone(), keys[0])
            again = self._augment(function, x[0].clone(), keys[0])
            if not torch.equal(first, again):
                raise ConfigError(
                    f"local.augment {self.path!r} returned two results for the same batch and "
                    "generator; draw from the generator that it is given, such as "
                    "torch.rand(len(batch), generator=generator, device=batch.device)"
                )
            _TRIED.add((self.path, x.shape[1:]))
        return torch.stack(list(map(partial(self._augment, function), x, keys)))

    def _augment(self, function: AugmentFunction, batch: Tensor, key: int) -> Tensor:
        shape, kind = batch.shape, batch.dtype
        # A key is a signed number of 64 bits, and a seed is never negative.
        generator = torch.Generator(batch.device).manual_seed(key & ((1 << 63) - 1))
        try:
            found = function(batch, generator)
        except Exception as error:
            raise ConfigError(
                f"local.augment {self.path!r} failed on a batch of shape {tuple(shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        said = f"a {type(found).__name__}"
        if isinstance(found, Tensor):
            said = f"{found.dtype} of shape {tuple(found.shape)} on {found.device}"
            same = (found.shape, found.dtype, found.device) == (shape, kind, batch.device)
            # On a device the test would wait for the result in every step.
            if same and (batch.device.type != "cpu" or bool(torch.isfinite(found).all())):
                return found
            if same:
                said = "NaN or infinity"
        raise ConfigError(
            f"local.augment {self.path!r} returned {said}; expected finite {kind} of shape "
            f"{tuple(shape)} on {batch.device}, like the batch that it was given"
        )


Augmentation = CropFlip | FunctionAugmentation
