"""Contract test of transports."""

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.wire import CHUNK, Address

if TYPE_CHECKING:  # they need the extra `net`
    from coterie.net.post import Post
    from coterie.net.roster import Roster
    from coterie.net.transport import Transport

MakeTransports = Callable[["Roster", Any], tuple["Roster", Any, Sequence["Transport"]]]
"""Makes connected transports of a roster's members from it and their keys.

It may return the roster with other keys, such as those of certificates.
"""
# More than two chunks, so that their order and their end matter.
_NUMBERS = 3 * CHUNK // 4
_WAIT = 20.0  # seconds for links to come up


def check_transport(make: MakeTransports, *, port: int = 21000) -> None:
    """Check that a transport keeps the contract of `Transport`.

    Args:
        make: makes the transports of three members. The caller closes them.
        port: of the first member; the two after it are used too.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    from coterie.net.local import make_members, make_signer
    from coterie.net.post import Post, Terms

    roster, keys = make_members([[0], [1], [2]], port=port)
    roster, keys, transports = make(roster, keys)
    posts, terms = [], Terms(deadline=_WAIT)
    for transport, key in zip(transports, keys, strict=True):
        posts.append(Post(transport, roster, make_signer(key), terms=terms))
    try:
        _check(roster, transports, posts)
    finally:
        for post in posts:
            post.close()


def _check(roster: "Roster", transports: Sequence["Transport"], posts: Sequence["Post"]) -> None:
    from coterie.net.transport import Delivery

    a, b, c = transports
    names = [member.name for member in roster.members]
    assert [t.name for t in transports] == names, "a transport has its member's name"
    template = Template({"params": (torch.float32, (_NUMBERS,))})
    tensors = {"params": torch.arange(float(_NUMBERS))}

    assert isinstance(b.ask_head(a.name, "1", 1.0), Missing), "a head that is not there yet"
    for transport in transports:
        # A default binds the name of this turn; the roster is longer than a chunk.
        transport.serve_head(lambda nonce, name=transport.name: f"{name} {nonce}".encode())
        transport.serve_roster(lambda: bytes(3 * CHUNK))
    for asker in transports:
        for peer in (name for name in names if name != asker.name):
            answer = f"{peer} ab1".encode()
            _await(
                lambda ask=asker.ask_head, peer=peer, answer=answer: (
                    ask(peer, "ab1", 2.0) == answer
                ),
                f"{peer} answers {asker.name}'s question with its nonce",
            )
    assert b.ask_roster(a.name, 5.0) == bytes(3 * CHUNK), "a roster arrives whole"
    assert not a.alive_members(), "who has published nothing does not take part"

    posts[0].publish(tensors, Address(0, 0, 0))
    for number in (1, 2):
        found = posts[number].fetch(a.name, Address(0, 0, 0), template, _WAIT)
        assert isinstance(found, Delivery), f"a message arrives: {found}"
        assert torch.equal(found.tensors["params"], tensors["params"]), "as it was sent"
    for transport in (b, c):
        _await(lambda t=transport: a.name in t.alive_members(), "who publishes takes part")

    with ThreadPoolExecutor(1) as pool:
        # Published only after a while, so that the question is there before its answer.
        waiting = pool.submit(posts[1].fetch, a.name, Address(1, 0, 0), template, _WAIT)
        threading.Event().wait(0.3)
        assert not waiting.done(), "a question about a coming round is held"
        posts[0].publish(tensors, Address(1, 0, 0))
        assert isinstance(waiting.result(), Delivery), "and answered when the message is there"
    began = time.monotonic()
    found = posts[1].fetch(a.name, Address(5, 0, 0), template, 1.0)
    assert isinstance(found, Missing), "what is never published never arrives"
    # A peer holds a question for a share of the patience (`WAIT`), here half a second.
    assert found.reason == "not_ready", "its reason arrives before the asker gives up"
    assert 0.5 < time.monotonic() - began < 5, "when the time is over"
    # Round 0 is over since round 1 was published; a reply is for the one that it was published to.
    for address, reason in ((Address(0, 3, 0), "gone"), (Address(1, 0, 0, "reply"), "forbidden")):
        if reason == "forbidden":
            posts[0].publish(tensors, address, to=c.name)
        found = posts[1].fetch(a.name, address, template, 2.0)
        assert isinstance(found, Missing), f"{address} is not for {b.name}"
        assert found.reason == reason, f"{found.reason} is not {reason}"
    assert isinstance(
        posts[2].fetch(a.name, Address(1, 0, 0, "reply"), template, _WAIT), Delivery
    ), "what is for one reader reaches that one"
    a.publish(Address(2, 0, 0), Missing("withheld", 2))
    found = posts[1].fetch(a.name, Address(2, 0, 0), template, 2.0)
    assert isinstance(found, Missing), "what is withheld does not arrive"
    assert (found.reason, found.round) == ("withheld", 2), "its reason does, and the round"
    a.publish_standing(Address(2, 1, 0), lambda at: posts[0].seal(tensors, at))
    for round in (2, 7):
        found = posts[1].fetch(a.name, Address(round, 1, 0), template, _WAIT)
        assert isinstance(found, Delivery), "a standing message answers every later round"
        assert found.manifest.round == round, "signed for the round that was asked for"

    with ThreadPoolExecutor(1) as pool:
        # A patience far above the 15 seconds below: the end of `a` must be what answers.
        waiting = pool.submit(posts[1].fetch, a.name, Address(9, 0, 0), template, 60.0)
        threading.Event().wait(0.3)
        began = time.monotonic()
        a.close()
        found = waiting.result()
        assert isinstance(found, Missing), "who leaves answers open questions"
        assert time.monotonic() - began < 15, "at once"
    a.close()  # a second time is no error
    samples = b.prometheus_samples()
    for number, (name, _, labels, value) in enumerate(samples):
        assert re.fullmatch("coterie_[a-z_]+", name), f"{name} is a name of Prometheus"
        assert (name, labels) not in [(s[0], s[2]) for s in samples[:number]], f"{name} comes once"
        assert math.isfinite(value), f"{name} is a number"
    for transport in (b, c):
        _await(lambda t=transport: a.name not in t.alive_members(), "who left takes no part")
    found = posts[1].fetch(a.name, Address(1, 0, 0), template, 2.0)
    assert isinstance(found, Missing), "and answers nothing"
    with b as entered:
        assert entered is b, "a transport is its own context manager"
    assert isinstance(c.ask_head(b.name, "1", 2.0), Missing), "which closes it"


def _await(condition: Callable[[], bool], what: str) -> None:
    """Wait until something is the case, as it has to be soon."""
    until, pause = time.monotonic() + _WAIT, threading.Event()
    while not condition():
        assert time.monotonic() < until, what
        pause.wait(0.05)
