"""Rehearsal: two or more members try the network before the run, each from its own machine.

Each opens its port and answers as the counterpart of the others, asks every other member, and says
what gets through in each direction. What comes in is seen at the port; why nothing goes out, by a
plain connection.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from coterie.net import doctor
from coterie.net.head import Head
from coterie.net.node import Node
from coterie.net.nodefile import NodeFile

_PAUSE = 1.0  # seconds between two looks
_STAY = 5.0  # seconds without a question after which nobody needs this node any more
_LEAVE = 30.0  # seconds for which it stays at most


@dataclass
class Directions:
    """What got through between this node and one member.

    Args:
        out: whether its answers to this node's questions came.
        came: whether its questions came here.
        head: its head, when it answered.
    """

    out: bool = False
    came: bool = False
    head: Head | None = None


@dataclass
class Rehearsal:
    """The state of a rehearsal.

    Args:
        node: this node, which answers and takes no part.
        say: called with each result: a sentence, and whether it is good.
        proxy: see `NetworkSettings.proxy`.
        found: by member.
    """

    node: Node
    say: doctor.Say
    proxy: str = ""
    found: dict[str, Directions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = {name: Directions() for name in self.node.other_members}

    @property
    def is_complete(self) -> bool:
        """Whether everything got through in both directions."""
        return all(one.out and one.came for one in self.found.values())

    def look(self) -> None:
        """Ask the members that have not answered yet, and say what is new."""
        askers = frozenset(self.node.transport.last_questions)
        for name in sorted(askers & self.found.keys()):
            if not self.found[name].came:
                self.found[name].came = True
                self.say(f"from {name}: its questions come in", True)
        silent = [name for name, one in self.found.items() if not one.out]
        if not silent:
            return
        # At once, since each member that is not there takes its whole deadline.
        with ThreadPoolExecutor(8, "coterie-rehearse") as pool:
            list(pool.map(self._try_member, silent))

    def _try_member(self, name: str) -> None:
        """Ask one member how it is, and for a megabyte."""
        node, before = self.node, time.time()
        head = node.ask_heads([name]).get(name)
        if head is None:
            return
        # The other clock was read between the question and the answer: the middle is the best
        # guess.
        skew = head.time - (before + time.time()) / 2
        # A small answer can pass where a large one does not.
        rate = doctor.measure_rate(node.post, name)
        one = self.found[name]
        one.head, to = head, f"to {node.roster.member(name)}"
        if rate is None:
            if not one.out:
                self.say(f"{to}: it answers, but a megabyte does not come", False)
            return
        one.out = True
        text, good = doctor.describe_head(node, head, skew, rate)
        self.say(f"{to}: {text}", good)

    def conclude(self) -> bool:
        """Say what did not get through, and why; return whether all did."""
        own = self.node.roster.member(self.node.transport.name)
        where = "by a stream or a relay" if own.is_outbound else f"at port {own.host_and_port[1]}"
        for name, one in sorted(self.found.items()):
            member = self.node.roster.member(name)
            if not one.out and one.head is None:
                self.say(f"to {member}: {doctor.explain_silence(member, self.proxy)}", False)
            if not one.came:
                self.say(
                    f"from {name}: nothing came in {where}; what its rehearsal says of this "
                    "member is the reason: where packets are dropped, open the port to it",
                    False,
                )
        heads = {}
        for name, one in self.found.items():
            if one.head is not None:
                heads[name] = one.head
        text, good = doctor.compare_models(self.node, heads)
        if text:
            self.say(text, good)
        return self.is_complete


def rehearse(file: NodeFile, say: doctor.Say, *, seconds: float, insecure: bool = False) -> bool:
    """Open this node's port, and try the links to and from all members.

    Args:
        file: node.toml.
        say: called with each result: a sentence, and whether it is good.
        seconds: how long to wait for the others, who begin when they like.
        insecure: without TLS, on loopback only.

    Returns:
        Whether everything is in order, and got through in both directions.
    """
    report = doctor.CheckReport(say)
    loaded = doctor.check_files(file, report)
    if loaded is None or not doctor.check_port(loaded, report):
        return False
    with doctor.open_visitor(loaded, insecure=insecure) as node:
        node.answer_visitors()
        transport, until = node.transport, time.monotonic() + seconds
        own = loaded.roster.member(loaded.own.name)
        at = "relays" if own.is_outbound else file.listen or own.address
        names = ", ".join(node.other_members[:10])
        report(f"listening at {at} for {seconds:.0f} s; the others rehearse now, too: {names}")
        tried = Rehearsal(node, report, file.network.proxy)
        while not tried.is_complete and time.monotonic() < until:
            tried.look()
            if not tried.is_complete:
                time.sleep(min(_PAUSE, max(0.0, until - time.monotonic())))
        complete = tried.conclude()
        # The others may not be done with this node.
        until = time.monotonic() + _LEAVE
        while complete and time.monotonic() < until:
            if time.monotonic() - max(transport.last_questions.values(), default=0.0) > _STAY:
                break
            time.sleep(0.2)  # fine enough for `_STAY`, which is seconds
    return report.fine and complete
