"""Pieces of one's own: each check passes on one that keeps its promises, and names the promise that another breaks.

What is broken is what the pages in docs/how-to list; their tables say what these tests read.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.selection import first_only
from torch import nn
from torch.nn import functional

from coterie.data.plan import Shift, assign_clusters
from coterie.functional import aggregation
from coterie.methods import METHODS
from coterie.models.layout import NamedModel
from coterie.rng import EVERYONE, Rng
from coterie.simulation.run import simulate
from coterie.testing import (
    TinyTokens,
    check_aggregation,
    check_model,
    check_partition,
    check_selection,
    check_shift,
    tiny_federation,
    tiny_settings,
    tiny_source,
)

HOW_TO = Path(__file__).resolve().parents[2] / "docs/how-to"
COUNTER = itertools.count(1)
"""What a piece must not use: it says something else at every call."""


def unsaid_rows(page: str, said: Sequence[str]) -> list[str]:
    """Return the messages that a page's table of broken promises lists and no check said; up to numbers."""
    text = (HOW_TO / page).read_text("utf-8")
    [table] = re.findall(
        r"^\| a broken promise \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    messages = re.findall(r"^\|[^|]*\| ([^|]*) \|$", table, re.MULTILINE)
    assert len(messages) > 2
    return [
        row
        for row in messages
        if not any(re.sub(r"\d+", "0", row) in re.sub(r"\d+", "0", one) for one in said)
    ]


def message_of(check: Callable[[Any], Any], piece: Any) -> str:
    """Return what a check says of a broken piece."""
    with pytest.raises(AssertionError) as raised:
        check(piece)
    return str(raised.value)


# ---------------------------------------------------------------- aggregation


def median(received):
    return received.models.median(0).values


def by_samples(received):
    share = received.samples / received.samples.sum()
    return (share[:, None] * received.models).sum(0)


def by_similarity(received):
    share = received.similarity / received.similarity.sum()
    return (share[:, None] * received.models).sum(0)


def forgotten(received):
    received.models.mean(0)


def one_number(received):
    return received.models.mean()


def in_place(received):
    return received.models.mul_(2).mean(0)


def counting(received):
    return received.models.mean(0) + next(COUNTER)


def last(received):
    return received.models[-1]


def divided(received):
    return received.models.mean(0) / 0.0


@pytest.mark.full
@pytest.mark.parametrize("rule", first_only([median, by_samples], slow=True))
def test_an_aggregation_rule_that_keeps_its_promises_passes(rule):
    check_aggregation(rule)


@pytest.mark.slow
def test_a_rule_by_similarity_is_checked_with_dac():
    check_aggregation(by_similarity, similarity=True)


@pytest.mark.slow
def test_whether_the_order_counts_is_the_rules_affair():
    check_aggregation(last, relabel=False)


BROKEN_AGGREGATION: list[tuple[Any, str]] = [
    (
        forgotten,
        r"it returned None; expected the merged model, a tensor of shape \(7,\): is a `return` missing\?",
    ),
    (
        one_number,
        r"it returned float32 of shape \(\); expected the merged model, floats of shape \(7,\)",
    ),
    (in_place, "the rule changed its argument models: copy what you change in place"),
    (counting, "the rule gave two results for the same arguments"),
    (last, "the order of the peers changes the result"),
    (divided, "merged from 1 finite models, the model is not finite"),
    (
        lambda received: received.models[0],
        "is found by its import path: .* defined at the top of a module",
    ),
    ("tests.nowhere:rule", "is found by its import path: .* there is no module"),
]


@pytest.mark.parametrize(("rule", "said"), BROKEN_AGGREGATION)
def test_a_broken_aggregation_rule_is_told_what_it_breaks(rule, said):
    with pytest.raises(AssertionError, match=said):
        check_aggregation(rule)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["random", "fix-topology", "oracle", "dac", "fedavg", "fedprox", "ditto"]
)
def test_the_average_written_as_a_rule_is_the_built_in_one(kind):
    """In float64, up to the order of sums."""
    method: Any = METHODS[kind]
    given = [simulate(tiny_federation(), made, model="linear", settings=tiny_settings(), seed=1).params
             for made in (method(), method(aggregation=by_samples))]  # fmt: skip
    assert torch.allclose(*given, rtol=0, atol=1e-12)


