"""Federation: every client's data and splits, the test sets, and the planted clusters.

A federation is plain tensors. Clients are rows, padded to the largest client, so that a whole
population is one array; images stay uint8 and are normalized batch by batch. Test sets are stored
once and referred to by index. Inputs on disk, and those of clients of very unequal size, are rows
of a table instead (`data.rows`).
"""

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie._util.facts import Described, format_range
from coterie._util.files import prepare_file, replace_atomically
from coterie._util.mappings import number_items
from coterie._util.names import format_client, format_clients, shorten_text
from coterie._util.tensors import index_optional
from coterie.data.preparation import FittedPreparation, TableColumn, stack_fitted, unstack_fitted
from coterie.data.rows import ClientRows, Inputs, read_inputs
from coterie.data.source import InputPart, all_finite, describe_parts
from coterie.errors import DataError

PADDING, TRAIN, VALIDATION = -1, 0, 1
SPLITS = {"train": TRAIN, "validation": VALIDATION}
_PIECE = 1 << 20  # bytes
T = TypeVar("T")


def parse_parts(stored: Sequence[Sequence[Any]]) -> tuple[InputPart, ...]:
    """Return the parts of an input from the lists of their fields, as JSON has them."""
    parts = []
    for name, shape, whole, *scale in stored:
        # JSON has lists where a part, which is hashed, has tuples.
        parts.append(InputPart(name, tuple(shape), whole, *map(tuple, scale)))
    return tuple(parts)


def parse_columns(stored: Sequence[Sequence[Any]]) -> tuple[TableColumn, ...]:
    """Return the columns of a table from the lists of their fields, as JSON has them."""
    columns = []
    for name, categories, *more in stored:
        known = None if categories is None else tuple(categories)
        columns.append(TableColumn(name, known, *more))
    return tuple(columns)


def compute_checksum(values: Inputs) -> bytes:
    """Return a checksum of the bytes of a tensor: 32 bits for each megabyte."""
    # A checksum per piece is computed at memory speed, and shows where two tensors differ.
    return b"".join(zlib.crc32(piece).to_bytes(4, "big") for piece in _iterate_bytes(values))


