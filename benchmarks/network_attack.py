"""Twenty thousand damaged messages to and from a node with mutual TLS: does it crash, grow, or let others down?"""

import os
import random
import statistics
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hostile
import netlab
import outlaw
import torch

from coterie.exchange.base import Message
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import Post, Terms
from coterie.net.wire import Address, seal_parcel
from coterie.rng import Rng

ANSWERS, QUESTIONS, HEADS, MESSAGES = 12_000, 7_000, 1_000, 20_000
PORT = 28800


def fuzz(emit: netlab.Emit, folder: Path, *, scale: float = 1.0) -> None:
    """n0 and n1 are honest; n2 is a member that answers and asks nonsense."""
    netlab.provision(folder / "keys", 3, port=PORT)
    draw, memory = random.Random(0), list[float]()
    with ExitStack() as stack:
        posts, exchanges = [], []
        for number in range(2):
            who, name, own = netlab.credentials(folder / "keys", number)
            transport = stack.enter_context(GrpcTransport(who, name, own))
            posts.append(Post(transport, who, own.sign, terms=Terms(deadline=20.0, redraws=0)))
            stack.callback(posts[-1].close)
            exchanges.append(RemoteExchange(posts[-1]))
        who, _, own = netlab.credentials(folder / "keys", 2)
        first = posts[0]
        netlab.ready([post.transport for post in posts], ["n0", "n1"])
        tensors = {"params": torch.arange(4000.0), "field.samples": torch.tensor(12.0)}
        template = Template.of(tensors)
        address = Address(0, 0, 2)
        good = seal_parcel(
            tensors,
            run=who.run,
            peer="n2",
            inc=1,
            address=address,
            schema=who.schema,
            sign=own.sign,
            chunk=4096,
        )
        current = [[(attachment, bytes(chunk)) for attachment, chunk in good.iterate_chunks()]]

        def answer(method: str, body: Mapping[str, Any]) -> Iterable[bytes]:
            for attachment, chunk in current[-1]:
                yield outlaw.frame(attachment, chunk)

        stack.enter_context(outlaw.serve(own, who.members[2].address, answer))
        channel = stack.enter_context(outlaw.channel_to(own, who.members[0]))
        while isinstance(first.fetch("n2", address, template, 5.0), Missing):
            threading.Event().wait(0.1)
        first.traffic.missing.clear()
        rounds, sound = 0, 0

        def still_well() -> None:
            """An honest exchange in between, and the memory at this moment."""
            nonlocal rounds
            rounds += 1
            for exchange in exchanges:
                exchange.begin_round(Rng(0).at_round(rounds))
                exchange.set_active(exchange.ids)
            own_message = Message(torch.full((1, 4000), 1.0), {"samples": torch.ones(1)})
            exchanges[1].pull(own_message, torch.full((1, 0), -1))
            assert bool(exchanges[0].pull(own_message, torch.tensor([[1]])).mask.all()), (
                "an honest peer was let down"
            )
            memory.append(netlab.resident(os.getpid()) or 0.0)

        for number in range(int(scale * ANSWERS)):
            current[:] = [hostile.message(good, own.sign, draw)]
            found = first.fetch("n2", address, template, 5.0)
            sound += not isinstance(found, Missing)
            if number % 500 == 0:
                still_well()
        reasons, errors = dict(sorted(first.traffic.missing.items())), Counter()
        for number in range(int(scale * QUESTIONS)):
            method, body = hostile.question(who.run, draw)
            found = outlaw.call(channel, method, body, 2.0)
            errors["answered" if found.parts else found.code] += 1
            if number % 500 == 0:
                still_well()
        for _ in range(int(scale * HEADS)):
            current[:] = [hostile.message(good, own.sign, draw)[:1] or [(b"", b"x")]]
            data = first.transport.ask_head("n2", "abc", 5.0)
            assert isinstance(data, bytes | Missing)
        still_well()
        assert first.transport.outbox.current_load[1] <= 8  # type: ignore[attr-defined]
    warm = memory[len(memory) // 10 :]
    emit({
        "messages": int(scale * MESSAGES), "answers": int(scale * ANSWERS), "questions": int(scale * QUESTIONS),
        "heads": int(scale * HEADS), "refused": reasons, "read_all_the_same": sound,
        "questions_ended": dict(sorted(errors.items())), "honest_exchanges": rounds, "let_down": 0,
        "memory_mb": {"start": round(warm[0], 1), "end": round(memory[-1], 1)},
        "memory_growth_mb": round(statistics.mean(warm[-5:]) - statistics.mean(warm[:5]), 1),
    })  # fmt: skip