def test_the_rule_of_dac_sees_the_similarities_of_fedsim():
    """`by_similarity` is FedSim where all similarities are positive, as those by loss are."""
    dac: Any = METHODS["dac"]
    settings, federation = tiny_settings(), tiny_federation()
    given = [simulate(federation, dac(num_peers=3, aggregation=one), model="linear", settings=settings, seed=1).params
             for one in ("fedsim", by_similarity)]  # fmt: skip
    assert torch.allclose(*given, rtol=0, atol=1e-12)


def test_pens_merges_by_the_rule_those_that_it_kept():
    pens: Any = METHODS["pens"]
    options = {"num_sampled": 3, "num_kept": 1, "num_peers": 2, "stage_one_rounds": 2}
    given = [simulate(tiny_federation(), made, model="linear", settings=tiny_settings(), seed=1).params
             for made in (pens(**options), pens(**options, aggregation=by_samples))]  # fmt: skip
    assert torch.allclose(*given, rtol=0, atol=1e-12)


def test_a_server_merges_each_cluster_with_enough_updates_by_the_rule():
    """By hand: the median of each column, and a cluster with one update of two stays as it is."""
    params = torch.tensor([[0.0, 9.0], [4.0, 1.0], [2.0, 5.0], [7.0, 7.0]])
    label, empty = torch.tensor([0, 0, 0, 1]), torch.full((2, 2), -1.0)
    merged = aggregation.merge_groups_by_rule(
        median, params, label, torch.ones(4), empty, 2, "median"
    )
    assert merged.tolist() == [[2.0, 5.0], [-1.0, -1.0]]


# ---------------------------------------------------------------- selection


def uniform(known):
    return known.noise


def curious(known):
    return known.noise + 5 * known.similarity - known.count + 0.1 * known.age


def ring(known):
    distance = (torch.arange(len(known.noise)) - known.client) % len(known.noise)
    return -distance.double()


def nobody(known):
    return torch.full_like(known.noise, -torch.inf)


def forgotten_choice(known):
    known.noise.argmax()


def one_peer(known):
    return known.noise[:1]


def sharpened(known):
    return known.noise.mul_(2)


def dizzy(known):
    return known.noise * (-1) ** next(COUNTER)


def undefined(known):
    return known.noise * torch.nan


@pytest.mark.full
@pytest.mark.parametrize("rule", first_only([uniform, curious, nobody], slow=True))
def test_a_selection_rule_that_keeps_its_promises_passes(rule):
    check_selection(rule)


@pytest.mark.slow
def test_a_graph_by_ids_is_allowed_where_it_is_said():
    check_selection(ring, relabel=False)


BROKEN_SELECTION: list[tuple[Any, str]] = [
    (
        forgotten_choice,
        r"it returned None; expected a number for each member, a tensor of shape \(7,\): is a `retu",
    ),
    (one_peer, r"it returned a tensor of shape \(1,\); expected \(7,\), a number for each member"),
    (sharpened, "the rule changed its argument noise: copy what you change in place"),
    (dizzy, "the rule gave two results for the same arguments"),
    (ring, "renaming the members changes the choice"),
    (
        undefined,
        "it returned NaN; expected a number for each member, -inf for one that is not to be read",
    ),
]


@pytest.mark.parametrize(("rule", "said"), BROKEN_SELECTION)
def test_a_broken_selection_rule_is_told_what_it_breaks(rule, said):
    with pytest.raises(AssertionError, match=said):
        check_selection(rule)


