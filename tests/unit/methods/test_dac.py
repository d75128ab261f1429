"""DAC and its options."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from coterie.errors import ConfigError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.functional import similarity
from coterie.methods.dac import Dac, DacNoTwoHop, DacVar, PeerSimilarities
from coterie.papers.dac import PublishedDac, PublishedDacVar
from coterie.testing import run_method, tiny_federation, tiny_settings

IDS = torch.arange(4)


def acquaintance(similarities, status):
    status = torch.tensor(status, dtype=torch.int8)
    return PeerSimilarities(
        torch.tensor(similarities).double(),
        status,
        (status == 2).long(),
        torch.zeros(len(status), 0),
    )


def test_measured_is_read_and_counts_add_up(play):
    """Invariant 17: status 2 exactly where c_ij > 0, and a row of c sums to m x rounds."""
    run = play(Dac(num_peers=2)).steps(7)
    memory = run.memory
    assert torch.equal(memory.status == 2, memory.count > 0)
    assert memory.count.sum(1).tolist() == [14] * 6
    assert not memory.count.diagonal().any()
    assert not memory.status.diagonal().any()


@pytest.mark.option("DacNoTwoHop.two_hop", False)
def test_without_two_hop_nothing_is_estimated(play):
    """Invariant 16: the status is 0 or 2 only; with two hops some similarities are estimates."""
    alone, told = (
        play(DacNoTwoHop(num_peers=1)).steps(2).memory,
        play(Dac(num_peers=1)).steps(2).memory,
    )
    assert set(alone.status.unique().tolist()) == {0, 2}
    assert set(told.status.unique().tolist()) == {0, 1, 2}
    assert not alone.similarity[alone.status == 0].any()


def test_what_was_measured_stays_until_it_is_measured_again(play):
    """Invariant 16: in one exchange only the similarities of peers read, and estimates, change."""
    run = play(Dac(num_peers=1)).steps(3)
    before, (state, info) = run.memory, run.exchange()
    read = torch.zeros(6, 6, dtype=torch.bool).scatter(1, info["peers"], True)
    kept = (before.status == 2) & ~read
    assert bool(kept.any())
    assert torch.equal(state.memory.similarity[kept], before.similarity[kept])
    assert bool((state.memory.status[kept] == 2).all())


@pytest.mark.parametrize(("relay", "known"), [("direct", [2]), ("any", [1, 2])])
def test_relays_vouch_for_what_they_measured_or_for_anything(relay, known):
    """Option D5: of an estimate of 1 and a measurement of 2, "direct" passes on the latter alone."""
    told = acquaintance([[0.0, 0.5, 0.7, 0.0]], [[0, 1, 2, 0]]).scores_to_share(
        relay, drop_nonpositive=False, dtype=torch.float32
    )
    assert told["known"][0].nonzero().flatten().tolist() == known
    assert told["similarity"].dtype == torch.float32


@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("pick", ["most", "least"])
@pytest.mark.parametrize(("relay", "known"), [("direct", 2), ("any", 1)])
def test_estimates_are_those_of_the_preferred_relay_that_was_heard(play, relay, known, pick, drop):
    """s_ij is what the most (or least) similar of the peers that answered says, if it may say anything of j."""
    method = PublishedDac(num_peers=2, two_hop_relay=relay, two_hop_pick=pick)
    run = play(
        method, tiny_federation(9), exchange=Faulty(InMemory(torch.arange(9), 9), drop=drop)
    ).steps(3)
    before, (state, info) = run.memory, run.exchange()
    after, estimated, choices = state.memory, 0, 0
    for i in range(9):
        heard = info["peers"][i][info["arrived"][i]].tolist()
        for j in range(9):
            if j == i or before.status[i, j] == 2 or j in heard:
                continue
            relays = sorted(
                (k for k in heard if before.status[k, j] >= known),
                key=lambda k: after.similarity[i, k],
            )
            chosen = (
                before.similarity[relays[-1 if pick == "most" else 0]]
                if relays
                else before.similarity[i]
            )
            assert after.similarity[i, j] == chosen[j], (i, j)
            assert after.status[i, j] == max(int(bool(relays)), int(before.status[i, j]))
            estimated, choices = estimated + bool(relays), choices + (len(relays) > 1)
    assert estimated > 9
    assert choices > 0


def test_relays_do_not_vouch_for_dropped_similarities():
    """Option D7: a similarity of -0.2 counts as unknown."""
    memory = acquaintance([[0.0, -0.2, 0.7, 0.0]], [[0, 2, 2, 0]])
    assert memory.scores_to_share("direct", drop_nonpositive=True, dtype=torch.float64)[
        "known"
    ].tolist() == [[False, False, True, False]]


@pytest.mark.option("PublishedDac.unknown", "zero", "floor")
def test_unknown_members_enter_with_zero_or_get_the_floor():
    """Option D6: s = (?, 1, ?) of three others: with tau = ln 2 shares (1, 2, 1) / 4, or all to the known one."""
    memory = acquaintance([[0.0, 0.0, 1.0, 0.0]], [[0, 0, 2, 0]])
    zero = PublishedDac(tau=math.log(2), eps_p=0.0).peer_probabilities(IDS[:1], memory, 0)
    torch.testing.assert_close(zero, torch.tensor([[0.0, 0.25, 0.5, 0.25]]).double())
    floor = PublishedDac(tau=math.log(2), eps_p=0.0, unknown="floor").peer_probabilities(
        IDS[:1], memory, 0
    )
    torch.testing.assert_close(floor, torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double())


@pytest.mark.option("PublishedDac.drop_nonpositive", False, True)
def test_nonpositive_similarities_can_count_as_unknown():
    """Option D7: s = (-1, 1, 0.5): kept, they rank below unknown; dropped, they count 0 or get the floor."""
    memory = acquaintance([[0.0, -1.0, 1.0, 0.5]], [[0, 2, 2, 2]])
    tau = math.log(2)
    kept = PublishedDac(tau=tau, eps_p=0.0).peer_probabilities(IDS[:1], memory, 0)
    torch.testing.assert_close(kept[0, 1] / kept[0, 2], torch.tensor(0.25).double())
    zero = PublishedDac(tau=tau, eps_p=0.0, drop_nonpositive=True).peer_probabilities(
        IDS[:1], memory, 0
    )
    torch.testing.assert_close(zero[0, 1] / zero[0, 2], torch.tensor(0.5).double())
    floor = PublishedDac(
        tau=tau, eps_p=0.0, drop_nonpositive=True, unknown="floor"
    ).peer_probabilities(IDS[:1], memory, 0)
    assert float(floor[0, 1]) == 0


@pytest.mark.option("PublishedDac.scaling", "none", "minmax")
@pytest.mark.option("Dac.tau_schedule", "constant")
@pytest.mark.option("PublishedDac.tau_schedule", "constant")
def test_min_max_scaling_uses_what_is_known():
    """s = (4, 2, ?) becomes (1, 0, 0): with tau = ln 2 shares (2, 1, 1) / 4, and (16, 4, 1) / 21 unscaled."""
    memory = acquaintance([[0.0, 4.0, 2.0, 0.0]], [[0, 2, 1, 0]])
    p = PublishedDac(tau=math.log(2), eps_p=0.0, scaling="minmax").peer_probabilities(
        IDS[:1], memory, 0
    )
    torch.testing.assert_close(p, torch.tensor([[0.0, 0.5, 0.25, 0.25]]).double())
    p = PublishedDac(tau=math.log(2), eps_p=0.0).peer_probabilities(IDS[:1], memory, 0)
    torch.testing.assert_close(p, torch.tensor([[0.0, 16.0, 4.0, 1.0]]).double() / 21)


@pytest.mark.option("PublishedDac.tau_schedule", "entropy")
def test_entropy_schedule_gives_every_client_its_own_temperature():
    """Wanted is 1 bit; similarities of very different scale give the same spread of probabilities."""
    memory = acquaintance(
        [[0.0, 1.0, 2.0, 3.0], [100.0, 0.0, 200.0, 300.0]], [[0, 2, 2, 2], [2, 0, 2, 2]]
    )
    p = PublishedDac(tau_schedule="entropy", entropy=1.0, eps_p=0.0).peer_probabilities(
        IDS[:2], memory, 5
    )
    entropy = -torch.special.xlogy(p, p).sum(1) / math.log(2)
    torch.testing.assert_close(entropy, torch.ones(2).double())


@pytest.mark.option("PublishedDac.tau_schedule", "reference")
def test_reference_schedule_has_the_published_values():
    """Invariant 18: 1 + 30 tanh(0.1 t): 1.00, 3.99, 6.92, 14.86, 23.85, 29.92; its limit is tau + 1."""
    dac = PublishedDacVar(tau_schedule="reference")
    values = [dac.tau_at(t) for t in (0, 1, 2, 5, 10, 20)]
    assert values == pytest.approx([1.00, 3.99, 6.92, 14.86, 23.85, 29.92], abs=0.006)
    assert dac.tau_at(1000) == pytest.approx(31)


@pytest.mark.option("Dac.tau_schedule", "var")
@pytest.mark.option("DacVar.tau_schedule", "var")
@pytest.mark.option("PublishedDacVar.tau_schedule", "var")
def test_var_schedule_rises_from_one_to_tau():
    """Invariant 18: tau(0) = 1, increasing, limit tau; with tau = 1 constant; "constant" is constant."""
    values = [DacVar().tau_at(t) for t in range(50)]
    assert values[0] == 1
    assert all(a < b for a, b in itertools.pairwise(values))
    assert DacVar().tau_at(1000) == pytest.approx(30)
    assert {DacVar(tau=1.0).tau_at(t) for t in range(9)} == {1.0}
    assert {Dac().tau_at(t) for t in range(9)} == {30.0}


def test_the_temperature_of_a_round_shapes_the_draws_of_the_next(play, monkeypatch):
    """p_i is formed with tau(t) and used in round t + 1."""
    asked = []
    real = Dac.peer_probabilities
    monkeypatch.setattr(
        Dac, "peer_probabilities", lambda self, ids, m, r: asked.append(r) or real(self, ids, m, r)
    )
    play(DacVar(num_peers=2)).steps(4)
    assert asked == [0, 0, 1, 2]


@pytest.mark.option("Dac.similarity", "inv_loss")
@pytest.mark.option("Dac.loss_direction", "pull")
def test_inverse_loss_is_one_over_the_sample_mean(play):
    """Invariant 21: s_ij = 1 / (loss of w_j on D_i + eps), by hand; the batch size of training has no part in it."""
    federation = tiny_federation(2, 2)
    run = play(Dac(num_peers=1), federation)
    state, info = run.exchange()
    swapped = run.loop.task.loss(run.state.params.flip(0), "train")
    expected = 1 / (swapped + 1e-6)
    torch.testing.assert_close(state.memory.similarity, torch.diag(expected).flip(1))
    assert info["passes"].tolist() == [12, 12]


@pytest.mark.option("Dac.loss_direction", "push")
def test_push_asks_for_the_loss_of_the_own_model_on_the_peers_data(play):
    """Invariant 21: s_ij = 1 / (loss of w_i on D_j + eps), which differs from what pulling gives."""
    federation = tiny_federation(2, 2)
    pushed = play(Dac(num_peers=1, loss_direction="push"), federation)
    state, _ = pushed.exchange()
    on_the_peers_data = pushed.loop.task.loss(pushed.state.params.flip(0), "train").flip(0)
    torch.testing.assert_close(
        state.memory.similarity, torch.diag(1 / (on_the_peers_data + 1e-6)).flip(1)
    )
    pulled, _ = play(Dac(num_peers=1), federation).exchange()
    assert not torch.allclose(pulled.memory.similarity, state.memory.similarity)


def test_eps_is_added_to_the_loss_that_a_peer_measures(play):
    """s_ij = 1 / (loss of w_i on D_j + 1)."""
    run = play(Dac(num_peers=1, loss_direction="push", eps=1.0), tiny_federation(2, 2))
    state, _ = run.exchange()
    on_the_peers_data = run.loop.task.loss(run.state.params.flip(0), "train").flip(0)
    torch.testing.assert_close(
        state.memory.similarity, torch.diag(1 / (on_the_peers_data + 1)).flip(1)
    )


@pytest.mark.parametrize("number", [0, 2])
def test_questions_and_answers_of_the_round_before_do_not_count(play, disturbed, number):
    """Where all questions, or all answers, come a round late, nobody is answered and nobody is read."""
    method, federation = Dac(num_peers=4, loss_direction="push", two_hop=False), tiny_federation()
    run = play(method, federation, exchange=disturbed(federation, number, late=True)).steps(2)
    info, before = run.infos[-1], run.infos[-2]
    assert bool(before["arrived"].all()), "in the first round there is nothing older"
    again = (info["peers"][:, :, None] == before["peers"][:, None, :]).any()
    assert bool(again), "some are asked in both rounds"
    assert not info["arrived"].any()
    assert info["own_weight"].tolist() == [1.0] * 6


def test_an_answer_without_the_model_is_not_enough(play, disturbed):
    """Client 0 hears what its peers think of its model, but receives none of theirs: it averages with nobody."""
    method, federation = Dac(num_peers=4, loss_direction="push", two_hop=False), tiny_federation()
    run = play(method, federation, exchange=disturbed(federation, 1, deaf=(0,)))
    state, info = run.exchange()
    assert info["arrived"].any(1).tolist() == [False] + [True] * 5
    assert torch.equal(state.params[0], run.state.params[0])


def test_push_shows_its_cost(play):
    """Every client is asked by as many as its row of requests says: that many models more and as many passes.

    Requests: 5 others x 2 numbers; answers: 2 x 6 numbers; estimates at second hand: 2 x 6 numbers.
    """
    run = play(Dac(num_peers=2, loss_direction="push"))
    _, info = run.exchange()
    asks = torch.zeros(6, 6, dtype=torch.bool).scatter(1, info["peers"], True)
    assert info["passes"].tolist() == (12 * asks.sum(0)).tolist()
    assert info["extra_models"].tolist() == (asks.T & ~asks).sum(1).tolist()
    assert info["extra_floats"].tolist() == [5 * 2 + 2 * 6 + 2 * 6] * 6
    model = 15 * 8 + 8 + 6 * 8 + 6  # 15 parameters, samples, similarities and whose
    answer = 6 * 8 + 6 + 8  # numbers, whose, and the round
    request = 2 * 8 + 8
    assert info["bytes"].tolist() == [[model + answer] * 2] * 6
    assert info["extra_bytes"].tolist() == (5 * request + model * info["extra_models"]).tolist()


def test_push_goes_on_when_peers_have_stopped(play):
    """A stopped peer answers no more: it has not arrived, and similarities to it stay as they were."""
    run = play(Dac(num_peers=5, loss_direction="push", two_hop=False)).steps(1)
    tracker = run.loop.tracker
    stopped = torch.arange(6) == 2
    run.loop.tracker = dataclasses.replace(tracker, stopped=stopped)
    run.loop.exchange.retire_clients(torch.tensor([2]), tracker.best[stopped])
    before = run.memory
    run.steps(1)
    assert not run.infos[-1]["arrived"][run.infos[-1]["peers"] == 2].any()
    assert int(run.infos[-1]["arrived"].sum()) == 5 * 4
    assert torch.equal(run.memory.similarity[:, 2], before.similarity[:, 2])
    assert torch.equal(run.memory.count[:, 2], before.count[:, 2])


def test_history_asks_everyone_ever_read(play):
    """Option D2: after two rounds with one peer each, estimates may come from both; the extra messages are counted."""
    run = play(PublishedDac(num_peers=1, two_hop_scope="history")).steps(3)
    read = (run.memory.count > 0).sum(1)
    _, info = run.exchange()
    new = torch.tensor(
        [bool(run.memory.count[i, j] == 0) for i, (j,) in enumerate(info["peers"].tolist())]
    )
    assert info["extra_floats"].tolist() == (6 * (read + new)).tolist()
    assert info["extra_bytes"].tolist() == ((6 * 8 + 6) * (read + new)).tolist()
    many = tiny_federation(12)
    told = [
        play(PublishedDac(num_peers=1, tau=0.0, two_hop_scope=scope), many).steps(4).memory.status
        > 0
        for scope in ("current", "history")
    ]
    assert bool((told[1] | ~told[0]).all()), (
        "who asks more peers knows everybody that the others know"
    )
    assert int(told[1].sum()) > int(told[0].sum())


def test_a_silent_peer_leaves_no_trace(play):
    """Nothing arrives: similarities, counts and models stay; the own weight is 1."""
    quiet = Faulty(InMemory(torch.arange(6), 6), drop=1.0)
    run = play(Dac(num_peers=3), exchange=quiet)
    state, info = run.exchange()
    assert torch.equal(state.params, run.state.params)
    assert not state.memory.status.any()
    assert not state.memory.count.any()
    assert info["own_weight"].tolist() == [1.0] * 6


def test_weights_are_shared_among_those_that_arrived(play):
    """About half of the messages are lost: every row of weights still sums to 1."""
    run = play(
        Dac(num_peers=4, aggregation="fedsim"),
        exchange=Faulty(InMemory(torch.arange(6), 6), drop=0.5),
    ).steps(3)
    arrived = torch.cat([info["arrived"] for info in run.infos])
    assert 0.2 < float(arrived.double().mean()) < 0.8, "some came and some did not"
    for info in run.infos:
        torch.testing.assert_close(
            info["weights"].sum(1) + info["own_weight"], torch.ones(6).double()
        )
        assert not info["weights"][~info["arrived"]].any()


def test_fedsim_prior_depends_on_the_past_alone(play):
    """Invariant 27: the plain mean in round 0; later, this round's similarities change nothing."""
    first = play(PublishedDac(num_peers=3, aggregation="fedsim_prior"))
    torch.testing.assert_close(first.exchange()[1]["weights"], torch.full((6, 3), 0.25).double())
    weights = []
    run = first.steps(3)
    for metric in ("inv_loss", "cos_weight"):
        run.loop.method = PublishedDac(num_peers=3, aggregation="fedsim_prior", similarity=metric)
        weights.append(run.exchange()[1]["weights"])
    assert torch.equal(*weights)
    assert not torch.allclose(weights[0], torch.full((6, 3), 0.25).double())


