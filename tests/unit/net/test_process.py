"""A node's process: signals that come while it starts."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.errors import CheckpointError, ConfigError, TransportError
from coterie.net import fleet, grpc_transport, nodefile, process
from coterie.net.transport import Hub, InProcess
from coterie.studies import config

STUDY = """
name = "told"
rounds = 1
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits", num_clients = 3, train = 8, validation = 4 }

[[methods]]
kind = "random"
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the test run come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end_of_the_block():
    """Told within, heard after; and what the block found is in place again."""
    events: list[object] = []
    signal.signal(signal.SIGTERM, lambda number, frame: events.append(number))
    before = signal.getsignal(signal.SIGINT)
    with process.defer_signals():
        signal.raise_signal(signal.SIGTERM)
        events.append("inside")
    assert events == ["inside", signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is before
    signal.raise_signal(signal.SIGTERM)
    assert events == ["inside", signal.SIGTERM, signal.SIGTERM]


def test_other_threads_leave_the_handlers_alone():
    """Python sets them from the main thread only."""
    failed: list[Exception] = []

    def work() -> None:
        try:
            with process.defer_signals():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_node_told_to_end_while_its_transport_starts_closes_it(
    number: signal.Signals,
    expected: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Otherwise the threads that the transport began would keep the process alive for ever."""
    events: list[str] = []

    class Starting(InProcess):
        """A transport that is told to end before it is whole."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(Hub(), "node-00")
            events.append("threads begin")
            signal.raise_signal(number)

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(grpc_transport, "GrpcTransport", Starting)
    files = fleet.lay_out(tmp_path, config.parse_study_text(STUDY))
    with pytest.raises(expected):
        process.run_node(files["node-00"], insecure=True)
    assert events == ["threads begin", "closed"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return fleet.lay_out(tmp_path, config.parse_study_text(STUDY))


def test_a_role_that_is_not_that_of_the_roster_is_refused_with_the_right_one(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match=r"role is 'server'; the roster makes node-01 a peer: "):
        process.run_node(files["node-01"], role="server")
    monkeypatch.setattr(process.rosters, "check_own", lambda roster, own: ["first", "second"])
    with pytest.raises(TransportError, match=r"^first$"):
        process.run_node(files["node-01"])


def test_the_run_of_a_node_lies_below_its_name(files: dict[str, Path], tmp_path: Path):
    folder = process.run_folder(nodefile.load(files["node-01"]), "node-01")
    assert folder == tmp_path / "nodes/node-01/told/random/seed-0"


@pytest.mark.parametrize(("alone", "status"), [({}, 0), ({"alone": [[0, 3]]}, 3)])
def test_a_finished_run_is_not_done_again_and_says_whether_anybody_was_there(
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    alone: dict[str, Any],
    status: int,
):
    folder = process.run_folder(nodefile.load(files["node-00"]), "node-00")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / process.checkpoint.PROVENANCE).write_text(json.dumps(alone))
    monkeypatch.setattr(process.checkpoint, "is_finished", lambda folder: True)
    assert process.run_node(files["node-00"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["event"], told["node"]) == ("done", "node-00")
    assert "delete the folder to run it again" in told["text"]
    assert ("without any message" in told["text"]) == bool(alone)


@pytest.mark.parametrize(
    ("before", "now", "over"),
    [
        ("seeds = [0]", "seeds = [0]\ndescription = 'other words'", True),
        ("rounds = 1", "rounds = 2", False),
        ("lr = 0.001", "lr = 0.5", False),
        ("linear", "mlp", False),
    ],
)
def test_a_finished_run_of_another_study_is_not_said_to_be_done(
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: str,
    now: str,
    over: bool,
):
    """The organizer has changed the study: the node begins, and finds what is stored."""
    file = nodefile.load(files["node-00"])
    folder = process.run_folder(file, "node-00")
    folder.mkdir(parents=True)
    process._write_study_files(folder, config.format_study(file.select_run()[0]), "{}")
    monkeypatch.setattr(process.checkpoint, "is_finished", lambda folder: True)
    path = tmp_path / "study.toml"
    text = path.read_text()
    path.write_text(text.replace(before, now, 1))
    assert path.read_text() != text
    begun = []

    def begin(*_: Any, **__: Any) -> Any:
        begun.append(True)
        return nullcontext(SimpleNamespace(run=lambda: None))

    monkeypatch.setattr(process, "open_node", begin)
    monkeypatch.setattr(process.summary, "write_summary", lambda _: None)
    assert process.run_node(files["node-00"]) == 0
    assert bool(begun) != over
    assert ("is over" in capsys.readouterr().err) == over


def test_a_start_that_is_refused_leaves_a_run_its_own_study_file(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is stored is of the study before: reports and comparisons read its settings there."""
    file = nodefile.load(files["node-00"])
    folder = process.run_folder(file, "node-00")
    folder.mkdir(parents=True)
    process._write_study_files(folder, config.format_study(file.select_run()[0]), "{}")
    before = (folder / "config.toml").read_bytes()
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace("lr = 0.001", "lr = 0.5"))

    def refuse(*_: Any, **__: Any) -> Any:
        raise CheckpointError("it belongs to a run with other settings")

    monkeypatch.setattr(process, "Node", refuse)
    monkeypatch.setattr(process, "open_transport", lambda *_, **__: InProcess(Hub(), "node-00"))
    with pytest.raises(CheckpointError), process.open_node(file):
        pass
    assert (folder / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "status"), [(None, 0), ({}, 0), ({"alone": False}, 0), ({"alone": True}, 4)]
)
def test_the_exit_status_says_whether_anybody_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Any, status: int
):
    monkeypatch.setattr(process, "ALONE", 4)
    if text is not None:
        (tmp_path / process.checkpoint.PROVENANCE).write_text(json.dumps(text))
    assert process._find_status(tmp_path) == status


@pytest.mark.parametrize(("alone", "status"), [({}, 0), ({"alone": [[0, 3]]}, 3)])
def test_a_run_that_ends_returns_whether_anybody_was_there(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, alone: dict[str, Any], status: int
):
    folder = process.run_folder(nodefile.load(files["node-00"]), "node-00")
    folder.mkdir(parents=True, exist_ok=True)

    class Quick:
        def run(self) -> None:
            (folder / process.checkpoint.PROVENANCE).write_text(json.dumps(alone))

    written = []
    monkeypatch.setattr(process, "open_node", lambda *_, **__: nullcontext(Quick()))
    monkeypatch.setattr(process.summary, "write_summary", written.append)
    assert process.run_node(files["node-00"]) == status
    assert written == [folder.parent.parent]


@pytest.mark.parametrize(
    ("error", "events"),
    [
        (OSError(28, "No space left on device"), ["disk_full"]),
        (ValueError("another"), []),
        (KeyboardInterrupt(), ["stopped"]),
        (SystemExit(3), ["stopped"]),
    ],
)
def test_the_end_of_a_node_is_said_where_it_goes_on_from(
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    events: list[str],
):
    def end(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(process, "open_node", end)
    with pytest.raises(type(error)) as caught:
        process.run_node(files["node-00"])
    assert caught.value is error
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["event"] for one in told] == events
    assert all("it continues from" in one["text"] for one in told)
    assert signal.getsignal(signal.SIGTERM) is process.exit_on_signal


def test_a_signal_ends_the_process_with_its_number_as_shells_say():
    with pytest.raises(SystemExit) as ended:
        process.exit_on_signal(15, None)
    assert ended.value.code == 128 + 15


def test_who_answers_members_that_join_late_is_started_again(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    file, asked = nodefile.load(files["node-00"]), []
    assert process._answers_newcomers(file, "node-00") is False
    sides = SimpleNamespace(answers_newcomers=lambda name: asked.append(name) or True)
    monkeypatch.setattr(process.latecomers, "find_participants", lambda *_: sides)
    assert process._answers_newcomers(file, "node-01") is True
    assert asked == ["node-01"]
