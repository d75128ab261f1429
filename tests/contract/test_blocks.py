"""A population that is hosted in blocks ends with the bytes of `simulate`, with every method."""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.selection import first_only, full, one_of_each_family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.cluster import blocks
from coterie.cluster.blocks import BlockDied, BlockSpec, ThreadBlocks, simulate_in_blocks
from coterie.cluster.exchange import BlockExchange
from coterie.errors import ConfigError
from coterie.exchange.attacking import AttackContext
from coterie.functional.selection import PeerKnowledge
from coterie.methods import METHODS
from coterie.methods.base import list_tensors
from coterie.rng import Rng
from coterie.simulation import _memory
from coterie.simulation.run import Note, Run, simulate
from coterie.testing import tiny_federation, tiny_settings

from .test_methods import SETTINGS

FILES = ("checkpoint.safetensors", "metrics.parquet", "edges.parquet")
HARD: dict[str, Any] = {"rounds": 3, "participation": 0.5, "patience": 1, "eval_every": 1}
"""Few take part, so that in many rounds nobody of a block does; who stops early is still read."""
LITTLE = {"kind": "a-little-is-enough", "clients": [1, 4]}
OWN = {"kind": f"{__name__}:farthest", "clients": [1, 5]}


def farthest(seen: AttackContext) -> torch.Tensor:
    """An attack that depends on all attackers, and on all honest clients of the exchange."""
    honest = seen.honest.sum(0) if len(seen.honest) else 0.0
    return seen.models.cumsum(0) - honest + seen.ids[:, None]


def returning(known: PeerKnowledge) -> torch.Tensor:
    """A selection rule by all that a client knows of who was read."""
    return known.noise + known.count + 0.1 * known.age


def small() -> nn.Module:
    """A network of one hidden layer."""
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def of(kind: str) -> Any:
    """The method, with settings that suit six clients."""
    if kind == "dac with tables":
        return METHODS["dac"](num_peers=2, table=3)
    return METHODS[kind](**SETTINGS.get(kind, {}))


def same(one: Run, other: Run) -> bool:
    """Whether two runs have the same models, tables and files."""
    assert one.folder is not None
    assert other.folder is not None
    assert torch.equal(one.params, other.params)
    assert one.metrics.equals(other.metrics)
    assert one.edges.equals(other.edges)
    unequal = [
        name
        for name in FILES
        if (one.folder / name).read_bytes() != (other.folder / name).read_bytes()
    ]
    assert not unequal
    return True


def compare(folder: Path, kind: str, splits: Sequence[Any], **changes: Any) -> Run:
    """Run a method in one process and in each of several splits, and compare them."""
    settings, data = tiny_settings(**changes), tiny_federation()
    whole = simulate(
        data, of(kind), model=small, settings=settings, seed=3, folder=folder / "whole"
    )
    for number, sizes in enumerate(splits):
        where = folder / str(number)
        split = simulate_in_blocks(
            data,
            of(kind),
            model=small,
            settings=settings,
            seed=3,
            folder=where,
            blocks=sizes,
            start=ThreadBlocks.start,
        )
        assert same(whole, split)
    return whole


@pytest.mark.parametrize("kind", one_of_each_family([*sorted(METHODS), "dac with tables"]))
def test_every_method_ends_with_the_bytes_of_one_process(tmp_path: Path, kind: str):
    compare(tmp_path, kind, [[1, 4, 1]], **HARD, engine="loop")


