"""Removing members and replacing keys while a run goes on: versions only rise, ids stay, the others go on."""

import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training import intercept_training

from coterie.errors import ConfigError, TransportError
from coterie.methods import METHODS
from coterie.net import head, identity, local, roster, setup
from coterie.net.keeper import Keeper
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.results.stored_runs import ROSTER_SEEN
from coterie.rng import Rng
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation(num_clients=4)
PLAN = RunSpec(
    METHODS["random"](**{"num_peers": 3}), tiny_settings(rounds=8), "linear", "linear", seed=3
)


@pytest.fixture
def organizer(tmp_path) -> Path:
    """The folder of the organizer of a run of four."""
    folder = tmp_path / "organizer"
    who, _ = local.make_members([[0], [1], [2], [3]])
    local.create_credentials(folder, who, study=head.study_hash(PLAN.common_settings(4)))
    setup._save_addresses(folder / setup.MEMBERS, {m.name: m.address for m in who.members})
    return folder


def send(organizer: Path, folder: Path) -> Path:
    """Copy the newest roster, as the organizer sends it, and return its file."""
    folder.mkdir(exist_ok=True)
    for name in ("roster.toml.sig", "roster.toml"):
        shutil.copy(organizer / name, folder / name)
    return folder / "roster.toml"


def keeper(organizer: Path, folder: Path, told: list) -> Keeper:
    return Keeper(
        folder / "roster.toml",
        organizer / "organizer.pub",
        folder,
        lambda event, **rest: told.append((event, rest)),
    )


def test_a_roster_is_passed_on_as_it_was_read_also_where_its_file_is_replaced_meanwhile(
    organizer, tmp_path, monkeypatch
):
    send(organizer, tmp_path / "n0")
    load = roster.load_signed

    def load_before_it_is_replaced(path: Path) -> bytes:
        found = load(path)
        monkeypatch.setattr(roster, "load_signed", load)
        setup.remove_member(organizer, "n3")
        send(organizer, tmp_path / "n0")
        return found

    monkeypatch.setattr(roster, "load_signed", load_before_it_is_replaced)
    kept = keeper(organizer, tmp_path / "n0", [])
    public = roster.load_organizer_key(organizer / "organizer.pub")
    assert (kept.roster.version, len(kept.roster.members)) == (1, 4)
    assert roster.parse_signed(kept.sealed, public) == kept.roster
    newer = kept.reload_file()
    assert newer is not None
    assert (newer.version, roster.parse_signed(kept.sealed, public)) == (2, newer)


def test_a_version_of_before_is_not_taken_again(organizer, tmp_path):
    """Neither from the file, nor from a member, nor after a restart, whatever file lies there."""
    told: list = []
    send(organizer, tmp_path / "first")
    file = send(organizer, tmp_path / "n0")
    kept = keeper(organizer, file.parent, told)
    kept.save_roster()
    assert kept.reload_file() is None
    first = kept.sealed
    setup.remove_member(organizer, "n3")
    send(organizer, file.parent)
    new = kept.reload_file()
    assert new is not None
    assert (new.version, new.removed) == (2, (3,))
    send(tmp_path / "first", file.parent)
    assert kept.reload_file() is None
    assert kept.accept_offer(first, "n2") is None
    assert [(event, rest["source"]) for event, rest in told] == [
        ("roster_refused", str(file)),
        ("roster_refused", "n2"),
    ]
    assert "version 1; version 2 of local is known" in told[0][1]["text"]
    assert keeper(organizer, file.parent, told).roster == new, "a restart finds the newest"


def test_only_the_organizers_roster_is_taken(organizer, tmp_path):
    """Another one's signature, one of another run by the same organizer, one that is damaged or half-copied."""
    told: list = []
    file = send(organizer, tmp_path / "n0")
    kept = keeper(organizer, file.parent, told)
    other = tmp_path / "other"
    identity.make_authority(other, "local")
    newer = replace(kept.roster, version=9)
    roster.write_signed(other / "roster.toml", newer, other / "organizer.key")
    assert kept.accept_offer(roster.load_signed(other / "roster.toml"), "n1") is None
    roster.write_signed(
        other / "roster.toml", replace(newer, run="another"), organizer / "organizer.key"
    )
    assert kept.accept_offer(roster.load_signed(other / "roster.toml"), "n1") is None
    roster.write_signed(other / "roster.toml", newer, organizer / "organizer.key")
    good = roster.load_signed(other / "roster.toml")
    assert kept.accept_offer(good[:-1], "n1") is None
    assert kept.accept_offer(b"", "n1") is None
    assert kept.accept_offer(bytes(2 << 20), "n1") is None
    file.write_bytes(good[64:])  # the signature has not been copied yet
    assert kept.reload_file() is None
    assert [event for event, _ in told] == ["roster_refused"] * 6
    send(other, file.parent)
    assert kept.reload_file() == newer


