"""DAC with tables of bounded size in place of a memory of all pairs."""

import dataclasses
import math

import pytest
import torch
from tests.selection import first_only

from coterie.errors import ConfigError
from coterie.exchange.base import Inbox
from coterie.methods.dac import Dac, DacNoTwoHop, DacVar
from coterie.methods.peer_table import PeerTable
from coterie.papers.dac import PublishedDac
from coterie.simulation.run import simulate
from coterie.testing import check_method, tiny_federation, tiny_settings

CLIENTS = 9


def returning(known):
    """A selection rule: who was read often and long ago, or is similar."""
    return known.noise + 0.7 * known.count + 0.2 * known.age + 5 * known.similarity


METHODS = {
    "dac": Dac(num_peers=2),
    "dac-no-two-hop": DacNoTwoHop(num_peers=2, aggregation="fedsim"),
    "dac-var": DacVar(num_peers=2),
    "cosines": Dac(num_peers=2, similarity="cos_grad"),
    "rule": Dac(num_peers=2, selection=f"{__name__}:returning"),
    "published": PublishedDac(
        num_peers=2,
        two_hop_relay="any",
        two_hop_pick="least",
        scaling="minmax",
        unknown="floor",
        drop_nonpositive=True,
        aggregation="fedsim_prior",
    ),
}
SETTINGS = {
    "all": {},
    "new clients": {"new_clients": 2, "new_client_others": "training", "new_client_rounds": 2},
    "participation and acceptance": {"participation": 0.5, "acceptance": True},
    "one after another": {"schedule": "sequential"},
}


def run(method, *, clients=CLIENTS, **settings):
    return simulate(
        tiny_federation(clients),
        method,
        model="linear",
        settings=tiny_settings(**{"rounds": 5, **settings}),
        seed=1,
    )


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", first_only(METHODS, slow=True))
def test_a_table_of_all_members_gives_the_bytes_of_a_memory_of_all_pairs(name, settings):
    """All models, metrics, readings and weights; a message has 4 bytes for an id in place of 1."""
    method = METHODS[name]
    dense = run(method, **SETTINGS[settings])
    # More than there are members is as many as there are.
    table = run(dataclasses.replace(method, table=CLIENTS + 3), **SETTINGS[settings])
    assert torch.equal(table.params, dense.params)
    assert table.metrics.equals(dense.metrics)
    assert table.edges.drop(columns="bytes").equals(dense.edges.drop(columns="bytes"))
    more = (table.edges["bytes"] - dense.edges["bytes"]).unique().tolist()
    members = {3 * CLIENTS, 3 * (CLIENTS - 2)}  # before the new clients have come, too
    assert set(more) <= (members if method.two_hop else {0})


def test_a_smaller_table_gives_another_result():
    """So that the test above compares something."""
    dense, table = run(METHODS["dac"]), run(Dac(num_peers=2, table=3))
    assert not torch.equal(table.params, dense.params)


@pytest.mark.full
@pytest.mark.parametrize("name", first_only(METHODS, slow=True))
def test_tables_keep_the_contract(name):
    """Draws of a table are by column, not by member: new ids give other draws."""
    check_method(dataclasses.replace(METHODS[name], table=3), relabel=False)


@pytest.mark.full
def test_exploring_keeps_the_contract():
    check_method(Dac(num_peers=2, table=3, explore=1), relabel=False)


def a_table(ids, similarity, status, count=None):
    ids, status = torch.tensor([ids], dtype=torch.int32), torch.tensor([status], dtype=torch.int8)
    count = torch.tensor([count], dtype=torch.int32) if count else (status == 2).int()
    return PeerTable(
        ids,
        torch.tensor([similarity], dtype=torch.float64),
        status,
        count,
        torch.zeros(len(ids), 0),
    )


def rows_of(table):
    """Return (id, similarity, status, count) of the columns that are not empty."""
    columns = (table.ids, table.similarity, table.status, table.count)
    return [row for row in zip(*(t[0].tolist() for t in columns), strict=True) if row[0] >= 0]


