"""The pages on the wire format name what the code has: keys, types, codes, methods, bounds, messages of each method."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import wire

import stranger
from coterie.methods import METHODS
from coterie.net import grpc_server, grpc_transport, identity
from coterie.net.head import Head
from coterie.net.outbox import REASONS, Outbox
from coterie.net.roster import Member, Roster
from coterie.net.wire import CHUNK, KINDS, MAX_HEAD, MAX_ROSTER, Manifest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/wire.md").read_text()
WORDS = {
    int: "integer",
    str: "text",
    float: "float",
    list: "array",
    dict: "object",
    tuple[int, ...]: "array",
}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str, kind: str = "JSON|TOML") -> dict[str, str]:
    """The keys of the tables of a section that give types, each with its type."""
    found = {}
    for table in re.findall(
        rf"^\| (?:key|field) \| (?:{kind}) type \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE
    ):
        for line in table.splitlines():
            names, told = line.split(" | ")[:2]
            found |= dict.fromkeys(re.findall(r"`(\w+)`", names), told)
    return found


@pytest.mark.parametrize(
    ("title", "kinds"),
    [("A message", [Manifest]), ("A head", [Head]), ("The roster", [Roster, Member])],
    ids=["manifest", "head", "roster"],
)
def test_the_tables_name_each_key_and_its_type(title, kinds):
    known = {
        item.name: item.type
        for kind in kinds
        for item in fields(kind)
        if item.name not in ("members", "relays")
    }
    told = rows(section(title))
    assert told.keys() == known.keys()
    for name, kind in known.items():
        assert told[name].startswith(WORDS[kind]), name


def test_kinds_and_codes_are_those_of_the_code():
    listed = re.findall(r"^\| `(\w+)` \|", section("Questions and answers"), re.MULTILINE)
    before, after = ["Presence", "Head", "Roster"], ["Message", "kind", *KINDS, *REASONS]
    assert listed == [*before, "Studies", "Statement", *after]
    source = "".join(
        (ROOT / "src/coterie/net" / name).read_text()
        for name in ("wire.py", "payload.py", "exchange.py")
    )
    raised = set(re.findall(r'Refused\(\s*"(\w+)"', source)) | {
        "header",
        "manifest",
        "run",
        "sender",
    }
    told = section("What a reader checks, in this order")
    codes = set(re.findall(r"`(\w+)`", told.split("Codes: ")[1].split("\n\n")[0]))
    assert codes == raised


def test_methods_keys_and_bounds_are_the_nodes_and_the_strangers():
    """The page's tables of links and methods, the code's own, and what the stranger has read there."""
    table = (
        section("Questions and answers").split("| method | question | answer |")[1].split("\n\n")[0]
    )
    told = {}
    for line in table.splitlines()[2:]:
        method, question, _ = line.strip("| ").split(" | ")
        told[method.strip("`")] = set(re.findall(r"`(\w+)`", question))
    known = {
        "Message": {"run", *grpc_transport._MESSAGE},
        "Head": {"run", "nonce"},
        "Roster": {"run"},
        "Presence": {"run", "here"},
    }
    # The stranger is a node of one run; members of a federation ask each other two things more.
    assert told == known | {"Studies": {"run"}, "Statement": {"run", "digest"}}
    assert {m: {"run", *keys} for m, keys in stranger.QUESTIONS.items()} == known
    assert f"`/{grpc_server.SERVICE}/<method>`" in PAGE
    assert stranger.SERVICE == grpc_server.SERVICE
    links = section("Links")
    for bound in (
        f"| {grpc_server.MAX_QUESTION:,} |",
        f"| {grpc_server.MAX_FRAME:,} (",
        f"| {MAX_HEAD:,}, {MAX_ROSTER:,} |",
        f"| {grpc_server.CALLS}; of these {Outbox.PER_ASKER} for messages |",
        f"| {grpc_server._LISTEN:g}, 10 |",
    ):
        assert bound in links, bound
    assert f"1024 to {CHUNK} |" not in links
    assert f"integer, 1024 to {CHUNK} |" in PAGE
    key = "ab" * 32
    assert stranger.key_host(key) == identity.key_host(key) == f"{key[:32]}.{key[32:]}.coterie"
    assert "`<first 32 digits>.<last 32 digits>.coterie`" in links


@pytest.mark.full
def test_the_page_of_messages_is_up_to_date_and_has_every_method():
    page = wire.page()
    assert (ROOT / "docs/reference/wire-messages.md").read_text() == page, "run make docs"
    shown = set(
        re.findall(r"`([a-z0-9-]+)`", "\n".join(line.split(" | ")[0] for line in page.splitlines()))
    )
    assert shown >= METHODS.keys()


def test_the_stranger_knows_nothing_of_coterie():
    source = Path(stranger.__file__).read_text()
    assert not re.search(r"^\s*(import|from) (coterie|torch)", source, re.MULTILINE)
