"""PANMLoss and PANMGrad."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.functional import gaussian_mixture, selection, similarity
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.testing import tiny_federation

SHORT = {"num_peers": 2, "num_candidates": 3, "stage_one_rounds": 3, "interval": 2}


def bag_of(memory, population=None):
    """Who is in each client's bag: a row for each, and a column for each member."""
    number = len(memory.members)
    bags = torch.zeros(number, population or number, dtype=torch.bool)
    for row, members in enumerate(memory.members.tolist()):
        number = sum(one >= 0 for one in members)
        assert len(set(members[:number])) == number, "each once"
        assert set(members[number:]) <= {-1}, "empty columns come last"
        bags[row, members[:number]] = True
    return bags


def listed(row):
    return {j for j in row.tolist() if j >= 0}


def test_stage_one_keeps_the_most_similar_of_candidates_and_neighbors(play):
    """Invariant 33: N_i within C_i and the N_i of before, k of them, never oneself, all averaged with."""
    run = play(PanmLoss(**SHORT), tiny_federation(9, 3))
    before = run.memory.neighbors
    for _ in range(3):
        run.steps(1)
        info, now = run.infos[-1], run.memory.neighbors
        for i in range(9):
            asked = listed(info["peers"][i])
            old = listed(before[i])
            assert old <= asked
            assert len(asked - old) == 3, "as many fresh candidates as asked for"
            assert listed(now[i]) <= asked
            assert len(listed(now[i])) == 2
            assert i not in asked
            assert set(info["peers"][i][info["weights"][i] > 0].tolist()) == listed(now[i])
        before = now


@pytest.mark.full
def test_with_frozen_models_neighbors_only_get_more_similar_and_end_in_the_own_cluster(
    play, loss_table
):
    """Invariant 33: lr = 0; the least similar neighbor never gets worse, and at last all are of the own cluster."""
    federation = tiny_federation(9, 3, train=40)
    run = play(PanmLoss(num_peers=2, num_candidates=2), federation)
    run.loop.state = dataclasses.replace(
        run.state,
        params=run.loop.task.train(run.state.params, run.loop.rng, run.loop.settings.local)[0],
    )
    params = run.state.params
    scores = 1 / (loss_table(run.loop.task, params) + 1e-6)
    worst = torch.full((9,), -torch.inf).double()
    for _ in range(40):
        state, _ = run.exchange()
        run.loop.state = dataclasses.replace(state, params=params)
        run.loop.next_round += 1
        now = scores.gather(1, state.memory.neighbors.clamp(min=0)).amin(1)
        assert bool((now >= worst).all())
        worst = now
    expected = scores.clone().fill_diagonal_(-1).topk(2, dim=1).indices.sort(1).values
    assert torch.equal(run.memory.neighbors.sort(1).values, expected)
    cluster = federation.truth.cluster
    assert bool((cluster[run.memory.neighbors] == cluster[:, None]).all())


def test_the_bag_starts_as_the_last_neighbors_and_is_corrected_at_intervals(play):
    """Invariant 37: with T1 = 3 and interval 2, rounds t = 1..3 match by ranking and t = 4, 6 correct the bag."""
    run = play(PanmLoss(**SHORT), tiny_federation(9, 3))
    sizes = []
    for _ in range(7):
        bag = bag_of(run.memory)
        run.steps(1)
        sizes.append(run.infos[-1]["peers"].shape[1])
        if len(sizes) in (5, 7):
            assert torch.equal(bag_of(run.memory), bag), "nothing changes between corrections"
    assert sizes == [5, 5, 5, 3 + 3 + 2, 2, 3 + 3 + 2, 2]
    assert not bag_of(run.memory).diagonal().any()
    assert bool(bag_of(run.memory).any(1).all())


