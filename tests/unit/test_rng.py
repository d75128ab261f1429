import hashlib

import numpy as np
import pytest
import torch

from coterie.rng import EVERYONE, Rng, RngByClient, RoundsDiffer
from coterie.testing.methods import RelabeledRng


def test_streams_differ_in_every_part_of_their_key():
    rng = Rng(1)
    draws = [
        stream.random()
        for stream in (
            rng.generator("a", 0), rng.generator("a", 1), rng.generator("b", 0), rng.at_round(0).generator("a", 0),
            Rng(2).generator("a", 0), rng.generator("a", EVERYONE),
        )
    ]  # fmt: skip
    assert len(set(draws)) == len(draws)


def test_what_a_client_draws_does_not_depend_on_who_is_hosted_beside_it():
    rng = Rng(3).at_round(5)
    whole = rng.gumbel("peers", torch.arange(10), 10)
    part = rng.gumbel("peers", torch.tensor([7, 2]), 10)
    assert torch.equal(part, whole[[7, 2]])
    assert torch.equal(
        rng.draw_keys("k", torch.tensor([4])), rng.draw_keys("k", torch.arange(6))[4:5]
    )
    assert torch.equal(
        rng.uniform("u", torch.tensor([4]), 3), rng.uniform("u", torch.arange(6), 3)[4:5]
    )


def test_gumbel_draws_have_the_mean_and_variance_of_the_standard_gumbel_law():
    draws = Rng(0).gumbel("peers", torch.arange(40), 1000).numpy()
    assert abs(draws.mean() - np.euler_gamma) < 0.03  # 4.6 standard errors
    assert abs(draws.var() - np.pi**2 / 6) < 0.08


def test_foreign_code_draws_reproducibly_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    with Rng(0).temporary_torch_seed("x"):
        first = torch.rand(3)
    with Rng(0).temporary_torch_seed("x"):
        second = torch.rand(3)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())


def test_relabeled_streams_give_the_new_client_the_draws_of_the_old_one():
    relabeled = RelabeledRng(3, 0, (2, 0, 1))
    plain = Rng(3, 0).gumbel("peers", torch.arange(3), 3)
    moved = relabeled.gumbel("peers", torch.arange(3), 3)
    assert moved[0, 1] == plain[2, 0]
    assert moved[2, 2] == plain[1, 1]


def test_gumbel_draws_are_numpys():
    """Computed in one go, but from the same stream."""
    rng = Rng(4, 2)
    expected = np.stack([rng.generator("peers", client).gumbel(size=50) for client in (3, 0)])
    np.testing.assert_allclose(
        rng.gumbel("peers", torch.tensor([3, 0]), 50).numpy(), expected, rtol=1e-14, atol=1e-15
    )


def test_every_client_has_keys_and_draws_of_its_own():
    """Shared ones would give two clients the same dropout masks, crops, noise or random peers."""
    rng, ids = Rng(5).at_round(2), torch.arange(50)
    assert len(rng.draw_keys("dropout", ids).unique()) == len(ids)
    assert len(rng.uniform("peers", ids, 3).flatten().unique()) == 3 * len(ids)


def test_streams_given_in_turn_start_afresh_whatever_was_drawn_before():
    """Of each client by Philox itself; the half of a word and the rest of a buffer are left by the one before."""
    rng = Rng(5).at_round(2)
    word = int.from_bytes(hashlib.sha256(b"peers").digest()[:8], "little")
    for client, stream in zip(
        ids := [7, 0, 7, 3], rng.iterate_generators("peers", ids), strict=True
    ):
        start = {"counter": [0, 0, client + 1, 3], "key": np.array([5, word], dtype=np.uint64)}
        expected = np.random.Generator(np.random.Philox(**start))
        for draw in (
            lambda one: one.integers(9, size=3, dtype=np.uint32),
            lambda one: one.random(5),
            lambda one: one.permutation(6),
        ):
            assert draw(stream).tolist() == draw(expected).tolist()
        stream.integers(9, dtype=np.uint32)


def test_streams_given_in_turn_are_those_of_the_rounds_and_the_old_ids():
    by_client = RngByClient(3, rounds={4: 1, 2: 6})
    relabeled = RelabeledRng(3, 0, (2, 0, 1))
    for rng, ids in ((by_client, [4, 2]), (relabeled, [0, 2])):
        drawn = [stream.random() for stream in rng.iterate_generators("x", ids)]
        assert drawn == [rng.generator("x", client).random() for client in ids]
    assert (
        next(by_client.iterate_generators("x", [2])).random()
        == Rng(3, 6).generator("x", 2).random()
    )
    with pytest.raises(RoundsDiffer):
        list(by_client.iterate_generators("x", [5]))
