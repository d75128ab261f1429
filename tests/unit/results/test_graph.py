import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array

from coterie.errors import ConfigError, DataError
from coterie.results import graph
from coterie.results.planted import PlantedPhases


def edges(*rows: tuple[int, int, int]) -> pd.DataFrame:
    """An edges table of (round, reader, read)."""
    return pd.DataFrame(rows, columns=["round", "reader", "read"]).assign(
        purpose="mix", weight=0.5, bytes=8
    )


def test_heatmap_counts_reads_with_readers_as_rows():
    """Client 0 read client 1 twice and client 2 once; nobody is credited for being read."""
    counts = graph.count_reads(edges((0, 0, 1), (1, 0, 1), (1, 0, 2), (1, 2, 0)), 3)
    np.testing.assert_array_equal(counts, [[0, 2, 1], [0, 0, 0], [1, 0, 0]])


def test_heatmap_leaves_out_a_client_that_reads_itself():
    """Reading one's own model is not collaboration."""
    np.testing.assert_array_equal(
        graph.count_reads(edges((0, 1, 1), (0, 1, 0)), 2), [[0, 0], [1, 0]]
    )


def test_a_message_that_did_not_arrive_was_not_read():
    """An edge of purpose "missing" is an attempt, not a read."""
    table = edges((0, 0, 1), (0, 1, 0)).assign(purpose=["mix", "missing"])
    np.testing.assert_array_equal(graph.count_reads(table, 2), [[0, 1], [0, 0]])


def test_heatmap_of_a_run_without_exchange_is_zero():
    """A method that never reads has an empty heatmap, not an error."""
    np.testing.assert_array_equal(graph.count_reads(edges(), 2), np.zeros((2, 2)))


@pytest.mark.parametrize("row", [(0, 0, 3), (0, 3, 0), (0, -1, 0)])
def test_heatmap_refuses_a_client_outside_the_population(row):
    """An edge to client 3 of 3 clients means that the table belongs to another run."""
    with pytest.raises(DataError, match="expected ids from 0 to 2"):
        graph.count_reads(edges(row), 3)


def test_within_share_is_per_round():
    """Round 0: one of two reads inside; round 4: both."""
    truth = np.array([0, 0, 1, 1])
    share = graph.within_share(edges((0, 0, 1), (0, 0, 2), (4, 2, 3), (4, 3, 2), (4, 1, 1)), truth)
    assert share.to_dict() == {0: 0.5, 4: 1.0}


def test_pairs_of_unknown_clients_are_no_cluster():
    """0 and 1 are a cluster, 2 and 3 unknown. One model of all: of three each, 0 and 1 share theirs with one of their own.

    In round 1 only unknown clients share a model, and there is nothing to say.
    """
    groups = [[7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 2.0, 2.0]]
    metrics = pd.DataFrame(
        [(t, c, "train", "label", groups[t][c]) for t in (0, 1) for c in range(4)],
        columns=["round", "client", "split", "metric", "value"],
    )
    truth = PlantedPhases(np.zeros(1, np.int64), np.array([[0, 0, -1, -1]]))
    shares = graph.within_share_of_groups(metrics, truth)
    assert shares[0] == pytest.approx(1 / 3)
    assert np.isnan(shares[1])


def test_reads_of_unknown_clients_are_outside_and_readers_of_these_are_not_counted():
    """Client 1 reads one of its cluster and one attacker; attackers read each other and it."""
    truth = np.array([-1, 0, 0, -1])
    table = edges((0, 1, 2), (0, 1, 0), (0, 0, 3), (0, 3, 0), (0, 3, 1))
    assert graph.within_share(table, truth).to_dict() == {0: 0.5}


def test_random_reads_meet_unknown_clients():
    """Two pairs and an attacker: one of the four clients that each may read is of its cluster."""
    assert graph.expected_share(np.array([0, 0, 1, 1, -1])) == 0.25
    assert graph.expected_share(np.array([-1, -1])) == 0.0