def test_stage_two_averages_with_members_of_the_bag_and_reads_nobody_twice(play):
    """Invariant 37: min(k, |B|) of them; those already read for the correction are not read again."""
    run = play(PanmLoss(**SHORT), tiny_federation(9, 3)).steps(3)
    for _ in range(6):
        run.steps(1)
        info = run.infos[-1]
        for i in range(9):
            asked = [j for j in info["peers"][i].tolist() if j >= 0]
            assert len(asked) == len(set(asked))
            weighed = set(info["peers"][i][info["weights"][i] > 0].tolist())
            bag = set(bag_of(run.memory)[i].nonzero().flatten().tolist())
            assert weighed <= bag
            assert len(weighed) == min(2, len(bag))
        torch.testing.assert_close(
            info["weights"].sum(1) + info["own_weight"], torch.ones(9).double()
        )


def test_a_neighbor_whose_first_message_was_lost_is_read_again(play, disturbed):
    """Nothing comes of the models to score: all that the client averages with is read in the second exchange."""
    federation = tiny_federation(9, 3)
    door = disturbed(federation, 0)
    run = play(PanmLoss(**SHORT), federation, exchange=door).steps(3)
    door.deaf = tuple(range(9))
    state, info = run.exchange()
    assert info["peers"].shape[1] == 3 + 3 + 2, "a round that corrects the bag"
    assert not info["arrived"][:, :6].any()
    assert bool(info["arrived"][:, 6:].all())
    assert torch.equal(bag_of(state.memory), bag_of(run.memory))
    # all have as many samples
    expected = (run.state.params + run.state.params[info["peers"][:, 6:]].sum(1)) / 3
    torch.testing.assert_close(state.params, expected)


def test_candidates_are_none_of_the_bag(play):
    """In stage one they are no neighbors, in stage two no members of the bag."""
    run = play(
        PanmLoss(num_peers=2, num_candidates=4, stage_one_rounds=2, interval=1),
        tiny_federation(9, 3),
    )
    for number in range(1, 5):
        bag = bag_of(run.memory)
        run.steps(1)
        believed = 2 if number <= 2 else 4
        candidates = run.infos[-1]["peers"][:, believed : believed + 4]
        assert bool((candidates >= 0).any())
        assert not bag.gather(1, candidates.clamp(min=0))[candidates >= 0].any(), number


def test_the_average_over_two_exchanges_is_one_weighted_mean(play):
    """In a correction round the models of both pulls are mixed as FedAvg over N_i and itself."""
    run = play(PanmLoss(**SHORT), tiny_federation(9, 3)).steps(3)
    state, info = run.exchange()
    peers = info["peers"].clamp(min=0)
    expected = info["own_weight"][:, None] * run.state.params
    expected = expected + (info["weights"][..., None] * run.state.params[peers]).sum(1)
    torch.testing.assert_close(state.params, expected)


def test_loss_transforms_rank_alike(play):
    """1 / loss and -loss choose the same neighbors in stage one."""
    chosen = [
        play(PanmLoss(**SHORT, transform=name)).exchange()[0].memory.neighbors
        for name in ("inverse", "negative")
    ]
    assert torch.equal(*chosen)


def test_loss_costs_passes_and_gradients_cost_a_second_model(play):
    """PANMGrad reads the last update beside the model: 15 more numbers a peer, counted; alpha = 0 needs none."""
    _, loss = play(PanmLoss(**SHORT)).exchange()
    _, grad = play(PanmGrad(**SHORT)).exchange()
    _, plain = play(PanmGrad(**SHORT, alpha=0.0)).exchange()
    assert loss["passes"].tolist() == [3 * 12] * 6
    assert "passes" not in grad
    assert grad["extra_models"].tolist() == [3] * 6
    assert plain["extra_models"].tolist() == [0] * 6
    assert int(grad["bytes"].max()) == 2 * 15 * 8 + 8
    assert int(plain["bytes"].max()) == int(loss["bytes"].max()) == 15 * 8 + 8


