"""Latecomers: members with a study's new clients, who join when the others' run has ended.

The rule is that of `runtime.newcomers`, and so are the results. The members that take part run as
if there were no others. At the end each of them answers newcomers with the message of its method
that it would publish in every round from now on; with a server, the server answers with the models
that serve clients now. A newcomer finds its peers among the members that answer, or its model among
the server's, trains its rounds, is tested, and changes nobody.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.mappings import number_items
from coterie.data.federation import Federation
from coterie.engine.task import Task
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.exchange.narrowed import narrow_message
from coterie.methods.base import Method, PeerMethod, Round
from coterie.methods.server import ServerContext, ServerMethod
from coterie.net.exchange import MAX_REPLY, RemoteExchange, cut_row
from coterie.net.payload import Refused, Template
from coterie.net.post import Post
from coterie.net.roster import Roster
from coterie.net.wire import Address
from coterie.runtime.loop import Loop
from coterie.runtime.newcomers import JoinContext, choose_newcomers, join_states
from coterie.runtime.settings import Settings

KIND = "join"
"""The kind of the messages that answer newcomers."""


@dataclass(frozen=True)
class Participants:
    """Who of a roster takes part in the run, and who joins when it has ended.

    Args:
        ids: the id on the roster of each client: first of the members in the run, then of the
            newcomers.
        run_roster: the members in the run as a roster of their own, numbered from 0.
        full_roster: all members, numbered in the order of `ids`.
        method: of the run.
    """

    ids: Int[Tensor, " clients"]
    run_roster: Roster
    full_roster: Roster
    method: Method

    @property
    def late_members(self) -> list[str]:
        """The members that join late."""
        here = {member.name for member in self.run_roster.members}
        return [member.name for member in self.full_roster.members if member.name not in here]

    def with_roster(self, roster: Roster) -> "Participants":
        """Return the same participants under a newer roster of the run."""
        return _make_participants(roster, self.method, self.ids, self.run_roster.population)

    def answers_newcomers(self, name: str) -> bool:
        """Return whether a member answers newcomers when the run has ended."""
        return (
            name == self.run_roster.server if self.method.server else name not in self.late_members
        )

    def roster_for(self, name: str) -> Roster:
        """Return the roster as a member sees it: newcomers know all, the others each other."""
        return self.full_roster if name in self.late_members else self.run_roster

    def renumber_rows(self, federation: Federation, name: str) -> Federation:
        """Return a member's rows with the numbers of that roster."""
        # The inverse of a permutation: from an id on the roster to its number in the run.
        place = torch.argsort(self.ids)
        return replace(
            federation, ids=place[federation.ids], population=self.roster_for(name).population
        )


def find_participants(
    roster: Roster, method: Method, settings: Settings, seed: int
) -> Participants | None:
    """Find who joins late; None where the study holds no client out.

    Args:
        roster: of all members; clients that a study names are its members.
        method: of the run.
        settings: of the run.
        seed: of the run, by which a share of the clients is drawn as in a simulation.

    Raises:
        ConfigError: when that cannot be between machines, in one line.
    """
    if settings.new_clients is None:
        return None
    if settings.new_client_others == "training":
        raise ConfigError(
            "new_client_others is 'training'; between machines new clients join when the run of "
            "the others has ended: "
            "leave it out"
        )
    if not isinstance(method, PeerMethod | ServerMethod):
        raise ConfigError(
            f"new_clients: nobody joins {method.kind} late, which is neither a PeerMethod nor a "
            "ServerMethod"
        )
    # Finished members run no rounds: they can answer with one message that does not change.
    if not method.server and (method.exchanges > 1 or type(method).enroll is not Method.enroll):
        raise ConfigError(
            f"new_clients: in a round of {method.kind} with these settings members answer each "
            "other, which members that "
            "have finished do not; between machines new clients join methods with one exchange a "
            "round, or a server"
        )
    population, known = roster.population, roster.client_names
    # A client has its member's name where it is its only one; a study may name it so.
    names = [known.get(client, "") for client in range(population)] if known else []
    new = set(choose_newcomers(settings.new_clients, population, names, seed).tolist())
    # Members of the run come first, so that their run is that of a smaller federation.
    order = [c for c in range(population) if c not in new] + sorted(new)
    for member in roster.members:
        if new & set(member.clients) and not set(member.clients) <= new:
            raise ConfigError(
                f"new_clients: some of the clients of {member.name} are new and some are not; a "
                "member's join together"
            )
    if len(order) - len(new) < 2:
        raise ConfigError(
            f"new_clients is {settings.new_clients!r}: of {population} clients "
            f"{population - len(new)} would take "
            "part; expected two or more"
        )
    if roster.server and set(roster.member(roster.server).clients) & new:
        raise ConfigError(f"new_clients: {roster.server} has the server role and cannot join late")
    return _make_participants(roster, method, torch.tensor(order), population - len(new))