@pytest.mark.parametrize(
    ("sizes", "share"),
    [([25] * 4, 0.242), ([70, 20, 5, 5], 0.530), ([40, 60], 0.515), ([20] * 5, 0.192), ([1], 0.0)],
)
def test_expected_share_of_random_equals_the_published_formula(sizes, share):
    """The four set-ups of the papers, and a client without anyone else."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    assert graph.expected_share(truth) == pytest.approx(share, abs=5e-4)


def test_discovery_is_the_first_round_whose_window_is_pure_enough():
    """Client 0 reads outside in round 0 and inside from round 1: two pure rounds end at round 2."""
    truth = np.array([0, 0, 1])
    table = edges((0, 0, 2), (1, 0, 1), (2, 0, 1), (3, 0, 1))
    found = graph.rounds_to_discovery(table, truth, share=1.0, window=2)
    np.testing.assert_array_equal(found, [2, np.nan, np.nan])


def test_discovery_is_measured_from_chance():
    """Over rounds 0 and 1 client 0 made 3 of 4 reads inside; chance gives 4 x 2/3: a quarter of the way to all 4."""
    truth = np.array([0, 0, 1, 0])
    table = edges((0, 0, 2), (1, 0, 1), (1, 0, 3), (0, 0, 1))
    assert graph.rounds_to_discovery(table, truth, share=0.25, window=2)[0] == 1
    assert np.isnan(graph.rounds_to_discovery(table, truth, share=0.26, window=2)[0])


def test_discovery_asks_no_more_of_a_small_cluster_than_it_holds():
    """Client 0 reads two peers a round but has only one of its kind: reading that one each time is all it can do."""
    truth = np.array([0, 0, 1, 1, 1])
    table = edges((0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 0, 3))
    assert graph.rounds_to_discovery(table, truth, share=1.0, window=2)[0] == 1


def test_who_was_in_no_round_is_no_chance_and_no_choice():
    """Of three peers one is of its kind: client 0 read it whenever it could, and another once."""
    truth = np.array([0, 0, 1, 1, 0])
    table = edges((0, 0, 1), (0, 0, 2), (1, 0, 1))
    found = graph.rounds_to_discovery(table, truth, absent=[4], share=1.0, window=2)
    np.testing.assert_array_equal(found, [1, *[np.nan] * 4])
    assert np.isnan(graph.rounds_to_discovery(table, truth, share=1.0, window=2)).all()


def test_unknown_clients_find_no_cluster():
    """Two attackers read each other always; so do two clients, of the three others that are there."""
    truth = np.array([-1, -1, 0, 0])
    table = edges(*[(r, *pair) for r in (0, 1) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))])
    found = graph.rounds_to_discovery(table, truth, window=2)
    np.testing.assert_array_equal(found, [np.nan, np.nan, 1, 1])


def test_reading_everyone_discovers_nothing():
    """The best choice and chance are the same when every other client is read."""
    table = edges((0, 0, 1), (0, 0, 2), (0, 0, 3))
    assert np.isnan(graph.rounds_to_discovery(table, np.array([0, 0, 1, 1]), window=1)).all()


def test_discovery_skips_rounds_in_which_a_client_was_not_active():
    """Active in rounds 0, 10 and 20 only: a window of two active rounds ends at round 10."""
    found = graph.rounds_to_discovery(
        edges((20, 0, 1), (0, 0, 1), (10, 0, 1)), np.array([0, 0, 1]), window=2
    )
    assert found[0] == 10


def test_discovery_of_many_clients_is_that_of_each_by_itself():
    """Random reads with gaps, of clusters of unequal size; beside a loop over clients and windows."""
    stream, clients, window, share = np.random.default_rng(5), 30, 3, 0.3
    truth = np.repeat([0, 1, 2], [18, 11, 1])
    rows = []
    for index in range(12):
        for reader in range(clients):
            for _ in range(stream.integers(0, 4)):
                near = np.flatnonzero(truth == truth[reader])
                read = (
                    stream.choice(near) if stream.random() < 0.06 * index else stream.integers(30)
                )
                rows.append((index, reader, int(read)))
    expected = np.full(clients, np.nan)
    for client in range(clients):
        mine = [(i, j) for i, c, j in rows if c == client and j != client]
        active, others = sorted({i for i, _ in mine}), int((truth == truth[client]).sum()) - 1
        for first in range(len(active) - window + 1):
            right = chance = most = 0.0
            for index in active[first : first + window]:
                read = [j for i, j in mine if i == index]
                right += sum(truth[j] == truth[client] for j in read)
                chance += len(read) * others / (clients - 1)
                most += min(len(read), others)
            enough = right - chance >= share * (most - chance) - 1e-9
            if enough and share * (most - chance) > 1e-9 and np.isnan(expected[client]):
                expected[client] = active[first + window - 1]
    found = graph.rounds_to_discovery(edges(*rows), truth, share=share, window=window)
    assert 5 < np.isfinite(expected).sum() < clients
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("share", "window"), [(0.0, 5), (1.1, 5), (0.5, 0)])
def test_discovery_refuses_an_impossible_threshold(share, window):
    """A share of nothing, or of more than everything, finds nothing."""
    with pytest.raises(ConfigError, match="expected a number"):
        graph.rounds_to_discovery(edges(), np.array([0]), share=share, window=window)


def test_communities_find_two_groups_that_hardly_read_each_other():
    """Two cliques of four joined by a single read."""
    counts = np.zeros((8, 8), dtype=np.int64)
    counts[:4, :4] = counts[4:, 4:] = 5
    counts[0, 4] = 1
    np.testing.assert_array_equal(graph.find_communities(counts), [0, 0, 0, 0, 1, 1, 1, 1])


def test_communities_of_everyone_reading_everyone_are_one():
    """No grouping of a complete graph has positive modularity."""
    np.testing.assert_array_equal(
        graph.find_communities(np.ones((6, 6), dtype=np.int64)), np.zeros(6)
    )


def test_communities_are_not_told_how_many_there_are():
    """Five planted groups of four come back as five."""
    truth = np.repeat(np.arange(5), 4)
    counts = 10 * (truth[:, None] == truth) + 1
    np.testing.assert_array_equal(graph.find_communities(counts), truth)


def test_communities_of_a_run_without_exchange_are_one():
    """Nobody read anybody: nothing was found."""
    np.testing.assert_array_equal(
        graph.find_communities(np.zeros((4, 4), dtype=np.int64)), np.zeros(4)
    )


def planted_reads(clients: int, groups: int, inside: int, outside: int) -> pd.DataFrame:
    """Reads of a population in equal groups: so many of one's own group, and so many of anybody, a client."""
    stream, size = np.random.default_rng(3), clients // groups
    reader = np.repeat(np.arange(clients), inside + outside)
    near = reader // size * size + stream.integers(size, size=len(reader))
    anybody = np.tile(np.arange(inside + outside) >= inside, clients)
    read = np.where(anybody, stream.integers(clients, size=len(reader)), near)
    return pd.DataFrame({"round": 0, "reader": reader, "read": read, "purpose": "mix"})


