"""The service of a federation's member: what it takes from others, which study runs, what it says."""

import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie._util.claims import claim_folder
from coterie.errors import ConfigError, TransportError
from coterie.net import consent, identity, local, service, servicefile, statements
from coterie.net import roster as rosters
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.node import RunSpec
from coterie.net.nodefile import make_run_spec
from coterie.net.outbox import Missing
from coterie.net.roster import Member, Roster
from coterie.net.service import Membership, Service, StudyKeeper, derive_roster
from coterie.net.statements import Proposal

NAMES = ("north", "south", "east")
STUDY = """
name = "{name}"
rounds = 3
seeds = [0]
data = "heart"
model = {{ kind = "{model}" }}
engine = "loop"
local.epochs = 3
[[methods]]
kind = "dac"
label = "DAC"
num_peers = 1
"""
NODE = """
roster = "../keys/roster.toml"
organizer = "../keys/organizer.pub"
ca = "../keys/ca.pem"
key = "../keys/{name}.key"
certificate = "../keys/members/{name}.pem"
[data.heart]
arrays = "data.npz"
classes = 2
[rules]
{rules}
"""
RULES = 'proposers = ["north"]\nmethods = ["dac"]\n'
PLAIN = STUDY.format(name="hearts", model="linear")
DITTO = PLAIN.replace('"dac"', '"ditto"').replace("num_peers = 1", "personal_epochs = 500")


class Hall:
    """Services of three members inside one program, without TLS."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        members = tuple(Member(n, f"127.0.0.1:{port + i}", (i,)) for i, n in enumerate(NAMES))
        self.roster, _ = local.create_credentials(folder / "keys", Roster("hall", members, 3))
        self.services: dict[str, Service] = {}
        self.events: dict[str, list[tuple[str, dict[str, Any]]]] = {name: [] for name in NAMES}
        rng = np.random.default_rng(0)
        for name in NAMES:
            (folder / name).mkdir()
            x, y = rng.normal(size=(40, 6)).astype("float32"), rng.integers(0, 2, 40)
            np.savez(folder / name / "data.npz", x=x, y=y)
            self.write_node(name)

    def write_node(self, name: str, rules: str = "") -> None:
        path = self.folder / name / "node.toml"
        path.write_text(NODE.format(name=name, rules=rules))

    def membership(self, name: str) -> Membership:
        return Membership.open(servicefile.load(self.folder / name / "node.toml"))

    def open(self, name: str) -> Service:
        made = self.membership(name)
        log = Log(name, stream=io.StringIO())
        log.also = lambda event, level, details: self.events[name].append((event, details))
        transport = GrpcTransport(made.keeper.roster, name, None, log=log)
        self.services[name] = Service(made, transport, log)
        return self.services[name]

    def proposal(self, name: str = "hearts", model: str = "linear", **changes) -> Proposal:
        """As `coterie propose` makes it at north."""
        study = STUDY.format(name=name, model=model)
        made = Proposal(
            federation="hall", organizer=self.membership("north").organizer, by="north",
            time=round(time.time(), 3), name=name, study=study, role="heart", features=[6],
            classes=2, outputs=2, table={}, members=list(NAMES), quorum=3, server="",
        )  # fmt: skip
        return replace(made, **changes)

    def propose(self, name: str = "hearts", **changes) -> Proposal:
        made = self.proposal(name, **changes)
        self.membership("north").propose(made)
        return made

    def say(self, by: str, kind: str, name: str = "hearts") -> None:
        membership = self.membership(by)
        membership.say(kind, membership.ledger.find(name))

    def exchange(self, *names: str) -> None:
        """Let members look around once each."""
        for one in self.services.values():
            one.ledger.reload()  # what commands have written
        for name in names or NAMES:
            self.services[name].look_around()

    def told(self, name: str, event: str) -> list[dict[str, Any]]:
        return [details for one, details in self.events[name] if one == event]

    def close(self) -> None:
        for one in self.services.values():
            one.transport.close()


@pytest.fixture
def hall(tmp_path: Path, port: int) -> Iterator[Hall]:
    made = Hall(tmp_path, port)
    yield made
    made.close()


@pytest.fixture
def three(hall: Hall) -> Hall:
    for name in NAMES:
        hall.open(name)
    return hall


def test_a_member_gets_a_study_from_any_member_that_has_it(three):
    """North is away when east comes: south has the proposal, with north's signature."""
    made = three.propose()
    three.exchange("south")
    three.services["north"].transport.close()
    assert three.services["east"].ledger.entries == {}
    three.exchange("east")
    entry = three.services["east"].ledger.find("hearts")
    assert entry.proposal == made
    assert entry.says("approval", "north"), "who proposes approves"


