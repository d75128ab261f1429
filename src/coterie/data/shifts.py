"""Distribution shifts between clients: covariate and concept shift here, label and quantity shift in `label_shifts`.

Each kind is a frozen dataclass; its fields are the keys of a `[[data.shift]]` table, and `apply` is a pure function
from plan to plan that also writes down what it planted. Shifts compose in the order given. Labels are those of the
client's own dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
from jaxtyping import Int

from coterie._util.tables import parse
from coterie.data._label_shifts import (
    DirichletPerClass,
    DirichletPerClient,
    Iid,
    KFold,
    Labels,
    Quantity,
    require_label,
)
from coterie.data.datasets import Source
from coterie.data.plan import Assign, Client, Clients, Linear, Shift, Streams, members
from coterie.data.transforms import MID_GREY, Blur, Rotate, Transform
from coterie.errors import ConfigError, DataError, require, unknown
from coterie.rng import EVERYONE


@final
@dataclass(frozen=True)
class Rotation(Shift):
    """Covariate shift: the images of a cluster are turned counter-clockwise.

    Args:
        degrees: the angle of each cluster. Quarter turns are exact; other angles take the nearest pixel.
        sizes: clients of each cluster; as even as possible when not given.
        assign: which clients: "blocks", "interleaved" or "shuffled".
        fill: value (0 to 255) of pixels from outside a turned image; 128 is zero after normalisation with 0.5.
    """

    kind: ClassVar[str] = "rotation"
    degrees: Sequence[float | int] = (0.0, 90.0, 180.0, 270.0)
    sizes: Sequence[int] | None = None
    assign: Assign = "blocks"
    fill: int = MID_GREY

    def check(self) -> None:
        """Check the angles and the fill."""
        require(len(self.degrees) > 0, "degrees", self.degrees, "at least one angle")
        require(0 <= self.fill <= 255, "fill", self.fill, "a value from 0 to 255")

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Turn the images of each cluster."""
        _require_images(sources, self.kind)
        for source in sources:
            height, width = source.train.x.shape[-2:]
            if height != width and any(angle % 180 == 90 for angle in self.degrees):
                raise DataError(f"{source.name} has images of {height}x{width}; a quarter turn needs square images")
        place = members(len(self.degrees), len(clients), self.sizes, self.assign, streams(EVERYONE))
        turns = [() if angle % 360 == 0 else (Rotate(angle, self.fill),) for angle in self.degrees]
        filled = [f"fill {self.fill}"] if self.fill != MID_GREY else []
        return tuple(
            c.plant(p, f"rotation {self.degrees[p]:g}", transforms=(*c.recipe.transforms, *turns[p])).note(*filled)
            for c, p in zip(clients, place, strict=True)
        )