@pytest.mark.option("Dac.similarity", "cos_grad")
def test_cosine_of_gradients_measures_from_the_common_start(play):
    """u_i = w_i - w_0 with the one first model of all."""
    run = play(Dac(num_peers=5, similarity="cos_grad"))
    state, _ = run.exchange()
    updates = run.state.params - run.loop.task.initial_models(run.loop.rng)
    expected = torch.nn.functional.cosine_similarity(
        updates[:, None], updates[None], dim=2
    ).fill_diagonal_(0)
    torch.testing.assert_close(state.memory.similarity, expected)


def test_clients_that_start_apart_tell_where_they_started(play):
    """Then w_j^0 travels with the model, which is counted, and a warning says that the cosine means little."""
    method = Dac(num_peers=5, similarity="cos_grad")
    with pytest.warns(UserWarning, match="start from different models"):
        run = play(method, init="per_client")
    state, info = run.exchange()
    updates = run.state.params - run.loop.task.initial_models(run.loop.rng)
    expected = torch.nn.functional.cosine_similarity(
        updates[:, None], updates[None], dim=2
    ).fill_diagonal_(0)
    torch.testing.assert_close(state.memory.similarity, expected)
    assert info["extra_models"].tolist() == [5] * 6
    assert int(info["bytes"][0, 0]) == 2 * 15 * 8 + 8 + 6 * 8 + 6


