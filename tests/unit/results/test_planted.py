"""Planted clusters by round: of a table of moves by hand, and of a stored run whose data change."""

import numpy as np
import pandas as pd
import pytest
from tests.drifting import build

from coterie._util import manifest
from coterie.engine.optim import LocalTraining
from coterie.methods.oracle import Oracle
from coterie.papers.figures import _own_share
from coterie.report.data import build_payload
from coterie.results import graph
from coterie.results.planted import PlantedPhases
from coterie.results.stored_runs import StoredRun, load_run
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate

CLUSTERS = np.array([[0, 0, 1, 1], [0, 1, 1, 0]])
MOVED = PlantedPhases(np.array([0, 3]), CLUSTERS)


def make_edges(*reads):
    table = pd.DataFrame(reads, columns=["round", "reader", "read"])
    return table.assign(purpose="mix", weight=1.0, bytes=8)


def test_a_cluster_is_that_of_the_round():
    rounds, clients = np.array([-1, 0, 2, 3, 9]), np.array([1, 1, 1, 1, 3])
    assert MOVED.find(rounds, clients).tolist() == [0, 0, 0, 1, 0]
    assert MOVED.select(2).tolist() == [0, 0, 1, 1]
    assert MOVED.select(3).tolist() == [0, 1, 1, 0]
    assert MOVED.last_change == 3


def test_reads_of_a_round_are_compared_with_the_clusters_of_that_round():
    """Client 1 reads client 0 all the time, which is of its cluster until round 3."""
    edges = make_edges(*((number, 1, 0) for number in range(5)), (4, 3, 0))
    assert graph.within_share(edges, MOVED).to_dict() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0, 4: 0.5}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Half of each cluster moves in round 3."""
    data = build(
        {"kind": "move", "at": 3, "share": 0.5}, shift=[{"kind": "rotation", "degrees": [0, 180]}]
    )
    folder = tmp_path_factory.mktemp("moved") / "study" / "Oracle" / "seed-0"
    settings = Settings(rounds=6, local=LocalTraining(epochs=1), engine="loop", check=False)
    folder.mkdir(parents=True)
    text = b'name = "study"\nseeds = [0]\n[[methods]]\nkind = "oracle"\n'
    manifest.replace_files(folder, {"config.toml": text})
    method = Oracle(num_peers=2)
    simulate(data, method, model="linear", settings=settings, label="Oracle", folder=folder)
    run = load_run(folder)
    assert isinstance(run, StoredRun)
    return run, data


def test_a_stored_run_has_the_truth_of_each_phase(stored):
    run, data = stored
    phases = run.planted_phases
    assert phases.firsts.tolist() == [0, 3]
    assert phases.clusters[0].tolist() == data.truth.cluster.tolist()
    assert phases.clusters[1].tolist() == data.phases[0].truth.cluster.tolist()
    # Results by cluster are by the one at the end, as the test sets of the final test are.
    assert run.client_clusters.tolist() == data.phases[0].truth.cluster.tolist()


def test_the_oracle_reads_its_own_cluster_before_and_after(stored):
    """Compared with the clusters of one phase alone it would not."""
    run, _ = stored
    assert set(_own_share(run)) == {1.0}
    page = build_payload([run])
    (reads,) = page["reads"]["methods"]
    assert graph.within_share(run.edges, run.planted_phases).tolist() == [1.0] * 6
    assert graph.within_share(run.edges, run.planted_clusters)[:3].max() < 1
    assert reads["asked"] == 8
    # All steps above the lowest share are 0: it is 1 in each round.
    share = reads["share"]
    assert (share["shape"], share["low"], share["step"]) == ([6], 1.0, 1.0)
    assert page["cluster"] == run.client_clusters.tolist()


def test_a_run_without_changes_has_one_phase(stored):
    run, _ = stored
    table = run.metrics.assign(cluster=1)
    (only,) = StoredRun(
        run.folder, run.config, {}, table, run.edges
    ).planted_phases.clusters.tolist()
    assert only == [1] * 8