class LargestStorage(TorchDispatchMode):
    """Notes the largest storage, in bytes, that any operation reads or writes; one in each thread."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, out)):
            if isinstance(one, torch.Tensor):
                self.seen.append(one.untyped_storage().nbytes())
        return out


@pytest.mark.filterwarnings("ignore:the vmap engine is used")
@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"table": 16, "similarity": "cos_weight"}, True),
        ({"table": 16, "similarity": "cos_weight", "sketch": 8, "num_candidates": 6}, True),
        full({"table": 16, "explore": 1}, True),
        ({"table": 16, "similarity": "cos_weight", "selection": f"{__name__}:returning"}, True),
        ({"kind": "random", "selection": f"{__name__}:returning"}, True),
        # What the test would notice: a memory of all pairs.
        ({"similarity": "cos_weight"}, False),
    ],
)
def test_with_tables_nothing_holds_a_byte_for_each_pair(
    tmp_path: Path, changes: dict[str, Any], fits: bool
):
    """1,000 clients in two blocks: no tensor of a block or of the driver has 500 x 1,000 bytes."""
    clients, seen = 1000, list[int]()
    make = cast(Any, METHODS[changes.get("kind", "dac")])
    options = {name: value for name, value in changes.items() if name != "kind"}

    @contextmanager
    def start(given: Iterable[BlockSpec]) -> Iterator[ThreadBlocks]:
        with ThreadBlocks.start(given) as crew:
            before = crew._pool
            crew._pool = ThreadPoolExecutor(2, initializer=LargestStorage(seen).__enter__)
            yield crew
            before.shutdown()

    with LargestStorage(seen):
        run = simulate_in_blocks(
            tiny_federation(clients, 4, train=4, validation=2),
            make(num_peers=2, **options),
            model=lambda: nn.Linear(4, 3),
            settings=tiny_settings(rounds=2, engine="vmap", check=False),
            folder=tmp_path / "run",
            blocks=2,
            start=start,
        )
    assert len(run.params) == clients
    assert len(seen) > 1000
    assert (max(seen) < clients // 2 * clients) == fits


def some(*more: str) -> list[Any]:
    """All methods, with each of some words; in `make test` three of them."""
    cases = []
    for kind in sorted(METHODS):
        for words in [(word,) for word in more] or [()]:
            is_fast = kind in ("dac", "fedavg", "ifca")
            cases.append(pytest.param(kind, *words) if is_fast else full(kind, *words, slow=True))
    return cases


@pytest.mark.full
@pytest.mark.parametrize("kind", some())
def test_the_number_of_blocks_changes_nothing(tmp_path: Path, kind: str):
    compare(tmp_path, kind, [1, 3, 6], **HARD, engine="loop")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "engine"), some("vmap", "compiled"))
@pytest.mark.filterwarnings("ignore:the vmap engine is used")
def test_so_it_does_with_every_engine(tmp_path: Path, kind: str, engine: str):
    compare(tmp_path, kind, [[1, 4, 1]], rounds=2, engine=engine, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "changes"),
    first_only(
        [
            (
                "dac",
                {"acceptance": {"worse": 1.0, "clip": 0.5, "samples": 0.5}, "participation": 0.5},
            ),
            ("random", {"shared": ["0.*"], "patience": 1, "stopped_broadcast": "last"}),
            (
                "pens",
                {
                    "order": "train_first",
                    "evaluate": "final",
                    "metrics": ["maxima"],
                    "eval_every": 1,
                },
            ),
            (
                "ifca",
                {"metrics": ["clusters", "reductions", "balanced_accuracy", "global_accuracy"]},
            ),
            ("fedavg", {"metrics": ["auroc"], "eval_every": 2, "init": "per_client"}),
            (
                "random",
                {
                    "attacks": [
                        {"kind": "copy", "clients": [1, 4]},
                        {"kind": "noise", "clients": [2]},
                    ]
                },
            ),
            (
                "sosicfl",
                {
                    "metrics": ["gradient_variance", "composed_gradient_variance"],
                    "participation": 0.5,
                },
            ),
            (
                "fedgwc",
                {
                    "metrics": ["interaction_change", "gradient_variance", "clusters"],
                    "participation": 0.5,
                },
            ),
            ("ifca", {"metrics": ["gradient_variance"], "participation": 0.3}),
            (
                "panm-loss",
                {"attacks": [LITTLE, {"kind": "copy", "clients": [0]}], "participation": 0.5},
            ),
            ("dac", {"attacks": [OWN], "participation": 0.5}),
            ("fedavg", {"attacks": [LITTLE], "participation": 0.5}),
            (
                "random",
                {"attacks": [{"kind": OWN["kind"], "clients": [0, 2, 3, 5]}], "participation": 0.5},
            ),
            ("panm-grad", {"new_clients": 2, "new_client_rounds": 2}),
            ("panm-loss", {"record_similarities": True}),
            ("fedavg", {"new_clients": 2, "new_client_rounds": 2, "new_client_others": "training"}),
        ],
        8,
    ),
)
def test_settings_of_a_run_change_nothing(tmp_path: Path, kind: str, changes: dict[str, Any]):
    sizes = [[1, 2, 1]] if "new_clients" in changes else [[2, 1, 3]]
    compare(tmp_path, kind, sizes, engine="loop", **changes)


@pytest.mark.slow
def test_a_run_in_blocks_goes_on_in_one_process_and_the_reverse(tmp_path: Path):
    """After the second of four rounds, while somebody has stopped already."""
    data, short, long = tiny_federation(), dict(HARD, rounds=2), dict(HARD, rounds=4)
    for kind in ("dac", "fedgwc"):
        runs = dict[str, Run]()
        for name, sizes in (
            ("whole", (None, None)),
            ("joined", ([2, 3, 1], None)),
            ("parted", (None, [1, 1, 4])),
        ):
            for rounds, blocks_ in zip((short, long), sizes, strict=True):
                more: dict[str, Any] = {
                    "folder": tmp_path / kind / name,
                    "resume": True,
                    "model": small,
                    "seed": 3,
                }
                settings = tiny_settings(**rounds, engine="loop")
                if blocks_ is None:
                    runs[name] = simulate(data, of(kind), settings=settings, **more)
                else:
                    hosted: dict[str, Any] = {"blocks": blocks_, "start": ThreadBlocks.start}
                    runs[name] = simulate_in_blocks(
                        data, of(kind), settings=settings, **more, **hosted
                    )
        assert same(runs["whole"], runs["joined"])
        assert same(runs["whole"], runs["parted"])


@pytest.mark.full
@pytest.mark.parametrize("kind", one_of_each_family(sorted(METHODS), slow=True))
def test_a_block_holds_its_rows_and_gets_what_its_clients_read(kind: str):
    """Of what clients remember, a row each, as long as the population where it is of all of them; and no board."""
    crews = list[ThreadBlocks]()

    @contextmanager
    def start(given: Iterable[BlockSpec]) -> Iterator[ThreadBlocks]:
        with ThreadBlocks.start(given) as crew:
            crews.append(crew)
            yield crew

    settings = tiny_settings(rounds=2, engine="loop", patience=1)
    simulate_in_blocks(
        tiny_federation(),
        of(kind),
        model=small,
        settings=settings,
        seed=3,
        blocks=[1, 3, 2],
        start=start,
    )
    for block, ids in zip(crews[0].blocks, ([0], [1, 2, 3], [4, 5]), strict=True):
        state, own = block.loop.state, block.loop.exchange
        assert isinstance(own, BlockExchange)
        assert len(state.params) == len(ids)
        held = [
            *list_tensors(state.memory),
            *list_tensors(state.moments),
            *(tensor for one in block.loop.extensions for tensor in list_tensors(one.state)),
        ]
        assert all(len(tensor) == len(ids) for tensor in held)
        for board in own.own.last.values():
            assert board.ids is not None
            assert set(board.ids.tolist()) <= set(ids)
        assert not own.links.postbox.parts, "everything that came was read"


def test_a_block_that_does_not_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    """Where it would be made: the machine that drives it has room."""
    room = iter([2**40, 2**40, 1000, 1000])
    monkeypatch.setattr(_memory, "available_bytes", lambda _: next(room))
    with pytest.raises(
        ConfigError, match=r"needs about .* for models of others.*; found 1000 bytes"
    ):
        simulate_in_blocks(
            tiny_federation(),
            of("dac"),
            model=small,
            settings=tiny_settings(),
            blocks=3,
            start=ThreadBlocks.start,
        )
    monkeypatch.setattr(_memory, "available_bytes", lambda _: 1000)
    with pytest.raises(
        ConfigError, match=r"for models, .* for the tables of results; found 1000 bytes"
    ):
        simulate_in_blocks(
            tiny_federation(),
            of("dac"),
            model=small,
            settings=tiny_settings(),
            blocks=3,
            start=ThreadBlocks.start,
        )


class Failing:
    """Starts blocks in threads, one of which dies in some rounds: the first time that each comes.

    Args:
        rounds: in which one dies.
    """

    def __init__(self, rounds: Iterable[int]) -> None:
        self.left, self.starts, self.done = list(rounds), 0, list[int]()

    @contextmanager
    def start(self, given: Iterable[BlockSpec]) -> Iterator[ThreadBlocks]:
        """Start blocks, as `ThreadBlocks.start` does."""
        with ThreadBlocks.start(given) as crew:
            self.starts += 1
            each = crew.call_all

            def fragile(name: str, *arguments: Any) -> list[Any]:
                if name == "run_round":
                    self.done.append(arguments[0][0])
                    if self.left and arguments[0][0] == self.left[0]:
                        self.left.pop(0)
                        crew.close()
                        raise BlockDied("a block died")
                return each(name, *arguments)

            crew.call_all = fragile
            yield crew


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dac", "fedavg", "ifca"])
def test_a_dead_block_costs_the_rounds_since_the_last_checkpoint(tmp_path: Path, kind: str):
    """It dies in a round drawn for the method; with a checkpoint after every round none is done twice."""
    data, settings, notes = (
        tiny_federation(),
        tiny_settings(engine="loop", checkpoint_seconds=0),
        list[Note](),
    )
    more: dict[str, Any] = {"model": small, "settings": settings, "seed": 3}
    whole = simulate(data, of(kind), folder=tmp_path / "whole", **more)
    fatal = int(Rng(0).generator(f"deaths.{kind}").integers(0, 4))
    failing = Failing([fatal])
    split = simulate_in_blocks(
        data,
        of(kind),
        folder=tmp_path / "split",
        blocks=2,
        start=failing.start,
        notes=notes.append,
        **more,
    )
    assert same(whole, split)
    assert (failing.starts, failing.done) == (2, sorted([-1, 0, 1, 2, 3, fatal]))
    assert f"a block died; all blocks go on from round {fatal}" in [note.text for note in notes]


def test_without_a_folder_what_dies_is_begun_again():
    data = tiny_federation()
    more: dict[str, Any] = {"model": small, "settings": tiny_settings(engine="loop"), "seed": 3}
    whole, failing = simulate(data, of("dac"), **more), Failing([1, 3])
    again = simulate_in_blocks(data, of("dac"), blocks=2, start=failing.start, **more)
    assert torch.equal(again.params, whole.params)
    assert again.metrics.equals(whole.metrics)
    assert (failing.starts, failing.done) == (3, [-1, 0, 1, -1, 0, 1, 2, 3, -1, 0, 1, 2, 3])


def test_blocks_that_die_again_and_again_are_not_started_for_ever():
    failing = Failing([1] * 9)
    with pytest.raises(BlockDied, match="a block died"):
        simulate_in_blocks(
            tiny_federation(),
            of("dac"),
            model=small,
            settings=tiny_settings(),
            blocks=2,
            start=failing.start,
        )
    assert failing.starts == 3


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "random",
            {"schedule": "sequential"},
            "clients act one after another, which blocks cannot",
        ),
        ("random", {"time": {}}, "blocks do not know the times of each other"),
        (
            "random",
            {"attacks": [LITTLE], "patience": 2},
            "looks at the honest models of all clients, which blocks do",
        ),
    ],
)
def test_what_needs_all_clients_in_one_process_is_refused(
    kind: str, changes: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words):
        simulate_in_blocks(
            tiny_federation(),
            of(kind),
            model=small,
            settings=tiny_settings(**changes),
            blocks=2,
            start=ThreadBlocks.start,
        )


def test_a_block_has_a_client_or_more():
    for sizes, words in ((7, "expected 1 to 6"), ([3, 0, 3], "sizes of 1 or more that are 6")):
        with pytest.raises(ConfigError, match=words):
            blocks.partition_clients(6, sizes)


def test_a_run_in_blocks_is_checked_once_by_its_driver(tmp_path):
    """What blocks train is compared before them, and the run says who has done it."""
    settings = tiny_settings(rounds=1, check=True)
    told: list[Note] = []
    for sizes in (None, 3, 3):  # the last one goes on from what is there
        more: dict[str, Any] = {"settings": settings, "seed": 3, "notes": told.append}
        if sizes is None:
            simulate(
                tiny_federation(), of("fedavg"), model=small, folder=tmp_path / "whole", **more
            )
            assert not told
            continue
        simulate_in_blocks(
            tiny_federation(), of("fedavg"), model=small, folder=tmp_path / "split",
            blocks=sizes, start=ThreadBlocks.start, resume=True, **more,
        )  # fmt: skip
    lines = [one.text for one in told if "checked once by the driver" in one.text]
    assert len(lines) == 1
    found = [
        json.loads((tmp_path / name / "provenance.json").read_text())["check"]
        for name in ("whole", "split")
    ]
    assert found[0]["compared"] == found[1]["compared"]
    assert found[1]["lines"] == [*found[0]["lines"], *lines]
