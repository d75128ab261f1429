"""The doctor finds what is wrong with a node and with the others, and says it in a line each."""

import json
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from coterie.engine import device as devices
from coterie.errors import PeerMismatch
from coterie.methods.random_gossip import Random
from coterie.net import doctor, fleet, identity, local, nodefile
from coterie.net import roster as rosters
from coterie.net.doctor import check_node
from coterie.net.head import Head, check_study
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.outbox import Missing
from coterie.net.post import Post
from coterie.net.roster import Member
from coterie.net.transport import Delivery, Hub, InProcess
from coterie.net.wire import Manifest
from coterie.studies import config
from coterie.testing import tiny_federation, tiny_settings

STUDY = """
name = "ill"
rounds = 2
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits", num_clients = 2, train = 24, validation = 8 }

[[methods]]
kind = "dac"
num_peers = 1
"""


def laid_out(folder: Path, port: int, **options) -> Path:
    """The node file of the first of two nodes on this host."""
    return fleet.lay_out(folder, config.parse_study_text(STUDY), port=port, days=9.0, **options)[
        "node-00"
    ]


def told(file: Path) -> dict[str, bool]:
    """What the doctor says of a node file, and whether each is good."""
    sentences: dict[str, bool] = {}
    fine = check_node(nodefile.load(file), sentences.__setitem__)
    assert fine == all(sentences.values())
    return sentences


def wrong(file: Path) -> list[str]:
    return [sentence for sentence, good in told(file).items() if not good]


def test_a_certificate_that_is_over_ends_the_examination_with_both_dates(tmp_path, port):
    file = laid_out(tmp_path, port)
    folder = tmp_path / "keys"
    identity.sign_request(
        folder,
        folder / "node-00.csr",
        "node-00",
        f"127.0.0.1:{port}",
        now=datetime.now(UTC) - timedelta(days=31),
    )
    (only,) = wrong(file)
    assert " is valid from " in only
    assert "; it is " in only
    assert only.endswith("ask the organizer for a new one, or check the clock")


@pytest.mark.slow
def test_a_certificate_that_ends_within_30_days_is_told(tmp_path, port, monkeypatch):
    ends = {"node-00": (25.0, None), "node-01": (20.4, 30)}
    monkeypatch.setattr(doctor.rosters, "find_ends", lambda roster, now: ends)
    sentences = told(laid_out(tmp_path, port))
    assert sentences["the certificate of node-01 ends in 20 days; it needs a new one"]
    assert not any("node-00 ends" in sentence for sentence in sentences)


def test_a_study_that_is_not_the_rosters_and_an_address_in_use_are_found(tmp_path, port):
    file = laid_out(tmp_path, port)
    study = tmp_path / "study.toml"
    study.write_text(study.read_text().replace("tau = 30.0", "tau = 3.0"))
    with socket.create_server(("127.0.0.1", port)):
        assert wrong(file) == [
            "study: dac with seed 0 is not what the roster says",
            f"127.0.0.1:{port} is taken: the node runs already, or another program",
        ]


def test_the_roster_that_the_node_would_run_by_is_examined(tmp_path, port):
    """A newer one came from another member, in which the other has moved."""
    file = nodefile.load(laid_out(tmp_path, port))
    organizer = file.resolve_path(file.organizer)
    first = rosters.load(file.resolve_path(file.roster), organizer)
    own, other = first.members
    moved = replace(other, address=f"127.0.0.1:{port + 9}")
    newer = replace(first, members=(own, moved), version=first.version + 1)
    rosters.write_signed(tmp_path / "newer.toml", newer, organizer.with_name("organizer.key"))
    kept = file.resolve_path(file.runs) / own.name / "roster.seen"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(rosters.load_signed(tmp_path / "newer.toml"))
    said: list[str] = []
    loaded = doctor.check_files(file, lambda text, good=True: said.append(text))
    assert loaded is not None
    assert loaded.roster == newer
    assert f"roster of {first.run}, version 2: signed, 2 members" in said
    assert any("has version 1 of the roster" in text for text in said)


@pytest.mark.slow
def test_a_device_that_is_not_here_ends_the_examination_and_one_that_is_here_is_told(
    tmp_path, port
):
    """On which device a node trains is its own affair: the study is the roster's all the same."""
    file = laid_out(tmp_path, port)
    study = tmp_path / "study.toml"
    text = study.read_text()
    study.write_text(text.replace('device = "cpu"', 'device = "cuda:77"'))
    (only,) = wrong(file)
    assert only.startswith("device is 'cuda:77'")
    study.write_text(text)
    assert any(
        sentence.startswith(f"trains on cpu; {devices.describe_devices()}")
        for sentence in told(file)
    )


