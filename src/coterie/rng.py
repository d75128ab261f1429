"""Random streams keyed by (seed, round, client, purpose).

A client's draws never depend on which other clients are hosted, on block sizes, on the order of
work or on evaluation: every draw comes from the Philox stream of its key, not from a position in a
shared stream.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import RLock

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

EVERYONE = -1
"""The client id of streams shared by all clients."""

# The generators are global: one thread at a time may have them seeded.
_TORCH_LOCK = RLock()


@lru_cache(maxsize=256)
def _hash_purpose(purpose: str) -> int:
    # Python's own hash of a text differs between processes.
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Rng:
    """The random streams of one run.

    Args:
        seed: the run's seed, 0 or larger.
        round: the current round; -1 for the warm-up and everything before it.

    Example:
        >>> a = Rng(seed=1).at_round(3).generator("peers", client=7).random()
        >>> b = Rng(seed=1).at_round(3).generator("peers", client=7).random()
        >>> a == b
        True
    """

    seed: int
    round: int = -1

    def at_round(self, round: int) -> "Rng":
        """Return the streams of another round."""
        return replace(self, round=round)

    def generator(self, purpose: str, client: int = EVERYONE) -> np.random.Generator:
        """Return the stream of a purpose and a client in this round, from its start."""
        counter, key = self._compute_start(purpose, *self._locate(purpose, client))
        return np.random.Generator(np.random.Philox(counter=counter, key=key))

    def iterate_generators(self, purpose: str, ids: Iterable[int]) -> Iterator[np.random.Generator]:
        """Give the stream of each client in turn, each valid until the next: they are one object.

        A new generator costs five times as much as a new start, since numpy asks the system for
        random bytes before it takes the key.
        """
        philox = np.random.Philox(key=0)
        stream, state = np.random.Generator(philox), philox.state
        for client in ids:
            start = self._compute_start(purpose, *self._locate(purpose, client))
            state["state"]["counter"], state["state"]["key"] = start
            # `state` is as of a new generator but for these two: nothing is buffered.
            philox.state = state
            yield stream

    def _locate(self, purpose: str, client: int) -> tuple[int, int]:
        """Return the client and the round of a stream."""
        return client, self.round

    def _compute_start(
        self, purpose: str, client: int, round: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the counter and the key with which a stream starts."""
        # The stream counts in the two low words and its address is in the two high ones, so streams
        # of one key never overlap. EVERYONE and the warm-up are -1: 1 is added because words are
        # unsigned.
        counter = np.array([0, 0, client + 1, round + 1], dtype=np.uint64)
        return counter, np.array([self.seed, _hash_purpose(purpose)], dtype=np.uint64)

    def gumbel(
        self, purpose: str, ids: Int[Tensor, " clients"], population: int
    ) -> Float[Tensor, "clients population"]:
        """Return a standard Gumbel draw, in float64, for each pair of a client and a member.

        Draws lie between -3.61 and 36.74; one in 2^53 is infinite.
        """
        out = self.pairs(purpose, ids, population).numpy()
        with np.errstate(divide="ignore"):  # a uniform draw of 0, one in 2^53, becomes infinity
            # -log(-log(1 - u)), step by step in place: no second array of clients x population
            # exists.
            for step in (partial(np.subtract, 1.0), np.log, np.negative, np.log, np.negative):
                step(out, out=out)
        return torch.from_numpy(out)

    def pairs(
        self, purpose: str, ids: Int[Tensor, " clients"], population: int
    ) -> Float[Tensor, "clients population"]:
        r"""Return the uniform draws $u$ in [0, 1) from which `gumbel` computes its own.

        The map $-\log(-\log(1 - u))$ is decreasing: the smallest $u$ is the largest Gumbel draw,
        without the cost of logarithms.
        """
        return self.uniform(purpose, ids, population)

    def uniform(
        self, purpose: str, ids: Int[Tensor, " clients"], size: int
    ) -> Float[Tensor, "clients size"]:
        """Return `size` draws from [0, 1) for each hosted client, in float64."""
        out = np.empty((len(ids), size))
        for row, stream in enumerate(self.iterate_generators(purpose, ids.tolist())):
            stream.random(out=out[row])
        return torch.from_numpy(out)

    def draw_keys(self, purpose: str, ids: Int[Tensor, " clients"]) -> Int[Tensor, " clients"]:
        """Return a 62-bit key for each hosted client, for a counter-based stream on a device."""
        # 62 bits are positive in int64.
        streams = self.iterate_generators(purpose, ids.tolist())
        draws = [int(stream.integers(1 << 62)) for stream in streams]
        return torch.tensor(draws, dtype=torch.int64)

    @contextmanager
    def temporary_torch_seed(
        self, purpose: str, client: int = EVERYONE, device: str = "cpu"
    ) -> Iterator[None]:
        """Seed PyTorch's global generators for the block, and restore their states afterwards.

        For foreign code, which draws from the global generators.

        Args:
            purpose: names the stream.
            client: the client whose stream it is.
            device: the device whose generator is seeded in addition to the CPU's.
        """
        key = int(self.generator(purpose, client).integers(1 << 62))
        # A device without an index is the first one.
        cuda = [] if device == "cpu" else [torch.device(device).index or 0]
        with _TORCH_LOCK, torch.random.fork_rng(devices=cuda, device_type="cuda"):
            # `torch.manual_seed` would also seed every CUDA device, and only the states of `cuda`
            # are restored.
            torch.default_generator.manual_seed(key)
            for index in cuda:
                with torch.cuda.device(index):
                    torch.cuda.manual_seed(key)
            yield


class RoundsDiffer(Exception):
    """Something needs the number of the round, and clients that act together are in several."""


@dataclass(frozen=True)
class RngByClient(Rng):
    """The random streams of clients that are each in a round of its own.

    What a client draws is what it draws alone. A stream shared by all clients, or the number of the
    round, raises `RoundsDiffer`.

    Args:
        seed: the run's seed.
        round: not used.
        rounds: the round of each client, by its id.
    """

    rounds: Mapping[int, int] = field(default_factory=dict)

    def at_round(self, round: int) -> Rng:
        """Return the streams of a round that is the same for all."""
        return Rng(self.seed, round)

    def _locate(self, purpose: str, client: int) -> tuple[int, int]:
        if client not in self.rounds:
            raise RoundsDiffer(f"the stream {purpose!r} is shared by clients in several rounds")
        return client, self.rounds[client]


def _refuse_round(rng: Rng) -> int:
    raise RoundsDiffer("these clients are in several rounds")


# A property in place of the inherited field: asking for the number of the round is an error. It is
# set after the class was made, so that the field stays an argument; setting it does nothing.
RngByClient.round = property(_refuse_round, lambda rng, value: None)  # type: ignore[assignment]
