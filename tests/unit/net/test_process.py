"""A node's process: signals that come while it starts."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.net import fleet, grpc_transport, process
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

    class Starting:
        """A transport that is told to end before it is whole."""

        def __init__(self, *_: Any, **__: Any) -> None:
            events.append("threads begin")
            signal.raise_signal(number)

        def __enter__(self) -> "Starting":
            return self

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    monkeypatch.setattr(grpc_transport, "GrpcTransport", Starting)
    files = fleet.lay_out(tmp_path, config.parse_study_text(STUDY))
    with pytest.raises(expected):
        process.run_node(files["node-00"], insecure=True)
    assert events == ["threads begin", "closed"]