def test_what_a_member_makes_up_is_refused_with_one_line_and_not_passed_on(three):
    """South sends a changed proposal, one in north's name, and words that are not its to say."""
    made, south = three.propose(), three.services["south"]
    three.exchange("east")
    sign = south.membership.own.sign
    sealed = statements.seal(made, three.membership("north").own.sign)
    changed = sealed.replace(b'"quorum":3', b'"quorum":2')
    forged = statements.seal(replace(made, quorum=2, time=made.time + 1), sign)
    word = statements.Word("hall", made.organizer, "south", time.time(), "withdrawal", made.digest)
    withdrawn = statements.seal(word, sign)
    sent = {
        statements.digest_of(data[64:]): data
        for data in (changed, forged, withdrawn, b"\x00" * 70, b"\x01" * 70)
    }
    listed = json.loads(south._list_studies()) | {"statements": list(sent)}
    south.transport.allow_runs(
        {"Studies": lambda: json.dumps(listed).encode(), "Statement": lambda d: sent[d]},
        lambda run: False,
    )
    three.exchange("north", "east", "north", "east")
    assert three.services["east"].ledger.entries.keys() == {"hearts"}
    assert three.services["east"].ledger.find("hearts").proposal == made
    assert not three.services["east"].ledger.find("hearts").is_withdrawn
    told = three.told("east", "statement_refused")
    assert len(told) == 4, "three once each, and after what no honest member passes on no more"
    for details in told:
        assert details["peer"] == "south"
        assert details["text"].isprintable()


@pytest.mark.parametrize("how", ["withdrawal", "stop", "end", "refusal", "failed", "too few"])
def test_a_study_that_is_over_for_a_member_is_not_waited_for_there(three, how):
    """South asks north, which takes part no more: it does not wait for the deadline of its round."""
    made, other = three.propose(), three.propose("other")
    three.exchange()
    north, south = three.services["north"], three.services["south"]

    def ask(proposal: Proposal) -> Missing:
        north.note_over()
        of_study = replace(three.roster, run=proposal.run)
        with south.transport.open_run(of_study) as run:
            return run.ask_head("north", "1", 5.0)

    assert ask(made) == Missing("not_ready"), "it may begin"
    if how == "failed":
        (north.ledger.find("hearts").folder / "failed.txt").write_text("why\n")
    elif how == "too few":
        three.say("south", "approval")
        three.exchange()
        assert ask(made) == Missing("not_ready"), "two of three have approved"
        three.say("south", "stop")
        three.exchange()
    elif how == "refusal":
        made = three.proposal("declined", by="south", time=made.time + 1)
        three.membership("south").propose(made)
        three.exchange()
        three.say("north", "refusal", "declined")
    else:
        three.say("north", how)
    north.ledger.reload()
    assert ask(made) == Missing("closing")
    assert ask(other) == Missing("not_ready"), "the other study may begin"


