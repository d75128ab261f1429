"""Assignment of samples to clients: disjoint draws from one pool, without rejection loops.

Each client's request becomes a number of samples per class, which are taken from the shuffled
samples of that class. No sample goes to two clients, and impossible requests are reported before
any draw. Only requests with `reuse` start again with a class's first samples when none are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from coterie.errors import DataError

LOWER = "lower num_clients, train, validation or test_samples"


@dataclass(frozen=True)
class SampleRequest:
    """The samples that one client wants from a pool.

    Args:
        size: number of samples.
        labels: the classes it may hold; None for all.
        mixture: wanted share of each class; classes that run out are replaced by the others in
            proportion. None: every sample of the allowed classes is equally likely.
        counts: the exact number of each class, instead of a mixture.
        reuse: with `counts`: samples may go to several clients when a class runs out. The same for
            all requests.
    """

    size: int
    labels: tuple[int, ...] | None = None
    mixture: tuple[float, ...] | None = None
    counts: tuple[int, ...] | None = None
    reuse: bool = False


def allocate_samples(
    requests: Sequence[SampleRequest],
    labels: Int[np.ndarray, " samples"],
    generator: np.random.Generator,
) -> list[Int[np.ndarray, "_"]]:
    """Cut a pool into disjoint parts.

    Args:
        requests: one for each client.
        labels: the class of each sample of the pool.
        generator: the source of randomness.

    Returns:
        The rows of the pool that each client gets, ordered by class.

    Raises:
        DataError: when the pool cannot satisfy all requests; the message has the shortage.
    """
    classes = 1
    for request in requests:
        # The pool may lack the last classes that a request names.
        named = max(request.labels) + 1 if request.labels else 0
        classes = max(classes, named, len(request.mixture or ()), len(request.counts or ()))
    present = np.bincount(labels, minlength=classes)
    check_room(requests, present)
    counts = draw_class_counts(requests, present, generator)
    by_class = order_by_class(labels, generator)
    # Sample k of class c is at by_class[first[c] + k]; a client gets those from stop - count to
    # stop.
    first, stops = np.cumsum(present) - present, np.cumsum(counts, axis=0)
    parts = []
    for stop, count in zip(stops, counts, strict=True):
        places = []
        for start, size, end, number in zip(first, present, stop, count, strict=True):
            # The remainder wraps around only where requests reuse samples.
            places.append(start + np.arange(end - number, end) % max(size, 1))
        parts.append(by_class[np.concatenate(places)])
    return parts


def order_by_class(
    labels: Int[np.ndarray, " samples"], generator: np.random.Generator
) -> Int[np.ndarray, " samples"]:
    """Return the places of all samples, ordered by class and at random within each class.

    It is what `allocate_samples` returns for one request of all samples.
    """
    shuffled = generator.permutation(len(labels))
    # A stable sort keeps the random order within each class.
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def group_rows(values: Int[np.ndarray, " samples"]) -> dict[int, Int[np.ndarray, "_"]]:
    """Return the places of each value, in ascending order."""
    # A stable sort keeps the places of one value in ascending order.
    order = np.argsort(values, kind="stable")
    found, starts = np.unique(values[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, starts[1:]), strict=True))


def check_room(requests: Sequence[SampleRequest], present: Int[np.ndarray, " classes"]) -> None:
    """Check that a pool with the given number of samples of each class can satisfy all requests.

    Raises:
        DataError: with the first shortage found.
    """
    # `reuse` is the same in all requests: one stands for all.
    if any(request.reuse for request in requests):
        # A class may be used again and again, but not if it has no sample at all.
        for label in np.flatnonzero(present == 0):
            if any((request.counts or present)[label] for request in requests):
                raise DataError(f"class {label}: samples are asked for; the pool has none of it")
        return
    total, pool = sum(request.size for request in requests), int(present.sum())
    if total > pool:
        sizes = {request.size for request in requests}
        asked = f"ask for {total:,} samples"
        if len(sizes) == 1:
            asked = f"x {sizes.pop()} samples = {total:,}"
        raise DataError(
            f"{len(requests)} client{'s' * (len(requests) != 1)} {asked}; the pool has {pool:,}: "
            f"{LOWER}"
        )
    # What is asked for of each class, less what there is.
    excess = -present
    for request in requests:
        if request.counts is not None:
            excess = excess + np.array(request.counts)
    if (excess > 0).any():
        worst = int(excess.argmax())
        asked = f"{excess[worst] + present[worst]:,} samples are asked for"
        raise DataError(f"class {worst}: {asked}; the pool has {present[worst]:,} of it: {LOWER}")
    # Necessary, not sufficient: overlapping groups are left to the flow below.
    for group, demand in _sum_group_sizes(requests).items():
        room = int(present[list(group)].sum())
        if demand > room:
            names = ", ".join(map(str, group))
            raise DataError(
                f"labels {names}: {demand:,} samples are asked for; the pool has {room:,} of them: "
                f"{LOWER}"
            )


def draw_class_counts(
    requests: Sequence[SampleRequest],
    present: Int[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> Int[np.ndarray, "clients classes"]:
    """Decide how many samples of each class every client gets.

    Exact counts are assigned first, then mixtures in random order, then the rest, the most
    restricted first. If that order leaves a client short (overlapping label groups in a small
    pool), a maximum flow first divides the classes between the groups; it finds a division if there
    is one.

    Raises:
        DataError: when overlapping label groups cannot all be satisfied.
    """
    # Exact counts leave nothing to choose, so they are taken off before anybody draws.
    fixed = np.zeros((len(requests), len(present)), dtype=np.int64)
    for row, request in enumerate(requests):
        if request.counts is not None:
            fixed[row] = request.counts
    # Mixtures choose in random order, so that no client always finds its classes used up.
    # Clients without a mixture come after those with one: any of their classes will do.
    order = generator.permutation(len(requests)).tolist()
    mixed = [row for row in order if requests[row].mixture is not None]
    plain = []
    for row, request in enumerate(requests):
        if not (request.mixture or request.counts):
            plain.append(row)
    # The most restricted first: the others can still choose among more classes.
    plain.sort(key=lambda row: len(_label_group(requests[row], present)))
    counts, left = fixed.copy(), present - fixed.sum(0)
    for row in [*mixed, *plain]:
        room = _restrict_to_labels(left, _label_group(requests[row], present))
        if room.sum() < requests[row].size:
            # Drawn client by client the classes ran out; another division may still serve all.
            return fixed + _count_by_flow(
                requests, [*mixed, *plain], present - fixed.sum(0), generator
            )
        counts[row] = _draw_counts(requests[row], room, generator)
        left = left - counts[row]
    return counts


def _draw_counts(
    request: SampleRequest, room: Int[np.ndarray, " classes"], generator: np.random.Generator
) -> Int[np.ndarray, " classes"]:
    """Draw a client's class counts, at most the samples that are left of each class."""
    drawn = np.zeros_like(room)
    # A mixture may end before the last classes of the pool: the client wants none of these.
    mixture = np.zeros(len(room))
    if request.mixture is not None:
        mixture[: len(request.mixture)] = request.mixture
    # Each pass but the last uses up at least one class, so this many passes suffice.
    for _ in range(len(room)):
        open_share = np.where(room > drawn, mixture, 0.0)
        missing = request.size - int(drawn.sum())
        if missing == 0 or open_share.sum() <= 0:
            break
        more = generator.multinomial(missing, open_share / open_share.sum())
        drawn = np.minimum(drawn + more, room)
    # Classes of the mixture that ran out are replaced by any that are left.
    rest = request.size - int(drawn.sum())
    # Method "count" would take memory for every sample of the pool.
    return drawn + generator.multivariate_hypergeometric(room - drawn, rest, method="marginals")


