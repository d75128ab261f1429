"""The roster: signed, strict, and explained when something is wrong."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from coterie.errors import PeerMismatch, TransportError
from coterie.net import local, roster
from coterie.net.roster import Member


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the signed roster of three members, and their identities."""
    folder = tmp_path_factory.mktemp("net")
    who, _ = local.make_members([[0], [1, 2], [3]], server="n1")
    signed, people = local.create_credentials(folder, who, days=10, study="5" * 16, schema="6" * 64)
    return folder, signed, people


def files(folder):
    return folder / "roster.toml", folder / "organizer.pub"


def test_a_roster_is_read_as_it_was_written(made):
    folder, signed, _ = made
    assert roster.load(*files(folder)) == signed
    assert signed.host_of == {0: "n0", 1: "n1", 2: "n1", 3: "n2"}
    assert signed.client_names == {0: "n0", 3: "n2"}, (
        "two clients of one member are told apart by their numbers"
    )


def test_a_roster_of_an_older_version_is_read(made, tmp_path):
    """It has neither removed clients nor common names: the members' names are those of their certificates."""
    _, signed, _ = made
    old = "\n".join(
        line
        for line in roster.dumps(signed).splitlines()
        if not line.startswith(("removed", "subject"))
    )
    read = roster.loads(old)
    assert read.removed == ()
    assert [m.common_name for m in read.members] == ["n0", "n1", "n2"]
    assert all(len(m.common_name) == 64 for m in signed.members)


def test_a_client_keeps_its_id_when_another_member_is_removed(made):
    _, signed, _ = made
    left = replace(signed, members=(signed.members[1], signed.members[2]), removed=(0,))
    assert left.host_of == {1: "n1", 2: "n1", 3: "n2"}
    assert left.population == 4


def test_a_changed_roster_is_refused_before_it_is_read(made, tmp_path):
    folder, _, _ = made
    text = (folder / "roster.toml").read_text()
    (tmp_path / "roster.toml").write_text(text.replace("127.0.0.1:21002", "127.0.0.1:21003"))
    (tmp_path / "roster.toml.sig").write_bytes((folder / "roster.toml.sig").read_bytes())
    with pytest.raises(TransportError, match="not signed by the organizer"):
        roster.load(tmp_path / "roster.toml", folder / "organizer.pub")
    (tmp_path / "roster.toml.sig").write_text("hello")
    with pytest.raises(TransportError, match="holds no signature"):
        roster.load(tmp_path / "roster.toml", folder / "organizer.pub")


def test_a_good_roster_has_no_problems(made):
    folder, _, people = made
    assert roster.check_file(*files(folder)) == []
    assert roster.check_file(*files(folder), own=people[0]) == []


def test_problems_of_a_member_are_named(made, tmp_path):
    """A member that is not on it, one with a newer certificate, certificates at their end, no study."""
    folder, signed, people = made
    stranger = replace(people[0], name="n9")
    assert (
        "'n9' is not on the roster of run local; members: n0, n1, n2"
        in roster.check_file(*files(folder), own=stranger)[0]
    )
    other = replace(people[0], key=people[1].key)
    assert "another key for n0" in roster.check_file(*files(folder), own=other)[0]
    later = datetime.now(UTC) + timedelta(days=9)
    assert [
        "less than two days" in text for text in roster.check_file(*files(folder), now=later)
    ] == [True] * 3
    assert "ended on" in roster.check_file(*files(folder), now=later + timedelta(days=2))[0]
    issued = datetime.now(UTC).isoformat(timespec="seconds")
    roster.write_signed(
        tmp_path / "i.toml", replace(signed, issued=issued), folder / "organizer.key"
    )
    sooner = datetime.fromisoformat(signed.members[0].expires) - timedelta(days=6)
    found = roster.check_file(tmp_path / "i.toml", folder / "organizer.pub", now=sooner)
    assert len(found) == 3
    assert "in 6 days; sign a new request" in found[0]
    roster.write_signed(tmp_path / "r.toml", replace(signed, study=""), folder / "organizer.key")
    assert "names no study" in roster.check_file(tmp_path / "r.toml", folder / "organizer.pub")[0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda r: replace(r, run="A run"), "run 'A run'"),
        (lambda r: replace(r, population=5), "each of 0 to 4 once"),
        (lambda r: replace(r, removed=(2,)), "each of 0 to 3 once"),
        (
            lambda r: replace(r, members=(replace(r.members[0], subject="5" * 64), *r.members[1:])),
            "not bound to its",
        ),
        (lambda r: replace(r, server="n7"), "'n7' is not a member"),
        (lambda r: replace(r, clusters=(0, 1)), "2 clusters for 4 clients"),
        (
            lambda r: replace(r, members=(*r.members, Member("n0", "127.0.0.1:1", ()))),
            "two members have the name n0",
        ),
        (
            lambda r: replace(r, members=(*r.members, Member("x", "127.0.0.1:21000", ()))),
            "the address 127.0.0.1:21000",
        ),
        (
            lambda r: replace(r, members=(*r.members, Member("a*", "127.0.0.1:1", ()))),
            r"name 'a\*'",
        ),
        (
            lambda r: replace(r, members=(*r.members, Member("x", "nowhere", ()))),
            "expected host:port",
        ),
        (
            lambda r: replace(r, members=(*r.members, Member("x", "127.0.0.1:1", (), "zz"))),
            "is no public key",
        ),
        (
            lambda r: replace(
                r, members=(r.members[0], replace(r.members[1], key=r.members[0].key))
            ),
            "have the key 0",
        ),
        (lambda r: replace(r, members=()), "0 members"),
    ],
)
def test_an_impossible_roster_cannot_be_made(made, change, found):
    with pytest.raises(TransportError, match=found):
        change(made[1])