@pytest.mark.parametrize("metric", ["inv_l2", "cos_weight"])
@pytest.mark.option("Dac.similarity", "inv_l2", "cos_weight")
def test_products_of_models_cost_no_forward_pass(play, metric):
    run = play(Dac(num_peers=5, similarity=metric))
    state, info = run.exchange()
    assert "passes" not in info
    w = run.state.params
    every, here = torch.arange(6).expand(6, 6), torch.ones(6, 6, dtype=torch.bool)
    expected = similarity.cosine(w, w, every, here)
    if metric == "inv_l2":
        expected = similarity.invert_cost(similarity.l2_distances(w, w, every, here))
    torch.testing.assert_close(state.memory.similarity, expected.fill_diagonal_(0))


def normalized() -> nn.Module:
    """Two layers with running statistics between them."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("metric", ["inv_l2", "cos_weight", "cos_grad"])
def test_running_statistics_have_no_part_in_a_similarity(play, metric):
    """Only the 25 + 10 + 18 trained parameters count; means and variances differ from client to client, too."""
    run = play(Dac(num_peers=5, similarity=metric), model=normalized).steps(1)
    state, _ = run.exchange()
    assert run.loop.task.layout.trainable == 53
    assert float(run.state.params[:, 53:63].std(0).min()) > 0.01
    w = run.state.params[:, :53]
    if metric == "inv_l2":
        expected = 1 / ((w[:, None] - w[None]).norm(dim=2) + 1e-6)
    else:
        start = run.loop.task.initial_models(run.loop.rng)[:, :53] if metric == "cos_grad" else 0
        expected = torch.nn.functional.cosine_similarity(
            (w - start)[:, None], (w - start)[None], dim=2
        )
    torch.testing.assert_close(state.memory.similarity, expected.fill_diagonal_(0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_peers": 0}, r"dac: num_peers is 0; expected a whole number, 1 or more"),
        ({"tau": -1.0}, r"dac: tau is -1.0; expected a number, 0 or more"),
        ({"tau": math.nan}, r"dac: tau is nan"),
        (
            {"loss_direction": "push", "similarity": "inv_l2"},
            r"loss_direction is 'push'; expected 'pull' unless",
        ),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        PublishedDac(**fields)


def test_an_unknown_word_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"dac: similarity is 'loss'; expected 'inv_loss', .*'cos_product', 'agreement' or 'public_agreement'",
    ):
        Dac(similarity="loss")  # type: ignore[arg-type]


def test_exchanges_are_counted_by_what_is_asked():
    """One; three to be answered; one more to ask earlier peers, or for sketches and predictions."""
    assert Dac().exchanges == 1
    assert Dac(loss_direction="push").exchanges == 3
    assert Dac(similarity="cos_grad", sketch=64).exchanges == 2
    assert Dac(similarity="public_agreement").exchanges == 2
    assert PublishedDac(two_hop_scope="history").exchanges == 2
    assert PublishedDac(two_hop_scope="history", two_hop=False).exchanges == 1


@pytest.mark.parametrize("schedule", ["sequential_exchange", "sequential"])
def test_sequential_schedules_show_what_was_measured_this_round(play, schedule):
    """In the first exchange a synchronous relay knows nobody yet; a client that acted before others does."""
    settings = {"schedule": schedule}
    run = play(Dac(num_peers=1), **settings).steps(1)
    assert bool((run.memory.status == 1).any())
    assert not (play(Dac(num_peers=1)).steps(1).memory.status == 1).any()


def test_the_smallest_populations_run(play):
    """Invariant 9: two clients read each other, whatever number of peers is asked for."""
    run = play(Dac(num_peers=9), tiny_federation(2, 2)).steps(2)
    assert run.infos[-1]["peers"].tolist() == [[1], [0]]


def estimated(before, read, measured, *, pick, relay, scope):
    """Similarities and statuses after an exchange, client by client as the paper says it.

    Args:
        before: the memory before it: what relays tell of.
        read: the ids that each client read.
        measured: the similarity of each of them.
        pick: see `Dac`; so are `relay` and `scope`.
        relay: None for no estimates.
        scope: whose word counts.
    """
    told, vouched = (
        before.similarity.numpy(),
        before.status.numpy() >= {"direct": 2, "any": 1, None: 3}[relay],
    )
    similarity, status = told.copy(), before.status.numpy().copy()
    for i, peers in enumerate(read):
        for j, value in zip(peers, measured[i], strict=True):
            similarity[i, j], status[i, j] = value, 2
        met = set(peers) | set(
            before.count[i].nonzero().flatten().tolist() if scope == "history" else []
        )
        liking = dict(sorted((k, similarity[i, k]) for k in met))
        for j in range(len(told)):
            relays = [k for k in liking if k != j and vouched[k, j]]
            if j != i and status[i, j] != 2 and relays:
                # ties: the lowest id
                best = (max if pick == "most" else min)(relays, key=liking.__getitem__)
                similarity[i, j], status[i, j] = told[best, j], 1
    return torch.from_numpy(similarity), torch.from_numpy(status)


@pytest.mark.full
@pytest.mark.option("Dac.two_hop", True, False)
@pytest.mark.option("PublishedDacNoTwoHop.two_hop", False)
@pytest.mark.option("PublishedDac.two_hop_pick", "most", "least")
@pytest.mark.option("PublishedDac.two_hop_relay", "direct", "any")
@pytest.mark.option("PublishedDac.two_hop_scope", "current", "history")
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"two_hop": False}, {"pick": "most", "relay": None, "scope": "current"}),
        ({}, {"pick": "most", "relay": "direct", "scope": "current"}),
        ({"two_hop_pick": "least"}, {"pick": "least", "relay": "direct", "scope": "current"}),
        ({"two_hop_relay": "any"}, {"pick": "most", "relay": "any", "scope": "current"}),
        ({"two_hop_scope": "history"}, {"pick": "most", "relay": "direct", "scope": "history"}),
        (
            {"two_hop_pick": "least", "two_hop_relay": "any", "two_hop_scope": "history"},
            {"pick": "least", "relay": "any", "scope": "history"},
        ),
    ],
)
def test_estimates_are_those_of_the_relay_that_the_options_name(play, loss_table, options, rule):
    """Eight clients that read two in each of three rounds, against loops over clients, peers and relays."""
    run = play(PublishedDac(num_peers=2, tau=0.0, **options), tiny_federation(8))
    for _ in range(3):
        read = run.exchange()[1]["peers"].tolist()
        losses = loss_table(run.loop.task, run.state.params)
        measured = [
            [1 / (float(losses[i, j]) + 1e-6) for j in peers] for i, peers in enumerate(read)
        ]
        similarity, status = estimated(run.memory, read, measured, **rule)
        run.steps(1)
        assert torch.equal(run.memory.status.long(), status.long())
        torch.testing.assert_close(run.memory.similarity, similarity)


@pytest.mark.option("Dac.aggregation", "fedavg", "fedsim")
@pytest.mark.option("PublishedDac.aggregation", "fedavg", "fedsim_prior")
def test_models_are_weighed_by_samples_by_similarity_or_by_probability(play, loss_table, uneven):
    """12 to 7 samples; n_j; or 1 / loss; or p_ij before the exchange, and then oneself like the best of them."""
    tau = 2.0
    for aggregation in ("fedavg", "fedsim", "fedsim_prior"):
        run = play(PublishedDac(num_peers=3, tau=tau, aggregation=aggregation), uneven).steps(3)
        _, info = run.exchange()
        losses = loss_table(run.loop.task, run.state.params)
        for i, peers in enumerate(info["peers"].tolist()):
            mass = torch.exp(tau * run.memory.similarity[i])
            mass[i] = 0
            share = {
                "fedavg": torch.tensor([12.0 - j for j in peers]),
                "fedsim": 1 / (losses[i, peers] + 1e-6),
                "fedsim_prior": (mass / mass.sum() + 1e-6)[peers],
            }[aggregation].double()
            own = 12.0 - i if aggregation == "fedavg" else float(share.max())
            torch.testing.assert_close(info["weights"][i], share / (share.sum() + own))
            assert float(info["own_weight"][i]) == pytest.approx(own / float(share.sum() + own))


@pytest.mark.parametrize("metric", ["inv_l2", "cos_weight", "cos_grad"])
def test_running_statistics_have_no_part_in_distances_and_cosines(metric):
    """A network with 21 parameters and 7 running statistics, which are given values of their own."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    method, settings = Dac(num_peers=5, similarity=metric, two_hop=False), tiny_settings(rounds=1)
    loop = run_method(method, model=lambda: model, settings=dataclasses.replace(settings, rounds=0))
    params = loop.state.params.clone()
    params[:, 21:] = torch.arange(42.0).reshape(6, 7)
    loop.state, loop.settings = dataclasses.replace(loop.state, params=params), settings
    loop.run_next_round()
    w = params[:, :21] - (loop.task.initial_models(loop.rng)[:, :21] if metric == "cos_grad" else 0)
    expected = torch.nn.functional.cosine_similarity(w[:, None], w[None], dim=2)
    if metric == "inv_l2":
        expected = 1 / (torch.cdist(w, w) + 1e-6)
    torch.testing.assert_close(loop.state.memory.similarity, expected.fill_diagonal_(0))