def test_an_address_that_is_not_this_machines_is_taken_by_nobody_here(tmp_path, port):
    """The roster's address is of a network for documentation: nothing can listen on it here."""
    file = laid_out(tmp_path, port, hosts=["192.0.2.7", "127.0.0.1"])
    (said,) = (sentence for sentence in wrong(file) if f"192.0.2.7:{port}" in sentence)
    assert "is no address of this machine" in said
    assert f'listen = "0.0.0.0:{port}"' in said
    assert "taken" not in said
    assert identity.find_obstacle("0.0.0.0", port) == ""


def test_why_this_machine_cannot_listen_is_told_apart(port, monkeypatch):
    errors = {
        socket.gaierror(-2, "Name or service not known"): "a host name that is not known here: DNS",
        OSError(98, "Address already in use"): "is taken",
        PermissionError(13, "Permission denied"): "cannot be opened: Permission denied",
    }
    for error, said in errors.items():

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(socket.socket, "bind", fail)
        assert said in identity.find_obstacle("north.example.org", port)


def test_a_key_that_others_can_read_and_a_roster_that_was_changed_are_found(tmp_path, port):
    file = laid_out(tmp_path, port)
    (tmp_path / "keys/node-00.key").chmod(0o644)
    assert "run chmod 600" in wrong(file)[0]
    (tmp_path / "keys/node-00.key").chmod(0o600)
    roster = tmp_path / "keys/roster.toml"
    roster.write_text(roster.read_text().replace(f":{port + 1}", f":{port + 2}"))
    assert "is not signed by the organizer" in wrong(file)[0]


@pytest.fixture
def three(tmp_path, port):
    """n0, who asks; n1, who is there; n2, who is not."""
    who, keys = local.make_members([[0], [1], [2, 3, 4, 5]], port=port)
    plan, hub, nodes = RunSpec(Random(num_peers=2), tiny_settings(), "linear", "linear"), Hub(), []
    for number in range(2):
        rows = tiny_federation().host([number])
        place, sign = InProcess(hub, f"n{number}"), local.make_signer(keys[number])
        patience = Patience(start=0.0, ask=1.0, poll=0.01)
        nodes.append(Node(plan, rows, who, place, sign, tmp_path / f"n{number}", patience=patience))
    asking, there = nodes
    there.transport.serve_head(there._make_head)
    there.post.serve_probe()
    yield asking, there, local.make_signer(keys[1])
    for node in nodes:
        node.close()
        node.transport.close()


def test_each_member_is_told_of_with_its_state_clock_and_rate(three, port, monkeypatch):
    asking, _, _ = three
    monkeypatch.setattr(doctor, "_LOOK", 0.1)
    (one, good), (two, bad), (round_, _) = doctor._check_others(asking)
    assert one.startswith(f"n1 at 127.0.0.1:{port + 1}: starting in round -1, clock ")
    assert one.endswith(" MB/s")
    assert two == (
        f"n2 at 127.0.0.1:{port + 2}: no answer (nothing listens there: the machine is on, and its "
        "node or rehearsal does not run)"
    )
    assert (good, bad) == (True, False)
    assert round_.startswith("one round: ")
    assert round_.endswith(" s in all")


def test_a_wrong_clock_an_older_roster_and_another_study_are_told(three, monkeypatch):
    asking, there, sign = three
    monkeypatch.setattr(doctor, "_LOOK", 0.1)
    there.roster = replace(there.roster, version=0)
    there.settings = {**there.settings, "rounds": 99}

    def skewed(nonce: str) -> bytes:
        text = there._make_head(nonce)[64:].decode()
        return replace(Head(**json.loads(text)), time=time.time() - 3600).seal(sign)

    there.transport.serve_head(skewed)
    one, good = next(iter(doctor._check_others(asking)))
    assert not good
    for part in (
        "clock -3600.0 s",
        "it runs something else: rounds is 99 there and 4 here",
        "version 0 of the roster",
    ):
        assert part in one


