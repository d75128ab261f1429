"""What holds for every shift, whatever its strength, the sizes and the seed."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data._partition import SampleRequest, allocate_samples
from coterie.data.build import DataConfig, build_from_sources
from coterie.data.federation import Federation
from coterie.data.source import Samples, Source
from coterie.errors import DataError
from coterie.rng import Rng

CLASSES = 6
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def toy(per_class: int = 40) -> Source:
    y = torch.arange(CLASSES).repeat_interleave(per_class)
    x = torch.arange(len(y) * 4).remainder(251).to(torch.uint8).reshape(len(y), 1, 2, 2)
    own = {"writer": torch.arange(len(y)) % 12}
    return Source(
        "toy", Samples(x, y, own), Samples(x[::3], y[::3], {"writer": own["writer"][::3]}), CLASSES
    )


def build(
    shift: list[dict],
    seed: int,
    clients: int = 8,
    train: int = 9,
    validation: int = 3,
    **more: object,
) -> Federation:
    config = DataConfig("toy", clients, train, validation, shift, **more)  # type: ignore[arg-type]
    return build_from_sources(config, (toy(),), Rng(seed))


concentrations = st.floats(1e-3, 1e3)
KEEP_SIZES = st.one_of(
    st.just([]),
    st.builds(
        lambda a: [{"kind": "rotation", "degrees": a}],
        st.lists(st.integers(-720, 720), min_size=1, max_size=8),
    ),
    st.builds(lambda r: [{"kind": "visual", "radius": r, "sigma": r}], st.floats(0, 3)),
    st.builds(
        lambda c: [{"kind": "dirichlet-per-client", "concentration_total": c}], concentrations
    ),
    st.builds(
        lambda c: [{"kind": "dirichlet-per-client", "concentration_per_class": c}], concentrations
    ),
    st.builds(
        lambda f, p: [{"kind": "k-fold", "folds": f, "primary": p}],
        st.integers(1, CLASSES),
        st.floats(0, 1),
    ),
    st.builds(
        lambda a: [{"kind": "labels", "groups": ["0-2", "2-5"], "assign": a}],
        st.sampled_from(["blocks", "shuffled"]),
    ),
    st.just([{"kind": "label-swap", "swaps": [[[0, 5]], [[1, 2], [3, 4]]]}]),
    st.just([{"kind": "natural", "column": "writer"}]),
)


def own(federation: Federation) -> list[np.ndarray]:
    """Which samples each client has."""
    assert federation.origin is not None
    return [row[row >= 0].numpy() for row in federation.origin]


@few
@given(KEEP_SIZES, KEEP_SIZES, seeds)
def test_sizes_are_kept_and_no_sample_serves_two_clients(first, second, seed):
    """Shifts that are not about quantity give every client exactly what it was promised, also two at a time."""
    kinds = [shift["kind"] for shift in [*first, *second]]
    one_of_classes = (
        sum(kind in ("k-fold", "dirichlet-per-client", "labels", "natural") for kind in kinds) <= 1
    )
    # two that choose classes may ask for the impossible
    shift = [*first, *second] if one_of_classes else first
    federation = build(shift, seed)
    assert federation.count_samples("train").tolist() == [9] * 8
    assert federation.count_samples("validation").tolist() == [3] * 8
    together = np.concatenate(own(federation))
    assert len(np.unique(together)) == len(together) == 96


@few
@given(
    st.sampled_from(["quantity", "dirichlet-per-class"]), concentrations, st.integers(2, 12), seeds
)
def test_quantity_shifts_keep_the_total_and_the_minimum(kind, concentration, minimum, seed):
    shift = {"kind": kind, "concentration_per_client": concentration, "minimum": minimum}
    federation = build([shift], seed)
    sizes = [len(rows) for rows in own(federation)]
    assert sum(sizes) == 96
    assert min(sizes) >= minimum
    assert len(np.unique(np.concatenate(own(federation)))) == 96
    assert int(federation.count_samples("train").min()) >= 1
    assert int(federation.count_samples("validation").min()) >= 1


@few
@given(
    st.sampled_from(
        [
            [{"kind": "iid"}],
            [{"kind": "rotation", "degrees": [0, 360, -720]}],
            [{"kind": "visual", "sigma": 0, "radius": 0}],
            [{"kind": "label-swap", "swaps": [[], []]}],
            [{"kind": "labels", "groups": ["0-5", "0-5"]}],
        ]
    ),
    seeds,
)
def test_a_shift_of_no_strength_changes_no_data(shift, seed):
    plain, shifted = build([], seed), build(shift, seed)
    for name in ("x", "y", "split", "origin"):
        assert torch.equal(getattr(plain, name), getattr(shifted, name)), name
    assert all(torch.equal(plain.tests[0].x, test.x) for test in shifted.tests)


@few
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0), seeds
)
def test_the_truth_has_the_clusters_asked_for(sizes, seed):
    degrees = [10 * place for place in range(len(sizes))]
    shift = [{"kind": "rotation", "degrees": degrees, "sizes": sizes, "assign": "shuffled"}]
    federation = build(shift, seed, clients=sum(sizes), train=2, validation=1)
    truth = federation.truth
    assert truth is not None
    found = {truth.names[c]: n for c, n in enumerate(torch.bincount(truth.cluster).tolist())}
    assert found == {f"rotation {10 * place}": size for place, size in enumerate(sizes) if size}
    for client in range(len(federation)):
        name = truth.names[int(truth.cluster[client])]
        assert federation.tests[int(federation.test_of[client])].name == name
        assert truth.shift[client] == name


@few
@given(seeds, seeds)
def test_fingerprints_tell_seeds_apart(first, second):
    same = build([], first).compute_fingerprint() == build([], second).compute_fingerprint()
    assert same == (first == second)


@few
@given(st.data(), seeds)
def test_an_allocation_ends_and_serves_exactly_or_says_that_it_cannot(data, seed):
    """Tiny pools, any wishes: everyone is served with samples of allowed classes, or it is impossible and said so."""
    labels = np.array(data.draw(st.lists(st.integers(0, 3), max_size=12)), dtype=np.int64)
    group = st.none() | st.sets(st.integers(0, 3), min_size=1).map(
        lambda chosen: tuple(sorted(chosen))
    )
    mixture = st.none() | st.tuples(*[st.floats(0, 1)] * 4)
    drawn = data.draw(
        st.lists(st.tuples(st.integers(0, 5), group, mixture), min_size=1, max_size=5)
    )
    wishes = [SampleRequest(*wish) for wish in drawn]
    try:
        parts = allocate_samples(wishes, labels, np.random.Generator(np.random.Philox(seed)))
    except DataError:
        assert not possible(wishes, labels)
        return
    assert [len(part) for part in parts] == [wish.size for wish in wishes]
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    for wish, part in zip(wishes, parts, strict=True):
        assert wish.labels is None or set(labels[part]) <= set(wish.labels)


def possible(wishes: list[SampleRequest], labels: np.ndarray) -> bool:
    """Hall's condition, by trying every set of classes: what wants only these must fit in these."""
    for chosen in range(1 << 4):
        classes = {label for label in range(4) if chosen >> label & 1}
        demand = sum(wish.size for wish in wishes if set(wish.labels or range(4)) <= classes)
        if demand > sum(label in classes for label in labels.tolist()):
            return False
    return True


@few
@given(st.integers(1, CLASSES), st.floats(0, 1), st.integers(1, 12), st.integers(1, 9), seeds)
def test_folds_never_give_a_class_more_than_its_share(folds, primary, clients, train, seed):
    """Evenly over the clients of a fold and over all clients: no class has more than its share, rounded up twice."""
    if folds > clients:
        folds = clients
    federation = build(
        [{"kind": "k-fold", "folds": folds, "primary": primary}], seed, clients, train, 1
    )
    size, main = train + 1, round(primary * (train + 1))
    counts = np.zeros(CLASSES, dtype=int)
    for client in range(clients):
        counts += np.bincount(
            federation.y[client][federation.split[client] >= 0].numpy(), minlength=CLASSES
        )
    for fold, block in enumerate(np.array_split(np.arange(CLASSES), folds)):
        members = len(range(fold, clients, folds))
        share = np.ceil(members * main / len(block)) + np.ceil(clients * (size - main) / CLASSES)
        assert (counts[block] <= share).all()
