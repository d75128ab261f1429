"""The samples of the clients hosted here, on the device of their models."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.data.federation import SPLITS, Federation, TestSet, compute_checksum
from coterie.data.rows import Inputs
from coterie.engine._work import RawSamples
from coterie.engine.noise import InputNoise
from coterie.functional.losses import Loss, cast_targets
from coterie.models.draws import splitmix
from coterie.rng import Rng


@dataclass(frozen=True)
class SplitPositions:
    """Positions of the samples of one split in each client's row, padded with 0."""

    indices: Int[Tensor, "clients samples"]
    count: Int[Tensor, " clients"]


def find_positions(split: Int[Tensor, "clients samples"], wanted: int) -> SplitPositions:
    """Find the samples of one split.

    Args:
        split: the split of each sample.
        wanted: its number.
    """
    chosen = split == wanted
    count = chosen.sum(1)
    width = max(1, int(count.max()))
    # A stable sort brings the chosen positions to the front and keeps their order.
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, :width]
    inside = torch.arange(order.shape[1]) < count[:, None]
    # 0 is a valid index for gathers, and `count` says where the positions end.
    return SplitPositions(torch.where(inside, order, 0), count)


def compute_code(samples: TestSet) -> int:
    """Return a checksum of a set of samples as an integer, which a message can carry."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(compute_checksum(samples.x) + compute_checksum(samples.y))
    return int.from_bytes(digest.digest(), "big", signed=True)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The samples of some of the clients of a federation; views of other clients share them.

    Args:
        federation: the rows of every client that this process hosts, without truth.
        samples: every sample of every one of them, one client after another, on the device.
        tests: the test sets, on the device.
        splits: positions of the samples of each split, by its name.
        rows: the rows of the federation that this view consists of.
        ids: the ids of these clients.
        population: number of clients in the whole population.
        device: where samples are, as the settings name it.
        public: the samples of the public set, on the device; None without one.
        public_code: a checksum of the public set.
    """

    federation: Federation
    samples: RawSamples
    tests: tuple[RawSamples, ...]
    splits: Mapping[str, SplitPositions]
    rows: Int[Tensor, " clients"]
    ids: Int[Tensor, " clients"]
    population: int
    device: str = "cpu"
    public: RawSamples | None = None
    public_code: int = 0

    @staticmethod
    def load(federation: Federation, loss: Loss, dtype: torch.dtype, device: str) -> "ClientData":
        """Copy the data of a federation to a device.

        Args:
            federation: the hosted rows, without truth.
            loss: says which type the targets have.
            dtype: floating-point type of models and inputs.
            device: where they are stored.
        """

        def to_samples(x: Inputs, y: Tensor) -> RawSamples:
            targets = cast_targets(loss, y, dtype).to(device)
            inputs = x.to(device) if isinstance(x, Tensor) else x
            return RawSamples(inputs, targets, dtype, federation.mean, federation.std)

        splits = {}
        for name, number in SPLITS.items():
            splits[name] = find_positions(federation.split, number)
        public = federation.public
        return ClientData(
            federation=federation,
            samples=to_samples(federation.x.flatten(0, 1), federation.y.flatten(0, 1)),
            tests=tuple(to_samples(test.x, test.y) for test in federation.tests),
            splits=splits,
            rows=torch.arange(len(federation)),
            ids=federation.ids,
            population=federation.population,
            device=device,
            public=None if public is None else to_samples(public.x, public.y),
            public_code=0 if public is None else compute_code(public),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def select_clients(self, rows: Int[Tensor, " rows"]) -> "ClientData":
        """Return a view of some of these clients; no sample is copied."""
        return replace(self, rows=self.rows[rows], ids=self.ids[rows])

    def select_phase(self, place: int) -> "ClientData":
        """Return a view of these clients in a phase, where their data change over the rounds.

        Args:
            place: of the phase in `Federation.phases`.
        """
        phase = self.federation.phases[place]
        now = replace(
            self.federation, split=phase.split, test_of=phase.test_of, noise=phase.noise, phases=()
        )
        splits = {name: find_positions(phase.split, number) for name, number in SPLITS.items()}
        return replace(self, federation=now, splits=splits)

    def first_clients_alone(self, count: int) -> "ClientData":
        """Return a view of the first clients with new ids, as if the population had no others."""
        alone = self.select_clients(torch.arange(count))
        return replace(alone, ids=torch.arange(count), population=count)

    def client_name(self, row: int) -> str:
        """Return how messages name a client of this view."""
        return self.federation.client_name(int(self.rows[row]))

    def make_trial_batch(self) -> tuple[Float[Tensor, "samples *features"], Tensor]:
        """Return prepared inputs and targets of eight samples for trials of the module."""
        # Few samples are repeated.
        first = torch.arange(8) % max(1, len(self.samples))
        return self.samples.prepare_inputs(first), self.samples.prepare_targets(first)

    # ------------------------------------------------------------------ numbers of samples

    def count_samples(self, split: str) -> Int[Tensor, " clients"]:
        """Return how many samples each client has in a split."""
        return self.splits[split].count[self.rows]

    @property
    def test_set_numbers(self) -> Int[Tensor, " clients"]:
        """The number of the test set that serves each client."""
        return self.federation.test_of[self.rows]

    def count_test_samples(self) -> Int[Tensor, " clients"]:
        """Return how many samples the test set that serves each client has ($m_k$)."""
        sizes = torch.tensor(list(map(len, self.tests)))
        return sizes[self.test_set_numbers]

    def class_counts(self) -> Int[Tensor, "clients classes"]:
        """Return each client's training samples of each class; no columns for regression."""
        classes = self.federation.classes
        if not classes:
            return torch.zeros(len(self), 0, dtype=torch.int64)
        inside = self.federation.split[self.rows] == SPLITS["train"]
        # samples of other splits count as one more class, which is cut off
        labels = torch.where(inside, self.federation.y[self.rows].to(torch.int64), classes)
        counts = torch.zeros(len(self), classes + 1, dtype=torch.int64)
        return counts.scatter_add_(1, labels, torch.ones_like(labels))[:, :classes]

    # ------------------------------------------------------------------ indices, keys, noise

    @property
    def samples_per_row(self) -> int:
        """The length of a client's padded row of samples."""
        return self.federation.split.shape[1]

    def sample_indices(self, split: str) -> Int[Tensor, "clients samples"]:
        """Return the indices of each client's samples of a split among all samples."""
        # All samples lie in one table, a padded row of equal width for each client.
        return self.rows[:, None] * self.samples_per_row + self.splits[split].indices[self.rows]

    def draw_keys(self, rng: Rng, purpose: str) -> Int[Tensor, " clients"]:
        """Return the keys of the clients' draws for a purpose, on the device of the samples."""
        return rng.draw_keys(purpose, self.ids).to(self.device)

    def test_draw_keys(self, rng: Rng, number: int, sets: int) -> Int[Tensor, " sets"]:
        """Return the keys of what models draw while they are measured on parts of a test set.

        Args:
            rng: the streams of the round.
            number: of the test set.
            sets: into how many sets it is cut.
        """
        return splitmix(self._test_key(rng, "draws", number) + torch.arange(sets))

    def _test_key(self, rng: Rng, purpose: str, number: int) -> int:
        # The stream belongs to the test set, not to a client, so that every process draws the same.
        # 62 bits are positive in int64.
        name = self.federation.tests[number].name
        return int(rng.generator(f"{purpose}.test.{name}").integers(1 << 62))

    def input_noise(self, rng: Rng, purpose: str) -> InputNoise | None:
        """Return the noise on the clients' inputs, on the CPU; None where there is none."""
        sigma = self.federation.noise
        if sigma is None:
            return None
        return InputNoise(rng.draw_keys(purpose, self.ids), sigma[self.rows], self.samples_per_row)

    def test_noise(self, rng: Rng, number: int, sets: int) -> InputNoise | None:
        """Return the noise of a test set; a sample's noise does not depend on how the set is cut.

        Args:
            rng: the streams of the round.
            number: of the test set.
            sets: into how many sets it is cut.
        """
        test = self.federation.tests[number]
        if not test.noise:
            return None
        key = torch.full((sets,), self._test_key(rng, "noise", number))
        return InputNoise(key, torch.full((sets,), test.noise, dtype=torch.float64), len(test.x))