@final
@dataclass(frozen=True)
class Visual(Shift):
    """Covariate shift: the images of a cluster are clean, noisy or blurred.

    Noise is added after normalisation (and augmentation). Blur is Pillow's Gaussian filter.

    Args:
        domains: the domain of each cluster: "clean", "noise" or "blur".
        sizes: clients of each cluster.
        assign: which clients.
        sigma: standard deviation of the noise, in normalised units.
        radius: radius of the blur, in pixels.
        noise: "redrawn": at every access, in training and in testing: in every step, and whenever a round measures
            models; or "fixed": once for each sample, so that the federation holds normalised float16 images.
    """

    kind: ClassVar[str] = "visual"
    domains: Sequence[Literal["clean", "noise", "blur"]] = ("clean", "noise", "blur")
    sizes: Sequence[int] | None = None
    assign: Assign = "blocks"
    sigma: float | int = 0.5
    radius: float | int = 2.0
    noise: Literal["redrawn", "fixed"] = "redrawn"

    def check(self) -> None:
        """Check the strengths."""
        require(self.sigma >= 0, "sigma", self.sigma, "a number that is not negative")
        require(self.radius >= 0, "radius", self.radius, "a number that is not negative")

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Blur or disturb the images of each cluster."""
        _require_images(sources, self.kind)
        place = members(len(self.domains), len(clients), self.sizes, self.assign, streams(EVERYONE))
        return tuple(self._disturb(c, p) for c, p in zip(clients, place, strict=True))

    def _disturb(self, client: Client, place: int) -> Client:
        domain, recipe = self.domains[place], client.recipe
        if domain == "noise":
            anew = self.noise == "redrawn"
            disturbed = client.plant(place, domain, noise=float(self.sigma), redrawn=anew)
            return disturbed.note(f"sigma {self.sigma:g}" + ", drawn anew at every access" * anew)
        if domain == "blur":
            blur: tuple[Transform, ...] = (Blur(self.radius),) if self.radius > 0 else ()
            return client.plant(place, domain, transforms=recipe.transforms + blur).note(f"radius {self.radius:g}")
        return client.plant(place, domain)


@final
@dataclass(frozen=True)
class LabelSwap(Shift):
    """Concept shift: a cluster has some pairs of labels exchanged, in training, validation and test alike.

    Args:
        swaps: for each cluster, the pairs of labels it exchanges; an empty list for none.
        sizes: clients of each cluster.
        assign: which clients.
    """

    kind: ClassVar[str] = "label-swap"
    swaps: Sequence[Sequence[Sequence[int]]] = ()
    sizes: Sequence[int] | None = None
    assign: Assign = "blocks"

    def check(self) -> None:
        """Check that the swaps are pairs."""
        require(len(self.swaps) > 0, "swaps", self.swaps, "one list of pairs for each cluster")
        pairs = [tuple(pair) for cluster in self.swaps for pair in cluster]
        require(all(len(set(pair)) == len(pair) == 2 for pair in pairs), "swaps", self.swaps, "pairs of two labels")
        for cluster in self.swaps:
            named = [label for pair in cluster for label in pair]
            require(len(set(named)) == len(named), "swaps", cluster, "each label in at most one pair of a cluster")

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Exchange the labels of each cluster."""
        for source in sources:
            for label in sorted({label for cluster in self.swaps for pair in cluster for label in pair}):
                require_label(label, source)
        place = members(len(self.swaps), len(clients), self.sizes, self.assign, streams(EVERYONE))
        out = []
        for client, p in zip(clients, place, strict=True):
            pairs = [(pair[0], pair[1]) for pair in self.swaps[p]]
            new = {a: b for a, b in pairs} | {b: a for a, b in pairs}
            old = client.recipe.relabel or tuple(range(sources[client.recipe.source].classes))
            relabel = tuple(new.get(label, label) for label in old) if pairs else client.recipe.relabel
            name = "swap " + " ".join(f"{a}-{b}" for a, b in pairs) if pairs else "no swap"
            out.append(client.plant(p, name, relabel=relabel))
        return tuple(out)


@final
@dataclass(frozen=True)
class RegressionTargets(Shift):
    r"""Concept shift: a cluster's targets are a linear function of its own, $y = \langle x, \theta \rangle + e$.

    Args:
        clusters: how many, when `sizes` is not given.
        sizes: clients of each cluster.
        assign: which clients.
        low: every coefficient of $\theta$ is uniform from here ...
        high: ... to here.
        noise: standard deviation of $e$.
    """

    kind: ClassVar[str] = "regression-targets"
    clusters: int = 3
    sizes: Sequence[int] | None = None
    assign: Assign = "blocks"
    low: float | int = -10.0
    high: float | int = 10.0
    noise: float | int = 3.0

    def check(self) -> None:
        """Check the ranges."""
        require(self.clusters >= 1, "clusters", self.clusters, "at least 1")
        require(self.low < self.high, "low", self.low, f"a number below high ({self.high:g})")
        require(self.noise >= 0, "noise", self.noise, "a number that is not negative")

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each cluster its coefficients."""
        for source in sources:
            if source.classes or source.train.x.ndim != 2:
                raise DataError(f"{source.name} is not a regression problem; {self.kind} needs one with flat features")
        clusters = len(self.sizes) if self.sizes is not None else self.clusters
        place = members(clusters, len(clients), self.sizes, self.assign, streams(EVERYONE))
        dim = sources[0].train.x.shape[1]
        theta = [tuple(streams(cluster).uniform(self.low, self.high, dim).tolist()) for cluster in range(clusters)]
        return tuple(
            c.plant(p, f"targets {p}", targets=Linear(theta[p], self.noise))
            for c, p in zip(clients, place, strict=True)
        )


@final
@dataclass(frozen=True)
class Domain(Shift):
    """Domain shift: every cluster draws from a dataset of its own.

    Args:
        sizes: clients of each dataset.
        assign: which clients.
        offset_labels: keep the classes of the datasets apart (the second dataset's start where the first's end).
    """

    kind: ClassVar[str] = "domain"
    chooses_pool: ClassVar[bool] = True
    sizes: Sequence[int] | None = None
    assign: Assign = "blocks"
    offset_labels: bool = True

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each cluster its dataset."""
        place = members(len(sources), len(clients), self.sizes, self.assign, streams(EVERYONE))
        offsets = [sum(s.classes for s in sources[:p]) if self.offset_labels else 0 for p in range(len(sources))]
        return tuple(
            c.plant(p, sources[p].name, source=p, offset=offsets[p]) for c, p in zip(clients, place, strict=True)
        )