def told(peers, members, similarity, mask=None):
    """An inbox of one reader: what each peer shares."""
    peers = torch.tensor([peers])
    return Inbox(
        table=torch.zeros(peers.shape[1], 1),
        index=torch.arange(peers.shape[1])[None],
        peers=peers,
        mask=torch.ones_like(peers, dtype=torch.bool) if mask is None else torch.tensor([mask]),
        age=torch.zeros_like(peers),
        fields={
            "members": torch.tensor(members, dtype=torch.int32),
            "similarity": torch.tensor(similarity),
        },
        bytes=torch.zeros_like(peers),
    )


def test_what_was_read_in_a_round_stays_until_its_end():
    """Client 5 has a full table of 4; it reads 8 and 1, and 7 in vain. 0.1 and 0.2 are the lowest."""
    before = a_table([2, 3, 4, 5, 8], [0.9, 0.8, 0.7, 0.0, 0.3], [2, 1, 2, 3, 2], [1, 0, 4, 0, 6])
    after = before.with_measurements(
        torch.tensor([[8, 1, 7]]),
        torch.tensor([[0.2, 0.1, 5.0]], dtype=torch.float64),
        torch.tensor([[True, True, False]]),
    )
    assert rows_of(after) == [
        (1, 0.1, 2, 1),
        (2, 0.9, 2, 1),
        (4, 0.7, 2, 4),
        (5, 0, 3, 0),
        (8, 0.2, 2, 7),
    ]
    assert rows_of(before)[4] == (8, 0.3, 2, 6)


def test_half_of_a_table_is_for_what_the_client_measured():
    """Peers say 0.8 of many: two of four places are kept for the best measured, 0.3 and 0.2."""
    mine = a_table([0, 1, 2, 3, 9], [0, 0.1, 0.3, 0.2, 0.05], [3, 2, 2, 2, 2])
    relays = told([1], [[4, 5, 6, 7, -1]], [[0.8, 0.7, 0.85, 0.75, 9.0]])
    after = mine.with_estimates(relays, 10, "most")
    assert [row[::2] for row in rows_of(after)] == [(0, 3), (2, 2), (3, 2), (4, 1), (6, 1)]


@pytest.mark.parametrize(("pick", "kept"), [("most", [4, 6]), ("least", [5, 7])])
def test_estimates_of_the_preferred_peer_come_before_higher_ones(pick, kept):
    """1 was measured as 0.6 and 2 as 0.4; what they say has no common scale."""
    mine = a_table([0, 1, 2, 8, -1], [0, 0.6, 0.4, 0.9, 0], [3, 2, 2, 1, 0])
    relays = told([1, 2], [[4, 6, 9], [5, 7, 4]], [[0.3, 0.2, 0.1], [0.9, 0.8, 0.1]])
    after = mine.with_estimates(relays, 10, pick)
    assert [row[0] for row in rows_of(after)] == sorted([0, 1, 2, *kept])


@pytest.mark.parametrize(("pick", "expected"), [("most", 0.5), ("least", 0.25)])
def test_an_estimate_is_the_one_of_the_preferred_peer(pick, expected):
    """Of 4 both peers speak; 1 was measured as 0.6, 2 as 0.4. The own 0.7 of 3 stays; of 5 one speaks."""
    mine = a_table([0, 1, 2, 3, 4, -1, -1], [0, 0.6, 0.4, 0.7, 0.1, 0, 0], [3, 2, 2, 2, 1, 0, 0])
    relays = told([1, 2], [[3, 4, -1], [4, 5, 0]], [[0.125, 0.5, 0.0], [0.25, 0.375, 8.0]])
    after = mine.with_estimates(relays, 10, pick)
    assert rows_of(after) == [
        (0, 0, 3, 0), (1, 0.6, 2, 1), (2, 0.4, 2, 1), (3, 0.7, 2, 1), (4, expected, 1, 0), (5, 0.375, 1, 0),
    ]  # fmt: skip