def _count_by_flow(
    requests: Sequence[SampleRequest],
    rows: Sequence[int],
    left: Int[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> Int[np.ndarray, "clients classes"]:
    """Divide the classes between label groups by a maximum flow, then draw within each group."""
    members: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        members.setdefault(_label_group(requests[row], left), []).append(row)
    # Sorted: the flow does not depend on the random order of the clients.
    groups = sorted(members)
    demand = {}
    for group in groups:
        demand[group] = sum(requests[row].size for row in members[group])
    # Edges: source -> groups (what they ask for) -> their classes -> sink (what the pool has).
    # The nodes in order: source, groups, classes (from `first` on), sink.
    source, sink, first = 0, 1 + len(groups) + len(left), 1 + len(groups)
    # int32 is what SciPy's maximum flow takes.
    graph = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    for place, group in enumerate(groups, start=1):
        graph[source, place] = demand[group]
        # A group may take all that it asks for from any one of its classes.
        graph[place, first + np.array(group)] = demand[group]
    graph[first:sink, sink] = left
    flow = maximum_flow(csr_array(graph), source, sink)
    if flow.flow_value < sum(demand.values()):
        raise DataError(
            f"overlapping label groups ask for {sum(demand.values()):,} samples; only "
            f"{flow.flow_value:,} can be served without using one twice: {LOWER}"
        )
    passed = flow.flow.toarray()
    counts = np.zeros((len(requests), len(left)), dtype=np.int64)
    for place, group in enumerate(groups, start=1):
        # What the flow gives the group of each class; its members draw from that in turn.
        budget = passed[place, first:sink].astype(np.int64)
        for row in members[group]:
            counts[row] = _draw_counts(requests[row], budget, generator)
            budget = budget - counts[row]
    return counts


def _label_group(request: SampleRequest, present: Int[np.ndarray, " classes"]) -> tuple[int, ...]:
    labels = range(len(present)) if request.labels is None else sorted(set(request.labels))
    return tuple(labels)


def _restrict_to_labels(
    left: Int[np.ndarray, " classes"], labels: tuple[int, ...]
) -> Int[np.ndarray, " classes"]:
    # By class, as `left`: 0 for classes that the client may not hold.
    room = np.zeros_like(left)
    room[list(labels)] = left[list(labels)]
    return room


def _sum_group_sizes(requests: Sequence[SampleRequest]) -> dict[tuple[int, ...], int]:
    """Sum the requested samples of each set of labels."""
    demand: dict[tuple[int, ...], int] = {}
    for request in requests:
        if request.labels is not None:
            group = tuple(sorted(set(request.labels)))
            demand[group] = demand.get(group, 0) + request.size
    return demand


def apportion_total(
    total: int, weights: Float[np.ndarray, " parts"], minimum: int = 0
) -> Int[np.ndarray, " parts"]:
    """Divide a number by weights after giving each part a minimum.

    Parts are rounded by largest remainders; the first of equal remainders wins.

    Example:
        >>> apportion_total(10, np.array([0.7, 0.2, 0.1]), minimum=1).tolist()
        [6, 2, 2]

    Raises:
        DataError: when there is not enough for the minimum of all parts.
    """
    rest = total - minimum * len(weights)
    if rest < 0:
        asked = (
            f"{len(weights)} clients x a minimum of {minimum} = {minimum * len(weights):,} samples"
        )
        raise DataError(f"{asked}; there are {total:,}: lower num_clients or the minimum")
    exact = rest * weights / weights.sum()
    out = np.floor(exact).astype(np.int64)
    # out - exact is minus the remainder: the largest remainders come first, equal ones in order.
    out[np.argsort(out - exact, kind="stable")[: rest - int(out.sum())]] += 1
    return out + minimum
