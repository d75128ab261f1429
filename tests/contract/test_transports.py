"""Every transport keeps the same contract: in one process and over the network."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from tests.selection import full

from coterie.net import identity, local
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.outbox import Missing
from coterie.net.relay import Relay
from coterie.net.roster import Member
from coterie.net.transport import Hub, InProcess
from coterie.testing import check_transport


def test_the_transport_inside_a_program_keeps_the_contract():
    hub = Hub()
    check_transport(
        lambda roster, keys: (roster, keys, [InProcess(hub, m.name) for m in roster.members])
    )


@pytest.mark.e2e
@pytest.mark.parametrize("insecure", [False, True], ids=["mutual-tls", "plain"])
def test_the_transport_over_grpc_keeps_the_contract(insecure, tmp_path, port):
    with ExitStack() as stack:

        def make(roster, keys):
            roster, people = local.create_credentials(tmp_path, roster)
            transports = [
                stack.enter_context(GrpcTransport(roster, own.name, None if insecure else own))
                for own in people
            ]
            return roster, tuple(own.key for own in people), transports

        check_transport(make, port=port)


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("outbound", [full("all"), "one"])
def test_members_that_only_dial_out_keep_the_contract(outbound, tmp_path, port):
    """All of them behind one relay; or one, which the others reach by its own streams alone."""
    with ExitStack() as stack:

        def make(roster, keys):
            some = len(roster.members) if outbound == "all" else 1
            hidden = tuple(replace(m, address=identity.OUTBOUND) for m in roster.members[:some])
            relays = (Member("relay", f"127.0.0.1:{port + 50}", ()),) if outbound == "all" else ()
            roster = replace(roster, members=(*hidden, *roster.members[some:]), relays=relays)
            roster, people = local.create_credentials(tmp_path, roster)
            for own in people[len(roster.members) :]:
                stack.enter_context(Relay(roster, own.name, own))
            people = people[: len(roster.members)]
            transports = [stack.enter_context(GrpcTransport(roster, p.name, p)) for p in people]
            if outbound == "one":  # it asks first: nobody can know of it before
                for other in roster.members[1:]:
                    transports[0].ask_roster(other.name, 5.0)
            return roster, tuple(own.key for own in people), transports

        check_transport(make, port=port)


class Late(InProcess):
    """Answers at once that a message is not ready, though it may still come."""

    def fetch(self, peer, expect, deadline, patience=None):
        return super().fetch(peer, expect, min(deadline, 0.01))


class Silent(InProcess):
    """Tells nobody who takes part."""

    def alive_members(self):
        return frozenset()


class Public(InProcess):
    """Gives everybody what is for one reader."""

    def publish(self, address, what, *, to=""):
        super().publish(address, what)


class Torn(InProcess):
    """Loses the end of a roster."""

    def ask_roster(self, peer, deadline):
        found = super().ask_roster(peer, deadline)
        return found if isinstance(found, Missing) else found[:-1]


class Open(InProcess):
    """Stays open when its block is left."""

    def __exit__(self, *error):
        pass


class Nameless(InProcess):
    """Has a number that Prometheus would refuse."""

    def prometheus_samples(self):
        return [("turned away", "questions", {}, 1.0)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Late, "a question about a coming round is held"),
        (Silent, "who publishes takes part"),
        (Public, "refused:reader is not forbidden"),
        (Torn, "a roster arrives whole"),
        (Open, "which closes it"),
        (Nameless, "is a name of Prometheus"),
    ],
)
def test_a_transport_that_breaks_the_contract_is_named(kind, said, monkeypatch):
    monkeypatch.setattr("coterie.testing.transports._WAIT", 1.0)
    hub = Hub()
    with pytest.raises(AssertionError, match=said):
        check_transport(
            lambda roster, keys: (roster, keys, [kind(hub, m.name) for m in roster.members])
        )