@pytest.mark.parametrize(
    ("seconds", "fine"), [(-20.0, True), (20.0, True), (-40.0, False), (40.0, False)]
)
def test_a_clock_that_is_late_or_early_by_half_a_minute_does_not_pass(
    three, monkeypatch, seconds, fine
):
    """Nothing else is wrong with the member."""
    asking, there, sign = three
    monkeypatch.setattr(doctor, "_LOOK", 0.1)

    def skewed(nonce: str) -> bytes:
        text = there._make_head(nonce)[64:].decode()
        return replace(Head(**json.loads(text)), time=time.time() + seconds).seal(sign)

    there.transport.serve_head(skewed)
    one, good = next(iter(doctor._check_others(asking)))
    assert f"clock {seconds:+.0f}" in one.replace(".0 s", "")
    assert good is fine


# ---------------------------------------------------------------- whose data, and whose roster


def roster_for(node: Node, columns: int, classes: int) -> Node:
    """Let the organizer have written the roster for so many columns and classes."""
    schema = node.plan.compute_schema((columns,), classes)
    node.roster = replace(node.roster, schema=schema)
    return node


@pytest.fixture
def asking(three, monkeypatch):
    """n0, and a head of n1 with the same model and study as its own."""
    monkeypatch.setattr(doctor, "_SEARCH", 120.0)
    node, there, _ = three
    head = Head(**json.loads(there._make_head("0")[64:]))
    return node, head


def test_the_models_hash_is_that_of_the_shapes(asking):
    node, _ = asking
    features, outputs = node.federation.features, node.federation.outputs
    assert node.plan.compute_schema(features, outputs) == node.schema
    assert doctor.compare_models(roster_for(node, features[0], outputs), {}) == ("", True)


@pytest.mark.parametrize(("more", "classes"), [(1, 0), (-1, 0), (500, 0), (0, 1), (0, 3)])
def test_what_the_roster_was_written_for_is_found_from_its_hash(asking, more, classes):
    node, _ = asking
    features, outputs = node.federation.features, node.federation.outputs
    roster_for(node, features[0] + more, outputs + classes)
    text, good = doctor.compare_models(node, {})
    assert not good
    assert f"this node's data are --features {features[0]} --classes {outputs}; " in text
    assert f"the roster was written for --features {features[0] + more}" in text
    assert (f" --classes {outputs + classes};" in text.split("written for")[1]) == bool(classes)


def test_the_organizer_is_at_fault_when_the_others_have_this_nodes_model(asking):
    node, head = asking
    roster_for(node, node.federation.features[0] + 1, node.federation.outputs)
    text, good = doctor.compare_models(node, {"n1": head, "n2": head})
    assert not good
    assert "2 of 2 members that answer have this node's: the roster is wrong" in text
    assert "organizer writes it again with --features" in text
    assert doctor.describe_head(node, head, 0.0, None)[1], "those members are not"
    with pytest.raises(PeerMismatch, match="1 of 1 members that answered have this node's"):
        check_study(node.roster, node.settings, node.schema, {"n1": head})


def test_this_node_is_at_fault_when_the_others_have_the_rosters_model(asking):
    node, head = asking
    roster_for(node, node.federation.features[0] + 1, node.federation.outputs)
    other = replace(head, schema=node.roster.schema)
    text, good = doctor.compare_models(node, {"n1": other, "n2": other})
    assert not good
    assert "2 of 2 members that answer have the roster's: this node's data have other" in text
    assert doctor.describe_head(node, other, 0.0, None)[1], "the others are as agreed"
    with pytest.raises(PeerMismatch, match="the data have other features or classes than the"):
        check_study(node.roster, node.settings, node.schema, {"n1": other})


def test_another_member_is_at_fault_when_its_model_is_not_the_rosters(asking):
    node, head = asking
    roster_for(node, node.federation.features[0], node.federation.outputs)
    odd = replace(head, schema="0" * 64, settings={**head.settings, "table.inputs": "age, sex"})
    assert doctor.compare_models(node, {"n1": odd}) == ("", True)
    text, good = doctor.describe_head(node, odd, 0.0, None)
    assert not good
    assert "table.inputs is 'age, sex' there" in text


def test_when_nobody_else_answers_both_are_possible(asking):
    node, _ = asking
    roster_for(node, node.federation.features[0] + 1, node.federation.outputs)
    text, good = doctor.compare_models(node, {})
    assert not good
    assert "compare the columns with another member" in text


