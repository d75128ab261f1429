"""Distribution shifts between clients: of labels, quantities, inputs and concepts.

Each kind is a frozen dataclass; its fields are the keys of a `[[data.shift]]` table, and `apply` is
a pure function from plan to plan that also writes down what it planted. Shifts compose in the order
given. Labels are those of the client's own dataset.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
from annotated_types import Ge, Le, MinLen
from jaxtyping import Float, Int

from coterie._util.importing import find_import_path, import_class, import_function, parse_kind
from coterie._util.settings import (
    CustomFunction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    parse_settings,
    to_plain,
)
from coterie.data._partition import apportion_total, group_rows
from coterie.data.plan import (
    Assign,
    Client,
    Clients,
    LinearTargets,
    Shift,
    Streams,
    assign_clusters,
    spread_evenly,
)
from coterie.data.source import Samples, Source
from coterie.data.transforms import MID_GRAY, Blur, Rotate, Transform
from coterie.errors import RETURN_HINT, ConfigError, DataError, describe_unknown, require
from coterie.rng import EVERYONE

Sizes = Annotated[Sequence[NonNegativeInt], MinLen(1)]
Levels = NonNegativeFloat | Annotated[Sequence[NonNegativeFloat], MinLen(1)]


def _place_clients(shift: Any, clusters: int, clients: Clients, streams: Streams) -> list[int]:
    """Return the cluster of each client, as the fields `sizes` and `assign` of a shift say."""
    return assign_clusters(clusters, len(clients), shift.sizes, shift.assign, streams(EVERYONE))


@final
@dataclass(frozen=True)
class Iid(Shift):
    """No shift: every client's samples are drawn from the whole pool."""

    kind: ClassVar[str] = "iid"

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Change nothing."""
        return clients


@final
@dataclass(frozen=True)
class Labels(Shift):
    """Label shift: a cluster has some of the classes only.

    Args:
        groups: the classes of each cluster, as a list or as text such as "0-9, 35-44". Groups may
            overlap.
        sizes: clients of each cluster.
        assign: which clients.
    """

    kind: ClassVar[str] = "labels"
    groups: Annotated[Sequence[str | Sequence[int]], MinLen(1)]
    sizes: Sizes | None = None
    assign: Assign = "blocks"

    def check(self) -> None:
        """Read the groups given as text."""
        # The class is frozen, and `check` is a part of its creation.
        object.__setattr__(self, "groups", tuple(map(_parse_labels, self.groups)))

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Restrict each cluster to its classes."""
        _require_no_class_counts(clients, self.kind)
        groups = [tuple(map(int, group)) for group in self.groups]
        labels = sorted(set(itertools.chain.from_iterable(groups)))
        for source in sources:
            for label in labels:
                require_label(label, source)
        place = _place_clients(self, len(self.groups), clients, streams)
        out = []
        for client, p in zip(clients, place, strict=True):
            name = f"labels {_format_labels(groups[p])}"
            out.append(client.plant_cluster(p, name, labels=groups[p]))
        return tuple(out)


@final
@dataclass(frozen=True)
class DirichletPerClient(Shift):
    """Label shift: every client draws its own mixture of classes from a Dirichlet distribution.

    Give one of the two concentrations. A class that runs out is replaced by the client's others, in
    proportion.

    Args:
        concentration_total: the mixture is Dirichlet(value x class shares of the pool), as in Hsu
            et al. (2019): the concentrations add to this value. 0 gives one class to each client. A
            list gives one level to each cluster.
        concentration_per_class: the mixture is Dirichlet(value, ..., value): the concentration of
            every class.
        sizes: clients of each level, when there are several.
        assign: which clients.
    """

    kind: ClassVar[str] = "dirichlet-per-client"
    concentration_total: Levels | None = None
    concentration_per_class: Levels | None = None
    sizes: Sizes | None = None
    assign: Assign = "blocks"

    def check(self) -> None:
        """Check that one of the concentrations is given."""
        total, per_class = self.concentration_total, self.concentration_per_class
        given = (total is not None) + (per_class is not None)
        # The two differ by a factor of the number of classes, so that none of them is a default.
        if given != 1:
            raise ConfigError(
                f"{self.kind} needs one of concentration_total and concentration_per_class; "
                f"{given} given"
            )

    @property
    def concentration_levels(self) -> tuple[float, ...]:
        """The concentration of each level."""
        value = self.concentration_total
        if value is None:
            value = self.concentration_per_class
        assert value is not None, "check requires one of the two"
        return tuple(value) if isinstance(value, Sequence) else (value,)

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Draw every client's mixture."""
        _require_no_class_counts(clients, self.kind)
        meaning = "in total" if self.concentration_total is not None else "per class"
        place = _place_clients(self, len(self.concentration_levels), clients, streams)
        out = []
        for row, (client, level) in enumerate(zip(clients, place, strict=True)):
            prior = _class_shares(client, sources)
            # The total is divided by the class shares of the pool; else each class that occurs has
            # the full value.
            scale = prior if self.concentration_total is not None else (prior > 0).astype(float)
            # Each client draws from its own stream.
            mixture = draw_dirichlet(self.concentration_levels[level] * scale, prior, streams(row))
            name = f"dirichlet {self.concentration_levels[level]:g} {meaning}"
            new = replace(client, mixture=tuple(mixture.tolist()))
            # One level for all plants no clusters.
            if len(self.concentration_levels) > 1:
                out.append(new.plant_cluster(level, name))
            else:
                out.append(new.add_note(name))
        return tuple(out)