class Run:
    """Four nodes with their own copies of the roster, inside one program."""

    def __init__(self, organizer: Path, folder: Path) -> None:
        self.organizer, self.folder, self.hub = organizer, folder, Hub()
        self.logs: dict[str, io.StringIO] = {}
        self.nodes: dict[str, Node] = {}

    def node(self, name: str, key: Path | None = None) -> Node:
        place = self.folder / name
        if not place.exists():
            send(self.organizer, place)
        kept = Keeper(place / "roster.toml", self.organizer / "organizer.pub", place)
        log = self.logs.setdefault(name, io.StringIO())
        own = identity.load_key(key or self.organizer / f"{name}.key")
        self.nodes[name] = Node(
            PLAN, FEDERATION.host(list(kept.roster.member(name).clients)), kept.roster, InProcess(self.hub, name),
            local.make_signer(own), place / "run", terms=Terms(deadline=20.0),
            patience=Patience(start=20.0, linger=5.0, ask=2.0, poll=0.02), log=Log(name, stream=log), keeper=kept,
        )  # fmt: skip
        return self.nodes[name]

    def at(self, name: str, round: int, action) -> None:
        """Do something when a node trains in a round."""

        def act_then_train(train, params, rng, *rest, **options):
            if rng.round == round:
                action()
            return train(params, rng, *rest, **options)

        intercept_training(self.nodes[name].loop, act_then_train)

    def told(self, name: str, event: str) -> list[dict]:
        return [
            e
            for e in map(json.loads, self.logs[name].getvalue().splitlines())
            if e["event"] == event
        ]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
            node.transport.close()


@pytest.fixture
def run(organizer, tmp_path) -> Iterator[Run]:
    made = Run(organizer, tmp_path / "nodes")
    made.folder.mkdir()
    yield made
    made.close()


def life(node: Node) -> str:
    try:
        node.run()
    except TransportError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_member_that_is_removed_is_read_by_nobody_from_the_next_round_on(run, organizer):
    """In round 2 every node gets the roster without n3: its client keeps its id, and the others end as four would."""
    nodes = [run.node(f"n{i}") for i in range(4)]

    def remove() -> None:
        setup.remove_member(organizer, "n3")
        for i in (0, 1, 2):
            send(organizer, run.folder / f"n{i}")

    run.at("n3", 2, remove)
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(life, nodes))
    assert ends[:3] == ["", "", ""]
    for name in ("n0", "n1", "n2"):
        (told,) = run.told(name, "roster")
        assert (told["version"], told["removed"]) == (2, ["n3"])
        edges = run.nodes[name].loop.record.edges
        later = edges[
            (edges["read"] == 3) & (edges["weight"] > 0) & (edges["round"] > told["round"])
        ]
        assert later.empty
    again = run.node("n0")
    assert again.loop.next_round == 8, (
        "what is stored fits a population of four, one of them removed"
    )
    assert again.roster.removed == (3,)


@pytest.mark.full
def test_one_member_that_has_the_new_roster_gives_it_to_the_others(run, organizer):
    nodes = [run.node(f"n{i}") for i in range(3)]

    def remove() -> None:
        setup.remove_member(organizer, "n3")
        send(organizer, run.folder / "n1")

    run.at("n1", 0, remove)
    for node in nodes:
        node.patience = replace(node.patience, start=0.2)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(life, nodes)) == ["", "", ""]
    assert [node.roster.version for node in nodes] == [2, 2, 2]
    assert (run.folder / "n0" / ROSTER_SEEN).read_bytes()[64:] == (
        organizer / "roster.toml"
    ).read_bytes()


def test_after_a_new_key_the_old_one_signs_nothing_that_counts(run, organizer, tmp_path):
    """n2 goes on with its old key: under the new roster its models are refused, and it is told to start again."""
    a, b, c = (run.node(f"n{i}") for i in range(3))
    for node in (a, b, c):
        node.transport.serve_head(node._make_head)
        node.loop.exchange.begin_round(node.loop.rng.at_round(0))
        node.loop.exchange.set_active(node.exchange.ids)
    request = identity.make_request(tmp_path / "new", "n2", a.roster.member("n2").address)
    a.post._newest["n2"] = 1 << 52  # the thief said that it had been started often
    setup.rekey_member(organizer, "n2", request, days=0.5)
    for name in ("n0", "n2"):
        send(organizer, run.folder / name)
    a.update_roster()
    (told,) = run.told("n0", "roster")
    assert told["rekeyed"] == ["n2"]
    old, new = (
        identity.load_key(organizer / "n2.key"),
        identity.load_key(tmp_path / "new" / "n2.key"),
    )
    verify = a.post._verify["n2"]
    assert not verify(identity.sign(old, b"text"), b"text")
    assert verify(identity.sign(new, b"text"), b"text")
    assert "n2" not in a.post._newest, "the new key begins anew"
    assert a.ask_heads(["n2"]) == {}, "nor do its heads count"
    with pytest.raises(
        TransportError, match="has another key for n2: put its key and certificate in place"
    ):
        c.update_roster()