def test_what_a_member_says_of_its_studies_is_read_strictly():
    good = {"roster": 1, "running": "", "begun": "", "statements": ["0" * 64]}
    assert service._parse_studies(json.dumps(good).encode()) == good
    for change in (
        {"statements": ["../../x"]},
        {"statements": [1]},
        {"statements": "0" * 64},
        {"roster": True},
        {"running": "x"},
        {"more": 1},
    ):
        with pytest.raises(statements.Refused):
            service._parse_studies(json.dumps(good | change).encode())


def test_rules_approve_what_they_allow_and_nothing_else(hall):
    hall.write_node("south", RULES + "rounds = 3")
    hall.write_node("east", RULES.replace("north", "south"))
    for name in NAMES:
        hall.open(name)
    hall.propose()
    hall.exchange()
    for name in NAMES:
        hall.services[name].decide()
    hall.exchange()
    entry = hall.services["north"].ledger.find("hearts")
    assert entry.says("approval", "south")
    assert not entry.says("approval", "east")
    (told,) = hall.told("east", "waits_for_approval")
    assert told["text"] == "north is none of [rules] proposers"


@pytest.mark.parametrize(
    ("rules", "change", "said"),
    [
        ("", {}, "names no proposers"),
        (RULES + "rounds = 2", {}, "it has 3 rounds; [rules] allow 2"),
        (RULES + "epochs = 2", {}, "it has 3 epochs; [rules] allow 2"),
        (RULES.replace('"dac"', '"fedavg"'), {}, "its method is dac"),
        (RULES + "secure_aggregation = true", {}, "secure_aggregation, which [rules] require"),
        (RULES + "noise = 1.0", {}, "its noise_multiplier is 0; [rules] require 1"),
        (RULES, {"model": "no_such_package.nets:Net"}, "a person decides"),
        # What a study multiplies, or counts in another way, is no way around the rules.
        (RULES + "rounds = 3", {"study": f"scale = 1000\n{PLAIN}"}, "it has 3000 rounds; [rules]"),
        (
            RULES,
            {"study": PLAIN.replace("local.epochs = 3", "local.steps = 100000")},
            "it trains 100000 steps a round; [rules] allow epochs",
        ),
        (
            RULES.replace('"dac"', '"ditto"'),
            {"study": DITTO, "server": "north"},
            "its personal_epochs are 500; [rules] allow 10 epochs",
        ),
        (
            RULES.replace('"dac"', '"per-fedavg"'),
            {
                "study": PLAIN.replace('"dac"', '"per-fedavg"')
                .replace("num_peers", "adapt_steps")
                .replace("adapt_steps = 1", "adapt_steps = 9000"),
                "server": "north",
            },
            "its adapt_steps are 9000; [rules] allow epochs",
        ),
        (RULES, {"features": [7]}, "have features [6]; the study hearts expects [7]"),
        (RULES, {"classes": 3, "outputs": 3}, "have classes 2; the study hearts expects 3"),
        (RULES, {"role": "lungs"}, "unknown role of data 'lungs'"),
    ],
)
def test_a_study_that_no_rule_allows_waits_for_a_person_and_says_why(hall, rules, change, said):
    hall.write_node("south", rules)
    for name in ("north", "south"):
        hall.open(name)
    hall.propose(**change)
    hall.exchange("south")
    for _ in range(3):
        hall.services["south"].decide()
    assert not hall.services["south"].ledger.find("hearts").says("approval", "south")
    (told,) = hall.told("south", "waits_for_approval")
    assert said in told["text"]


def test_the_same_study_comes_first_everywhere_and_when_its_quorum_is_here(three):
    now = time.time()
    # In the order in which they were proposed, whatever the order in which they are approved.
    three.propose("second", time=now)
    three.propose("first", time=now - 60, members=["north", "south"], quorum=2)
    three.exchange()
    three.say("south", "approval", "second")
    three.say("east", "approval", "second")
    three.exchange()
    three.exchange()
    assert [three.services[n].pick_study().proposal.name for n in NAMES] == ["second"] * 3
    three.say("south", "approval", "first")
    three.exchange()
    three.exchange()
    picked = [three.services[n].pick_study() for n in NAMES]
    assert [one and one.proposal.name for one in picked] == ["first", "first", "second"]
    # East is away: its study waits, and the other does not.
    for name in ("north", "south"):
        views = three.services[name]._views
        views["east"] = replace(views["east"], at=time.monotonic() - 3600)
        three.services[name].membership.say(
            "withdrawal" if name == "north" else "stop", three.services[name].ledger.find("first")
        )
        assert three.services[name].pick_study() is None