def _make_participants(
    roster: Roster, method: Method, ids: Int[Tensor, " clients"], taking: int
) -> Participants:
    """The sides of a roster, of whose clients, in the order of `ids`, the first take part."""
    place = number_items(ids.tolist())
    numbered, here = [], []
    for member in roster.members:
        moved = replace(member, clients=tuple(place[c] for c in member.clients))
        numbered.append(moved)
        # Clients of one member join together, so all of them are in the run or none is.
        if max(moved.clients, default=-1) < taking:
            here.append(moved)
    removed = tuple(sorted(place[c] for c in roster.removed))
    # The run's own roster names none of the newcomers, so none that was removed.
    gone = tuple(c for c in removed if c < taking)
    return Participants(
        ids,
        replace(roster, members=tuple(here), population=taking, clusters=(), removed=gone),
        replace(roster, members=tuple(numbered), clusters=(), removed=removed),
        method,
    )


# ---------------------------------------------------------------- members of the run


def answer_newcomers(post: Post, loop: Loop, wide: Callable[[], Task]) -> bool:
    """Answer newcomers from now on, with the outcome of the run.

    Args:
        post: of a node that has done its last round.
        loop: its run.
        wide: returns the task of its clients in the whole population.

    Returns:
        Whether there is anything to answer: a model that diverged is not sent.
    """
    method, last = loop.method, loop.next_round - 1
    if isinstance(method, ServerMethod):
        task = loop.task
        context = ServerContext(
            last, loop.rng.at_round(last), task.layout, task.population, None, task.sharing
        )
        table = method.newcomer_candidates(context, loop.state.shared)
        # Client -1 stands for the server role.
        answers = {
            -1: {
                "table": table
                if task.sharing.shares_all
                else task.sharing.shared.select_from(table)
            }
        }
    else:
        assert isinstance(method, PeerMethod)
        task = wide()
        # Newcomers get what is shared alone, as peers do in a round.
        message = narrow_message(task.sharing, method.publish(task, join_states(loop, task)))
        answers = {client: cut_row(message, row) for row, client in enumerate(task.ids.tolist())}
    for client, tensors in answers.items():
        # Newcomers ask from round -1 on, and always get this message.
        at = Address(-1, 0, client, KIND)
        try:
            # Sealed once as a test: a model that is not finite must not be offered.
            post.seal(tensors, at)
        except Refused:
            return False
        post.publish_standing(tensors, at)
    return True


# ---------------------------------------------------------------- newcomers


class LateExchange(RemoteExchange):
    """The exchange of a newcomer: it reads what finished members answer, and nobody reads it."""

    def _address_of(self, number: int, client: int) -> Address:
        return Address(self._rng.round, number, client, KIND)

    def _publish_rows(self, message: Message, number: int) -> None:
        pass

    def fetch_models(self, like: Tensor) -> Float[Tensor, "models shared"]:
        """Fetch the models that serve clients now from the server: what is shared of them.

        Args:
            like: has the type and the device that they get.

        Raises:
            RoundMissed: when the server says that it has none.
            TransportError: when the server does not answer, or with something else.
        """
        shapes = {"table": (like.dtype, ("models", "params" if self.width is None else self.width))}
        template = Template(shapes, halved=frozenset({"table"}), max_bytes=MAX_REPLY)

        def check_models(tensors: Mapping[str, Tensor]) -> None:
            if not len(tensors["table"]):
                raise Refused("shape", "the server answers with no model; expected one or more")

        return (
            self.post.fetch_from_server(Address(-1, 0, -1, KIND), template, check_models)
            .tensors["table"]
            .to(like.device)
        )


class NodeJoining(JoinContext):
    """A run that the newcomers of a node join: members that are away cannot be chosen."""

    def make_round(self, index: int, task: Task, params: Float[Tensor, "clients params"]) -> Round:
        """See `JoinContext.make_round`."""
        rnd = super().make_round(index, task, params)
        assert isinstance(self.exchange, RemoteExchange)
        return replace(rnd, reachable=rnd.reachable & self.exchange.reachable_clients())


def make_joining(loop: Loop, here: Participants) -> NodeJoining:
    """Return the run that the clients of a node join.

    Args:
        loop: of the node, with its newcomers alone, before its first round.
        here: who takes part and who is late.
    """
    # Newcomers have the last numbers; they read members of the run only.
    reachable: Bool[Tensor, " population"] = (
        torch.arange(here.full_roster.population) < here.run_roster.population
    )
    rows = torch.arange(len(loop.task))
    return NodeJoining(
        loop.method, loop.settings, loop.order, loop.rng, loop.task, rows, loop.exchange, reachable
    )
