"""Whole networks on one machine, for tests and demonstrations."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from coterie.net import identity, roster
from coterie.net.exchange import RemoteExchange
from coterie.net.post import Post, Terms
from coterie.net.roster import Member, Roster
from coterie.net.transport import Hub, InProcess

Keys = tuple[ec.EllipticCurvePrivateKey, ...]


def make_members(
    groups: Sequence[Sequence[int]],
    *,
    server: str = "",
    port: int = 21000,
    schema: str = "",
    outbound: Collection[int] = (),
    relays: int = 0,
) -> tuple[Roster, Keys]:
    """Make a roster of nodes n0, n1, ... on loopback and their keys, in memory.

    Args:
        groups: ids of the clients that each node hosts.
        server: the node in the server role.
        port: of the first node; the others follow.
        schema: the model schema's hash.
        outbound: numbers of nodes that only dial out.
        relays: number of relays r0, r1, ..., whose ports follow those of the nodes.
    """
    # Never on disk: they end with the program.
    keys = tuple(ec.generate_private_key(ec.SECP256R1()) for _ in groups)
    nodes = list[Member]()
    for i, group in enumerate(groups):
        address = identity.OUTBOUND if i in outbound else f"127.0.0.1:{port + i}"
        key = identity.encode_public_key(keys[i].public_key())
        nodes.append(Member(f"n{i}", address, tuple(group), key))
    more = tuple(Member(f"r{i}", f"127.0.0.1:{port + len(nodes) + i}", ()) for i in range(relays))
    made = Roster(
        "local", tuple(nodes), sum(map(len, groups)), server=server, schema=schema, relays=more
    )
    return made, keys


def make_signer(key: ec.EllipticCurvePrivateKey) -> Callable[[bytes], bytes]:
    """Return a function that signs bytes with a key."""
    return lambda data: identity.sign(key, data)


def connect_in_process(
    groups: Sequence[Sequence[int]], *, server: str = "n0", terms: Terms | None = None, **options
) -> tuple[Hub, list[RemoteExchange]]:
    """Connect exchanges, one for each group of clients, inside this program.

    Args:
        groups: ids of the clients that each node hosts.
        server: the node in the server role.
        terms: deadlines and options.
        options: more for every `Post`.
    """
    hub = Hub()
    who, keys = make_members(groups, server=server)
    exchanges = []
    for member, key in zip(who.members, keys, strict=True):
        # A node each, with a key of its own: messages are signed and checked as between machines.
        transport = InProcess(hub, member.name)
        post = Post(transport, who, make_signer(key), terms=terms, **options)
        exchanges.append(RemoteExchange(post))
    return hub, exchanges


def create_credentials(
    folder: Path, who: Roster, *, days: float = 1.0, study: str = "", schema: str = ""
) -> tuple[Roster, list[identity.Identity]]:
    """Create the files of an organizer and all members in one folder, up to the signed roster.

    On real machines every member makes its own key (`coterie net join`); here one folder holds them
    all.

    Args:
        folder: where; it must not hold keys yet.
        who: names, addresses and clients of the members, and the relays.
        days: how long the certificates are valid.
        study: the study's hash.
        schema: the model schema's hash.

    Returns:
        The signed roster, and the identities of the members, and after them of the relays.
    """
    identity.make_authority(folder, who.run, days=days)
    made, people = [], []
    for member in who.everyone:
        request = identity.make_request(folder, member.name, member.address)
        certificate = identity.sign_request(folder, request, member.name, member.address, days=days)
        made.append(roster.add_certificate(member, certificate))
        people.append(
            identity.Identity.load(
                folder / f"{member.name}.key",
                folder / "members" / f"{member.name}.pem",
                folder / "ca.pem",
            )
        )
    # `everyone` has the members first, and the relays behind them.
    number = len(who.members)
    signed = replace(
        who, members=tuple(made[:number]), relays=tuple(made[number:]), study=study, schema=schema
    )
    roster.write_signed(folder / "roster.toml", signed, folder / "organizer.key")
    return signed, people