@pytest.mark.parametrize("outside", [0, 3])
def test_communities_of_many_clients_come_from_the_leading_eigenvectors_alone(outside, monkeypatch):
    """Five groups of 120: the iteration on the reads finds the same partition as the whole spectrum, the planted one.

    Without any read outside, the largest eigenvalue is there five times.
    """
    counts = graph.count_reads_sparse(planted_reads(600, 5, 8, outside), 600)
    truth = np.repeat(np.arange(5), 120)
    found = graph.find_communities(counts)
    assert len(counts.indices) < 600 * 12
    np.testing.assert_array_equal(found, truth)
    np.testing.assert_array_equal(found, graph.find_communities(counts))
    monkeypatch.setattr(graph, "WHOLE_SPECTRUM", 600)
    np.testing.assert_array_equal(graph.find_communities(counts), truth)
    np.testing.assert_array_equal(graph.find_communities(counts.toarray()), truth)


def test_centers_of_groups_are_those_of_a_sample_where_clients_are_many(monkeypatch):
    """Of 600 clients 150 give the centers, and all 600 get the label of their group; the same in each call."""
    counts = graph.count_reads_sparse(planted_reads(600, 5, 8, 3), 600)
    monkeypatch.setattr(graph, "MOST_ROWS", 150)
    found = graph.find_communities(counts)
    np.testing.assert_array_equal(found, np.repeat(np.arange(5), 120))
    np.testing.assert_array_equal(found, graph.find_communities(counts))