def test_a_study_with_a_server_begins_when_its_server_takes_part_and_is_here(three):
    """Two of three are the quorum, and without the third, the server, nothing would be trained."""
    three.propose(
        quorum=2,
        server="east",
        study=PLAIN.replace('"dac"', '"fedavg"').replace("num_peers = 1", ""),
    )
    three.exchange()
    three.say("south", "approval")
    three.exchange()
    three.exchange()
    assert [three.services[name].pick_study() for name in NAMES] == [None] * 3
    south = three.services["south"]
    word, text = south.membership.describe(south.ledger.find("hearts"), {"here": []})
    assert (word, text) == ("approved", "2 of 2 approved, and the server east does not take part")
    three.say("east", "approval")
    three.exchange()
    three.exchange()
    picked = [three.services[name].pick_study() for name in NAMES]
    assert [one and one.proposal.name for one in picked] == ["hearts"] * 3
    view = south._views["east"]
    south._views["east"] = replace(view, at=time.monotonic() - 3600)
    assert south.pick_study() is None, "its server is away"


def test_what_a_service_that_was_killed_was_doing_is_no_news(hall):
    """Its last words stay in the folder, and are not what it does now."""
    made, membership = hall.propose(quorum=2), hall.membership("north")
    hall.say("north", "approval")
    folder = membership.ledger.folder
    told = {"running": made.digest, "round": 59, "waiting": False, "here": ["south"]}
    (folder / service.STATE).write_text(json.dumps(told))
    assert membership.load_state() == {}
    with claim_folder(folder / service.CLAIM):
        assert membership.load_state() == told
        (folder / service.STATE).unlink()
        assert membership.load_state() == {"here": []}, "it runs, and has not said more yet"


def test_a_member_that_is_in_another_study_is_not_here(three):
    made = three.propose()
    for name in ("south", "east"):
        three.exchange(name)
        three.say(name, "approval")
    three.exchange()
    three.exchange()
    north = three.services["north"]
    assert north.pick_study() is not None
    view = north._views["south"]
    north._views["south"] = replace(view, running="f" * 64, begun="f" * 64)
    assert north.pick_study() is None
    # It only waits there, for members that may wait here.
    north._views["south"] = replace(view, running="f" * 64)
    assert north.pick_study() is not None
    north._views["south"] = replace(view, running=made.digest, begun=made.digest)
    assert north.pick_study() is not None


def test_a_study_that_failed_at_a_member_holds_up_no_other(three):
    """North waits in the first for south, where it has failed: the second begins."""
    first, second = three.propose("first"), three.propose("second")
    for name in ("south", "east"):
        three.exchange(name)
        for study in ("first", "second"):
            three.say(name, "approval", study)
    three.exchange()
    three.exchange()
    north, south = three.services["north"], three.services["south"]
    picked = north.pick_study()
    assert picked is not None
    assert picked.proposal == first
    (south.ledger.find("first").folder / "failed.txt").write_text("why\n")
    south.note_over()
    with north._open_node(picked) as node:
        north._node, north._running = node, picked
        north._check_running()
        assert node._stop.is_set()
        found = north.pick_study()
        assert found is not None
        assert found.proposal == second
        # When it is tried again there, it counts again.
        view = north._views["south"]
        north._views["south"] = replace(view, running=first.digest)
        found = north.pick_study()
        assert found is not None
        assert found.proposal == first
        north._node = north._running = None


