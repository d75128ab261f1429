"""What holds blocks together: they end together, and what one sends another may not change afterwards."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import pandas as pd
import pytest
import torch

from coterie.cluster import blocks
from coterie.cluster.blocks import ThreadBlocks, partition_clients, simulate_in_blocks
from coterie.cluster.exchange import BlockInterrupted, Postbox
from coterie.data.federation import Truth
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.methods import METHODS, Local
from coterie.simulation.run import RunPlan, simulate
from coterie.testing import tiny_federation, tiny_settings

ADDRESS = (0, 0, "part")


@dataclass
class Member:
    """A block that waits for the parts of both, or fails."""

    box: Postbox
    fails: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def collect(self, more: int) -> list[int]:
        try:
            if self.fails is not None:
                raise self.fails
            return [part + more for part in self.box.collect(ADDRESS)]
        finally:
            self.ended.set()


@pytest.fixture
def crew() -> Iterator[ThreadBlocks]:
    """Two blocks in threads; a test that fails leaves no thread that waits."""
    made = object.__new__(ThreadBlocks)
    made.boxes = [Postbox(2), Postbox(2)]
    made._pool = ThreadPoolExecutor(2)
    made.blocks = [Member(box) for box in made.boxes]
    yield made
    for box in made.boxes:
        box.close()
    made._pool.shutdown()


def test_a_function_of_every_block_gets_its_own_arguments(crew):
    for number, box in enumerate(crew.boxes):
        for sender in (1, 0):
            box.put(ADDRESS, sender, 10 * number + sender)
    assert crew.call_all("collect", [100, 200]) == [[100, 101], [210, 211]]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [ValueError("no data"), KeyboardInterrupt()])
def test_the_error_of_a_block_ends_those_that_wait_for_it(crew, failing, error):
    """And is what is raised, not that the others were interrupted."""
    crew.blocks[failing].fails = error
    found = []

    def call() -> None:
        try:
            crew.call_all("collect", [0, 0])
        except BaseException as caught:
            found.append(caught)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert found == [error]
    assert all(one.ended.is_set() for one in crew.blocks)


def test_blocks_that_wait_are_released_at_the_end(crew):
    waiting = crew._pool.submit(crew.blocks[0].collect, 0)
    crew.close()
    with pytest.raises(BlockInterrupted, match="another block of the population has ended"):
        waiting.result(10)


def test_threads_of_blocks_end_with_their_context(monkeypatch):
    """Also those that wait for parts."""
    monkeypatch.setattr(blocks, "Block", lambda _spec, links: Member(links.postbox))
    specs = [object.__new__(blocks.BlockSpec) for _ in range(2)]
    for number, spec in enumerate(specs):
        object.__setattr__(spec, "number", number)
    with ThreadBlocks.start(specs) as crew:
        assert [one.box for one in crew.blocks] == crew.boxes
        waiting = crew._pool.submit(crew.blocks[0].collect, 0)
    assert isinstance(waiting.exception(10), BlockInterrupted)
    with pytest.raises(RuntimeError, match="after shutdown"):
        crew._pool.submit(print)


def test_a_part_is_a_copy_with_all_that_is_in_it():
    box = Postbox(1)
    message = Message(torch.ones(2, 3), {"samples": torch.tensor([4, 5])})
    blocks._deliver_copy(box, ADDRESS, 0, message)
    message.params.zero_()
    message.fields["samples"].zero_()
    (found,) = box.collect(ADDRESS)
    assert (found.params.tolist(), found.fields["samples"].tolist()) == ([[1.0] * 3] * 2, [4, 5])


@pytest.mark.filterwarnings("ignore")
def test_clients_that_diverge_are_those_of_one_process():
    """Of six clients the inputs of number 2 are so large that its model is not finite."""
    data = tiny_federation()
    data = replace(data, x=data.x.clone())
    data.x[2] *= 1e37
    given = {"model": "linear", "settings": tiny_settings(rounds=2, dtype="float32"), "seed": 3}
    whole = simulate(data, Local(), **given)
    parted = simulate_in_blocks(data, Local(), **given, blocks=[4, 2], start=ThreadBlocks.start)
    assert whole.diverged == parted.diverged == (2,)
    assert whole.facts() == parted.facts()
    assert "diverged" in whole.facts()[1]
    pd.testing.assert_frame_equal(whole.metrics, parted.metrics)


@pytest.mark.parametrize(("kind", "told"), [("oracle", True), ("local", False)])
def test_a_block_is_made_of_its_own_clients_and_of_the_tests_that_they_use(kind, told):
    """Only a method that asks for the planted clusters gets them."""
    data = tiny_federation()
    data = replace(data, truth=Truth(torch.tensor([0, 1, 0, 1, 0, 1]), (), ()))
    plan = RunPlan(data, METHODS[kind](), "linear", tiny_settings(), 3, [])
    rows = [torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])]
    specs = list(blocks.iterate_block_specs(plan, rows))
    assert [spec.number for spec in specs] == [0, 1]
    for spec, mine in zip(specs, rows, strict=True):
        part = spec.plan.federation
        assert part.ids.tolist() == mine.tolist()
        assert spec.owner.tolist() == [0, 1, 1, 0, 1, 1]
        assert spec.pool is None
        used = [part.tests[place] for place in part.test_of.tolist()]
        assert used == [data.tests[place] for place in data.test_of[mine].tolist()]
        assert len(part.tests) == len({*part.test_of.tolist()})
        if told:
            assert part.truth.cluster.tolist() == [row % 2 for row in mine.tolist()]
        else:
            assert part.truth is None


@pytest.mark.filterwarnings("ignore")
def test_clients_whose_data_leave_a_metric_undefined_are_those_of_one_process(tmp_path):
    """Client 4 has test samples of one class alone: of it there is no area under a curve."""
    data = tiny_federation()
    tests = list(data.tests)
    number = int(data.test_of[4])
    own = replace(tests[number], y=torch.zeros_like(tests[number].y))
    test_of = data.test_of.clone()
    test_of[4] = len(tests)
    data = replace(data, tests=(*tests, own), test_of=test_of)
    settings = replace(tiny_settings(rounds=2), metrics=("auroc",))
    told = []
    for folder, run in (
        ("whole", simulate),
        ("parted", partial(simulate_in_blocks, blocks=[4, 2], start=ThreadBlocks.start)),
    ):
        run(data, Local(), model="linear", settings=settings, seed=3, folder=tmp_path / folder)
        told.append(json.loads((tmp_path / folder / "provenance.json").read_text())["undefined"])
    assert told[0] == told[1]
    assert "4" in str(told[0]["auroc"])


@pytest.mark.parametrize(("clients", "blocks"), [(7, 1), (7, 3), (7, 6), (7, 7), (1, 1)])
def test_clients_are_partitioned_in_order_into_blocks_of_about_one_size(clients, blocks):
    found = partition_clients(clients, blocks)
    assert torch.cat(found).tolist() == list(range(clients))
    sizes = [len(rows) for rows in found]
    assert len(sizes) == blocks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("blocks", [0, 8, -1, [], [7, 0], [3, 3], [4, 4]])
def test_blocks_without_a_client_or_of_other_clients_are_refused(blocks):
    with pytest.raises(ConfigError, match="blocks"):
        partition_clients(7, blocks)
