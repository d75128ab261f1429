"""Describe a federation for federation.json and the report: counts and a few sample images.

The description does not contain the data itself.
"""

import base64
import io
import itertools
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from coterie.data.federation import TRAIN, VALIDATION, Federation
from coterie.data.rows import read_inputs
from coterie.engine.noise import draw_gaussian
from coterie.models.draws import splitmix

MAX_IMAGES = 10  # sample images per planted cluster
NUM_BINS = 12  # bins of a regression target
MAX_SIDE = 64  # side above which a sample image is made smaller


def describe_federation(federation: Federation) -> dict[str, Any]:
    """Describe a federation in plain values.

    Args:
        federation: the federation, with its planted clusters where they are known.

    Returns:
        `name`, `fingerprint`, `clients` (a count), `client_names` (empty where clients are
        numbers), `clusters` (names of the planted clusters), `shift` (a description per client),
        `train` and `validation` (samples per client), `classes` (names of the columns of `labels`),
        `labels` (training samples per client and class; for regression, per bin of the target),
        `features` (names of the entries of an input, when known), and `images`: for each cluster a
        list of PNG images as data addresses; empty when the inputs are no images.
    """
    truth = federation.truth
    shift = [] if truth is None else list(truth.shift)
    names, labels = _count_labels(federation)
    return {
        "name": federation.name,
        "fingerprint": federation.compute_fingerprint(),
        "clients": len(federation),
        "client_names": list(federation.client_names),
        "clusters": [] if truth is None else list(truth.names),
        "shift": shift,
        "train": federation.count_samples("train").tolist(),
        "validation": federation.count_samples("validation").tolist(),
        "classes": names,
        "labels": labels.tolist(),
        "features": list(federation.feature_names),
        "images": _sample_images(federation),
    }


def _count_labels(federation: Federation) -> tuple[list[str], Tensor]:
    """Column names, and training samples per client and column."""
    train = federation.split == TRAIN
    if federation.classes:
        # Samples of other splits go to an additional last column, which is cut off below.
        columns = torch.where(train, federation.y.long(), federation.classes)
        width = federation.classes
        names = list(federation.class_names) or list(map(str, range(width)))
    else:
        # Of a target with several numbers, the first.
        target = federation.y.double().reshape(*federation.y.shape[:2], -1)[..., 0]
        values = target[train].numpy()
        edges = np.histogram_bin_edges(values, bins=NUM_BINS)
        # The inner edges only: the smallest and the largest value belong to the outer bins.
        place = np.clip(np.digitize(target.numpy(), edges[1:-1]), 0, NUM_BINS - 1)
        columns = torch.where(train, torch.from_numpy(place), NUM_BINS)
        width = NUM_BINS
        names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    counts = torch.zeros(len(federation), width + 1, dtype=torch.int64)
    counts.scatter_add_(1, columns, torch.ones_like(columns))
    return names, counts[:, :width]


def _sample_images(federation: Federation) -> list[list[str]]:
    """Return a few training samples of each planted cluster, of many classes, as PNG addresses."""
    if not _is_image(federation):
        return []
    # Without planted clusters, all clients count as one.
    cluster = torch.zeros(len(federation), dtype=torch.int64)
    if federation.truth is not None:
        cluster = federation.truth.cluster
    out = []
    for number in range(int(cluster.max()) + 1):
        rows = (cluster == number).nonzero().flatten()
        held = (federation.split[rows] == TRAIN) | (federation.split[rows] == VALIDATION)
        x, y = federation.x[rows][held], federation.y[rows][held]
        noise = 0.0 if federation.noise is None else float(federation.noise[rows].max())
        # Without classes all samples count as of one.
        places = _pick_samples(y if federation.classes else torch.zeros(len(y)))
        noisy = [_add_noise(read_inputs(x[place]), noise, place, federation) for place in places]
        out.append(list(map(_encode_png, noisy)))
    return out


def _add_noise(image: Tensor, noise: float, place: int, federation: Federation) -> Tensor:
    """Return an image with one draw of its noise, as uint8 if it was uint8."""
    if not noise or image.dtype != torch.uint8:
        return image
    # One deviation a channel, for all places of it.
    deviation = torch.tensor(federation.std or (1.0,), dtype=torch.float64)
    deviation = deviation.reshape(-1, *[1] * (image.ndim - 1))
    # A draw that depends on the place alone: a description must not change between calls.
    normal = draw_gaussian(splitmix(torch.tensor([place + 1])), image.numel()).reshape(image.shape)
    # Noise is added to normalized inputs: its unit is a channel's deviation, of 255 in bytes.
    return (image + 255 * deviation * noise * normal).round().clamp(0, 255).to(torch.uint8)


def _is_image(federation: Federation) -> bool:
    shape = federation.features
    # One channel or three come first; other inputs of two axes have none.
    pixels = shape[1:] if len(shape) == 3 and shape[0] in (1, 3) else shape
    return len(pixels) == 2 and min(pixels) >= 4


def _pick_samples(y: Tensor) -> list[int]:
    """Return the indices of the first samples, one of each class before a second of any."""
    seen: dict[int, int] = {}
    ranked = []
    for place, label in enumerate(y.tolist()):
        turn = seen.get(label, 0)
        seen[label] = turn + 1
        if turn < MAX_IMAGES:
            ranked.append((turn, label, place))
    return [place for _, _, place in sorted(ranked)[:MAX_IMAGES]]


def _encode_png(image: Tensor) -> str:
    """Encode one input as a PNG data address; floats are stretched to the full range."""
    values = image.float()
    if image.dtype != torch.uint8:
        low, high = float(values.min()), float(values.max())
        # A constant image has no range to stretch.
        values = (values - low) * (255 / (high - low or 1.0))
    pixels = values.round().clamp(0, 255).to(torch.uint8).numpy()
    if pixels.ndim == 3:
        # PIL expects the channels last.
        pixels = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    picture = Image.fromarray(pixels)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
