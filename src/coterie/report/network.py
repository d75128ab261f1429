"""The network of a node on its live page, from the file that the node writes."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from coterie.results.stored_runs import NETWORK

_SOON = 30  # days to the end of a certificate that are marked
_MOST = 4 * 1024 * 1024  # bytes of a file: a thousand members take some 200 kB


def render_networks(folder: Path) -> str:
    """Return the networks of all nodes below a folder as HTML; "" where there is none.

    Args:
        folder: folder of a study, a run or a node.
    """
    parts = []
    for path in sorted(folder.rglob(NETWORK)):
        try:
            if path.stat().st_size > _MOST:
                continue
            found = json.loads(path.read_text("utf-8"))
            if isinstance(found, dict):
                parts.append(render_network(found))
        # Damaged or replaced: the page has its other views.
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return "".join(parts)


def render_network(found: Mapping[str, Any]) -> str:
    """Return the network of one node as HTML.

    Args:
        found: the content of the node's file.
    """
    members = found["members"]
    # Without this node, which is always here to itself.
    here = sum(bool(one["here"]) for one in members) - 1
    when = _format_time(found["time"])
    state = str(found["state"])
    text = (
        f"{escape(str(found['node']))} in run {escape(str(found['run']))}: {escape(state)}, "
        f"round {int(found['round'])}; {here} of {len(members) - 1} other members are here. "
        f"Version {int(found['roster'])} of the roster. As of {when}."
    )
    waits = ""
    if state == "waiting":
        waits = (
            f'<p class="problem">Fewer than {int(found["min_peers"])} other members are here '
            "(min_peers): nothing is trained until they are.</p>"
        )
    rows = "".join(_render_member(one, str(found["node"])) for one in members)
    heads = '<th scope="col">Member</th><th class="text" scope="col">State</th>'
    heads += '<th scope="col">Answers in</th><th class="text" scope="col">Refused</th>'
    heads += '<th scope="col">Certificate</th>'
    table = f'<table class="network"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return (
        f"<h2>The network</h2>{waits}<p>{text}</p>"
        f'<div class="scroll tall" tabindex="0" role="group" aria-label="Members">{table}</div>'
    )


def _render_member(one: Mapping[str, Any], own: str) -> str:
    """Return the row of a member."""
    # Numbers through int and float, texts escaped: nothing gets into the page as the file has it.
    name = str(one["name"])
    state = '<span class="better">up</span>' if one["here"] else '<span class="worse">away</span>'
    if name == own:
        state = "this node"
    elif one["since"] is not None:
        state += f" <small>since {_format_time(one['since'])}</small>"
    seconds = "–"
    if one["seconds"] is not None:
        seconds = f"{float(one['seconds']):.2g} s"
    if one["slow"]:
        seconds += ' <span class="worse">slow</span>'
    counts = sorted(one["refused"].items())
    refused = ", ".join(f"{int(times)} {escape(str(why))}" for why, times in counts)
    days = "–"
    if one["days"] is not None:
        left = int(one["days"])
        days = f"{left} days" if left >= 0 else "over"
        if left < _SOON:
            days = f'<span class="worse">{days}</span>'
    # On a narrow screen each member is a block, with these names before the values.
    cells = f'<td class="text" data-name="State">{state}</td>'
    cells += f'<td data-name="Answers in">{seconds}</td>'
    cells += f'<td class="text" data-name="Refused">{refused or "–"}</td>'
    cells += f'<td data-name="Certificate">{days}</td>'
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _format_time(seconds: Any) -> str:
    """Return a time in UTC, to the second."""
    return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