def test_the_noise_is_that_of_the_uniform_draw():
    """So a rule that returns it gives the bytes of Random."""
    random: Any = METHODS["random"]
    settings, federation = tiny_settings(), tiny_federation()
    given = [simulate(federation, random(num_peers=2, selection=one), model="linear", settings=settings, seed=1)
             for one in (None, uniform)]  # fmt: skip
    assert torch.equal(given[0].params, given[1].params)
    assert given[0].edges.equals(given[1].edges)


def test_a_ring_is_read_as_it_says():
    random: Any = METHODS["random"]
    run = simulate(
        tiny_federation(),
        random(num_peers=2, selection=ring),
        model="linear",
        settings=tiny_settings(),
    )
    read = {(reader, peer) for reader, peer in run.edges[["reader", "read"]].to_numpy().tolist()}
    assert read == {(i, (i + step) % 6) for i in range(6) for step in (1, 2)}


SEEN: list[tuple[Any, ...]] = []


def noting(known):
    """Read the next two, and note what is known."""
    SEEN.append(
        (
            known.round,
            known.client,
            known.count.tolist(),
            known.age.tolist(),
            known.measured.tolist(),
        )
    )
    return ring(known)


@pytest.mark.parametrize("kind", ["random", "dac"])
def test_a_rule_knows_how_often_and_how_long_ago_a_member_was_read(kind):
    """Client 0 reads 1 and 2 in every round: after t rounds t times each, one round ago; DAC has measured them."""
    SEEN.clear()
    method: Any = METHODS[kind]
    simulate(
        tiny_federation(),
        method(num_peers=2, selection=noting),
        model="linear",
        settings=tiny_settings(rounds=3),
    )
    for round in range(3):
        found = next(entry[2:] for entry in SEEN if entry[:2] == (round, 0))
        age = 1 if round else -1
        measured = kind == "dac" and round > 0
        assert found == (
            [0, round, round, 0, 0, 0],
            [-1, age, age, -1, -1, -1],
            [False, measured, measured, False, False, False],
        )


# ---------------------------------------------------------------- partition


def thirds(samples, num_clients, generator):
    """A third of the samples, those with the last class, to nobody; the others in turn."""
    return np.where(samples.y == 2, -1, generator.permutation(len(samples)) % num_clients)


def by_writer(samples, num_clients, generator):
    return samples.columns["writer"] % num_clients


def unsaid(samples, num_clients, generator):
    np.arange(len(samples)) % num_clients