def test_epsilon_is_added_to_the_loss(play):
    """Two clients that read each other: 1 / (loss + 0.5)."""
    run = play(Dac(num_peers=1, eps=0.5), tiny_federation(2, 2))
    state, _ = run.exchange()
    expected = 1 / (run.loop.task.loss(run.state.params.flip(0), "train") + 0.5)
    torch.testing.assert_close(state.memory.similarity, torch.diag(expected).flip(1))


@pytest.mark.parametrize(
    "options", [{}, {"loss_direction": "push"}, {"similarity": "cos_weight", "two_hop": False}]
)
def test_similarities_and_probabilities_are_reported_where_the_run_records_them(play, options):
    """What was measured of the peers, and p_ij of the round before, uniform in the first."""
    method = PublishedDac(num_peers=2, **options)
    run = play(method, record_similarities=True).steps(1)
    info = run.infos[-1]
    assert bool((info["probabilities"] == 1 / 5).all())
    rows = torch.arange(6)[:, None]
    for _ in range(2):
        expected = method.peer_probabilities(torch.arange(6), run.memory, run.loop.next_round - 1)
        run.steps(1)
        info = run.infos[-1]
        torch.testing.assert_close(info["probabilities"], expected[rows, info["peers"]])
        torch.testing.assert_close(info["similarities"], run.memory.similarity[rows, info["peers"]])


def test_who_chooses_by_a_rule_of_the_user_draws_with_no_known_probability(play, monkeypatch):
    chosen = torch.arange(6)[:, None].add(1).remainder(6)
    monkeypatch.setattr("coterie.methods.dac.choose_peers_by_rule", lambda *_: chosen)
    run = play(Dac(num_peers=1, selection="own:rule"), record_similarities=True).steps(1)
    assert bool(run.infos[-1]["probabilities"].isnan().all())
    assert bool((run.infos[-1]["similarities"] > 0).all())