def peers_by(values):
    """The three best others of each client."""
    return values.clone().fill_diagonal_(-torch.inf).topk(3, dim=1).indices.sort(1).values


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradient_similarity_weighs_last_update_and_whole_way(play, alpha):
    """Invariant 38: alpha = 0 is the cosine since the start, alpha = 1 ignores the past."""
    run = play(
        PanmGrad(num_peers=3, num_candidates=5, alpha=alpha),
        tiny_federation(6, 2),
        order="exchange_first",
    ).steps(1)
    w, every, here = (
        run.state.params,
        torch.arange(6).expand(6, 6),
        torch.ones(6, 6, dtype=torch.bool),
    )
    way = w - run.loop.task.initial_models(run.loop.rng)
    last = run.memory.update if alpha else torch.zeros_like(way)
    total = alpha * similarity.cosine(last, last, every, here) + (1 - alpha) * similarity.cosine(
        way, way, every, here
    )
    state, _ = run.exchange()
    assert torch.equal(state.memory.neighbors.sort(1).values, peers_by(total))


def test_the_update_remembered_is_that_of_the_last_local_training(play):
    """g_i = w_i after minus before this round's training, in the order train first."""
    run = play(PanmGrad(**SHORT)).steps(2)
    before = run.state.params
    after, _, _ = run.loop.task.train(before, run.loop.rng.at_round(2), run.loop.settings.local)
    run.steps(1)
    assert torch.equal(run.memory.update, after - before)


def test_clients_that_start_apart_tell_where_they_started(play):
    with pytest.warns(UserWarning, match="start from different models"):
        run = play(PanmGrad(**SHORT), init="per_client")
    assert run.exchange()[1]["extra_models"].tolist() == [6] * 6


def test_neighbors_that_fall_silent_keep_their_place_when_nobody_takes_it(play):
    """Everything is lost from round 2 on: the list stays, nothing is averaged, and stage two has a bag."""
    door = Faulty(InMemory(torch.arange(6), 6))
    run = play(PanmLoss(**SHORT), exchange=door).steps(1)
    neighbors = run.memory.neighbors.sort(1).values
    door.drop = 1.0
    run.steps(5)
    assert torch.equal(run.memory.neighbors.sort(1).values, neighbors)
    assert run.infos[-1]["own_weight"].tolist() == [1.0] * 6
    assert bool((bag_of(run.memory).sum(1) == 2).all())


def test_training_comes_first_by_default(play):
    """As in the published algorithm: no warm-up, and the first exchange is of trained models."""
    run = play(PanmLoss(**SHORT))
    assert torch.equal(run.state.params, run.loop.task.initial_models(run.loop.rng))
    run.steps(1)
    assert "trained" in run.infos[-1]


def test_impossible_settings_are_refused():
    with pytest.raises(
        ConfigError, match=r"panm-grad: alpha is 1.5; expected a number, from 0 to 1"
    ):
        PanmGrad(alpha=1.5)
    with pytest.raises(
        ConfigError, match=r"panm-loss: interval is 0; expected a whole number, 1 or more"
    ):
        PanmLoss(interval=0)
    with pytest.raises(ConfigError, match=r"panm-loss: eps is -1.0"):
        PanmLoss(eps=-1.0)


@pytest.mark.option("PanmLoss.transform", "inverse", "negative")
def test_the_loss_becomes_a_similarity(play, loss_table, monkeypatch):
    """1 / (l + eps) with eps = 0.5, or -l, of each model on each client's training data."""
    asked = []
    real = PanmLoss.score_peers
    spy = lambda self, rnd, state, inbox: (  # noqa: E731
        asked.append((inbox, real(self, rnd, state, inbox))) or asked[-1][1]
    )
    monkeypatch.setattr(PanmLoss, "score_peers", spy)
    for transform in ("inverse", "negative"):
        run = play(PanmLoss(**SHORT, transform=transform, eps=0.5))
        run.exchange()
        (inbox, (scores, _)), loss = asked[-1], loss_table(run.loop.task, run.state.params)
        expected = (1 / (loss + 0.5) if transform == "inverse" else -loss).gather(
            1, inbox.peers.clamp(min=0)
        )
        assert int(inbox.mask.sum()) == 6 * 3
        torch.testing.assert_close(scores[inbox.mask], expected[inbox.mask])