def _iterate_bytes(values: Inputs) -> Iterator[bytes | memoryview]:
    """Return the bytes of a tensor, or of what stands for it, in pieces of equal size."""
    if isinstance(values, Tensor):
        data = values.contiguous().flatten().view(torch.uint8).numpy().data
        for at in range(0, len(data), _PIECE):
            yield data[at : at + _PIECE]
        return
    flat = values.flatten(0, values.index.ndim - 1) if values.index.ndim > 1 else values
    size = math.prod(flat.shape[1:]) * flat.dtype.itemsize
    # Sixteen pieces are read at a time: a disk is asked less often.
    used, most = (flat.index >= 0).numpy(), max(1, 16 * _PIECE // max(1, size))
    # Left over from a read: pieces are of equal size, wherever a read ends.
    rest, zeros = b"", bytes(_PIECE)
    # Ranges of samples, and of padding, in turn.
    ends = [*(np.flatnonzero(np.diff(used)) + 1).tolist(), len(used)]
    for start, stop in itertools.pairwise([0, *ends]):
        for first in range(start, stop, most):
            last = min(first + most, stop)
            if used[first]:
                found = flat[first:last].read().flatten().view(torch.uint8).numpy().tobytes()
                rest += found
            # Padding is most of what clients of unequal size have: pieces of it are not made.
            padding = 0 if used[first] else (last - first) * size
            # What the piece that is begun still lacks.
            joined = min(padding, -len(rest) % _PIECE)
            rest, padding = rest + zeros[:joined], padding - joined
            whole = len(rest) // _PIECE * _PIECE
            for at in range(0, whole, _PIECE):
                yield rest[at : at + _PIECE]
            yield from itertools.repeat(zeros, padding // _PIECE)
            rest = rest[whole:] + zeros[: padding % _PIECE]
    if rest:
        yield rest


def _find_first(flags: Shaped[Tensor, "clients *rest"]) -> int:
    """Return the first row that has a flag."""
    return int(flags.reshape(len(flags), -1).any(1).nonzero()[0])


def _select(values: tuple[T, ...], rows: Int[Tensor, " chosen"]) -> tuple[T, ...]:
    """Return the values of some rows; none where there are none."""
    return tuple(values[row] for row in rows.tolist()) if values else ()


@dataclass(frozen=True)
class Truth:
    """The planted clusters, for Oracle, metrics and reports only; hosted clients do not see them.

    Args:
        cluster: the planted cluster of each client, from 0.
        names: a name for each cluster, such as "rotation 90".
        shift: a description of the shift of each client's data.
    """

    cluster: Int[Tensor, " clients"]
    names: tuple[str, ...]
    shift: tuple[str, ...]


def _describe_truth(truth: Truth | None) -> dict[str, Any] | None:
    """Return what a file has of planted clusters besides the tensor, as JSON stores it."""
    return truth and {"names": truth.names, "shift": truth.shift}


def _make_truth(stored: Mapping[str, Any], cluster: Int[Tensor, " clients"]) -> Truth:
    """Invert `_describe_truth`."""
    return Truth(cluster, tuple(stored["names"]), tuple(stored["shift"]))


@dataclass(frozen=True)
class TestSet:
    """A test set of one or more clients.

    Args:
        x: the inputs, in the same form as the federation's.
        y: the targets.
        name: its content, such as "rotation 90".
        noise: standard deviation of the noise on prepared inputs, drawn again at every access.
    """

    x: Shaped[Tensor, "samples *features"] | ClientRows
    y: Shaped[Tensor, "samples *targets"]
    name: str
    noise: float = 0.0

    __test__ = False  # not a pytest class


@dataclass(frozen=True)
class Phase:
    """What clients have from a round on, where their data change over the rounds (see `drift`).

    Args:
        first: the first round of the phase, 1 or later.
        split: the split of each sample, in place of the federation's: -1 for those not in use.
        test_of: index of each client's test set.
        noise: standard deviation of the noise on each client's inputs; None for no noise.
        truth: the planted clusters; None when unknown or hidden.
    """

    first: int
    split: Int[Tensor, "clients samples"]
    test_of: Int[Tensor, " clients"]
    noise: Float[Tensor, " clients"] | None = None
    truth: Truth | None = None

    def host(self, rows: Int[Tensor, " hosted"]) -> "Phase":
        """Return the phase of some rows, without the planted clusters."""
        noise = index_optional(self.noise, rows)
        return Phase(self.first, self.split[rows], self.test_of[rows], noise)


@dataclass(frozen=True, repr=False)
class Federation(Described):
    """The data of a population of clients.

    Args:
        x: inputs of every client, padded to the largest client. uint8 images are scaled to [0, 1]
            and normalized with `mean` and `std` per batch; floats are used as they are (float16 is
            widened), and integers kept. `ClientRows` where they are read when they are needed.
        y: integers (one class a sample, or several integers), or float targets, of any shape.
        split: -1 padding, 0 train, 1 validation.
        tests: the test sets.
        test_of: index of each client's test set.
        ids: the id of each client: its position in the population.
        population: number of clients in all; more than the rows here when only some are hosted.
        classes: number of classes; 0 where a target is not one class.
        mean: per channel, for uint8 images; empty for "do not normalize".
        std: per channel.
        origin: index in the source of each client's samples (-1 for padding); part of the
            fingerprint.
        truth: the planted clusters; None when unknown or hidden.
        name: a short description.
        class_names: a name per class, when known.
        noise: standard deviation of the noise on each client's prepared inputs, drawn again at
            every access; None for no noise.
        client_names: a name for each row, such as that of a hospital; empty where clients are
            numbers.
        feature_names: a name for each entry of an input, when known.
        parts: where an input is several tensors: what they are, in the order in which `x` holds
            them, one after another as numbers. Empty where `x` is the input.
        fitted: what each row's client did to its inputs, which `x` holds as they came out; empty
            for nothing.
        table: the columns of the table that inputs were read from; empty where they came otherwise.
        targets: the columns of that table that are learned.
        notes: how its file was read, where that is not the usual way.
        phases: what changes in which round; `split`, `test_of`, `noise` and `truth` are those
            before the first of them.
        public: samples that all clients have, on which predictions are compared; see
            `with_public_set`.
    """

    x: Shaped[Tensor, "clients samples *features"] | ClientRows
    y: Shaped[Tensor, "clients samples *targets"]
    split: Int[Tensor, "clients samples"]
    tests: tuple[TestSet, ...]
    test_of: Int[Tensor, " clients"]
    ids: Int[Tensor, " clients"]
    population: int
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    origin: Int[Tensor, "clients samples"] | None = None
    truth: Truth | None = None
    name: str = "federation"
    class_names: tuple[str, ...] = ()
    noise: Float[Tensor, " clients"] | None = None
    client_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    parts: tuple[InputPart, ...] = ()
    fitted: tuple[FittedPreparation, ...] = ()
    table: tuple[TableColumn, ...] = ()
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    public: TestSet | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def client_name(self, row: int) -> str:
        """Return the name of the client of a row, or "client 7" if it has none."""
        return format_client(self.names_by_id, int(self.ids[row]))

    @property
    def names_by_id(self) -> dict[int, str]:
        """The name of each client here by its id; empty where clients are numbers."""
        # Without names a mapping of all ids would say nothing.
        if not self.client_names:
            return {}
        return dict(zip(self.ids.tolist(), self.client_names, strict=True))

    def facts(self) -> tuple[str, dict[str, Any]]:
        """Return a title and the main facts, which `print` and notebooks show."""
        clients = len(self) if len(self) == self.population else f"{len(self)} of {self.population}"
        if self.names_by_id:
            clients = f"{clients} ({format_clients(self.names_by_id, self.ids.tolist())})"
        samples = []
        for split in SPLITS:
            samples.append(f"{split} {format_range(self.count_samples(split).tolist())}")
        tests = [len(self.tests[place].x) for place in self.test_of.tolist()]
        samples.append(f"test {format_range(tests)}")
        shape = " x ".join(map(str, self.features))
        inputs = f"{shape} of {str(self.x.dtype).removeprefix('torch.')}"
        numbers = "numbers (regression)" if self.y.is_floating_point() else "whole numbers"
        what = f"{self.classes} classes" if self.classes else f"{self.outputs} {numbers}"
        clusters = "unknown"
        if self.truth is not None:
            sizes = torch.bincount(self.truth.cluster, minlength=len(self.truth.names)).tolist()
            named = zip(self.truth.names, sizes, strict=True)
            clusters = ", ".join(f"{name} ({size})" for name, size in named if size)
        facts = {
            "clients": clients,
            "samples of a client": ", ".join(samples),
            "inputs": describe_parts(self.parts) if self.parts else inputs,
            "targets": what,
            "planted clusters": clusters,
        }
        if self.phases:
            facts["changes in rounds"] = ", ".join(str(phase.first) for phase in self.phases)
        if self.public is not None:
            facts["public set"] = f"{len(self.public.x)} samples"
        return f"Federation {self.name!r}", facts

    @property
    def _test_noises(self) -> list[float]:
        """The level of noise of each test set; a new list in each call."""
        return [test.noise for test in self.tests]

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[2:])

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: the classes, or the size of a regression target."""
        return self.classes or max(1, math.prod(self.y.shape[2:]))

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs and targets in memory, including the test sets."""
        clients = self.x.nbytes + self.y.nbytes + self.split.nbytes
        sets = self.tests if self.public is None else (*self.tests, self.public)
        return clients + sum(one.x.nbytes + one.y.nbytes for one in sets)

    def count_samples(self, split: str) -> Int[Tensor, " clients"]:
        """Return the number of samples of each client in a split ("train" or "validation")."""
        return (self.split == SPLITS[split]).sum(1)

    def host(self, ids: Sequence[int] | Int[Tensor, " hosted"]) -> "Federation":
        """Return the data of some clients as a process hosts them: without the planted clusters.

        Args:
            ids: ids of the clients to host, each of them in this federation.

        Raises:
            DataError: when an id is not in this federation.
        """
        wanted = torch.as_tensor(ids, dtype=torch.int64).tolist()
        place = number_items(self.ids.tolist())
        missing = [client for client in wanted if client not in place]
        if missing:
            raise DataError(
                f"clients {missing[:5]} are not in this federation of {len(self)} clients"
            )
        rows = torch.tensor([place[client] for client in wanted], dtype=torch.int64)
        phases = tuple(phase.host(rows) for phase in self.phases)
        # All clients in their order: the tensors are shared, not copied.
        if torch.equal(rows, torch.arange(len(self))):
            return replace(self, truth=None, phases=phases)
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            split=self.split[rows],
            test_of=self.test_of[rows],
            ids=self.ids[rows],
            origin=index_optional(self.origin, rows),
            noise=index_optional(self.noise, rows),
            client_names=_select(self.client_names, rows),
            fitted=_select(self.fitted, rows),
            truth=None,
            phases=phases,
        )

    def select_clients(self, rows: Int[Tensor, " chosen"]) -> "Federation":
        """Return some clients as a federation: numbered from 0 in this order, with their test sets.

        Args:
            rows: of the clients; not all of them need to be there.

        Raises:
            DataError: when the data change over the rounds.
        """
        self._require_one_phase("chosen as a population of their own")
        # Only test sets that a chosen client has, renumbered.
        kept, test_of = self.test_of[rows].unique(return_inverse=True)
        hosted = self.host(self.ids[rows])
        truth = self.truth
        if truth is not None:
            truth = replace(truth, cluster=truth.cluster[rows], shift=_select(truth.shift, rows))
        return replace(
            hosted,
            tests=_select(self.tests, kept),
            test_of=test_of,
            ids=torch.arange(len(rows)),
            population=len(rows),
            truth=truth,
        )

    def pool_clients(self) -> "Federation":
        """Return a federation of one client with the samples of all, in order, without test sets.

        Raises:
            DataError: when inputs have noise that each client draws at every access, or the data
                change over the rounds.
        """
        self._require_one_phase("pooled")
        if self.noise is not None:
            raise DataError(
                "the inputs have noise that each client draws again; such data are not pooled"
            )
        # A mask selects the samples of one client after another, without padding.
        used = self.split >= 0
        return replace(
            self,
            x=self.x[used][None],
            y=self.y[used][None],
            split=self.split[used][None],
            tests=(),
            test_of=torch.zeros(1, dtype=torch.int64),
            ids=torch.zeros(1, dtype=torch.int64),
            population=1,
            origin=None if self.origin is None else self.origin[used][None],
            client_names=(),
            truth=None,
        )

    def with_public_set(self, public: "Federation") -> "Federation":
        """Return these data with a public set: samples that all clients have.

        Clients compare what their models predict for it; see `similarity = "public_agreement"` of
        DAC. Nobody trains on it, and no result is measured with it. Its targets matter only where
        they are -100, which means that a position does not count.

        Args:
            public: the public samples, made in the same way as these data; all samples of all its
                clients, held-out ones included.

        Raises:
            DataError: when its inputs or targets have another form.

        Example:
            >>> from coterie import from_arrays
            >>> x, y = torch.rand(40, 3), torch.arange(40) % 2
            >>> data = from_arrays(x[:30], y[:30], num_clients=2)
            >>> len(data.with_public_set(from_arrays(x[30:], y[30:], num_clients=1)).public.x)
            10
        """

        def describe_form(data: Federation) -> str:
            parts = [(part.name, part.shape, part.whole) for part in data.parts]
            # Numbers of another precision have the same meaning; bytes of images have not.
            kind = "floats" if data.x.dtype.is_floating_point else str(data.x.dtype)
            inputs = f"inputs {list(data.features)} of {kind.removeprefix('torch.')}"
            parted = f" in parts {parts}" if parts else ""
            return f"{inputs}{parted}, targets {list(data.y.shape[2:])}"

        own, other = describe_form(self), describe_form(public)
        if own != other:
            raise DataError(
                f"the public set has {other}; expected {own}, as the clients' samples have"
            )
        used = public.split >= 0
        inputs = [read_inputs(public.x)[used], *(read_inputs(test.x) for test in public.tests)]
        targets = [public.y[used], *(test.y for test in public.tests)]
        x, y = torch.cat(inputs).to(self.x.dtype), torch.cat(targets).to(self.y.dtype)
        return replace(self, public=TestSet(x, y, "public"))

    def _require_one_phase(self, what: str) -> None:
        if self.phases:
            raise DataError(
                f"data that change over the rounds (data.drift) are not {what}; leave the drift out"
            )

    def compute_fingerprint(self) -> str:
        """Hash all data that results depend on: samples, splits, test sets and their shifts.

        A gigabyte takes about a second.
        """
        # 8 bytes: enough to notice data that were mixed up, not data that somebody forged.
        digest = hashlib.blake2b(digest_size=8)
        # Their order is part of stored fingerprints.
        parts = [self.ids, self.split, self.x, self.y, self.test_of]
        for test in self.tests:
            parts += [test.x, test.y]
        if self.origin is not None:
            parts.append(self.origin)
        for part in parts:
            # Shape and type keep parts apart whose bytes are equal.
            digest.update(json.dumps([list(part.shape), str(part.dtype)]).encode())
            digest.update(compute_checksum(part))
        noise = None if self.noise is None else self.noise.tolist()
        shift = self.truth.shift if self.truth else ()
        cluster = self.truth.cluster.tolist() if self.truth else ()
        more: list[Any] = [
            self.name,
            self.mean,
            self.std,
            shift,
            cluster,
            noise,
            self._test_noises,
            self.classes,
        ]
        # Added only where there are parts: other fingerprints stay comparable with stored runs.
        if self.parts:
            more.append([[part.name, part.shape, part.whole] for part in self.parts])
        if self.public is not None:
            digest.update(compute_checksum(self.public.x) + compute_checksum(self.public.y))
        for phase in self.phases:
            digest.update(compute_checksum(phase.split) + compute_checksum(phase.test_of))
            truth = phase.truth
            planted = ((), ()) if truth is None else (truth.shift, truth.cluster.tolist())
            level = None if phase.noise is None else phase.noise.tolist()
            more.append([phase.first, *planted, level])
        digest.update(json.dumps([*more, self.population]).encode())
        return digest.hexdigest()

    def compute_digest(self) -> str:
        """Hash the data (`compute_fingerprint`), and all names that results have."""
        columns = list(map(TableColumn.to_fields, self.table))
        names = [self.client_names, self.class_names, self.feature_names, columns]
        # Categories may be of types that JSON lacks, such as dates.
        text = json.dumps([self.compute_fingerprint(), names], default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def validate(self) -> "Federation":
        """Check shapes, ranges and values.

        Raises:
            DataError: with what was found, what was expected and what to do.
        """
        self._check_names()
        # The search for the first one is slower: it runs only when there is one.
        # A table was checked when it was read, and would have to be read again.
        x = self.x if isinstance(self.x, Tensor) else self.y.new_zeros(len(self), 0)
        if x.is_floating_point() and not all_finite(x):
            bad = _find_first(~torch.isfinite(x))
            raise DataError(
                f"the inputs of {self._describe_client(bad)} contain NaN or infinity; fill or drop "
                "them"
            )
        used = self.split >= 0
        if self.classes:
            labels = self.y[used]
            if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
                bad = _find_first(used & ((self.y < 0) | (self.y >= self.classes)))
                raise DataError(
                    f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to "
                    f"{self.classes - 1}: "
                    "raise `classes` or map the labels (the first other one is of "
                    f"{self._describe_client(bad)})"
                )
        elif not all_finite(self.y):
            bad = _find_first(~torch.isfinite(self.y))
            raise DataError(
                f"the targets contain NaN or infinity (first of {self._describe_client(bad)}); "
                "drop those samples"
            )
        levels = self._test_noises
        if self.noise is not None:
            levels += self.noise.tolist()
        if not all(0 <= level < float("inf") for level in levels):
            raise DataError(
                f"noise from {min(levels)} to {max(levels)}; expected finite numbers, not negative"
            )
        empty = (self.count_samples("train") == 0).nonzero().flatten().tolist()
        if empty:
            raise DataError(
                f"{self._describe_client(empty[0])} has no training samples; give every client at "
                "least one, or leave it out"
            )
        before = 0
        for phase in self.phases:
            if phase.first <= before:
                raise DataError(
                    f"a phase begins in round {phase.first}, and one before it in round {before}; "
                    "expected ascending rounds from 1 on"
                )
            before = phase.first
            # Each phase as a federation of its own has to be valid.
            replace(
                self, split=phase.split, test_of=phase.test_of, noise=phase.noise,
                truth=phase.truth, phases=(),
            ).validate()  # fmt: skip
        return self

    def _describe_client(self, row: int) -> str:
        """Return the client of a row as messages name it."""
        return f"client {self.client_names[row]!r}" if self.client_names else self.client_name(row)

    def _check_names(self) -> None:
        """Check that all or none have names, and that names of clients are distinct text."""
        # Clients and entries of an input: all of them are named, or none.
        for names, many, what in (
            (self.client_names, len(self), "clients"),
            (self.feature_names, math.prod(self.features), "entries of an input"),
        ):
            if len(names) not in (0, many):
                raise DataError(
                    f"there are {len(names)} names for {many} {what}; expected one for each, or "
                    "none"
                )
        names = self.client_names
        for name in names:
            # A lone surrogate cannot be written as UTF-8.
            if not name.strip() or any("\ud800" <= sign <= "\udfff" for sign in name):
                raise DataError(
                    f"a client is called {name!r}; expected a text that is not empty and valid "
                    "Unicode"
                )
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise DataError(
                f"two clients are called {shorten_text(twice, 80)!r}; give every client a name of "
                "its own"
            )

    def save(self, path: str | Path) -> None:
        """Write the federation to one safetensors file, atomically."""
        tensors = {
            "x": read_inputs(self.x),
            "y": self.y,
            "split": self.split,
            "test_of": self.test_of,
            "ids": self.ids,
        }
        if self.origin is not None:
            tensors["origin"] = self.origin
        if self.noise is not None:
            tensors["noise"] = self.noise
        if self.truth is not None:
            tensors["truth.cluster"] = self.truth.cluster
        tensors |= stack_fitted(self.fitted)
        stored_phases = []
        for i, phase in enumerate(self.phases):
            tensors |= {f"phases.{i}.split": phase.split, f"phases.{i}.test_of": phase.test_of}
            if phase.noise is not None:
                tensors[f"phases.{i}.noise"] = phase.noise
            if phase.truth is not None:
                tensors[f"phases.{i}.cluster"] = phase.truth.cluster
            stored_phases.append({"first": phase.first, "truth": _describe_truth(phase.truth)})
        for i, test in enumerate(self.tests):
            tensors |= {f"tests.{i}.x": read_inputs(test.x), f"tests.{i}.y": test.y}
        if self.public is not None:
            tensors |= {"public.x": read_inputs(self.public.x), "public.y": self.public.y}
        # safetensors stores tensors and texts only: everything else becomes one JSON text.
        meta: dict[str, Any] = {
            "population": self.population,
            "classes": self.classes,
            "mean": self.mean,
            "std": self.std,
            "name": self.name,
            "class_names": self.class_names,
            "client_names": self.client_names,
            "feature_names": self.feature_names,
            "parts": list(map(astuple, self.parts)),
        }
        # Only data of a table have these: files of other data keep their bytes.
        if self.table:
            meta["table"] = list(map(TableColumn.to_fields, self.table))
        if self.targets:
            meta |= {"targets": self.targets, "notes": self.notes}
        meta |= {
            "tests": [test.name for test in self.tests],
            "test_noise": self._test_noises,
            "truth": _describe_truth(self.truth),
        }
        if stored_phases:
            meta["phases"] = stored_phases
        path = prepare_file(path)
        # safetensors refuses tensors that share memory, such as views.
        contiguous = {}
        for name, tensor in tensors.items():
            contiguous[name] = tensor.clone(memory_format=torch.contiguous_format)
        with replace_atomically(path) as temporary:
            save_file(contiguous, temporary, metadata={"coterie": json.dumps(meta)})

    @staticmethod
    def load(path: str | Path) -> "Federation":
        """Read a federation that `save` wrote.

        Raises:
            DataError: when the file is not a stored federation.
        """
        from safetensors import SafetensorError, safe_open

        try:
            # The texts first: `load_file` returns the tensors alone.
            with safe_open(str(path), framework="pt") as file:
                meta = json.loads((file.metadata() or {})["coterie"])
            tensors = load_file(str(path))
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise DataError(f"{path} is not a federation file: {error}") from error
        truth = meta["truth"] and _make_truth(meta["truth"], tensors["truth.cluster"])
        # In a file without this field no test set has noise.
        noises = meta.get("test_noise", [0.0] * len(meta["tests"]))
        tests = []
        for i, (name, noise) in enumerate(zip(meta["tests"], noises, strict=True)):
            x, y = tensors[f"tests.{i}.x"], tensors[f"tests.{i}.y"]
            tests.append(TestSet(x, y, name, noise))
        public = None
        if "public.x" in tensors:
            public = TestSet(tensors["public.x"], tensors["public.y"], "public")
        phases = []
        for i, stored in enumerate(meta.get("phases", ())):
            known = stored["truth"]
            known = known and _make_truth(known, tensors[f"phases.{i}.cluster"])
            phases.append(
                Phase(
                    stored["first"],
                    tensors[f"phases.{i}.split"],
                    tensors[f"phases.{i}.test_of"],
                    tensors.get(f"phases.{i}.noise"),
                    known,
                )
            )
        return Federation(
            x=tensors["x"],
            y=tensors["y"],
            split=tensors["split"],
            tests=tuple(tests),
            test_of=tensors["test_of"],
            ids=tensors["ids"],
            population=meta["population"],
            classes=meta["classes"],
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            origin=tensors.get("origin"),
            truth=truth,
            name=meta["name"],
            class_names=tuple(meta["class_names"]),
            noise=tensors.get("noise"),
            # `get`, here and below: these came later, and older files lack them.
            client_names=tuple(meta.get("client_names", ())),
            feature_names=tuple(meta.get("feature_names", ())),
            parts=parse_parts(meta.get("parts", ())),
            fitted=unstack_fitted(tensors),
            table=parse_columns(meta.get("table", ())),
            targets=tuple(meta.get("targets", ())),
            notes=tuple(meta.get("notes", ())),
            phases=tuple(phases),
            public=public,
        )
