"""Who takes part in a round."""

import threading

import torch

from coterie.exchange.in_memory import InMemory
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.functional import selection
from coterie.rng import Rng


def test_half_a_client_is_rounded_up():
    """0.1 of 25 are 2.5, 0.1 of 35 are 3.5: 3 and 4; the nearest even number would be 2 and 4."""
    assert [selection.cohort_size(members, 0.1) for members in (25, 35)] == [3, 4]


def test_cohort_size_is_the_rounded_share_but_at_least_three():
    """K = 100 gives 10, 25 gives floor(2.5 + 0.5) = 3, 3 gives 3, 2 gives 2; a count is a count."""
    assert [selection.cohort_size(k, 0.1, least=3) for k in (100, 25, 14, 3, 2)] == [10, 3, 3, 3, 2]
    assert [selection.cohort_size(k, 10) for k in (100, 10, 7)] == [10, 10, 7]
    assert selection.cohort_size(7, 1.0) == 7


def test_cohort_has_no_duplicates_and_stays_among_members():
    """Ids ascend, are distinct and are members; the weight of a client that is never wanted keeps it out."""
    noise = torch.from_numpy(Rng(0).generator("cohort").gumbel(size=20))
    members = torch.arange(20) % 2 == 0
    log_weights = torch.where(torch.arange(20) == 4, -1e9, 0.0).double()
    chosen = selection.draw_cohort(noise, 9, log_weights=log_weights, members=members)
    assert chosen.tolist() == [0, 2, 6, 8, 10, 12, 14, 16, 18]


def test_cohort_weights_are_probabilities():
    """With odds 3 to 1 for the first of two clients it is drawn 3/4 of the time (4 standard errors of 4000 draws)."""
    odds = torch.tensor([3.0, 1.0]).double().log()
    draws = Rng(1).generator("cohort").gumbel(size=(4000, 2))
    hits = sum(
        int(selection.draw_cohort(torch.from_numpy(d), 1, log_weights=odds)[0] == 0) for d in draws
    )
    assert abs(hits / 4000 - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5


def test_a_cohort_in_memory_is_computed():
    """One process asks nobody."""
    assert InMemory(torch.arange(3), 3).agree_on_cohort(lambda: torch.tensor([0, 2])).tolist() == [
        0,
        2,
    ]


def test_processes_learn_the_cohort_from_the_server():
    """The process without the server role never computes, and a second choice in a round is another address."""
    office = PostOffice(4, timeout=10.0)
    boxes = [
        Mailbox(office, torch.tensor([0, 1]), server=True),
        Mailbox(office, torch.tensor([2, 3])),
    ]
    seen: dict[int, list[list[int]]] = {}

    def work(which: int) -> None:
        box = boxes[which]
        box.begin_round(Rng(0).at_round(0))
        choices = [torch.tensor([1, 2]), torch.tensor([0, 1, 2, 3])]
        seen[which] = [
            box.agree_on_cohort(lambda c=c: c if which == 0 else torch.tensor([-5])).tolist()
            for c in choices
        ]

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == [[1, 2], [0, 1, 2, 3]]
