"""The pages on the wire format name what the code has: keys, types, codes, configuration, messages of each method."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import wire

import stranger
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.head import Head
from coterie.net.outbox import REASONS
from coterie.net.roster import Member, Roster
from coterie.net.wire import KINDS, Manifest
from coterie.net.zenoh_transport import build_config

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
        item.name: item.type for kind in kinds for item in fields(kind) if item.name != "members"
    }
    told = rows(section(title))
    assert told.keys() == known.keys()
    for name, kind in known.items():
        assert told[name].startswith(WORDS[kind]), name


def test_kinds_and_codes_are_those_of_the_code():
    listed = re.findall(r"^\| `(\w+)` \|", section("Questions and answers"), re.MULTILINE)
    assert listed == ["kind", *KINDS, *REASONS]
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


def test_the_configuration_is_the_nodes_and_the_strangers(tmp_path):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    addresses = {"north": "192.0.2.7:7447", "south": "198.51.100.9:7447"}
    members = tuple(
        Member(name, address, (number,)) for number, (name, address) in enumerate(addresses.items())
    )
    roster, (_, south) = local.create_credentials(tmp_path, Roster("three-hospitals", members, 2))
    for member in roster.members:
        text = text.replace(f"CN-{member.name}", member.subject)
    files = {
        "key_file": Path("south.key"),
        "certificate_file": Path("south.pem"),
        "ca_file": Path("ca.pem"),
    }
    assert json.loads(text) == build_config(roster, "south", replace(south, **files))
    members = {member.name: vars(member) for member in roster.members}
    known = stranger.Roster(b"", b"", {"run": roster.run}, members)
    assert json.loads(text) == json.loads(stranger.link_config(known, "south", Path()))


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