def test_a_roster_of_another_wire_format_is_a_mismatch_that_names_both(made):
    with pytest.raises(PeerMismatch, match="has wire format 9; this program speaks wire format 1"):
        replace(made[1], protocol=9)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run = ", "not valid TOML"),
        ("x = 1", "unknown key 'x'"),
        ('run = "a"', "lacks population"),
        ('run = "a"\npopulation = "1"', "population in the roster is '1'"),
        ('run = "a"\npopulation = true', "population in the roster is True"),
        (
            'run = "a"\npopulation = 1\n[[members]]\nname = "a"\naddress = "h:1"\nclients = ["0"]',
            "clients in the roster",
        ),
        ('run = "a"\npopulation = 1\nmembers = [1]', "not .*tables"),
    ],
)
def test_a_text_that_is_no_roster_is_refused(text, found):
    with pytest.raises(TransportError, match=found):
        roster.loads(text)


@pytest.mark.parametrize(
    ("days", "notice"),
    [(31, None), (30, 30), (29, 30), (14, 14), (7, 7), (6.9, 7), (1, 1), (0.5, 1), (0, 0), (-3, 0)],
)
def test_the_end_of_a_certificate_is_noticed_at_30_14_7_and_1_days(days, notice):
    """Of a certificate of 60 days; one of a day, which the organizer knew, is noticed at its end alone."""
    now = datetime(2026, 6, 1, tzinfo=UTC)
    end = now + timedelta(days=days)
    for long, expected in ((60, notice), (1, 0 if days <= 0 else None)):
        member = Member("a", "127.0.0.1:7000", (0,), expires=end.isoformat())
        signed = (end - timedelta(days=long)).isoformat()
        found = roster.find_ends(roster.Roster("r", (member,), 1, issued=signed), now)
        assert found == {"a": (pytest.approx(days), expected)}


def test_an_address_in_two_spellings_is_one_and_one_that_nobody_can_dial_is_none():
    who, _ = local.make_members([[0], [1]])
    first, second = who.members
    for a, b in (
        ("North.example.org:1", "north.Example.org:1"),
        ("[2001:db8::1]:1", "[2001:DB8:0::1]:1"),
    ):
        with pytest.raises(TransportError, match="two members have the address"):
            replace(who, members=(replace(first, address=a), replace(second, address=b)))
    with pytest.raises(TransportError, match=r"n0: address '0\.0\.0\.0:7447' stands for all"):
        replace(who, members=(replace(first, address="0.0.0.0:7447"), second))


def test_members_that_only_dial_out_and_relays_are_on_the_roster(tmp_path):
    """Written and read again; two that cannot reach each other are a problem; a relay is dialed, and no member."""
    who, _ = local.make_members([[0], [1], [2]], outbound=(1, 2), relays=1)
    signed, people = local.create_credentials(tmp_path, who)
    assert roster.loads(roster.dumps(signed)) == signed
    assert [m.is_outbound for m in signed.members] == [False, True, True]
    file, organizer = tmp_path / "roster.toml", tmp_path / "organizer.pub"
    assert not [p for p in roster.check_file(file, organizer) if "only dial out" in p]
    roster.write_signed(file, replace(signed, relays=()), tmp_path / "organizer.key")
    (said,) = [p for p in roster.check_file(file, organizer) if "only dial out" in p]
    assert said.startswith("n1, n2 only dial out, and no relay")
    roster.write_signed(file, replace(signed, relays=(), server="n0"), tmp_path / "organizer.key")
    assert not [p for p in roster.check_file(file, organizer) if "only dial out" in p]
    assert roster.check_own(signed, people[3]) == []
    for wrong in (
        replace(signed.relays[0], address="outbound"),
        replace(signed.relays[0], clients=(0,)),
        replace(signed.relays[0], name="n0"),
    ):
        with pytest.raises(TransportError):
            replace(signed, relays=(wrong,))


def test_a_roster_has_ten_thousand_members_and_no_more():
    """Of as many no comparison may be of all pairs: this takes a second."""
    who, _ = local.make_members([[0]])
    first = replace(who.members[0], key="", subject="")
    many = [
        replace(first, name=f"m{k}", address=f"127.0.{k // 250}.{k % 250}:1", clients=(k,))
        for k in range(10_001)
    ]
    large = replace(who, members=tuple(many[:-1]), population=10_000)
    assert large.member("m9999").clients == (9999,)
    assert large.has_member("m0")
    assert not large.has_member("m10000")
    with pytest.raises(TransportError, match="10001 members; expected 1 to 10000"):
        replace(who, members=tuple(many), population=10_001)