def test_hours_hold_back_what_has_not_begun(three, monkeypatch):
    rules = servicefile.Rules(hours="20-6")
    hours = {h: rules.allows_hour(time.mktime((2030, 1, 1, h, 30, 0, 0, 1, -1))) for h in range(24)}
    assert [h for h, fine in hours.items() if fine] == [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    day = servicefile.Rules(hours="8-17")
    assert not day.allows_hour(time.mktime((2030, 1, 1, 17, 0, 0, 0, 1, -1)))
    with pytest.raises(ConfigError, match="two hours of the day"):
        servicefile.Rules(hours="25-3")
    three.propose(members=["north", "south"], quorum=2)
    three.exchange("south")
    three.say("south", "approval")
    three.exchange()
    three.exchange()
    north = three.services["north"]
    assert north.pick_study() is not None
    monkeypatch.setattr(servicefile.Rules, "allows_hour", lambda self, now: False)
    assert north.pick_study() is None


def spec(proposal: Proposal) -> RunSpec:
    return make_run_spec(statements.parse_proposed(proposal.study, to_run=True))


def test_a_study_has_its_own_members_numbers_and_run_with_the_keys_of_today(hall):
    made = hall.proposal(members=["east", "north"], quorum=2)
    first = derive_roster(made, hall.roster, spec(made))
    assert [(m.name, m.clients) for m in first.members] == [("east", (0,)), ("north", (1,))]
    assert (first.run, first.population) == (made.run, 2)
    assert first.member("north").key == hall.roster.member("north").key
    assert first.study
    assert first.schema
    left = replace(
        hall.roster, members=hall.roster.members[:2], removed=(2,), version=hall.roster.version + 1
    )
    second = derive_roster(made, left, spec(made))
    assert (second.host_of, second.removed) == ({1: "north"}, (0,))
    assert second.study == first.study


def test_a_running_study_adopts_a_newer_roster_of_the_federation(hall):
    north, made = hall.open("north"), hall.proposal()
    keeper = StudyKeeper(north.keeper, lambda newest: derive_roster(made, newest, spec(made)))
    assert keeper.reload_file() is None
    left = replace(
        hall.roster, members=hall.roster.members[:2], removed=(2,), version=hall.roster.version + 1
    )
    keys = hall.folder / "keys"
    rosters.write_signed(hall.folder / "newer.toml", left, keys / "organizer.key")
    found = keeper.accept_offer(rosters.load_signed(hall.folder / "newer.toml"), "south")
    assert found is not None
    assert [m.name for m in found.members] == ["north", "south"]
    assert north.transport.roster == left, "its links are those of the newer roster, too"
    assert keeper.reload_file() is None
    assert hall.membership("north").keeper.roster == left, "it is kept for the next start"
    (told,) = hall.told("north", "roster")
    assert told["removed"] == ["east"]


@pytest.mark.parametrize("what", ["certificate", "key"])
def test_a_service_goes_on_with_a_certificate_that_was_renewed(hall, what):
    """Others may have the roster before this member has the new file. With another key nobody answers it."""
    north, keys = hall.open("north"), hall.folder / "keys"
    member, south, east = hall.roster.members
    changed = replace(member, certificate="0" * 64)
    if what == "key":
        other = ec.generate_private_key(ec.SECP256R1()).public_key()
        text = identity.encode_public_key(other)
        changed = replace(changed, key=text, subject=identity.key_fingerprint(other))
    newer = replace(hall.roster, members=(changed, south, east), version=2)
    rosters.write_signed(hall.folder / "newer.toml", newer, keys / "organizer.key")
    assert north.keeper.accept_offer(rosters.load_signed(hall.folder / "newer.toml"), "south")
    if what == "key":
        with pytest.raises(TransportError, match="another key for north"):
            north._check_own()
        return
    north._check_own()
    north._check_own()
    (told,) = hall.told("north", "certificate")
    assert "the roster knows another certificate of north" in told["text"]


def test_a_roster_of_somebody_else_changes_nothing(hall):
    north, made = hall.open("north"), hall.proposal()
    keeper = StudyKeeper(north.keeper, lambda newest: derive_roster(made, newest, spec(made)))
    assert keeper.accept_offer(b"\x00" * 200, "south") is None
    assert north.keeper.roster == hall.roster


def test_how_a_study_stands_is_said_in_a_word(three):
    made = three.propose(quorum=2)
    three.exchange("south")
    membership = three.membership("south")

    def word(state: dict[str, Any] | None = None) -> str:
        membership.ledger.reload()
        return membership.describe(membership.ledger.find("hearts"), state or {})[0]

    assert word() == "proposed"
    three.say("south", "refusal")
    assert word() == "declined"
    three.say("south", "approval")
    assert word() == "queued"
    stands = membership.describe(membership.ledger.find("hearts"), {})
    assert stands == ("queued", "2 of 2 approved; the service of this member does not run")
    assert word({"running": made.digest, "round": 1, "waiting": False}) == "running"
    three.say("south", "stop")
    assert word() == "stopped"


def test_data_that_have_changed_since_they_were_approved_begin_no_study(hall):
    south = hall.open("south")
    hall.propose(by="north", quorum=2)
    hall.open("north")
    hall.exchange("south")
    hall.say("south", "approval")
    south.ledger.reload()
    np.savez(hall.folder / "south/data.npz", x=np.zeros((40, 7), "float32"), y=np.arange(40) % 2)
    south._run_study(south.ledger.find("hearts"))
    word, why = south.membership.describe(south.ledger.find("hearts"), {})
    assert (word, why) == (
        "failed",
        "the data of the role heart have features [7]; the study hearts expects [6]",
    )


def run_study(hall: Hall, *names: str) -> None:
    """Run services until the study is over at all of these members."""
    with ThreadPoolExecutor(len(names)) as pool:
        running = [pool.submit(hall.services[name].run) for name in names]
        until = time.monotonic() + 120
        while time.monotonic() < until and not any(one.done() for one in running):
            entries = [hall.services[name].ledger.entries["hearts"] for name in names]
            if all(e.says("end", name) for e, name in zip(entries, names, strict=True)):
                break
            time.sleep(0.05)
        for name in names:
            hall.services[name].stop()
        for one in running:
            one.result()


def test_what_is_said_of_a_study_that_is_over_is_so(hall):
    """Its log has what its links met, "done" names the rounds without others, and who comes late is told."""
    for name in ("north", "south"):
        hall.open(name)
    made = hall.propose(members=["north", "south"], quorum=2)
    hall.exchange("south")
    hall.say("south", "approval")
    run_study(hall, "north", "south")
    north, south = hall.services["north"], hall.services["south"]
    # What happens to the links of all studies is of the one that runs then.
    places = {one.name: one.ledger.find("hearts").folder / one.name for one in (north, south)}
    for name, other in (("north", "south"), ("south", "north")):
        lines = (places[name] / "audit.log").read_text().splitlines()
        came = [line for line in map(json.loads, lines) if line["event"] == "peer_up"]
        assert [line["peer"] for line in came] == [other]
        assert hall.told(name, "peer_up"), "the service's own log has it as before"
        network = json.loads(next(places[name].rglob("network.json")).read_text())
        (about,) = [one for one in network["members"] if one["name"] == other]
        assert about["since"] is not None

    membership = hall.membership("north")
    stands = membership.describe(membership.ledger.find("hearts"), {})
    assert stands == ("done", f"results in {places['north']}")
    provenance = next(places["north"].rglob("provenance.json"))
    marked = json.loads(provenance.read_text()) | {"alone": [[0, 0], [2, 2]], "skipped": [[1, 1]]}
    provenance.write_text(json.dumps(marked))
    stands = membership.describe(membership.ledger.find("hearts"), {})
    assert stands[1].endswith(
        "; 2 of its rounds were done alone: no message of another member arrived in them; "
        "1 of its rounds were left out, not trained: the others went on"
    )

    # South was killed after its last round, before it said so: north may have heard it already.
    for one in (north, south):
        end = one.ledger.find("hearts").folder / "signed" / "end-south"
        end.unlink(missing_ok=one is north)
        one.transport.close()
    hall.open("north")
    again = hall.open("south")
    # North's service has ended its run as well, and answers.
    again.look_around()
    again.fail_left_behind()
    found = again.pick_study()
    assert found is not None, "nobody else has to be there"
    again._run_study(found)
    assert again.ledger.find("hearts").says("end", "south")

    # South was killed before its last round.
    (again.ledger.find("hearts").folder / "signed" / "end-south").unlink()
    shutil.rmtree(places["south"])
    again.transport.close()
    late = hall.open("south")
    late.fail_left_behind()
    assert late.membership.describe(late.ledger.find("hearts"), {})[0] == "queued", "north may wait"
    late.look_around()
    view = late._views["north"]
    late._views["north"] = replace(view, running=made.digest)
    late.fail_left_behind()
    assert late.pick_study() is not None, "north waits for it"
    late._views["north"] = view
    late.fail_left_behind()
    word, why = late.membership.describe(late.ledger.find("hearts"), {})
    assert word == "failed"
    assert why.startswith("north finished it without this member")
    assert late.pick_study() is None


def test_the_report_says_what_would_leave_and_loads_no_code_unasked(hall):
    membership = hall.membership("south")
    made = hall.proposal()
    study = statements.parse_proposed(made.study, to_run=True)
    file = membership.file.make_node_file("hearts", "heart", server=False, quorum=3)
    rows = consent.load_role(file, made, study, (1,))
    said = "\n".join(consent.describe_sending(made, rows, "south"))
    # A linear model of 6 features and 2 classes has 14 numbers of 4 bytes.
    assert "56 bytes of numbers" in said
    assert "1.weight [2, 6], 1.bias [2]" in said
    # One peer in each of three rounds.
    assert "to any of north, east: 3 models in 3 rounds" in said
    assert "privacy   none" in said
    served = replace(made, server="south")
    (line,) = (line for line in consent.describe_sending(served, rows, "south") if "sends" in line)
    assert "to all others, as it has the server role" in line
    elsewhere = consent.describe_sending(replace(made, members=["north", "east"]), None, "south")
    assert elsewhere[-1] == "sends     nothing: this member is none of its members"
    assert "models" not in " ".join(elsewhere)
    scaled = replace(made, study=f"scale = 100\n{made.study}")
    said = "\n".join(consent.describe_sending(scaled, rows, "south"))
    assert "300 models in 300 rounds" in said, "as many as it runs"
    clipping = "local.dp = { clip = 1.0, noise_multiplier = 0.0 }"
    clipped = PLAIN.replace("local.epochs = 3", f"local.epochs = 3\n{clipping}")
    said = "\n".join(consent.describe_sending(replace(made, study=clipped), None, "south"))
    assert "privacy   none" in said, "gradients that are clipped alone are not private"
    assert "differential" not in said
    code = hall.proposal(model="no_such_package.nets:Net")
    said = "\n".join(consent.describe_sending(code, None, "south"))
    assert "loads     model.kind = no_such_package.nets:Net" in said


def test_a_node_file_without_a_role_or_with_rows_of_the_study_is_refused(tmp_path):
    for text, said in (
        ('[data]\narrays = "x.npz"', "expected a table: .data.arrays"),
        ('[data."../x"]\narrays = "x.npz"', "letters, digits"),
        ('[data.heart]\nstudy = "own rows"', "for demonstrations"),
        ("[rules]\nround = 3", "did you mean 'rounds'"),
    ):
        path = tmp_path / "node.toml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            servicefile.load(path)