def half(samples, num_clients, generator):
    return np.arange(len(samples) // 2) % num_clients


def beyond(samples, num_clients, generator):
    return np.arange(len(samples)) % (num_clients + 1)


def lonely(samples, num_clients, generator):
    return np.zeros(len(samples), dtype=int)


def relabeling(samples, num_clients, generator):
    samples.y.zero_()
    return by_writer(samples, num_clients, generator)


def moody(samples, num_clients, generator):
    return (np.arange(len(samples)) + next(COUNTER)) % num_clients


@pytest.mark.parametrize("function", [thirds, by_writer])
def test_a_partition_that_keeps_its_promises_passes(function):
    check_partition(function)


BROKEN_PARTITION: list[tuple[Any, str]] = [
    (unsaid, "returned None; expected the client of each sample: is a `return` missing?"),
    (
        half,
        r"returned int64 of shape \(120,\); expected 240 whole numbers, the client of each sample",
    ),
    (beyond, "returned clients from 0 to 6; expected 0 to 5, or -1 for a sample that nobody gets"),
    (lonely, r"gives client 1 no sample \(5 of 6 clients\)"),
    (relabeling, "the partition changes the samples that it is given"),
    (moody, "the partition gave two results for equal generators"),
    (lambda samples, *_: samples.y, "is found by its import path"),
]


@pytest.mark.parametrize(("function", "said"), BROKEN_PARTITION)
def test_a_broken_partition_is_told_what_it_breaks(function, said):
    with pytest.raises(AssertionError, match=said):
        check_partition(function)


# ---------------------------------------------------------------- shift


@dataclass(frozen=True)
class Dead:
    """Some pixels are black."""

    share: float

    def __call__(self, x):
        return x.masked_fill(
            torch.from_numpy(Rng(0).generator("dead").random(x.shape[1:]) < self.share), 0
        )


@dataclass(frozen=True)
class Brightened:
    """Breaks a promise of transforms."""

    breaks: str

    def __call__(self, x):
        if self.breaks == "input":
            return x.clamp_(max=9)
        if self.breaks == "batch":
            return x - x.amin(0)
        if self.breaks == "type":
            return x.float()
        return x ^ (next(COUNTER) % 2)


class Unhashable:
    """Compares by value, and has no hash."""

    def __eq__(self, other):
        return True

    def __call__(self, x):
        return x


@dataclass(frozen=True)
class Own(Shift):
    """Dead pixels for half of the clients, or a broken promise."""

    kind: ClassVar[str] = "own"
    breaks: str = ""
    share: float = 0.2

    def apply(self, clients, sources, streams):
        if self.breaks == "return":
            return None  # type: ignore[return-value]
        if self.breaks == "kind":
            return len(clients)  # type: ignore[return-value]
        if self.breaks == "data":
            sources[0].train.x.zero_()
        place = assign_clusters(2, len(clients), None, "shuffled", streams(EVERYONE))
        made: Any = Dead(self.share + next(COUNTER)) if self.breaks == "plan" else Dead(self.share)
        if self.breaks == "compare":
            made = lambda x: x  # noqa: E731
        if self.breaks == "hash":
            made = Unhashable()
        if self.breaks in ("input", "batch", "type", "twice"):
            made = Brightened(self.breaks)
        out = tuple(
            c.plant_cluster(
                p, "dead" if p else "whole", transforms=(*c.recipe.transforms, *((made,) * p))
            )
            for c, p in zip(clients, place, strict=True)
        )
        return out[1:] if self.breaks == "number" else out


class Undecorated(Own):
    """Has a field that is none."""

    kind = "undecorated"
    strength: float = 1.0


@pytest.mark.parametrize("shift", [Own(), Own(share=0.5)])
def test_a_shift_that_keeps_its_promises_passes(shift):
    check_shift(shift)


def test_the_built_in_shifts_keep_them_too():
    from coterie.data import shifts

    for shift in (
        shifts.Rotation(),
        shifts.Visual(),
        shifts.Labels([[0, 1], [2]]),
        shifts.Natural("writer"),
    ):
        source = tiny_source(480) if shift.kind == "natural" else tiny_source()
        check_shift(shift, source=source)


BROKEN_SHIFT: list[tuple[Any, str]] = [
    ("return", "apply returned None; expected the clients: is a `return` missing?"),
    ("kind", "apply returned 6; expected a tuple of clients"),
    ("number", "apply returned 5 clients; expected the 6 that it was given"),
    ("data", "apply changed the dataset"),
    ("plan", "apply gave two plans for the same random streams"),
    ("compare", "apply gave two plans for the same random streams"),
    ("hash", "cannot be called or hashed; expected a frozen dataclass with"),
    ("input", "changes its input in place"),
    ("twice", "gave two results for the same inputs"),
    ("batch", "of a sample depends on the others of its batch"),
    ("type", r"returned torch.float32 of shape \(\d+, 1, 6, 6\); expected torch.uint8 of shape"),
]


@pytest.mark.parametrize(("breaks", "said"), BROKEN_SHIFT)
def test_a_broken_shift_is_told_what_it_breaks(breaks, said):
    with pytest.raises(AssertionError, match=said):
        check_shift(Own(breaks))


def test_a_field_that_is_none_is_named():
    with pytest.raises(AssertionError, match="strength is no field: write @dataclass"):
        check_shift(Undecorated())


def test_a_shift_that_no_file_can_name_is_refused():
    @dataclass(frozen=True)
    class Inner(Own):
        """Made inside a function."""

    with pytest.raises(
        AssertionError, match=r"a study file can name it: .* defined at the top of a module"
    ):
        check_shift(Inner())


# ---------------------------------------------------------------- models


class Net(nn.Sequential):
    """A small network."""

    def __init__(self, features, outputs, width=4):
        layers = (
            nn.Linear(math.prod(features), width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        super().__init__(nn.Flatten(), *layers, nn.Linear(width, outputs))


def made(outputs, breaks=""):
    """Return a network, or one that breaks a promise."""
    if breaks == "return":
        return None
    if breaks == "weights":
        net = nn.Linear(4, outputs)
        net.weight.data.fill_(0.1 * next(COUNTER))
        return net
    return Odd(outputs, breaks)


class Odd(nn.Module):
    """Breaks a promise of models."""

    def __init__(self, outputs, breaks):
        super().__init__()
        self.layer, self.breaks, self.calls = nn.Linear(4, outputs), breaks, 0

    def forward(self, x):
        if self.breaks == "random":
            x = x * float(np.random.default_rng().random())
        if self.breaks == "dropout":
            x = functional.dropout(x, 0.5, self.training)
        if self.breaks == "state":
            self.calls += 1
            x = x * (1 + 0.01 * self.calls)
        return self.layer(x)


def check_broken_model(breaks):
    check_model(NamedModel(f"{made.__module__}:made", {"breaks": breaks}), engines=("loop",))


@pytest.mark.full
def test_a_model_that_keeps_its_promises_passes_and_is_told_what_runs_it():
    said = check_model(f"{Net.__module__}:Net", engines=("loop", "vmap"))
    assert said["loop"].startswith("loop, one client after another")
    assert said["vmap"].startswith("vmap, many clients at once")
    assert set(said) == {"loop", "vmap", "auto"}
    check_model(Odd(3, ""), engines=("loop",))
    check_model(Odd(3, "dropout"), engines=("loop",))  # draws from torch's generator


def test_a_model_of_tokens_is_checked_on_its_own_data_and_loss():
    settings = tiny_settings(rounds=1, loss="tokens")
    said = check_model(
        TinyTokens,
        federation=tiny_federation(kind="tokens"),
        settings=settings,
        engines=("loop", "vmap"),
    )
    assert said["vmap"].startswith("vmap")


BROKEN_MODEL: list[tuple[Any, str]] = [
    ("return", "returned NoneType; expected a torch.nn.Module: is a `return` missing?"),
    ("weights", "made again from the same random stream it has other weights"),
    ("random", "trained again with the same seed it is another model"),
    ("state", "trained with other clients it is another model"),
]


@pytest.mark.parametrize(("breaks", "said"), BROKEN_MODEL)
def test_a_broken_model_is_told_what_it_breaks(breaks, said):
    with pytest.raises(AssertionError, match=said):
        check_broken_model(breaks)


def test_a_model_that_cannot_be_trained_on_the_data_is_told_so():
    with pytest.raises(AssertionError, match=r"it can be trained on the data: .* Linear"):
        check_model(lambda: nn.Linear(5, 3))


def test_the_pages_list_what_the_checks_say():
    """Each message in their tables is one that a broken piece above is told."""
    rules = [message_of(check_aggregation, rule) for rule, _ in BROKEN_AGGREGATION]
    rules += [message_of(check_selection, rule) for rule, _ in BROKEN_SELECTION]
    data = [message_of(check_partition, function) for function, _ in BROKEN_PARTITION]
    data += [
        message_of(lambda breaks: check_shift(Own(breaks)), breaks) for breaks, _ in BROKEN_SHIFT
    ]
    models = [message_of(check_broken_model, breaks) for breaks, _ in BROKEN_MODEL]
    assert unsaid_rows("own-aggregation.md", rules) == []
    assert unsaid_rows("own-shift.md", data) == []
    assert unsaid_rows("own-model.md", models) == []