@final
@dataclass(frozen=True)
class Natural(Shift):
    """Natural groups: every client is one value of a column of the data, such as a writer.

    Args:
        column: the column that says whose a sample is.
        cluster: a column with the planted cluster of each group; not known when not given. Test samples are then
            those of the same cluster.
    """

    kind: ClassVar[str] = "natural"
    chooses_pool: ClassVar[bool] = True
    column: str
    cluster: str | None = None

    def values(self, sources: Sequence[Source]) -> Int[np.ndarray, " samples"]:
        """Return the column.

        Raises:
            ConfigError: when there is no such column, or more than one dataset.
        """
        require(len(sources) == 1, "dataset", tuple(s.name for s in sources), "one dataset for natural groups")
        for name in (self.column, self.cluster):
            if name is not None and name not in sources[0].train.columns:
                raise ConfigError(f"{sources[0].name}: {unknown('column', name, sources[0].train.columns)}")
        return sources[0].train.columns[self.column].numpy()

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each client a group with enough samples."""
        values = self.values(sources)
        groups, sizes = np.unique(values, return_counts=True)
        wanted = max((c.samples or 1 for c in clients), default=1)
        enough = np.flatnonzero(sizes >= wanted)
        if len(enough) < len(clients):
            raise DataError(
                f"{len(enough)} of {len(groups)} groups of column {self.column!r} have {wanted} samples or more; "
                f"{len(clients)} clients ask for that: lower num_clients, train or validation"
            )
        chosen = np.sort(streams(EVERYONE).permutation(enough)[: len(clients)])
        return tuple(
            self._of_group(replace(c, samples=c.samples or int(sizes[g])), int(groups[g]), values, sources[0])
            for c, g in zip(clients, chosen, strict=True)
        )

    def _of_group(self, client: Client, group: int, values: Int[np.ndarray, " samples"], source: Source) -> Client:
        client = replace(client, group=(self.column, group)).note(f"{self.column} {group}")
        if self.cluster is None:
            return client
        clusters = np.unique(source.train.columns[self.cluster].numpy()[values == group])
        if len(clusters) > 1:
            raise DataError(f"{self.column} {group} has {len(clusters)} values of {self.cluster!r}; expected one")
        cluster = int(clusters[0])
        return client.plant(cluster, f"{self.cluster} {cluster}", where=(self.cluster, cluster))


SHIFTS: dict[str, type[Shift]] = {
    shift.kind: shift
    for shift in (
        Iid,
        Rotation,
        Visual,
        Labels,
        LabelSwap,
        RegressionTargets,
        Domain,
        DirichletPerClient,
        DirichletPerClass,
        KFold,
        Quantity,
        Natural,
    )
}
"""Every kind of shift by the name that a study file uses."""


def read_shift(table: Mapping[str, Any], where: str = "shift") -> Shift:
    """Make a shift from a table such as `{"kind": "rotation", "degrees": [0, 90]}`.

    Args:
        table: `kind` and the fields of that kind.
        where: how the user finds it.

    Raises:
        ConfigError: on an unknown kind or key, or a value that does not fit.
    """
    rest = dict(table)
    kind = rest.pop("kind", None)
    if kind is None:
        raise ConfigError(f"{where}: kind is missing; valid: {', '.join(sorted(SHIFTS))}")
    if kind not in SHIFTS:
        raise ConfigError(f"{where}: {unknown('shift', str(kind), SHIFTS)}")
    if kind.startswith("dirichlet") and "alpha" in rest:
        names = ", ".join(field.name for field in fields(SHIFTS[kind]) if field.name.startswith("concentration"))
        raise ConfigError(f"{where}: alpha means different things in different papers; use one of: {names}")
    return parse(SHIFTS[kind], rest, where)


def write_shift(shift: Shift) -> dict[str, Any]:
    """Return the table that `read_shift` makes this shift from; values that are not given are left out."""
    values = {field.name: getattr(shift, field.name) for field in fields(shift)}
    return {"kind": shift.kind} | {name: _lists(value) for name, value in values.items() if value is not None}


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _require_images(sources: Sequence[Source], kind: str) -> None:
    for source in sources:
        if not source.is_images:
            raise DataError(f"{kind} needs uint8 images; {source.name} has {source.form}")