def draw_dirichlet(
    concentration: Float[np.ndarray, " classes"],
    prior: Float[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> Float[np.ndarray, " classes"]:
    """Draw from a Dirichlet distribution, also where its concentrations vanish.

    Args:
        concentration: of each class; classes with 0 get nothing, unless all have 0.
        prior: decides the one class of the limit, where the concentrations are too small to draw
            with.
        generator: the stream.
    """
    some = concentration > 0
    out = np.zeros(len(concentration))
    if some.any():
        drawn = generator.dirichlet(concentration[some])
        # Tiny concentrations underflow to NaN or to a sum of 0.
        if np.isfinite(drawn).all() and abs(drawn.sum() - 1) < 1e-6:
            out[some] = drawn
            return out
    # The limit of vanishing concentrations: one class, by the prior.
    out[generator.choice(len(prior), p=prior / prior.sum())] = 1.0
    return out


def _draw_even_dirichlet(
    concentration: float, clients: int, generator: np.random.Generator
) -> Float[np.ndarray, " clients"]:
    return draw_dirichlet(np.full(clients, concentration), np.full(clients, 1 / clients), generator)


@final
@dataclass(frozen=True)
class DirichletPerClass(Shift):
    """Label and quantity shift: a Dirichlet draw divides every class between the clients.

    Clients end up with different classes and different numbers of samples; together they use as
    many as without the shift, in the class shares of the pool.

    Args:
        concentration_per_client: the shares of one class are Dirichlet(value, ..., value) over the
            clients.
        minimum: samples that every client gets at least; they are taken from the clients that have
            most.
    """

    kind: ClassVar[str] = "dirichlet-per-class"
    concentration_per_client: PositiveFloat
    minimum: PositiveInt = 10

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Share every class of every dataset."""
        _require_no_class_counts(clients, self.kind)
        _require_whole_pool(clients, self.kind)
        out = list(clients)
        generator = streams(EVERYONE)
        for place, source in enumerate(sources):
            # Dataset by dataset: classes of one number are other things in another one.
            rows = [row for row, c in enumerate(clients) if c.recipe.source == place]
            sizes = [clients[row].num_samples for row in rows]
            counts = self._share_classes(sizes, source, generator)
            for row, count in zip(rows, counts, strict=True):
                new = replace(clients[row], samples=int(count.sum()), counts=tuple(count.tolist()))
                out[row] = new.add_note(
                    f"dirichlet {self.concentration_per_client:g} per client of each class"
                )
        return tuple(out)

    def _share_classes(
        self, sizes: list[int], source: Source, generator: np.random.Generator
    ) -> Int[np.ndarray, "clients classes"]:
        present = _count_classes(source)
        if sum(sizes) > present.sum():
            raise DataError(
                f"the clients ask for {sum(sizes):,} samples; {source.name} has {present.sum():,}"
            )
        # Raises when there are not enough samples for the minimum of all clients.
        apportion_total(sum(sizes), np.ones(len(sizes)), self.minimum)
        budget = generator.multivariate_hypergeometric(present, sum(sizes), method="marginals")
        # All weights are drawn before any count: the order of draws decides stored results.
        weights = []
        for _ in budget:
            weights.append(
                _draw_even_dirichlet(self.concentration_per_client, len(sizes), generator)
            )
        counts = np.zeros((len(sizes), len(budget)), dtype=np.int64)
        for label, (total, shares) in enumerate(zip(budget, weights, strict=True)):
            counts[:, label] = generator.multinomial(total, shares)
        # The client with the most samples gives one of its largest class at a time.
        for poor in np.flatnonzero(counts.sum(1) < self.minimum):
            for _ in range(self.minimum - int(counts[poor].sum())):
                rich = int(counts.sum(1).argmax())
                label = int(counts[rich].argmax())
                counts[rich, label] -= 1
                counts[poor, label] += 1
        return counts


@final
@dataclass(frozen=True)
class KFold(Shift):
    """Label shift: classes are cut into blocks, and each client has one block as its main part.

    Client k belongs to fold k mod `folds`; the folds are contiguous blocks of classes. The rest of
    its samples comes evenly from all classes. Both parts are spread as evenly as whole samples
    allow, over the clients too.

    Args:
        folds: number of blocks.
        primary: part of a client's samples that comes from its block, from 0 to 1.
        rest: how the other part is spread: "even", or "released" as in the public code of SosicFL,
            where each class gets the whole number below its share and the last class all that is
            left, and where samples serve several clients when a class runs out. Where the classes
            divide the part both are the same.
    """

    kind: ClassVar[str] = "k-fold"
    folds: PositiveInt = 5
    primary: Share = 0.8
    rest: Literal["even", "released"] = "even"

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Set every client's class counts."""
        _require_no_class_counts(clients, self.kind)
        _require_whole_pool(clients, self.kind)
        for source in sources:
            _require_classes(source)
            require(
                self.folds <= source.classes,
                "folds",
                self.folds,
                f"at most the {source.classes} classes",
            )
        require(
            self.folds <= len(clients), "folds", self.folds, f"at most the {len(clients)} clients"
        )
        # Remainders go to consecutive classes from client to client, so that they even out.
        next_primary, next_rest = [0] * (self.folds * len(sources)), [0] * len(sources)
        out = []
        for row, client in enumerate(clients):
            place = client.recipe.source
            classes, fold = sources[place].classes, row % self.folds
            block = np.array_split(np.arange(classes), self.folds)[fold]
            # A counter of remainders for each block of each dataset.
            primary, slot = round(self.primary * client.num_samples), place * self.folds + fold
            rest = client.num_samples - primary
            counts = spread_evenly(rest, classes, next_rest[place])
            if self.rest == "released":
                # As the released code: the remainder goes to the last class alone.
                counts[:] = rest // classes
                counts[-1] += rest % classes
            counts[block] += spread_evenly(primary, len(block), next_primary[slot])
            next_rest[place] += rest % classes
            next_primary[slot] += primary % len(block)
            # The test set has the intended shares, not the rounded counts of the client.
            mixture = np.full(classes, (1 - self.primary) / classes)
            mixture[block] += self.primary / len(block)
            if self.rest == "released":
                mixture = counts / client.num_samples
            name = f"fold {block[0]}-{block[-1]}"
            new = replace(client, counts=tuple(counts.tolist()), reuse=self.rest == "released")
            out.append(new.plant_cluster(fold, name, mixture=tuple(mixture.tolist())))
        return tuple(out)


@final
@dataclass(frozen=True)
class Quantity(Shift):
    """Quantity shift: clients have different numbers of samples.

    Together they have as many as without the shift.

    Args:
        concentration_per_client: the shares are Dirichlet(value, ..., value) over the clients:
            small is uneven.
        minimum: samples that every client gets first.
    """

    kind: ClassVar[str] = "quantity"
    concentration_per_client: PositiveFloat
    minimum: PositiveInt = 10

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Draw the sizes."""
        _require_no_class_counts(clients, self.kind)
        if any(c.group is not None for c in clients):
            raise ConfigError(
                f"{self.kind} cannot change natural groups; leave one of the two shifts out"
            )
        # One stream for all clients: their sizes are drawn together, as shares of one whole.
        generator, out = streams(EVERYONE), list(clients)
        # Clients of one pool exchange samples.
        members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row, client in enumerate(clients):
            pool = (client.recipe.source, client.recipe.labels or ())
            members.setdefault(pool, []).append(row)
        # Sorted: the order of draws decides the result.
        for _, rows in sorted(members.items()):
            weights = _draw_even_dirichlet(self.concentration_per_client, len(rows), generator)
            sizes = apportion_total(
                sum(clients[row].num_samples for row in rows), weights, self.minimum
            )
            for row, size in zip(rows, sizes.tolist(), strict=True):
                out[row] = replace(clients[row], samples=size).add_note(f"{size} samples")
        return tuple(out)


def require_label(label: int, source: Source) -> None:
    """Check that a dataset has a class.

    Raises:
        ConfigError: when it does not.
    """
    _require_classes(source)
    if not 0 <= label < source.classes:
        raise ConfigError(
            f"label {label} is not in {source.name}; expected 0 to {source.classes - 1}"
        )


def _require_no_class_counts(clients: Clients, kind: str) -> None:
    if any(c.mixture is not None or c.counts is not None for c in clients):
        raise ConfigError(
            f"{kind} comes after a shift that has set every client's classes; put it first or "
            "leave it out"
        )


def _require_whole_pool(clients: Clients, kind: str) -> None:
    if any(c.recipe.labels is not None for c in clients):
        raise ConfigError(f"{kind} sets every client's classes; leave out the labels shift")
    if any(c.group is not None for c in clients):
        raise ConfigError(f"{kind} draws from the whole pool; leave out the natural groups")


def _count_classes(source: Source) -> Int[np.ndarray, " classes"]:
    _require_classes(source)
    return np.bincount(source.train.y.numpy(), minlength=source.classes)


def _require_classes(source: Source) -> None:
    if not source.classes:
        raise DataError(
            f"the targets of {source.name} are not one class a sample, which a shift of labels "
            "needs: leave that shift "
            "out (rotation, visual, quantity and natural groups work without classes)"
        )


def _class_shares(client: Client, sources: Sequence[Source]) -> Float[np.ndarray, " classes"]:
    """The class shares of the samples a client may get."""
    present = _count_classes(sources[client.recipe.source]).astype(np.float64)
    if client.recipe.labels is not None:
        allowed = np.zeros(len(present))
        allowed[list(client.recipe.labels)] = 1.0
        present = present * allowed
    return present / present.sum()


def _parse_labels(group: str | Sequence[int]) -> tuple[int, ...]:
    """Read "0-9, 35" as 0 to 9 and 35; lists stay as they are."""
    if not isinstance(group, str):
        return tuple(group)
    out: list[int] = []
    for part in group.split(","):
        first, dash, last = part.strip().partition("-")
        digits = first.isdecimal() and (last.isdecimal() or not dash)
        require(digits, "groups", group, 'labels as a list or as text such as "0-9, 35-44"')
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


def _format_labels(labels: Sequence[int]) -> str:
    """Write 0 to 9 and 35 as "0-9,35"."""
    # Each run is a list of consecutive labels.
    runs: list[list[int]] = []
    for label in sorted(set(labels)):
        if runs and label == runs[-1][-1] + 1:
            runs[-1].append(label)
        else:
            runs.append([label])
    parts = []
    for run in runs:
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


@final
@dataclass(frozen=True)
class Rotation(Shift):
    """Covariate shift: the images of a cluster are turned counter-clockwise.

    Args:
        degrees: the angle of each cluster. Quarter turns are exact; other angles take the nearest
            pixel.
        sizes: clients of each cluster; as even as possible when not given.
        assign: which clients: "blocks", "interleaved" or "shuffled".
        fill: value (0 to 255) of pixels from outside a turned image; 128 is zero after
            normalization with 0.5.
    """

    kind: ClassVar[str] = "rotation"
    degrees: Annotated[Sequence[float], MinLen(1)] = (0.0, 90.0, 180.0, 270.0)
    sizes: Sizes | None = None
    assign: Assign = "blocks"
    fill: Annotated[int, Ge(0), Le(255)] = MID_GRAY

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Turn the images of each cluster."""
        _require_images(sources, self.kind)
        for source in sources:
            height, width = source.train.x.shape[-2:]
            # Other angles keep the shape, and fill the corners.
            if height != width and any(angle % 180 == 90 for angle in self.degrees):
                raise DataError(
                    f"{source.name} has images of {height}x{width}; a quarter turn needs square "
                    "images"
                )
        place = _place_clients(self, len(self.degrees), clients, streams)
        # No transform for no turn: such clients share the test set of clients without the shift.
        out = []
        for client, p in zip(clients, place, strict=True):
            angle, transforms = self.degrees[p], client.recipe.transforms
            if angle % 360:
                transforms = (*transforms, Rotate(angle, self.fill))
            turned = client.plant_cluster(p, f"rotation {angle:g}", transforms=transforms)
            # Notes are part of the fingerprint of the data: the usual fill stays unsaid in them.
            if self.fill != MID_GRAY:
                turned = turned.add_note(f"fill {self.fill}")
            out.append(turned)
        return tuple(out)


@final
@dataclass(frozen=True)
class Visual(Shift):
    """Covariate shift: the images of a cluster are clean, noisy or blurred.

    Noise is added after normalization (and augmentation). Blur is Pillow's Gaussian filter.

    Args:
        domains: the domain of each cluster: "clean", "noise" or "blur".
        sizes: clients of each cluster.
        assign: which clients.
        sigma: standard deviation of the noise, in normalized units.
        radius: radius of the blur, in pixels.
        noise: "redrawn": at every access, in training and in testing: in every step, and whenever a
            round measures models; or "fixed": once for each sample, so that the federation holds
            normalized float16 images.
    """

    kind: ClassVar[str] = "visual"
    domains: Annotated[Sequence[Literal["clean", "noise", "blur"]], MinLen(1)] = (
        "clean",
        "noise",
        "blur",
    )
    sizes: Sizes | None = None
    assign: Assign = "blocks"
    sigma: NonNegativeFloat = 0.5
    radius: NonNegativeFloat = 2.0
    noise: Literal["redrawn", "fixed"] = "redrawn"

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Blur or disturb the images of each cluster."""
        _require_images(sources, self.kind)
        place = _place_clients(self, len(self.domains), clients, streams)
        return tuple(map(self._apply_domain, clients, place))

    def _apply_domain(self, client: Client, place: int) -> Client:
        domain, recipe = self.domains[place], client.recipe
        if domain == "noise":
            redrawn = self.noise == "redrawn"
            disturbed = client.plant_cluster(
                place, domain, noise=float(self.sigma), redrawn=redrawn
            )
            # Part of the data's fingerprint, so the text stays as it is.
            note = f"sigma {self.sigma:g}" + ", drawn anew at every access" * redrawn
            return disturbed.add_note(note)
        if domain == "blur":
            # Radius 0 changes nothing and needs no transform.
            blur: tuple[Transform, ...] = (Blur(self.radius),) if self.radius > 0 else ()
            return client.plant_cluster(
                place, domain, transforms=recipe.transforms + blur
            ).add_note(f"radius {self.radius:g}")
        return client.plant_cluster(place, domain)


@final
@dataclass(frozen=True)
class LabelSwap(Shift):
    """Concept shift: a cluster has some pairs of labels exchanged.

    They are exchanged in training, validation and test samples.

    Args:
        swaps: for each cluster, the pairs of labels it exchanges; an empty list for none.
        sizes: clients of each cluster.
        assign: which clients.
    """

    kind: ClassVar[str] = "label-swap"
    swaps: Annotated[Sequence[Sequence[Sequence[int]]], MinLen(1)]
    sizes: Sizes | None = None
    assign: Assign = "blocks"

    def check(self) -> None:
        """Check that the swaps are pairs."""
        pairs = list(map(tuple, itertools.chain.from_iterable(self.swaps)))
        require(
            all(len(set(pair)) == len(pair) == 2 for pair in pairs),
            "swaps",
            self.swaps,
            "pairs of two labels",
        )
        for cluster in self.swaps:
            named = list(itertools.chain.from_iterable(cluster))
            require(
                len(set(named)) == len(named),
                "swaps",
                cluster,
                "each label in at most one pair of a cluster",
            )

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Exchange the labels of each cluster."""
        pairs = itertools.chain.from_iterable(self.swaps)
        labels = sorted(set(itertools.chain.from_iterable(pairs)))
        for source in sources:
            for label in labels:
                require_label(label, source)
        place = _place_clients(self, len(self.swaps), clients, streams)
        out = []
        for client, p in zip(clients, place, strict=True):
            new: dict[int, int] = {}
            for first, second in self.swaps[p]:
                new |= {first: second, second: first}
            if not new:
                out.append(client.plant_cluster(p, "no swap"))
                continue
            # Swaps of an earlier shift come first.
            old = client.recipe.relabel or range(sources[client.recipe.source].classes)
            relabel = tuple(new.get(label, label) for label in old)
            name = "swap " + " ".join(f"{first}-{second}" for first, second in self.swaps[p])
            out.append(client.plant_cluster(p, name, relabel=relabel))
        return tuple(out)


@final
@dataclass(frozen=True)
class RegressionTargets(Shift):
    r"""Concept shift: each cluster has its own linear targets.

    They are $y = \langle x, \theta \rangle + e$ with the cluster's own $\theta$.

    Args:
        clusters: how many, when `sizes` is not given.
        sizes: clients of each cluster.
        assign: which clients.
        low: every coefficient of $\theta$ is uniform from here ...
        high: ... to here.
        noise: standard deviation of $e$.
    """

    kind: ClassVar[str] = "regression-targets"
    clusters: PositiveInt = 3
    sizes: Sizes | None = None
    assign: Assign = "blocks"
    low: float = -10.0
    high: float = 10.0
    noise: NonNegativeFloat = 3.0

    def check(self) -> None:
        """Check that the range is one."""
        require(self.low < self.high, "low", self.low, f"a number below high ({self.high:g})")

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each cluster its coefficients."""
        for source in sources:
            if (
                source.classes
                or source.train.x.ndim != 2
                or source.train.y.ndim != 1
                or source.parts
            ):
                raise DataError(
                    f"{source.name} is not a regression problem of one number; {self.kind} needs "
                    "one with flat features"
                )
        clusters = len(self.sizes) if self.sizes is not None else self.clusters
        place = _place_clients(self, clusters, clients, streams)
        dim = sources[0].train.x.shape[1]
        theta = []
        for cluster in range(clusters):
            # Keyed by the cluster: the number of clients changes no coefficients.
            drawn = streams(cluster).uniform(self.low, self.high, dim)
            theta.append(tuple(drawn.tolist()))
        out = []
        for client, p in zip(clients, place, strict=True):
            targets = LinearTargets(theta[p], self.noise)
            out.append(client.plant_cluster(p, f"targets {p}", targets=targets))
        return tuple(out)


@final
@dataclass(frozen=True)
class Domain(Shift):
    """Domain shift: every cluster draws from a dataset of its own.

    Args:
        sizes: clients of each dataset.
        assign: which clients.
        offset_labels: keep the classes of the datasets apart (the second dataset's start where the
            first's end).
    """

    kind: ClassVar[str] = "domain"
    chooses_pool: ClassVar[bool] = True
    sizes: Sizes | None = None
    assign: Assign = "blocks"
    offset_labels: bool = True

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each cluster its dataset."""
        place = _place_clients(self, len(sources), clients, streams)
        offsets = [0] * len(sources)
        if self.offset_labels:
            classes = [source.classes for source in sources]
            # Classes of a dataset come behind those of all earlier ones.
            offsets = list(itertools.accumulate(classes[:-1], initial=0))
        out = []
        for client, p in zip(clients, place, strict=True):
            out.append(client.plant_cluster(p, sources[p].name, source=p, offset=offsets[p]))
        return tuple(out)


@final
@dataclass(frozen=True)
class Natural(Shift):
    """Natural groups: every client is one value of a column of the data, such as a writer.

    Args:
        column: the column that says whose a sample is.
        cluster: a column with the planted cluster of each group; not known when not given. Test
            samples are then those of the same cluster.
    """

    kind: ClassVar[str] = "natural"
    chooses_pool: ClassVar[bool] = True
    column: str
    cluster: str | None = None

    def group_values(self, sources: Sequence[Source]) -> Int[np.ndarray, " samples"]:
        """Return the column.

        Raises:
            ConfigError: when there is no such column, or more than one dataset.
        """
        _require_one_dataset(sources, "natural groups")
        for name in (self.column, self.cluster):
            if name is not None and name not in sources[0].train.columns:
                raise ConfigError(
                    f"{sources[0].name}: "
                    f"{describe_unknown('column', name, sources[0].train.columns)}"
                )
        return sources[0].train.columns[self.column].numpy()

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each client a group with enough samples."""
        values = self.group_values(sources)
        # Groups in ascending order, with the number of samples of each.
        groups, sizes = np.unique(values, return_counts=True)
        # A client without a size takes its whole group.
        wanted = max((c.samples or 1 for c in clients), default=1)
        enough = np.flatnonzero(sizes >= wanted)
        # Where the groups are the clients, the message names one that is too small.
        if len(enough) < len(clients) and self.column == sources[0].clients:
            few = np.flatnonzero(sizes < wanted)
            first = int(groups[few[0]])
            raise DataError(
                f"client {sources[0].client_name(first) or first!r} has {sizes[few[0]]} samples, "
                f"and {len(few)} of "
                f"{len(groups)} clients fewer than the {wanted} that each shall have: lower train, "
                "validation or "
                "test_samples, leave train out to use all samples, or lower num_clients"
            )
        if len(enough) < len(clients):
            raise DataError(
                f"{len(enough)} of {len(groups)} groups of column {self.column!r} have {wanted} "
                "samples or more; "
                f"{len(clients)} clients ask for that: lower num_clients, train or validation"
            )
        # Random groups, in ascending order.
        chosen = np.sort(streams(EVERYONE).permutation(enough)[: len(clients)])
        numbers = groups[chosen].tolist()
        # Clients that are numbered from 0 already need no names.
        unnamed = numbers == list(range(len(numbers)))
        out = []
        for client, place in zip(clients, chosen, strict=True):
            sized = replace(client, samples=client.samples or int(sizes[place]))
            group = int(groups[place])
            out.append(self._assign_group(sized, group, values, sources[0], unnamed))
        return tuple(out)

    def _assign_group(
        self,
        client: Client,
        group: int,
        values: Int[np.ndarray, " samples"],
        source: Source,
        unnamed: bool,
    ) -> Client:
        is_client_column = self.column == source.clients
        given_name = source.client_name(group) if is_client_column else ""
        # Ids of clients are names themselves; the value of another column needs its column's name.
        name = given_name
        if not given_name and not unnamed:
            name = str(group) if is_client_column else f"{self.column} {group}"
        client = replace(client, group=(self.column, group), name=name)
        client = client.add_note(f"{self.column} {given_name or group}")
        if self.cluster is None:
            return client
        clusters = np.unique(source.train.columns[self.cluster].numpy()[values == group])
        if len(clusters) > 1:
            raise DataError(
                f"{self.column} {group} has {len(clusters)} values of {self.cluster!r}; expected "
                "one"
            )
        cluster = int(clusters[0])
        return client.plant_cluster(
            cluster, f"{self.cluster} {cluster}", where=(self.cluster, cluster)
        )


@final
@dataclass(frozen=True)
class Partition(Shift):
    """A user-defined partition: a function returns the client of each sample of the pool.

    Where the study gives `train`, each client draws that many of its samples; else it has all of
    them.

    Args:
        function: import path of a function (samples, num_clients, generator) that returns a number
            for each sample: the client that has it, from 0 to num_clients - 1, or -1 for none. It
            sees `samples.x`, `samples.y` and `samples.columns`; the generator is keyed by the seed
            of the data.
    """

    kind: ClassVar[str] = "partition"
    chooses_pool: ClassVar[bool] = True
    function: CustomFunction

    def find_owners(
        self, samples: Samples, num_clients: int, generator: np.random.Generator
    ) -> Int[np.ndarray, " samples"]:
        """Return the client of each sample; -1 for none.

        Raises:
            ConfigError: when the function returns something else.
            DataError: when a client gets nothing.
        """
        what = f"partition {self.function!r}"
        takes = ("samples", "num_clients", "generator")
        found = import_function(str(self.function), what, takes)(samples, num_clients, generator)
        if found is None:
            raise ConfigError(
                f"{what} returned None; expected the client of each sample{RETURN_HINT}"
            )
        # A custom function: what it returns is checked before it is used.
        owners = np.asarray(found)
        # Whole numbers only: rounding would put samples to clients that nobody named.
        if owners.shape != (len(samples),) or owners.dtype.kind not in "iu":
            raise ConfigError(
                f"{what} returned {owners.dtype} of shape {owners.shape}; expected {len(samples)} "
                "whole numbers, the "
                "client of each sample"
            )
        if len(owners) and not -1 <= owners.min() <= owners.max() < num_clients:
            raise ConfigError(
                f"{what} returned clients from {owners.min()} to {owners.max()}; expected 0 to "
                f"{num_clients - 1}, or "
                "-1 for a sample that nobody gets"
            )
        # Samples of -1 belong to nobody.
        without = np.flatnonzero(np.bincount(owners[owners >= 0], minlength=num_clients) == 0)
        if len(without):
            raise DataError(
                f"{what} gives client {without[0]} no sample ({len(without)} of {num_clients} "
                "clients); every client "
                "needs some: lower num_clients, or spread the samples"
            )
        return owners.astype(np.int64)

    def apply(self, clients: Clients, sources: Sequence[Source], streams: Streams) -> Clients:
        """Give each client its samples."""
        _require_one_dataset(sources, "a partition")
        owners = self.find_owners(sources[0].train, len(clients), streams(EVERYONE))
        # Grouped once: a search for each of 100,000 clients would take minutes.
        rows_of = group_rows(owners)
        out = []
        for row, client in enumerate(clients):
            own = tuple(rows_of[row].tolist())
            if client.samples is not None and len(own) < client.samples:
                raise DataError(
                    f"partition {self.function!r} gives client {row} {len(own)} samples; "
                    f"{client.samples} are asked "
                    "for: lower train or validation, or leave them out"
                )
            new = replace(
                client, group=(self.kind, row), rows=own, samples=client.samples or len(own)
            )
            out.append(new.add_note(f"{len(own)} samples by {self.function}"))
        return tuple(out)


SHIFTS: dict[str, type[Shift]] = {
    Iid.kind: Iid,
    Rotation.kind: Rotation,
    Visual.kind: Visual,
    Labels.kind: Labels,
    LabelSwap.kind: LabelSwap,
    RegressionTargets.kind: RegressionTargets,
    Domain.kind: Domain,
    DirichletPerClient.kind: DirichletPerClient,
    DirichletPerClass.kind: DirichletPerClass,
    KFold.kind: KFold,
    Quantity.kind: Quantity,
    Natural.kind: Natural,
    Partition.kind: Partition,
}
"""Every kind of shift by the name that a study file uses."""


def parse_shift(table: Mapping[str, Any], where: str = "shift") -> Shift:
    """Make a shift from a table such as `{"kind": "rotation", "degrees": [0, 90]}`.

    Args:
        table: `kind`, a name of SHIFTS or the import path of a subclass of `Shift`, and the fields
            of that kind.
        where: how the user finds it.

    Raises:
        ConfigError: on an unknown kind or key, or a value that does not fit.
    """
    kind, rest = parse_kind(table, SHIFTS, "shift", where)
    if kind not in SHIFTS:
        return parse_settings(
            import_class(kind, f"{where} {kind!r}", Shift, "coterie.data.plan.Shift"), rest, where
        )
    # Before the settings are parsed, which would only say that the key is unknown.
    if kind.startswith("dirichlet") and "alpha" in rest:
        names = []
        for field in fields(SHIFTS[kind]):
            if field.name.startswith("concentration"):
                names.append(field.name)
        raise ConfigError(
            f"{where}: alpha means different things in different papers; use one of: "
            f"{', '.join(names)}"
        )
    return parse_settings(SHIFTS[kind], rest, where)


def shift_to_table(shift: Shift | Mapping[str, Any], where: str = "shift") -> dict[str, Any]:
    """Return the table from which `parse_shift` makes a shift, with every field.

    A table that names an import path stays as it is, so that nothing is imported to read a study's
    results.

    Args:
        shift: the shift, or a table of it.
        where: how the user finds it.
    """
    # A shift of one's own is not imported to be stored.
    if isinstance(shift, Mapping) and ":" in str(shift.get("kind")):
        return to_plain(shift)
    made = shift if isinstance(shift, Shift) else parse_shift(shift, where)
    # By the class: a subclass of one's own inherits the kind of its base.
    if SHIFTS.get(getattr(made, "kind", "")) is type(made):
        return {**to_plain(made), "kind": made.kind}
    return {**to_plain(made), "kind": find_import_path(type(made), where)}


def _require_one_dataset(sources: Sequence[Source], what: str) -> None:
    names = tuple(source.name for source in sources)
    require(len(names) == 1, "dataset", names, f"one dataset for {what}")


def _require_images(sources: Sequence[Source], kind: str) -> None:
    for source in sources:
        if not source.is_images:
            raise DataError(
                f"{kind} needs uint8 images; {source.name} has {source.input_description}"
            )