def test_a_wrong_number_of_columns_is_found_by_the_whole_examination(tmp_path, port, monkeypatch):
    """The organizer wrote the roster for 3 channels; the node has images of one."""
    monkeypatch.setattr(doctor, "_LOOK", 0.1)
    file = laid_out(tmp_path, port)
    loaded = nodefile.load(file)
    keys = tmp_path / "keys"
    old = rosters.load(keys / "roster.toml", keys / "organizer.pub")
    plan = nodefile.make_run_spec(loaded.select_run()[0])
    made = replace(old, schema=plan.compute_schema((3, 8, 8), 10))
    rosters.write_signed(keys / "roster.toml", made, keys / "organizer.key")
    (found,) = [text for text in wrong(file) if text.startswith("model: ")]
    assert "this node's data are --features 1,8,8 --classes 10" in found
    assert "the roster was written for --features 3,8,8" in found


# ---------------------------------------------------------------- silence


def test_why_a_member_does_not_answer_is_told_apart(port, monkeypatch):
    """A refusal, a silence, a name that nobody knows, and something else that listens."""
    near, far = (Member("n", at, ()) for at in (f"127.0.0.1:{port}", "north.example.org:7447"))
    assert doctor.explain_silence(near).startswith("nothing listens there")
    assert doctor.check_relay(near)[0].startswith(f"relay n at 127.0.0.1:{port}: nothing listens")
    assert "no stream" in doctor.explain_silence(Member("n", "outbound", ()))
    with socket.create_server(("127.0.0.1", port)):
        assert "does not answer as this member" in doctor.explain_silence(near)
        assert doctor.check_relay(near)[1]
    errors = {
        TimeoutError("timed out"): "a firewall drops packets",
        socket.gaierror(-2, "Name or service not known"): "is not known here: DNS",
        OSError(113, "No route to host"): "no connection: No route to host",
    }
    for error, said in errors.items():

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
        assert said in doctor.explain_silence(far)


# ---------------------------------------------------------------- how far it looks for a shape


@pytest.fixture
def shapes(monkeypatch):
    """The search, and the shapes that it has tried, of a model that has no form of 13 columns or 7 outputs."""
    spec, tried = RunSpec(Random(), tiny_settings(), "linear", "linear"), []

    def compute(self, features, outputs):
        tried.append((features, outputs))
        if outputs == 7 or features[0] == 13:  # no such form
            raise ValueError
        return f"{features} {outputs}"

    monkeypatch.setattr(RunSpec, "compute_schema", compute)
    return partial(doctor.find_shapes, spec), tried


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("(10, 3) 1", ((10, 3), 1)),
        ("(10, 3) 64", ((10, 3), 64)),
        ("(10, 3) 65", None),
        ("(1, 3) 2", ((1, 3), 2)),
        ("(0, 3) 2", None),
        ("(1024, 3) 2", ((1024, 3), 2)),
        ("(1025, 3) 2", None),
        ("(12, 3) 3", None),  # both are others
    ],
)
def test_near_shapes_are_up_to_1024_columns_or_64_outputs(shapes, schema, expected):
    find, _ = shapes
    assert find((10, 3), 2, schema) == expected


def test_outputs_are_tried_first_and_then_the_nearest_columns(shapes):
    find, tried = shapes
    assert find((3,), 2, "none") is None
    assert tried[:64] == [((3,), n) for n in range(1, 65)]
    assert [features[0] for features, _ in tried[64:70]] == [3, 2, 4, 1, 5, 6]
    assert len(tried) == 64 + 1024


def test_the_search_ends_after_ten_seconds(shapes, monkeypatch):
    find, tried = shapes
    times = iter([100.0, 110.0, 110.0, 110.1])
    monkeypatch.setattr(doctor.time, "monotonic", lambda: next(times))
    assert find((3,), 2, "none") is None
    assert len(tried) == 2, "as long as ten seconds are not over"


@pytest.mark.parametrize(
    ("seconds", "rate"), [((4.0, 2.0), 500.0), ((4.0, 0.0), None), ((4.0, None), None)]
)
def test_a_rate_is_that_of_the_second_megabyte(seconds, rate):
    """The first one warms the link; of one that does not come, or takes no time, there is none."""
    manifest, took, asked = object.__new__(Manifest), iter(seconds), []
    post = object.__new__(Post)

    def measure(peer, wait):
        asked.append((peer, wait))
        time_ = next(took)
        return Missing("timeout") if time_ is None else Delivery(manifest, {}, 1000, time_)

    post.measure_link = measure
    assert doctor.measure_rate(post, "n1") == rate
    assert asked == [("n1", 10.0)] * 2
