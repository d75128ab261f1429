"""A node's log and its metrics: what cannot be written ends nothing, and other sites' pages read nothing.

What may be told rarely is told rarely, and how often it was not told is said.
"""

import http.client
import io
import json
from collections import Counter

import pytest

from coterie.net.log import Log, MetricsServer, RateLimit, format_samples


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


def test_warnings_about_one_member_are_written_at_a_rate_and_others_are_not_held_back():
    """A member whose answers are refused again and again does not fill the log; nothing else is missing."""
    seen: list[str] = []
    log = Log("a", stream=(stream := io.StringIO()))
    log.also = lambda event, level, details: seen.append(event)
    for number in range(1000):
        log("refused", level="warning", peer="n1", code="head")
        log("roster_refused", level="warning", source="n1")
        log("round", seconds=number)
    log("refused", level="warning", peer="n2", code="head")
    log("mismatch", level="error", peer="n1")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    count = Counter((line["event"], line.get("peer")) for line in lines)
    assert count == {
        ("refused", "n1"): 20,
        ("roster_refused", None): 20,
        ("round", None): 1000,
        ("refused", "n2"): 1,
        ("mismatch", "n1"): 1,
    }
    assert len(seen) == 3002, "the audit log counts all of them"


def test_no_value_of_a_label_ends_a_line_or_its_quotes():
    said = format_samples([("coterie_x", "help", {"reason": 'a"b\\c\nforged 1'}, 1.0)])
    assert said.splitlines()[2:] == ['coterie_x{reason="a\\"b\\\\c\\nforged 1"} 1.0']
