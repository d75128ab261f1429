import shutil

import pytest

from coterie.net.fleet import Fleet, compare_with_simulation
from coterie.studies import config
from coterie.studies.run import load_study_results, run_study

LINES = 'for i in 1 2 3 4 5; do echo "{\\"event\\": \\"round\\", \\"round\\": $i}" >&2 || exit 1; sleep 0.1; done'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_listener_ends_no_node(tmp_path):
    """The log of the process is read and kept to its end: a closed pipe would be its end as well."""

    def listener(name, event):
        raise RuntimeError("a fault of the listener")

    files, behind = {"a": tmp_path / "node.toml"}, {"a": ["sh", "-c", LINES]}
    with Fleet(files, logs=tmp_path, listener=listener, behind=behind) as one:
        one.start("a")
        assert one.wait(30) == {"a": 0}
    assert len((tmp_path / "a.log").read_text().splitlines()) == 5


STUDY = """
name = "pair"
rounds = 2
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits", num_clients = 4 }
methods = [{ kind = "local", label = "L" }]
"""


@pytest.mark.full
def test_the_study_of_nodes_and_their_simulation_can_be_read(tmp_path):
    """What was written says what is there: both runs, in a study that is whole."""
    study = config.parse_study_text(STUDY).select_run("L", 0)
    run_study(study, out=tmp_path / "alone")
    shutil.copytree(tmp_path / "alone", tmp_path / "nodes" / "node-00")
    top = compare_with_simulation(tmp_path, study, ["node-00"])
    rows = load_study_results(top).summary["rows"]
    assert {row["label"] for row in rows} == {"nodes", "simulated"}
