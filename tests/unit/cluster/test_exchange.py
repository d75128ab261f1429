"""What blocks tell each other, and what is stored of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from coterie.cluster.exchange import (
    BlockExchange,
    BlockInterrupted,
    BlockLinks,
    Postbox,
    merge_snapshots,
    select_messages,
)
from coterie.errors import ExchangeError
from coterie.exchange.base import Message, Reply, ReplyForm
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng

OWNER = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)


def two() -> list[BlockExchange]:
    """Blocks of clients 0, 1, 2 and of 3, 4."""
    boxes = [Postbox(2), Postbox(2)]
    links = [BlockLinks(number, [box.put for box in boxes], boxes[number]) for number in range(2)]
    return [
        BlockExchange(links[n], (n == OWNER).nonzero().flatten(), OWNER, server=False)
        for n in range(2)
    ]


def published(ids: torch.Tensor) -> Message:
    """Models that tell whose they are."""
    return Message(ids[:, None].float().expand(-1, 4).clone(), {"samples": ids.float()})


def test_a_block_is_told_what_it_reads_and_no_more():
    """Client 0 reads 4; client 3 reads 4 too, in its own block: one row of 16 bytes, and its field, crosses."""
    blocks = two()
    wanted = [torch.tensor([[4], [-1], [-1]]), torch.tensor([[4], [-1]])]

    def pull(number: int) -> torch.Tensor:
        one = blocks[number]
        one.begin_round(Rng(0).at_round(0))
        one.set_active(one.own.ids)
        inbox = one.pull(published(one.own.ids), wanted[number])
        return inbox.table

    with ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(pull, range(2)))
    assert [table[:, 0].tolist() for table in tables] == [[4], [4]]
    # the id that is wanted; the model and its samples
    assert [one.links.sent for one in blocks] == [8, 16 + 4]


def test_messages_of_clients_that_are_not_there_are_left_out():
    board = Message(torch.arange(3.0)[:, None], {}, torch.tensor([7, 2, 5]))
    found = select_messages(board, torch.tensor([1, 2, 7, 9]))
    assert found is not None
    assert found.ids is not None
    assert found.ids.tolist() == [2, 7]
    assert found.params.flatten().tolist() == [1, 0]
    assert select_messages(board, torch.tensor([4])) is None
    assert select_messages(board, torch.tensor([], dtype=torch.int64)) is None
    assert select_messages(None, torch.tensor([2])) is None


def test_who_waits_for_a_block_that_has_ended_is_released():
    box, raised = Postbox(2), list[str]()

    def wait() -> None:
        try:
            box.collect((0, 0, "wanted"))
        except BlockInterrupted as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    box.close()
    thread.join(60)
    assert raised == ["another block of the population has ended"]


def test_what_comes_twice_is_read_once_and_not_kept():
    """Ray sends again what it cannot tell has arrived."""
    box = Postbox(2)
    for sender in (0, 1, 1):
        box.put((3, 0, "wanted"), sender, sender)
    assert box.collect((3, 0, "wanted")) == [0, 1]
    box.put((3, 0, "wanted"), 1, 1)
    assert box.parts == {}


def test_snapshots_of_blocks_are_that_of_one_process_and_are_parted_again():
    """Clients 1 and 3 stop after a round; in the next, 2 takes no part, and nobody of the second block."""
    whole, blocks = InMemory(torch.arange(5), 5), two()
    nobody = torch.full((1, 1), -1)
    for index, active in enumerate(([0, 1, 2, 3, 4], [0])):
        whole.begin_round(Rng(0).at_round(index))
        whole.set_active(torch.tensor(active))
        whole.pull(published(torch.tensor(active)), nobody.expand(len(active), 1))

        def act(number: int, index: int = index, active: list[int] = active) -> None:
            one, mine = (
                blocks[number],
                torch.tensor([i for i in active if OWNER[i] == number], dtype=torch.int64),
            )
            one.begin_round(Rng(0).at_round(index))
            if len(mine):
                one.set_active(mine)
                one.pull(published(mine), nobody.expand(len(mine), 1))
            else:
                one.skip_round(1)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(act, range(2)))
        if index == 0:
            for client in (1, 3):
                for one in (whole, blocks[int(OWNER[client])]):
                    one.retire_clients(torch.tensor([client]), torch.full((1, 4), 50.0 + client))
    expected = whole.snapshot()
    found = merge_snapshots([one.snapshot() for one in blocks])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["last.0.ids"].tolist() == [0, 1, 3]
    again = two()
    for one in again:
        one.restore(expected)
    parted = merge_snapshots([one.snapshot() for one in again])
    assert all(torch.equal(parted[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3)])
def test_parts_are_told_in_the_order_of_the_blocks(sizes):
    boxes = [Postbox(2), Postbox(2)]
    links = [BlockLinks(number, [box.put for box in boxes], boxes[number]) for number in range(2)]

    def swap(number: int) -> list[int]:
        parts = [torch.full((size,), number) for size in sizes]
        return [
            int(part.sum())
            for part in links[number].all_to_all((0, 0, "x"), parts)
            if isinstance(part, torch.Tensor)
        ]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(swap, range(2))) == [[0, sizes[0]], [0, sizes[1]]]


def test_rows_of_the_cohort_are_gathered_in_the_order_of_its_ids():
    """Twice in a round, also where nobody of a block takes part: what it passes then has no width that counts."""
    blocks = two()

    def gathered(number: int) -> list[list[float]]:
        one, found = blocks[number], list[list[float]]()
        one.begin_round(Rng(0).at_round(0))
        for active in ([[2, 0], [4]], [[], [3]], [[], []]):
            ids = torch.tensor(active[number], dtype=torch.int64)
            one.set_active(ids)
            rows = (
                ids[:, None].double().expand(-1, 2)
                if len(ids)
                else torch.zeros(0, 1, dtype=torch.float64)
            )
            found.append(one.gather(rows)[:, -1].tolist())
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(gathered, range(2))) == [[[0, 2, 4], [3], []]] * 2


def test_readers_that_cannot_be_are_refused_before_anything_is_sent():
    one = two()[0]
    one.begin_round(Rng(0).at_round(0))
    one.set_active(one.own.ids)
    for peers in (torch.tensor([[5], [-1], [-1]]), torch.tensor([[0], [-1], [-1]])):
        with pytest.raises(ExchangeError):
            one.pull(published(one.own.ids), peers)
    assert one.links.sent == 0


@pytest.mark.parametrize("models", [1, 2])
def test_an_answer_of_another_form_than_its_method_expects_is_refused_in_every_block(models):
    """As in one process: two models for the one that is expected."""
    blocks = two()

    def ask(number: int) -> list[list[float]]:
        one = blocks[number]
        one.begin_round(Rng(0).at_round(0))
        one.set_active(one.own.ids)
        message = replace(published(one.own.ids), expects=ReplyForm(1))

        def rule(shared, whole):
            return shared, Reply.to_every_client(whole.params[3 : 3 + models], len(whole))

        inbox = one.ask_server(message, rule, None)[1]
        return inbox.table[inbox.index[:, 0]][:, 0].tolist()

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, number) for number in range(2)]
        if models == 1:
            assert [one.result() for one in answers] == [[3.0] * 3, [3.0] * 2]
            return
        for one in answers:
            with pytest.raises(ExchangeError, match=r"has 2 models .* expects 1"):
                one.result()
