"""The calls of one process, from those of its blocks."""

import pytest
import torch

from coterie.cluster.block_records import BlockRecord, RecordCall, merge_calls
from coterie.errors import CoterieError
from coterie.runtime.record import Record


def test_calls_that_only_some_blocks_make_are_in_the_order_of_one_process():
    """The first block reports no loss (nobody of it took part), the second nobody who diverged."""

    def told(ids, *calls):
        one, at = BlockRecord(5), torch.tensor(ids)
        for name, value in calls:
            one.add_metrics(0, at, "train", "current", {name: torch.tensor(value)})
        return one.take_calls()

    first = told([0, 1], ("diverged", [1.0, 1.0]), ("accuracy", [0.1, 0.2]))
    second = told([2, 3], ("loss", [5.0, 6.0]), ("accuracy", [0.3, 0.4]))
    third = told([4], ("loss", [7.0]), ("diverged", [1.0]), ("accuracy", [0.5]))
    found = merge_calls([first, second, third])
    assert [sorted(entry.values) for entry in found] == [["loss"], ["diverged"], ["accuracy"]]
    assert [entry.ids.tolist() for entry in found] == [[2, 3, 4], [0, 1, 4], [0, 1, 2, 3, 4]]
    assert found[2].values["accuracy"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_orders_that_do_not_agree_are_refused():
    one = [
        RecordCall("metrics", 0, "train", "current", values={name: torch.zeros(0)})
        for name in ("a", "b")
    ]
    with pytest.raises(CoterieError, match="in different orders"):
        merge_calls([one, one[::-1]])


def test_reads_of_blocks_with_unequal_numbers_of_slots_make_one_table():
    """As one process would have written them: an unused slot leaves no row."""
    infos = [
        {
            "peers": torch.tensor([[3], [2]]),
            "weights": torch.tensor([[0.5], [0.0]]),
            "bytes": torch.tensor([[8], [8]]),
        },
        {
            "peers": torch.tensor([[0, 1], [-1, 2]]),
            "weights": torch.tensor([[0.2, 0.3], [0.0, 0.4]]),
            "bytes": torch.tensor([[8, 8], [0, 8]]),
        },
    ]
    for info in infos:
        info["arrived"] = info["peers"] >= 0
        info["similarities"] = info["peers"] / 10
    blocks = [BlockRecord(4), BlockRecord(4)]
    for block, info, ids in zip(blocks, infos, ([0, 1], [2, 3]), strict=True):
        block.add_edges(0, torch.tensor(ids), info)
    record = Record(torch.zeros(4, dtype=torch.int64), similarities=True)
    for entry in merge_calls([block.take_calls() for block in blocks]):
        record.add_edges(entry.round, entry.ids, entry.values)
    table = record.edges
    assert table[["reader", "read"]].to_numpy().tolist() == [[0, 3], [1, 2], [2, 0], [2, 1], [3, 2]]
    assert table["weight"].tolist() == pytest.approx([0.5, 0.0, 0.2, 0.3, 0.4])
    assert table["purpose"].tolist() == ["mix", "probe", "mix", "mix", "mix"]
    assert table["similarity"].tolist() == pytest.approx([0.3, 0.2, 0.0, 0.1, 0.2])
    assert table["probability"].isna().all()


def test_clients_without_a_value_are_put_together():
    blocks = [BlockRecord(3), BlockRecord(3)]
    blocks[0].add_undefined(torch.tensor([0]), {"auroc": torch.tensor([0.5])})
    blocks[1].add_undefined(torch.tensor([1, 2]), {"auroc": torch.tensor([torch.nan, 0.5])})
    (found,) = merge_calls([block.take_calls() for block in blocks])
    assert found.ids[found.values["auroc"]].tolist() == [1]
