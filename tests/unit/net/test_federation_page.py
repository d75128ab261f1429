"""The page of a member's federation: what it shows, what its buttons do, and whom it obeys."""

import html
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pandas as pd
import pytest
from tests.unit.net.test_service import NAMES, Hall

from coterie._util.claims import claim_folder
from coterie._util.loopback import HOST
from coterie.net import service
from coterie.net.federation_page import FederationPage, find_own_gain

HOSTILE = "<script>alert(1)</script>"


class Visitor:
    """A browser at the page of one member."""

    def __init__(self, hall: Hall, name: str) -> None:
        self.membership = hall.membership(name)
        self.page = FederationPage(self.membership)

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.page.port, timeout=30)
        host = f"{HOST}:{self.page.port}"
        connection.request(method, path, body or None, {"Host": host, **headers})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def read(self, path: str = "/", **query: str) -> str:
        status, text = self.ask("GET", f"{path}?{urlencode({'token': self.page.token, **query})}")
        assert status == 200, text
        return text

    def press(
        self, action: str, study: str = "hearts", origin: str | None = None, **changes: str
    ) -> tuple[int, str]:
        """Send the form of a button, as the page has it but for `changes`."""
        entry = self.membership.ledger.entries[study]
        form = {"token": self.page.token, "proposal": entry.proposal.digest, **changes}
        here = f"http://{HOST}:{self.page.port}" if origin is None else origin
        path = f"/studies/{study}/{action}"
        return self.ask("POST", path, urlencode(form), Origin=here)

    def says(self, kind: str, study: str = "hearts") -> bool:
        self.membership.ledger.reload()
        return self.membership.ledger.entries[study].says(kind, self.membership.own.name)


@pytest.fixture
def hall(tmp_path: Path, port: int) -> Iterator[Hall]:
    made = Hall(tmp_path, port)
    yield made
    made.close()


@pytest.fixture
def south(hall: Hall) -> Iterator[Visitor]:
    """South's page, with a study that north has proposed."""
    hall.propose(quorum=2)
    hall.open("north")
    hall.open("south")
    hall.exchange("south")
    made = Visitor(hall, "south")
    with made.page:
        yield made


def rows(text: str) -> dict[str, str]:
    """The rows of the page's tables by their first cell, without tags."""
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", text):
        cells = [
            html.unescape(re.sub(r"<[^>]*>", " ", cell))
            for cell in re.findall(r"<t[hd].*?>.*?</t[hd]>", row)
        ]
        found[cells[0].strip()] = " ".join(" ".join(cells[1:]).split())
    return found


def buttons(visitor: Visitor, study: str = "hearts") -> list[str]:
    """What the page of a study lets a member decide."""
    return re.findall(
        r"<button id=[^>]*>(.*?)</button></form>", visitor.read(f"/studies/{study}/review")
    )


def test_members_and_studies_are_shown_with_what_this_member_may_say(south):
    shown = rows(south.read())
    assert shown["hearts"].startswith("north proposed 1 of 2 approved north")
    assert shown["south"].startswith("this member")
    assert set(NAMES) <= set(shown)
    assert "<button id=" not in south.read().partition("<main")[2], "who decides has seen the study"
    assert buttons(south) == ["Approve", "Decline"], "the proposer alone may withdraw"


def test_a_study_is_approved_on_the_page_that_says_what_would_leave(south):
    review = html.unescape(south.read("/studies/hearts/review"))
    # A linear model of 6 features and 2 classes has 14 numbers of 4 bytes.
    assert "56 bytes of numbers" in review
    assert 'kind = "linear"' in review
    assert south.press("approve")[0] == 303
    assert south.says("approval")
    assert rows(south.read())["hearts"].startswith("north queued 2 of 2 approved")
    assert buttons(south) == ["Stop here"]
    assert south.press("decline")[0] == 409, "it is approved already"
    assert south.press("stop")[0] == 303
    assert rows(south.read())["hearts"].startswith("north stopped")


