"""A node's log and its metrics: what cannot be written ends nothing, and other sites' pages read nothing.

What may be told rarely is told rarely, and how often it was not told is said.
"""

import http.client
import io
import json

import pytest

from coterie.net.log import Log, MetricsServer, RateLimit


class Full(io.StringIO):
    """A file on a disk that is full for a while."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_that_cannot_be_written_are_counted_and_end_nothing():
    log = Log("a", stream=(stream := Full()))
    log("one")
    stream.full = True
    log("two")
    log("three")
    stream.full = False
    log("four")
    log("five")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line.get("lines_lost")) for line in lines] == [
        ("one", None),
        ("four", 2),
        ("five", None),
    ]


@pytest.fixture
def port():
    server = MetricsServer(0, lambda: [("coterie_round", "round that is going on", {}, 7)])
    yield server.port
    server.close()


def ask(port: int, path: str, host: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_metrics_are_read_under_this_machines_name(port, name):
    status, text = ask(port, "/metrics", f"{name}:{port}")
    assert status == 200
    assert "coterie_round 7" in text
    assert ask(port, "/other", f"{name}:{port}")[0] == 404


@pytest.mark.full
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""]
)
def test_a_page_of_another_site_that_is_rebound_to_this_machine_reads_nothing(port, host):
    """What its browser sends as Host is the site's own name."""
    status, text = ask(port, "/metrics", host.format(port=port))
    assert status == 403
    assert "coterie_round" not in text


def test_what_happens_without_end_is_told_so_often_in_so_many_seconds():
    now = [0.0]
    rarely = RateLimit(2, 10.0, clock=lambda: now[0])
    assert [rarely() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 9.9
    assert rarely() is None
    now[0] = 10.0
    assert [rarely(), rarely(), rarely()] == [4, 0, None]
