"""Several nodes of one machine: their files, their processes and their joined results."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest

from coterie.errors import ConfigError, TransportError
from coterie.net import fleet
from coterie.net.fleet import Fleet, compare_with_simulation, demo_study, join_results, lay_out
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


# ---------------------------------------------------------------- processes


class Process(subprocess.Popen):
    """A process that a fleet has started; there is none."""

    def __del__(self):
        pass

    def __init__(self, lines=(), ends=True):
        self.stderr = io.StringIO("".join(f"{line}\n" for line in lines))
        self.ends, self.told, self.returncode = ends, [], 3

    def poll(self):
        return self.returncode if self.ends else None

    def wait(self, timeout=None):
        if not self.ends and timeout is not None:
            raise subprocess.TimeoutExpired("node", timeout)

    def send_signal(self, sig):
        self.told.append(sig)

    def kill(self):
        self.told.append("killed")


@pytest.fixture
def started(monkeypatch):
    """The commands that were given, and their processes."""
    # Types are looked up by name once, before another stands there.
    Fleet({}, logs=None, listener=print)._copy_log("", Process())
    found, processes = [], []

    def start(command, **given):
        found.append((command, given))
        return processes.pop(0) if processes else Process()

    monkeypatch.setattr(subprocess, "Popen", start)
    return found, processes


def test_a_node_is_started_with_its_file_and_the_cores_are_shared(started, tmp_path):
    found, _ = started
    heard = []
    more = {"threads": 3, "behind": {"b": ["nice"]}, "arguments": ["--insecure"]}
    files = {name: tmp_path / f"{name}.toml" for name in "ab"}
    with Fleet(files, logs=tmp_path, listener=lambda *event: heard.append(event), **more) as one:
        one.start("a")
        one.start("b", "--role", "server")
    node = [sys.executable, "-m", "coterie", "node"]
    assert [command for command, _ in found] == [
        [*node, str(files["a"]), "--insecure"],
        ["nice", *node, str(files["b"]), "--insecure", "--role", "server"],
    ]
    assert found[0][1]["env"] == os.environ | {"OMP_NUM_THREADS": "3"}
    assert found[0][1]["stdout"].name == str(tmp_path / "a.out")


def test_lines_of_a_node_are_copied_and_its_events_heard(started, tmp_path):
    _, processes = started
    processes.append(Process(['{"event": "met"}', "Traceback", '{"event": "done"}']))
    (tmp_path / "a.log").write_text("of the start before\n")
    heard = []
    with Fleet({"a": tmp_path}, logs=tmp_path, listener=lambda *event: heard.append(event)) as one:
        one.start("a")
        assert one.wait(5) == {"a": 3}
    assert heard == [("a", {"event": "met"}), ("a", {"event": "done"})]
    assert (tmp_path / "a.log").read_text().splitlines() == [
        "of the start before", '{"event": "met"}', "Traceback", '{"event": "done"}',
    ]  # fmt: skip


def test_without_a_folder_logs_go_to_the_own_errors(started, tmp_path, capsys):
    _, processes = started
    processes.append(Process(["a line"]))
    with Fleet({"a": tmp_path}, logs=None, listener=print) as one:
        one.start("a")
        one.wait(5)
    assert capsys.readouterr().err == "a line\n"


def test_who_has_not_ended_in_time_is_named(started, tmp_path):
    _, processes = started
    slow = Process(ends=False)
    processes += [Process(), slow]
    one = Fleet({"a": tmp_path, "b": tmp_path}, logs=tmp_path, listener=print)
    for name in "ab":
        one.start(name)
    with pytest.raises(TransportError, match=r"^b has not ended after 7 s; see its log$"):
        one.wait(7.0)
    one.close()
    # All are told first; who does not end is killed.
    assert slow.told == [signal.SIGTERM, "killed"]
    assert one.processes["a"].told == [], "it has ended already"


def test_a_kill_is_waited_for():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = Fleet({}, logs=None, listener=print)
    one.processes["a"] = process
    one.kill("a")
    assert process.returncode == -signal.SIGKILL
    process.stdin.close()


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def laid(tmp_path_factory):
    """The files of a run of four members on other hosts, with a server."""
    folder = tmp_path_factory.mktemp("fleet")
    study = config.parse_study_text(STUDY.replace('"local"', '"fedavg"')).select_run("L", 0)
    hosts = [f"10.0.0.{number}" for number in range(4)]
    given = {"port": 2000, "hosts": hosts, "network": {"deadline": 5.0}, "days": 3.0}
    return folder, lay_out(folder, study, **given, data_dir=folder / "data"), study


def test_each_node_has_a_file_that_names_its_keys_and_its_role(laid):
    folder, files, study = laid
    assert list(files) == [f"node-0{number}" for number in range(4)]
    for name, path in files.items():
        table = tomllib.loads(path.read_text())
        assert path == folder / f"{name}.toml"
        assert table["role"] == ("server" if name == "node-00" else "peer")
        assert table["network"] == {"deadline": 5.0}
        assert table["data"] == {"study": "own rows", "data_dir": str(folder / "data")}
        assert (folder / table["key"]).stat().st_mode & 0o777 == 0o600
        for part in ("study", "roster", "organizer", "ca", "certificate"):
            assert (folder / table[part]).is_file()
    assert config.parse_study_text((folder / "study.toml").read_text()) == study


def test_the_roster_has_a_port_and_a_client_for_each_member(laid):
    folder, _, _ = laid
    text = tomllib.loads((folder / "keys" / "roster.toml").read_text())
    found = [(one["name"], one["address"], one["clients"]) for one in text["members"]]
    assert found == [
        (f"node-0{number}", f"10.0.0.{number}:{2000 + number}", [number]) for number in range(4)
    ]
    assert text["server"] == "node-00"
    ends = [datetime.fromisoformat(one["expires"]) for one in text["members"]]
    assert all(2.9 < (end - datetime.now(UTC)) / timedelta(days=1) < 3.1 for end in ends)


@pytest.mark.parametrize(
    ("port", "fits"), [(1023, False), (1024, True), (32764, True), (32765, False)]
)
def test_ports_are_between_those_of_the_system_and_those_of_outgoing_connections(
    tmp_path, monkeypatch, port, fits
):
    """Four members: the last of 32,764 and on is below 32,768."""
    monkeypatch.setattr(fleet.local, "create_credentials", lambda *_, **__: None)
    study = config.parse_study_text(STUDY).select_run("L", 0)
    if fits:
        files = lay_out(tmp_path, study, port=port)
        table = tomllib.loads(files["node-03"].read_text())
        assert (table["role"], table["network"], table["data"]) == (
            "peer", {}, {"study": "own rows"},
        )  # fmt: skip
        return
    with pytest.raises(ConfigError, match="expected some between 1024 and 32768"):
        lay_out(tmp_path, study, port=port)


def test_the_demonstration_is_two_rotations_of_the_digits_in_halves():
    study = demo_study(5, 7)
    (shift,) = study.data.shift
    assert (study.name, study.settings.rounds, study.seeds) == ("net-demo", 7, (0,))
    assert (study.data.num_clients, list(shift["degrees"])) == (5, [0, 180])
    assert list(shift["sizes"]) == [3, 2]
    assert [entry.label for entry in study.methods] == ["DAC"]


def test_results_of_nodes_are_one_run_in_the_order_of_rounds_and_clients(tmp_path):
    """Two nodes whose tables have other categories; the configuration names the label."""
    study = config.parse_study_text(STUDY).select_run("L", 0)
    for number, name in enumerate(("a", "b")):
        source = tmp_path / "nodes" / name / "pair" / "L" / "seed-0"
        source.mkdir(parents=True)
        metrics = pd.DataFrame(
            {
                "round": [1, 0],
                "client": [1 - number] * 2,
                "metric": ["loss", name],
                "value": [1.0, 2.0],
            }
        ).astype({"metric": "category"})
        edges = pd.DataFrame(
            {"round": [1, 0], "reader": [1 - number] * 2, "purpose": ["mix", "probe"]}
        )
        metrics.to_parquet(source / "metrics.parquet")
        edges.astype({"purpose": "category"}).to_parquet(source / "edges.parquet")
        (source / "provenance.json").write_text(json.dumps({"of": name}))
    tables = join_results(tmp_path, study, ["a", "b"], "nodes")
    target = tmp_path / "runs" / "pair" / "nodes" / "seed-0"
    stored = pd.read_parquet(target / "metrics.parquet")
    rows = [(0, 0, "b"), (0, 1, "a"), (1, 0, "loss"), (1, 1, "loss")]
    assert [*zip(stored["round"], stored["client"], stored["metric"], strict=True)] == rows
    assert stored["metric"].dtype == "category"
    assert list(tables) == ["metrics", "edges"]
    edges = pd.read_parquet(target / "edges.parquet")
    assert [*zip(edges["round"], edges["reader"], strict=True)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert json.loads((target / "provenance.json").read_text()) == {"of": "a"}
    named = config.parse_study_text((target / "config.toml").read_text())
    assert [entry.label for entry in named.methods] == ["nodes"]


def test_the_demonstration_kills_a_node_after_a_third_and_starts_it_again(tmp_path, monkeypatch):
    """With a pretended fleet whose nodes report rounds; what is said is of the first node alone."""
    steps, said = [], []
    monkeypatch.setattr(
        fleet, "lay_out", lambda folder, study, **given: {"n0": 1, "n1": 2, "n2": 3}
    )
    monkeypatch.setattr(fleet, "compare_with_simulation", lambda *given: given[0] / "top")

    class Pretended:
        def __init__(self, files, logs, listener):
            self.listener, self.status = listener, dict.fromkeys(("n0", "n1", "n2"), 0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            steps.append("closed")

        def start(self, name):
            steps.append(f"start {name}")
            if len(steps) == 3:
                for number in (-1, 0, 1, 2, 1):
                    for one in ("n0", "n1", "n2"):
                        event = {
                            "event": "round",
                            "round": number,
                            "seconds": 1.25,
                            "accuracy": 0.5,
                        }
                        self.listener(one, event)
                self.listener("n0", {"event": "peer_down", "peer": "n1", "missing": []})
                self.listener("n1", {"event": "done"})

        def kill(self, name):
            steps.append(f"kill {name}")

        def wait(self, seconds):
            return self.status

    monkeypatch.setattr(fleet, "Fleet", Pretended)
    given = {"clients": 3, "rounds": 3, "port": 9000, "say": said.append}
    assert fleet.run_demo(tmp_path, **given) == tmp_path / "top"
    assert steps == ["start n0", "start n1", "start n2", "kill n2", "start n2", "closed"]
    assert said[0].startswith("3 nodes with mutual TLS on 127.0.0.1:9000 to 9002; logs in ")
    assert said[1:5] == [f"n0: round {number} of 3, 1.25 s, 50 %" for number in range(4)]
    assert said[5:] == ["n2: killed without warning; started again"]
    monkeypatch.setattr(Pretended, "wait", lambda *_: {"n0": 0, "n1": 4})
    shutil.rmtree(tmp_path / "logs")
    steps.clear()
    with pytest.raises(TransportError, match=r"nodes ended with \{'n0': 0, 'n1': 4\}; see "):
        fleet.run_demo(tmp_path, **given)
