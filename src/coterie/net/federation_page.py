"""A member's page of its federation: who is there, which studies there are, and what it says about them.

It is served to this machine only, see `report.server`, and reads the files of the member's folder, so
it shows what is there with or without a running service. A study is decided on at a page of its own,
which says what would leave this member. Names and texts of others are escaped; none reaches a script.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from http import HTTPStatus
from urllib.parse import quote

import pandas as pd

from coterie.errors import CoterieError
from coterie.functional.metrics import ACCURACY, LOSS
from coterie.net import roster as rosters
from coterie.net.decisions import Decisions
from coterie.net.ledger import Entry
from coterie.net.process import locate_run
from coterie.net.service import Membership
from coterie.net.statements import STUDY_NAME, find_code, parse_proposed
from coterie.report.page import fill_template, load_asset
from coterie.report.server import NO_PAGE, Answer, PageServer
from coterie.report.watch import FolderFollower
from coterie.results.stored_runs import METRICS

_SOON = 30  # days to the end of a certificate that are marked
_STUDY = re.compile(rf"/studies/({STUDY_NAME.pattern})/(\w*)")
_BUTTONS = {
    "approve": "Approve",
    "decline": "Decline",
    "stop": "Stop here",
    "withdraw": "Withdraw for all",
}


class FederationPage(PageServer):
    """A server of a member's page, running from its creation until `close`.

    Args:
        membership: the member's folder.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: when the port is taken.
    """

    def __init__(self, membership: Membership, *, port: int = 0) -> None:
        self.membership, self._followers = membership, dict[str, FolderFollower]()
        super().__init__(self._answer, self._act, port=port)

    # ------------------------------------------------------------------ requests

    def _answer(self, path: str, given: Mapping[str, str]) -> Answer:
        self._reload()
        if path == "/":
            content = self.render_overview()
            return Answer(self._render_page("", content, _sign(content)))
        if path == "/news":
            content = self.render_overview()
            signature = _sign(content)
            if given.get("since") == signature:
                return Answer("", "application/json", HTTPStatus.NO_CONTENT)
            news = json.dumps({"signature": signature, "content": content})
            return Answer(news, "application/json")
        entry, rest = self._find_study(path)
        if entry is None:
            return NO_PAGE
        if rest == "review":
            return Answer(self._render_page(entry.proposal.name, self.render_review(entry)))
        folder = entry.folder / self.membership.own.name
        if rest not in ("", "data") or not folder.is_dir():
            return NO_PAGE
        follower = self._followers.setdefault(entry.proposal.name, FolderFollower(folder))
        return follower.answer(f"/{rest}", given)

    def _act(self, path: str, given: Mapping[str, str]) -> Answer:
        self._reload()
        entry, action = self._find_study(path)
        if entry is None or action not in _BUTTONS:
            return NO_PAGE
        decisions = Decisions(self.membership, entry)
        try:
            if given.get("proposal") != entry.proposal.digest:
                raise CoterieError("the study is another one than the page has shown")
            getattr(decisions, action)()
        except (CoterieError, OSError) as error:
            problem = f'<p class="problem" role="alert">{escape(str(error))}</p>'
            page = self._render_page(entry.proposal.name, problem + self._link_back())
            return Answer(page, status=HTTPStatus.CONFLICT)
        where = f"/?token={quote(self.token)}"
        return Answer("", status=HTTPStatus.SEE_OTHER, location=where)

    def _reload(self) -> None:
        self.membership.keeper.reload_file()
        self.membership.ledger.reload()

    def _find_study(self, path: str) -> tuple[Entry | None, str]:
        found = _STUDY.fullmatch(path)
        if found is None:
            return None, ""
        return self.membership.ledger.entries.get(found[1]), found[2]

    # ------------------------------------------------------------------ pages

    def _render_page(self, name: str, content: str, signature: str = "") -> str:
        membership = self.membership
        roster = membership.keeper.roster
        subtitle = f"The federation {roster.run}, as {membership.own.name} sees it"
        slots = {
            "title": escape(name or roster.run),
            "subtitle": escape(subtitle),
            "style": load_asset("report.css"),
            "signature": signature,
            "content": content,
            "footer": "Made by Coterie from the files of this member alone.",
            "script": load_asset("theme.js") + load_asset("federation.js"),
        }
        return fill_template("federation.html", slots)

    def render_overview(self) -> str:
        """Return members and studies as HTML."""
        return self._render_service() + self._render_studies() + self._render_members()

    def _render_service(self) -> str:
        if self.membership.load_state():
            return ""
        return (
            '<p class="problem">The service of this member does not run: nothing is sent or '
            "received, and no study runs. Start it with: coterie federation serve</p>"
        )

    def _render_studies(self) -> str:
        membership, state = self.membership, self.membership.load_state()
        rows = []
        # The newest first.
        for entry in reversed(membership.ledger.entries.values()):
            name, proposal = escape(entry.proposal.name), entry.proposal
            word, text = membership.describe(entry, state)
            title = name
            if (entry.folder / membership.own.name).is_dir():
                title = f'<a id="open-{name}" href="{self._link(entry, "")}">{name}</a>'
            approved = ", ".join(entry.list_taking_part(membership.keeper.roster))
            cells = f'<td class="text" data-name="By">{escape(proposal.by)}</td>'
            cells += f'<td class="text" data-name="State"><strong>{word}</strong>'
            cells += f" <small>{escape(text)}</small></td>"
            cells += f'<td class="text" data-name="Approved by">{escape(approved) or "–"}</td>'
            cells += f'<td class="text" data-name="Own result">{self._render_result(entry)}</td>'
            link = f'<a id="review-{name}" href="{self._link(entry, "review")}">Review</a>'
            cells += f'<td class="text" data-name="Decide">{link}</td>'
            rows.append(f'<tr><th scope="row">{title}</th>{cells}</tr>')
        if not rows:
            return "<h2>Studies</h2><p>None was proposed yet: coterie propose STUDY.toml</p>"
        heads = ("By", "State", "Approved by", "Own result", "Decide")
        return f"<h2>Studies</h2>{_render_table('Studies', ('Study', *heads), rows)}"

    def _render_button(self, entry: Entry, action: str) -> str:
        name = escape(entry.proposal.name)
        hidden = f'<input type="hidden" name="token" value="{escape(self.token)}">'
        # What is pressed is about the study that was shown.
        hidden += f'<input type="hidden" name="proposal" value="{entry.proposal.digest}">'
        button = f'<button id="{action}-{name}" aria-label="{_BUTTONS[action]}: {name}">'
        return (
            f'<form class="inline" method="post" action="/studies/{name}/{action}">{hidden}'
            f"{button}{_BUTTONS[action]}</button></form>"
        )

    def _render_result(self, entry: Entry) -> str:
        found = find_own_gain(entry, self.membership.own.name)
        if found is None:
            return "–"
        metric, first, last = found
        higher = last > first if metric == ACCURACY.name else last < first
        kind = "better" if higher else "worse" if first != last else ""
        return f'{escape(metric)} {first:.4g} → <span class="{kind}">{last:.4g}</span>'

    def render_review(self, entry: Entry) -> str:
        """Return what a study would send, and the buttons that are possible, as HTML."""
        decisions = Decisions(self.membership, entry)
        problem, lines = "", list[str]()
        try:
            lines = decisions.describe()
        except (CoterieError, OSError) as error:
            problem = f'<p class="problem">{escape(str(error))}</p>'
        # Lines are a word and what there is to say about it.
        pairs = [line.partition(" ") for line in lines]
        words = "".join(
            f"<dt>{escape(word)}</dt><dd>{escape(text.strip())}</dd>" for word, _, text in pairs
        )
        possible, code = decisions.list_possible(), ""
        if find_code(entry.proposal.study):
            possible = [one for one in possible if one != "approve"]
            code = (
                '<p class="problem">It loads code or files of this machine: look at them there, '
                "and approve it with coterie approve --code.</p>"
            )
        buttons = "".join(self._render_button(entry, one) for one in possible)
        study = f"<h2>The study file</h2><pre>{escape(entry.proposal.study)}</pre>"
        return f'{problem}<dl class="words">{words}</dl>{code}<p>{buttons}</p>{study}' + (
            self._link_back()
        )

    def _render_members(self) -> str:
        membership, rows = self.membership, []
        roster, own = membership.keeper.roster, membership.own.name
        state = membership.load_state()
        here = state.get("here", ())
        ends = rosters.find_ends(roster, datetime.now(UTC))
        for member in roster.members:
            stands = '<span class="worse">away</span>'
            if member.name == own:
                stands = "this member"
            elif member.name in here:
                stands = '<span class="better">here</span>'
            elif not state:
                stands = "–"  # only the service knows
            days = "–"
            if member.name in ends:
                left = int(ends[member.name][0] // 1)
                days = f"{left} days" if left >= 0 else "over"
                if left < _SOON:
                    days = f'<span class="worse">{days}</span>'
            cells = f'<td class="text" data-name="State">{stands}</td>'
            cells += f'<td class="text" data-name="Address">{escape(member.address)}</td>'
            cells += f'<td data-name="Certificate">{days}</td>'
            rows.append(f'<tr><th scope="row">{escape(member.name)}</th>{cells}</tr>')
        table = _render_table("Members", ("Member", "State", "Address", "Certificate"), rows)
        return f"<h2>Members</h2><p>Version {roster.version} of the roster.</p>{table}"

    def _link(self, entry: Entry, rest: str) -> str:
        return f"/studies/{escape(entry.proposal.name)}/{rest}?token={quote(self.token)}"

    def _link_back(self) -> str:
        return f'<p><a href="/?token={quote(self.token)}">All studies</a></p>'


def find_own_gain(entry: Entry, own: str) -> tuple[str, float, float] | None:
    """Return a metric of a member's own validation data, before the first round and now.

    The metric is the accuracy where the study has one, else the loss. None while nothing is stored.
    """
    try:
        study = parse_proposed(entry.proposal.study)
        table = pd.read_parquet(locate_run(entry.folder / own, study) / METRICS)
    except (CoterieError, OSError, ValueError):
        return None
    columns = {name: table[name].to_numpy() for name in ("split", "model", "metric", "round")}
    values = table["value"].to_numpy()
    shown = (columns["split"] == "validation") & (columns["model"] == "current")
    for metric in (ACCURACY.name, LOSS.name):
        mine = shown & (columns["metric"] == metric)
        if mine.any():
            rounds = columns["round"]
            first, last = (mine & (rounds == end(rounds[mine])) for end in (min, max))
            return metric, float(values[first].mean()), float(values[last].mean())
    return None


def _render_table(name: str, heads: tuple[str, ...], rows: list[str]) -> str:
    cells = "".join(f'<th class="text" scope="col">{escape(head)}</th>' for head in heads)
    table = f'<table class="network"><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{name}">{table}</div>'


def _sign(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