def test_ids_that_nobody_has_and_messages_that_did_not_come_are_ignored():
    mine = a_table([0, 1, -1, -1], [0, 0.6, 0, 0], [3, 2, 0, 0])
    relays = told([1, 2], [[10, -7, 4], [5, 6, 7]], [[0.5] * 3, [0.5] * 3], [True, False])
    assert [row[0] for row in rows_of(mine.with_estimates(relays, 10, "most"))] == [0, 1, 4]


def test_only_what_was_measured_is_relayed():
    fields = a_table([0, 1, 2, -1], [0, 0.6, 0.7, 0], [3, 2, 1, 0]).scores_to_share(
        "direct", drop_nonpositive=False, dtype=torch.float32
    )
    assert fields["members"].tolist() == [[-1, 1, -1, -1]]
    torch.testing.assert_close(fields["similarity"], torch.tensor([[0, 0.6, 0, 0]]))


def test_members_outside_a_table_count_as_unknown():
    """s = 1 of one member, and three unknown: with tau = ln 2 shares (2, 1, 1, 1) / 5."""
    columns = a_table([0, 3, -1], [0, 1.0, 0], [3, 2, 0]).list_columns(torch.tensor([0]), 5)
    p = PublishedDac(tau=math.log(2), eps_p=0.0).peer_probabilities(torch.tensor([0]), columns, 0)
    torch.testing.assert_close(p, torch.tensor([[0, 0.4, 0, 0.2]]).double())
    floor = PublishedDac(eps_p=0.0, unknown="floor").peer_probabilities(
        torch.tensor([0]), columns, 0
    )
    assert floor.tolist() == [[0, 1, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("num_peers", first_only([3, 1], slow=True))
def test_peers_are_drawn_as_often_as_from_a_memory_of_all_pairs(play, num_peers):
    """The share of draws in which each member occurs, of 1,000, with tables that hold all that is known.

    The exact shares come from the memory of all pairs with other draws; 4 standard errors apart.
    """
    federation, tau = tiny_federation(12), 2.0
    similarity = {1: 0.9, 4: 0.5, 7: 0.2}
    shares = []
    for table in (None, 4):
        method = Dac(num_peers=num_peers, tau=tau, table=table)
        if table is None:
            method = Dac(num_peers=num_peers, tau=tau)
        game = play(method, federation)
        memory = game.memory
        if table is None:
            for t in (memory.similarity, memory.status):
                t.zero_()
            for member, value in similarity.items():
                memory.similarity[:, member] = value
        else:
            for row in range(12):
                known = [m for m in similarity if m != row]
                ids = sorted([row, *known])
                memory.ids[row] = torch.tensor(ids + [-1] * (5 - len(ids)))
                for column, member in enumerate(ids):
                    memory.similarity[row, column] = similarity.get(member, 0) * (member != row)
                    memory.status[row, column] = 3 if member == row else 2
                memory.similarity[row, len(ids) :] = 0
                memory.status[row, len(ids) :] = 0
        seen = torch.zeros(12)
        for index in range(1000):
            rnd = dataclasses.replace(
                round_of(game), rng=game.loop.rng.at_round(index + 5000 * bool(table))
            )
            peers = method.draw_peers(rnd, memory)[0][0]
            assert len(set(peers.tolist())) == num_peers
            seen[peers] += 1
        shares.append(seen / 1000)
    assert shares[0][0] == shares[1][0] == 0
    error = (shares[0] * (1 - shares[0]) * 2 / 1000).sqrt().clamp(min=1e-3)
    assert bool(((shares[0] - shares[1]).abs() < 4 * error).all()), shares


def round_of(game):
    loop, everybody = game.loop, torch.arange(12)
    return loop._make_round(loop.next_round, everybody, everybody)


@pytest.mark.parametrize("reachable", [[0, 3, 5, 8, 10], [0, 3]])
def test_only_members_that_can_be_reached_are_drawn(play, reachable):
    method = Dac(num_peers=4, table=4)
    game = play(method, tiny_federation(12)).steps(3)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[reachable] = True
    for each in (mask, mask.expand(12, -1)):
        peers = method.draw_peers(
            dataclasses.replace(round_of(game), reachable=each, rng=game.loop.rng), game.memory
        )[0]
        for row in range(12):
            drawn = [peer for peer in peers[row].tolist() if peer >= 0]
            others = set(reachable) - {row}
            assert set(drawn) <= others
            assert len(drawn) == len(set(drawn)) == min(4, len(others))


def fill_tables(memory, width):
    """Let each of 12 clients know its `width` next members as equally and very similar."""
    for row in range(12):
        ids = sorted((row + step) % 12 for step in range(width + 1))
        memory.ids[row] = torch.tensor(ids)
        memory.status[row] = torch.tensor([3 if member == row else 2 for member in ids])
        memory.similarity[row] = torch.tensor([float(member != row) for member in ids])


def test_the_last_peers_are_drawn_uniformly_outside_of_the_table(play):
    """Of 12 members 4 are listed, and each of the 7 others has a millionth: 300 draws of 12 clients."""
    method = Dac(num_peers=4, table=4, explore=1)
    game = play(method, tiny_federation(12))
    fill_tables(game.memory, 4)
    plain, steps = Dac(num_peers=4, table=4), torch.zeros(12)
    for index in range(300):
        rnd = dataclasses.replace(round_of(game), rng=game.loop.rng.at_round(index))
        peers, prior = method.draw_peers(rnd, game.memory)
        before, _ = plain.draw_peers(rnd, game.memory)
        away = (peers - torch.arange(12)[:, None]) % 12
        # 3,600 times three draws among the four listed ones, and a millionth for each other.
        listed = (away[:, :3] <= 4).all(1)
        assert listed.sum() >= 11
        assert torch.equal(peers[listed, :3], before[listed, :3]), "the others are a draw of three"
        assert bool((prior[listed, 3] < prior[listed, :3].min(1).values).all())
        steps += away[:, 3].bincount(minlength=12)
    assert steps[:5].sum() == 0
    share, error = 1 / 7, math.sqrt(1 / 7 * 6 / 7 / 3600)
    assert bool(((steps[5:] / 3600 - share).abs() < 4 * error).all()), steps


@pytest.mark.parametrize("explore", [2, 4])
def test_members_of_the_table_are_read_where_none_is_left_outside(play, explore):
    """Of the 12 only six can be reached: for client 0 it are 1 to 4, which it lists, and 5."""
    method = Dac(num_peers=4, table=4, explore=explore)
    game = play(method, tiny_federation(12))
    fill_tables(game.memory, 4)
    reachable = torch.arange(12) < 6
    rnd = dataclasses.replace(round_of(game), reachable=reachable, rng=game.loop.rng)
    peers = method.draw_peers(rnd, game.memory)[0]
    for row, drawn in enumerate(peers.tolist()):
        listed = {(row + step) % 12 for step in range(1, 5)} & set(range(6))
        others = set(range(6)) - listed - {row}
        assert len(set(drawn)) == 4
        assert set(drawn) <= listed | others
        assert len(set(drawn) & others) == max(min(explore, len(others)), 4 - len(listed))


def test_a_table_is_as_wide_as_it_was_told_to_be(play):
    memory = play(Dac(num_peers=2, table=3), tiny_federation(12)).steps(4).memory
    assert memory.ids.shape == (12, 4)
    assert bool((memory.ids == torch.arange(12)[:, None]).any(1).all())
    for row in memory.ids.tolist():
        listed = [member for member in row if member >= 0]
        assert listed == sorted(set(listed))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"table": 2, "num_peers": 3}, "table is 2; expected num_peers \\(3\\) or more"),
        ({"table": 9, "loss_direction": "push"}, "loss_direction is 'push'; expected 'pull'"),
        ({"explore": 1}, "explore is 1; expected 0 without a table"),
        ({"table": 9, "explore": 6}, "explore is 6; expected at most num_peers \\(5\\)"),
        (
            {"table": 9, "two_hop_scope": "history"},
            "two_hop_scope is 'history'; expected 'current'",
        ),
        ({"table": 9, "tau_schedule": "entropy"}, "tau_schedule is 'entropy'; expected another"),
    ],
)
def test_what_needs_a_memory_of_all_pairs_is_refused(options, found):
    with pytest.raises(ConfigError, match=found):
        PublishedDac(**options)