def em(scores, bag, *, soft):
    """EM over two Gaussians in the words of the paper: whose scores end in the component that starts as the bag."""
    share = np.isin(np.arange(len(scores)), bag).astype(float)
    floor = max(0.01 * scores.std(), 1e-8)
    for _ in range(100):
        log = []
        for part in (share, 1 - share):
            mean = (part * scores).sum() / part.sum()
            deviation = max(math.sqrt((part * (scores - mean) ** 2).sum() / part.sum()), floor)
            log.append(
                np.log(part.mean()) - np.log(deviation) - ((scores - mean) / deviation) ** 2 / 2
            )
        new = (
            1 / (1 + np.exp(np.clip(log[1] - log[0], -700, 700)))
            if soft
            else (log[0] > log[1]).astype(float)
        )
        if np.abs(new - share).max() < 1e-9:
            break
        share = new
    return np.flatnonzero(share > 0.5).tolist()


OVERLAP = [0.0, 1.5, 0.6, 1.4, 1.1, 0.1, 0.3, 0.0, 0.7]
"""Similarities of the clients 1 to 8 to the client 0 of which hard and soft EM judge differently."""


@pytest.mark.option("Panm.em", "hard", "soft")
@pytest.mark.option("Panm.component", "larger", "first")
@pytest.mark.option("Panm.monotone", False, True)
@pytest.mark.parametrize(
    ("options", "scores", "bag", "expected"),
    [
        # the bag's own scores are the low ones: the neighbors are those with high ones, or whom the
        # bag began with
        ({}, [0, 0.1, 0.11, 0.9, 0.91, 0.92, 0.93], [1, 2], [3, 4, 5, 6]),
        ({"component": "first"}, [0, 0.1, 0.11, 0.9, 0.91, 0.92, 0.93], [1, 2], [1, 2]),
        # around 0.91 and narrow; 1.5 is nearer to the wide ones, whose mean is 0.425
        ({}, [0, 0.9, 0.91, 0.92, 0.1, -0.5, 0.6, 1.5], [1, 2, 3], [1, 2, 3]),
        ({"monotone": True}, [0, 0.9, 0.91, 0.92, 0.1, -0.5, 0.6, 1.5], [1, 2, 3], [1, 2, 3, 7]),
        ({"em": "hard"}, OVERLAP, [1, 2, 3, 4], None),
        ({"em": "soft"}, OVERLAP, [1, 2, 3, 4], None),
    ],
)
def test_the_bag_is_corrected_as_the_options_say(play, monkeypatch, options, scores, bag, expected):
    """Everybody is scored: the bag becomes the neighbors that are found, of scores that are the same for all."""
    scores = np.array(scores, dtype=float)
    if expected is None:
        found = {
            soft: [1 + j for j in em(scores[1:], np.array(bag) - 1, soft=soft)]
            for soft in (False, True)
        }
        assert found[False] != found[True]
        expected = found[options["em"] == "soft"]
    method = PanmLoss(num_peers=2, num_candidates=9, stage_one_rounds=1, interval=2, **options)
    known = torch.from_numpy(scores)
    monkeypatch.setattr(
        PanmLoss,
        "score_peers",
        lambda self, rnd, state, inbox: (known[inbox.peers.clamp(min=0)], {}),
    )
    run = play(method, tiny_federation(len(scores)))
    start = torch.full((len(scores), len(bag)), -1, dtype=torch.int32)
    start[0] = torch.tensor(bag)
    memory = dataclasses.replace(run.memory, members=start)
    run.loop.state, run.loop.next_round = dataclasses.replace(run.state, memory=memory), 1
    state, _ = run.exchange()
    assert bag_of(state.memory)[0].nonzero().flatten().tolist() == expected


