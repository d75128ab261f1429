"""The engine's configuration: what the access list lets in and out, and for whom."""

from fnmatch import fnmatchcase

import pytest

from coterie.net.zenoh_transport import access

NAMES = {name: f"cn-of-{name}" for name in ("n0", "n1", "n2")}
BASE = "coterie/1/r"


def allowed(peer: str, flow: str, message: str, key: str) -> bool:
    """Whether n0's list lets a message pass on the link of a peer; the keys here have no wildcards but * and **."""
    rules = access("n0", NAMES, "r")
    subjects = {s["id"] for s in rules["subjects"] if NAMES[peer] in s["cert_common_names"]}
    granted = {rule for policy in rules["policies"] if subjects & set(policy["subjects"]) for rule in policy["rules"]}
    return any(
        rule["id"] in granted
        and flow in rule["flows"]
        and message in rule["messages"]
        and any(fnmatchcase(key, pattern) for pattern in rule["key_exprs"])
        for rule in rules["rules"]
    )


@pytest.mark.parametrize("peer", ["n1", "n2"])
@pytest.mark.parametrize("kind", ["head", "model", "roster"])
def test_a_question_goes_out_to_the_member_alone_that_it_is_for(peer, kind):
    """Peers whose announcements have not come yet would get it too, and turn the asker away: 1,628 times in one run."""
    assert [name for name in ("n1", "n2") if allowed(name, "egress", "query", f"{BASE}/{peer}/{kind}/n0")] == [peer]


def test_a_member_asks_answers_and_announces_under_its_own_name_only():
    for message, key, fine in (
        ("query", f"{BASE}/n0/model/n1", True),
        ("query", f"{BASE}/n0/model/n2", False),
        ("query", f"{BASE}/n2/model/n1", False),
        ("reply", f"{BASE}/n1/model/n0", True),
        ("reply", f"{BASE}/n2/model/n0", False),
        ("declare_queryable", f"{BASE}/n1/head", True),
        ("declare_queryable", f"{BASE}/n2/head", False),
        ("liveliness_token", f"{BASE}/n1/alive", True),
        ("liveliness_token", f"{BASE}/n2/alive", False),
        ("put", f"{BASE}/n1/head", False),
    ):
        assert allowed("n1", "ingress", message, key) is fine, (message, key)