def test_a_member_moves_with_one_command_and_keeps_its_certificate(run, organizer):
    """The next version has the address; the others take it, and the node that moved says where it is expected."""
    before = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    made = setup.move_member(organizer, "n1", "North.Example.org:7447")
    assert (made.version, made.member("n1").address) == (2, "north.example.org:7447")
    assert replace(made.member("n1"), address=before.member("n1").address) == before.member("n1")
    assert setup.load_members(organizer)["n1"] == "north.example.org:7447", "for later rosters"
    a, b = run.node("n0"), run.node("n1")
    made = setup.move_member(organizer, "n1", "192.0.2.9:7447")
    for node in (a, b):
        send(organizer, run.folder / node.transport.name)
        node.update_roster()
        assert node.roster == made
    (told,) = run.told("n0", "roster")
    assert (told["moved"], told["rekeyed"], told["removed"]) == (["n1"], [], [])
    assert run.told("n0", "moved") == []
    (told,) = run.told("n1", "moved")
    assert "192.0.2.9:7447" in told["text"]
    with pytest.raises(TransportError, match="two members have the address"):
        setup.move_member(organizer, "n1", before.member("n0").address)
    with pytest.raises(TransportError, match="stands for all addresses"):
        setup.move_member(organizer, "n1", "0.0.0.0:7447")
    now = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    assert now == made, "what is refused changes nothing"


def test_key_and_address_change_with_one_command(organizer, tmp_path):
    request = identity.make_request(tmp_path / "new", "n2", "new.example.org:7447")
    with pytest.raises(TransportError, match="agreed was"):
        setup.rekey_member(organizer, "n2", request, days=0.5)
    before = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    made = setup.rekey_member(organizer, "n2", request, address="new.example.org:7447", days=0.5)
    assert made.version == before.version + 1
    assert made.member("n2").address == "new.example.org:7447"
    key = identity.load_key(tmp_path / "new" / "n2.key").public_key()
    assert made.member("n2").key == identity.encode_public_key(key)
    assert setup.load_members(organizer)["n2"] == "new.example.org:7447"


def test_a_certificate_that_is_bound_to_its_host_does_not_move(organizer):
    old = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    members = tuple(replace(m, subject="") for m in old.members)
    roster.write_signed(
        organizer / "roster.toml", replace(old, members=members), organizer / "organizer.key"
    )
    with pytest.raises(ConfigError, match="coterie net rekey"):
        setup.move_member(organizer, "n1", "192.0.2.9:7447")


def test_a_member_that_was_removed_ends(run, organizer):
    node = run.node("n3")
    setup.remove_member(organizer, "n3")
    send(organizer, run.folder / "n3")
    with pytest.raises(TransportError, match="n3 was removed from run local in version 2"):
        node.update_roster()


def test_a_removed_name_and_id_are_not_used_again(organizer, tmp_path):
    setup.remove_member(organizer, "n1")
    with pytest.raises(
        ConfigError, match="n1 was removed, and neither names nor ids are used again"
    ):
        setup.check_member(organizer, "n1")
    with pytest.raises(TransportError, match="'n1' is not on the roster"):
        setup.remove_member(organizer, "n1")
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "s"\nrounds = 2\nseeds = [0]\nmodel = { kind = "linear" }\ndata = { dataset = "digits" }\n'
        '[[methods]]\nkind = "random"\nnum_peers = 1\n'
    )
    made = setup.write_roster(organizer, study, (1, 8, 8), 10)
    assert (made.version, made.population, made.removed) == (3, 4, (1,))
    assert made.host_of == {0: "n0", 2: "n2", 3: "n3"}


def test_the_server_and_the_last_member_are_not_removed(organizer, tmp_path):
    old = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    roster.write_signed(
        organizer / "roster.toml", replace(old, server="n2"), organizer / "organizer.key"
    )
    with pytest.raises(ConfigError, match="n2 has the server role"):
        setup.remove_member(organizer, "n2")
    for name in ("n0", "n1", "n3"):
        setup.remove_member(organizer, name)
    roster.write_signed(
        organizer / "roster.toml",
        replace(roster.load(organizer / "roster.toml", organizer / "organizer.pub"), server=""),
        organizer / "organizer.key",
    )
    with pytest.raises(ConfigError, match="n2 is the only member"):
        setup.remove_member(organizer, "n2")


def test_a_removed_client_is_not_asked_by_a_server_either():
    """Whatever cohort was drawn: its message is missing for the reason that it was removed."""
    hub, exchanges = local.connect_in_process([[0], [1], [2]], terms=Terms(deadline=5.0))
    try:
        post = exchanges[0].post
        post.use_roster(replace(post.roster, members=post.roster.members[:2], removed=(2,)))
        exchanges[0].begin_round(Rng(0).at_round(0))
        assert exchanges[0].reachable_clients().tolist() == [True, True, False]
        found = post.fetch_all(
            [replace(exchanges[0]._address_of(0, 2), kind="request")],
            Template.of({"params": torch.zeros(4)}),
            1.0,
        )
        assert found[2] == Missing("removed")
    finally:
        for exchange in exchanges:
            exchange.post.close()
            exchange.post.transport.close()
    assert hub.nodes == {}