@pytest.mark.parametrize(
    ("origin", "changes", "status"),
    [
        ("http://evil.example", {}, 403),
        ("null", {}, 403),
        ("", {}, 403),
        (None, {"token": "wrong"}, 403),
        (None, {"proposal": "0" * 64}, 409),
        (None, {"more": "x" * 5000}, 403),
    ],
)
def test_a_form_of_another_page_changes_nothing(south, origin, changes, status):
    """Another site's, one without the token, one of a study that was shown as another, a long one."""
    assert south.press("approve", origin=origin, **changes)[0] == status
    assert not south.says("approval")


def test_what_is_no_page_and_no_button_is_not_found(south):
    for path in (
        "/studies/none/review",
        "/studies/../keys/review",
        "/keys/ca.pem",
        "/studies/hearts/",
    ):
        assert south.ask("GET", f"{path}?token={south.page.token}")[0] == 404, path
    assert south.press("describe")[0] == 404
    assert south.ask("GET", "/")[0] == 403


def test_a_study_that_loads_code_has_to_be_approved_on_the_machine(hall):
    hall.propose(model="no_such_package.nets:Net")
    north = Visitor(hall, "north")
    hall.open("north")
    hall.open("south")
    hall.exchange("south")
    south = Visitor(hall, "south")
    with north.page, south.page:
        assert "coterie approve --code" in south.read("/studies/hearts/review")
        assert buttons(south) == ["Decline"]
        assert buttons(north) == ["Stop here", "Withdraw for all"]
        status, text = south.press("approve")
        assert status == 409
        assert "approve it with --code" in text
        assert not south.says("approval")


def test_what_others_wrote_stays_text(hall):
    """A comment in the study file is the proposer's words; names and labels have no such letters."""
    made = hall.proposal()
    hall.membership("north").propose(replace(made, study=f"# {HOSTILE}\n{made.study}"))
    north = Visitor(hall, "north")
    with north.page:
        for path in ("/", "/studies/hearts/review"):
            text = north.read(path)
            assert HOSTILE not in text
        assert html.escape(HOSTILE) in north.read("/studies/hearts/review")


def test_news_come_once_and_a_service_that_does_not_run_is_said(south):
    news = json.loads(south.read("/news"))
    assert "The service of this member does not run" in news["content"]
    since = {"since": news["signature"]}
    path = f"/news?{urlencode({'token': south.page.token, **since})}"
    assert south.ask("GET", path) == (204, "")
    with claim_folder(south.membership.ledger.folder / service.CLAIM):
        again = json.loads(south.read("/news", **since))
    assert "does not run" not in again["content"]


def write_rounds(folder: Path, values: Mapping[str, list[float]]) -> None:
    """Validation results of one client, a value for each round from -1 on."""
    rows = [
        (number - 1, 0, -1, "validation", "current", metric, value)
        for metric, own in values.items()
        for number, value in enumerate(own)
    ]
    columns = ["round", "client", "cluster", "split", "model", "metric", "value"]
    folder.mkdir(parents=True)
    pd.DataFrame(rows, columns=columns).to_parquet(folder / "metrics.parquet")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"accuracy": [0.5, 0.7, 0.8], "loss": [1.0, 0.5, 0.4]}, ("accuracy", 0.5, 0.8)),
        ({"loss": [1.0, 0.5]}, ("loss", 1.0, 0.5)),
    ],
)
def test_the_own_result_is_that_before_the_first_round_and_now(south, values, expected):
    entry = south.membership.ledger.entries["hearts"]
    assert find_own_gain(entry, "south") is None
    write_rounds(entry.folder / "south/hearts/DAC/seed-0", values)
    assert find_own_gain(entry, "south") == expected
    assert f"{expected[1]:.4g} → {expected[2]:.4g}" in rows(south.read())["hearts"]