def test_communities_are_found_with_one_thread_whatever_the_caller_has(monkeypatch):
    """Of every pool, also while it is raised to two around the call; afterwards it has two again."""
    from threadpoolctl import threadpool_info, threadpool_limits

    def count_threads():
        return {pool["num_threads"] for pool in threadpool_info()}

    seen, real = set(), graph.modularity
    monkeypatch.setattr(graph, "modularity", lambda *of: seen.update(count_threads()) or real(*of))
    with threadpool_limits(2):
        graph.find_communities(np.kron(np.eye(2), np.ones((4, 4))))
        assert 2 in count_threads()
    assert seen == {1}


def test_communities_of_many_clients_without_structure_have_hardly_any_modularity():
    """1,000 clients that read four of anybody: whatever groups are found agree with no partition."""
    found = graph.find_communities(graph.count_reads_sparse(planted_reads(1000, 4, 0, 4), 1000))
    assert abs(graph.compare_partitions(found, np.repeat(np.arange(4), 250))["ari"]) < 0.02


def test_counted_reads_are_those_of_the_heatmap():
    """Two reads of one peer are one entry of 2; reads of oneself and what did not arrive are none."""
    table = edges((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 2, 0)).assign(
        purpose=["mix", "probe", "mix", "missing"]
    )
    counts = graph.count_reads_sparse(table, 3)
    assert counts.nnz == 1
    np.testing.assert_array_equal(counts.toarray(), graph.count_reads(table, 3))


def test_modularity_of_two_separate_pairs_is_a_half():
    """Two components with equal weight: 2 x (1/2 - 1/4); as one group: 1 - 1."""
    weights = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
    assert graph.modularity(weights, np.array([0, 0, 1, 1])) == pytest.approx(0.5)
    assert graph.modularity(weights, np.zeros(4, dtype=np.int64)) == pytest.approx(0.0)
    assert graph.modularity(csr_array(weights), np.array([0, 0, 1, 1])) == pytest.approx(0.5)


def test_agreement_of_a_hand_worked_partition():
    """Six clients, one of them misplaced; and one group for everyone, which says nothing."""
    truth, label = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])
    # Contingency [[2, 1], [0, 3]]: pairs together in both 1 + 3 = 4, in truth 6, in label 1 + 6 =
    # 7; expected 42 / 15.
    assert graph.compare_partitions(label, truth)["ari"] == pytest.approx(
        (4 - 2.8) / ((6 + 7) / 2 - 2.8)
    )
    assert graph.compare_partitions(np.zeros(6, dtype=np.int64), truth) == {"ari": 0.0, "nmi": 0.0}


def test_in_degree_is_the_column_sum():
    """How often each was read, not how often each read."""
    np.testing.assert_array_equal(graph.count_readers(np.array([[0, 2], [3, 0]])), [3, 2])


@pytest.mark.parametrize(
    ("values", "expected"), [([3, 3, 3], 0.0), ([0, 0, 0, 8], 0.75), ([1, 3], 0.25), ([0, 0], 0.0)]
)
def test_gini_of_small_cases(values, expected):
    """Equal, all with one, a quarter (|1 - 3| / (2 x 2 x 2)), and nothing at all."""
    assert graph.gini(np.array(values)) == pytest.approx(expected)