@pytest.mark.option("Settings.record_similarities", False, True)
@pytest.mark.parametrize("kind", [PanmLoss, PanmGrad])
def test_similarities_and_probabilities_are_reported_where_the_run_records_them(
    play, monkeypatch, kind
):
    """Of scored slots what was scored; 1 for neighbors kept, 1 over the number of others or of the bag for draws."""
    scored = []
    real = kind.score_peers
    spy = lambda self, rnd, state, inbox: scored.append(real(self, rnd, state, inbox)) or scored[-1]  # noqa: E731
    monkeypatch.setattr(kind, "score_peers", spy)
    run = play(kind(**SHORT), tiny_federation(9, 3), record_similarities=True)
    silent = play(kind(**SHORT), tiny_federation(9, 3))
    for number in range(1, 8):
        bag = bag_of(run.memory).sum(1)
        run.steps(1)
        mine = scored[-1][0]
        info, after = run.infos[-1], bag_of(run.memory).sum(1)
        values, drawn, asked = info["similarities"], info["probabilities"], info["peers"] >= 0
        width = mine.shape[1]
        torch.testing.assert_close(values[:, :width], mine)
        assert bool(values[:, width:].isnan().all())
        believed = 2 if number <= 3 else 3 if number % 2 == 0 else 0
        candidates = 3 if believed else 0
        for i in range(9):
            kept = 1.0 if number <= 3 else 1 / int(bag[i])
            outside = 1 / max(1, 8 - int(bag[i]))
            parts = [(kept, believed), (outside, candidates), (1 / int(after[i]), 9)]
            expected = torch.tensor(
                [value for value, many in parts for _ in range(many)][: values.shape[1]]
            ).double()
            torch.testing.assert_close(drawn[i][asked[i]], expected[asked[i]])
        silent.steps(1)
        assert not {"similarities", "probabilities"} & set(silent.infos[-1])
        assert torch.equal(silent.state.params, run.state.params)


class PairsAtOnce(PanmLoss):  # pyright: ignore[reportGeneralTypeIssues]
    """The draws and corrections of PANM with masks of all pairs: the reference."""

    def choose_peers_to_score(self, rnd, memory, early, due):
        if not early and not due:
            return memory.neighbors[:, :0], memory.neighbors[:, :0]
        population = rnd.task.population
        bag = bag_of(memory, population)

        def draw(purpose, allowed):
            noise = rnd.rng.gumbel(purpose, rnd.ids, population)
            return selection.sample_uniformly(noise, self.num_candidates, rnd.candidates & allowed)

        candidates = draw("candidates", ~bag)
        return (memory.neighbors, candidates) if early else (draw("believed", bag), candidates)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_lists_of_members_are_corrected_and_drawn_from_as_masks_of_all_pairs(
    play, monkeypatch, participation
):
    """Corrections of a few clients at a time are those of all at once, with lost messages too."""
    corrected, real = [], gaussian_mixture.correct_bags
    monkeypatch.setattr("coterie.methods.panm._PAIRS_AT_ONCE", 1)
    monkeypatch.setattr("coterie.methods.panm.ROWS_AT_ONCE", 4)
    monkeypatch.setattr(
        gaussian_mixture, "correct_bags", lambda *given: corrected.append(given) or real(*given)
    )
    runs = []
    for kind in (PanmLoss, PairsAtOnce):
        door = Faulty(InMemory(torch.arange(21), 21), drop=0.2)
        federation = tiny_federation(21, 3)
        runs.append(play(kind(**SHORT), federation, exchange=door, participation=participation))
    for _ in range(8):
        corrected.clear()
        for run in runs:
            run.steps(1)
        ours, reference = runs
        assert torch.equal(ours.state.params, reference.state.params)
        assert torch.equal(ours.infos[-1]["peers"], reference.infos[-1]["peers"])
        assert torch.equal(ours.memory.members, reference.memory.members)
        if corrected:
            blocks = -(-len(ours.infos[-1]["peers"]) // 4)
            assert len(corrected) == 2 * blocks, "of four clients at a time, in both runs"
            given = zip(*[one[:5] for one in corrected[:blocks]], strict=True)
            at_once = real(*map(torch.cat, given), corrected[0][5])
            if participation == 1:
                assert torch.equal(bag_of(ours.memory), at_once)
