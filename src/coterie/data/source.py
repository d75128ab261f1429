"""Source: a dataset as a pool, from which clients draw their samples, and a test set.

Images are uint8, channels first; other inputs are numbers or integers as they came, or several
tensors in one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie._util.mappings import select_keys
from coterie.data.coding import code_targets, match_clients, number_clients, to_array
from coterie.data.guesses import (
    LARGEST,
    require_aligned,
    warn_about_inputs,
    warn_about_shared_samples,
)
from coterie.data.preparation import Preparation, TableColumn
from coterie.data.rows import StoredRows, is_stored, iterate_pieces
from coterie.errors import ConfigError, DataError, require

_SEEN = 1000  # rows of an array on disk by which its meaning is guessed

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""


def all_finite(values: Shaped[Tensor, "..."]) -> bool:
    """Whether no value is NaN or infinite."""
    # The extremes show it too, much faster than a test of every value.
    if not values.numel():  # nothing has no extremes
        return True
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(most))


def normalize_images(
    x: Shaped[Tensor, "samples *features"],
    dtype: torch.dtype,
    mean: Float[Tensor, "channels *ones"] | None = None,
    std: Float[Tensor, "channels *ones"] | None = None,
) -> Float[Tensor, "samples *features"]:
    """Normalize uint8 images: scale to [0, 1], subtract the mean, divide by the deviation.

    Args:
        x: uint8 images.
        dtype: of the result.
        mean: of each channel, shaped like an image; None for "do not normalize".
        std: of each channel.
    """
    x = x.to(dtype).div_(255)
    return x if mean is None or std is None else x.sub_(mean).div_(std)


def is_images(x: Shaped[Tensor, "*features"]) -> bool:
    """Whether an input is an image of bytes: uint8, channels first."""
    return x.dtype == torch.uint8 and x.ndim == 3


@dataclass(frozen=True)
class InputPart:
    """One tensor of an input that is several.

    Args:
        name: the argument of the module's `forward` that it is; empty for the next positional one.
        shape: of one sample.
        whole: whether the module takes it as whole numbers (int64), such as the codes of
            categories.
        mean: per channel, for an image of bytes, which is scaled to [0, 1] and normalized when it
            is read; empty for "do not normalize", and for other tensors.
        std: per channel.
    """

    name: str
    shape: tuple[int, ...]
    whole: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Samples:
    """Inputs, targets and further columns of samples.

    Args:
        x: uint8 images, channels first, or numbers; in memory or on disk.
        y: integers (one class a sample, or several), or float targets.
        columns: further integers, such as the writer of each sample.
    """

    x: Shaped[Tensor, "samples *features"] | StoredRows
    y: Shaped[Tensor, "samples *targets"]
    columns: Mapping[str, Int[Tensor, " samples"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def is_images(self) -> bool:
        """Whether the inputs are uint8 images."""
        return self.x.dtype == torch.uint8 and self.x.ndim == 4

    def drop_rows(self) -> "Samples":
        """Return no samples, of the same shapes and types and with the same columns."""
        columns = {name: values[:0] for name, values in self.columns.items()}
        return Samples(self.x[:0], self.y[:0], columns)


@dataclass(frozen=True)
class Source:
    """A dataset: a pool, from which clients draw their samples, and a test set.

    Args:
        name: its name.
        train: the pool.
        test: the test set; it may be empty.
        classes: number of classes; 0 where a target is not one class.
        class_names: a name for each class, when known.
        standard: the usual mean and standard deviation of each channel; computed from the pool when
            not given.
        clients: the column that says whose a sample is, where data come with clients.
        client_names: a name for each value of that column, from 0.
        feature_names: a name for each entry of an input, when known.
        parts: what `x` holds one after another, where an input is several tensors.
        preparation: what each client still does to its inputs, fitted on its own training samples.
        table: the columns of a table that the entries of an input were read from.
        targets: the columns of the table that are learned.
        notes: how a file was read, where that is not the usual way.
        validation: the column of the pool that is 1 for validation samples and 0 for training
            samples, where the data say which are which.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    class_names: tuple[str, ...] = ()
    standard: Constants | None = None
    clients: str = ""
    client_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    parts: tuple[InputPart, ...] = ()
    preparation: Preparation | None = None
    table: tuple[TableColumn, ...] = ()
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    validation: str = ""

    @staticmethod
    def from_arrays(
        x: Any,
        y: Any,
        *,
        clients: Any = None,
        clusters: Sequence[int] | Mapping[Any, int] | None = None,
        test: tuple[Any, ...] | None = None,
        classes: int | None = None,
        class_names: Sequence[str] = (),
        feature_names: Sequence[str] = (),
        normalize: str = "half",
        name: str = "arrays",
    ) -> "Source":
        """Make a source from arrays or tensors; the arguments are those of `from_arrays`.

        Args:
            x: inputs: an array, or a tuple or table of arrays where an input is several tensors.
            y: targets.
            clients: the client of each sample; without it the samples are a pool that others
                divide.
            clusters: the known cluster of each client.
            test: (x, y) of a test set for all clients, or (x, y, clients) of each client's own test
                samples.
            classes: number of classes.
            class_names: a name for each class.
            feature_names: a name for each entry of an input; the columns of a table of pandas or
                polars by default.
            normalize: of images among several tensors, which are scaled here; other images are
                scaled later.
            name: a name for the data.

        Raises:
            DataError: on data that cannot be used.

        Example:
            >>> labels, clients = ["yes", "no", "no", "yes"], ["ann", "bob", "ann", "bob"]
            >>> source = Source.from_arrays(torch.rand(4, 2), labels, clients=clients)
            >>> source.class_names, source.client_names, source.train.y.tolist()
            (('no', 'yes'), ('ann', 'bob'), [1, 0, 0, 1])
        """
        if test is not None and len(test) not in (2, 3):
            raise DataError(f"test has {len(test)} parts; expected (x, y) or (x, y, clients)")
        if test is not None and len(test) == 3 and clients is None:
            raise ConfigError(
                "test has clients, and the training samples have none; give clients, or a test set "
                "(x, y) for all"
            )
        require_aligned(x=x, y=y, clients=clients)
        if test is not None:
            require_aligned(
                **dict(zip(("x of test", "y of test", "its clients"), test, strict=False))
            )
        # Together, so that a label means the same in training and in testing.
        given = [y] if test is None else [y, test[1]]
        targets, names, classes = code_targets(given, classes, class_names)
        # Before the conversion, which hides the types that were given.
        _warn_about_parts(x)
        inputs, parts, constants = _convert_inputs(x, normalize)
        pool = make_samples(inputs, targets[0], classes)
        columns, client_names = {}, ()
        if clients is not None:
            columns, client_names = number_clients(clients, len(pool), clusters)
        pool = replace(pool, columns=columns)
        if test is None:
            kept = pool.drop_rows()
        else:
            # Test images are normalized by the constants of the training images.
            held = _order_parts(test[0], parts)
            x_held, parts_held, _ = _convert_inputs(held, normalize, constants)
            if parts_held != parts:
                raise DataError(
                    f"{name}: test inputs are {describe_parts(parts_held)}; training inputs are "
                    f"{describe_parts(parts)}"
                )
            kept = make_samples(x_held, targets[1], classes)
            if len(test) == 3:
                owners = match_clients(test[2], len(kept), columns["client"], client_names)
                kept = replace(kept, columns={"client": owners})
            pool, kept = _match_dtypes(pool, kept)
            warn_about_shared_samples((pool.x, pool.y), (kept.x, kept.y), name)
        entries = int(np.prod(pool.x.shape[1:]))
        if feature_names:
            require(
                len(feature_names) == entries,
                "feature_names",
                feature_names,
                f"{entries}, one for each entry",
            )
        elif not parts and len(column_names(x)) == entries:
            feature_names = column_names(x)
        return Source(
            name,
            pool,
            kept,
            classes,
            names,
            clients="client" if columns else "",
            client_names=client_names,
            feature_names=tuple(feature_names),
            parts=parts,
        ).check()

    @property
    def has_client_tests(self) -> bool:
        """Whether the test samples say whose they are: each client then has a test set."""
        return bool(self.clients and len(self.test)) and self.clients in self.test.columns

    @property
    def is_images(self) -> bool:
        """Whether the inputs are uint8 images."""
        return self.train.is_images

    @property
    def input_description(self) -> str:
        """The type and shape of one input, in words."""
        if self.parts:
            return describe_parts(self.parts)
        shape = "x".join(map(str, self.train.x.shape[1:])) or "scalar"
        return f"{shape} {str(self.train.x.dtype).removeprefix('torch.')} inputs"

    def client_name(self, value: int) -> str:
        """Return the name of a value of the column of clients; empty where clients are numbers."""
        return self.client_names[value] if self.client_names else ""

    def channel_constants(self, normalize: str) -> Constants:
        """Return mean and deviation of each channel of images; empty for "none" and other inputs.

        Args:
            normalize: "half" (0.5 and 0.5), "standard" (the dataset's own) or "none".
        """
        require(
            normalize in ("half", "standard", "none"),
            "normalize",
            normalize,
            "'half', 'standard' or 'none'",
        )
        if normalize == "none" or not self.is_images:
            return (), ()
        channels = self.train.x.shape[1]
        if normalize == "half":
            return (0.5,) * channels, (0.5,) * channels
        return self.standard or _compute_moments(self.train.x)

    def check(self) -> "Source":
        """Check the data.

        Raises:
            DataError: on labels out of range, NaN, different lengths or shapes; with what to do.
        """
        for part, samples in (("training", self.train), ("test", self.test)):
            self._check_samples(samples, f"{self.name}: the {part} data")
        if len(self.test) and self.train.x.shape[1:] != self.test.x.shape[1:]:
            shapes = tuple(self.train.x.shape[1:]), tuple(self.test.x.shape[1:])
            raise DataError(
                f"{self.name}: training inputs have shape {shapes[0]}, test inputs {shapes[1]}; "
                "make them equal"
            )
        forms = []
        for one in (self.train, self.test):
            forms.append((str(one.y.dtype).removeprefix("torch."), tuple(one.y.shape[1:])))
        if len(self.test) and forms[0] != forms[1]:
            raise DataError(
                f"{self.name}: training targets are {forms[0]}, test targets {forms[1]}; make them "
                "equal"
            )
        return self

    def _check_samples(self, samples: Samples, what: str) -> None:
        # Bytes are all right; whole numbers of a disk are checked while they are converted.
        pieces = () if samples.x.dtype == torch.uint8 else iterate_pieces(samples.x)
        for first, piece in pieces:
            # With a preparation NaN marks the empty entries, which each client fills.
            if self.preparation or not piece.is_floating_point() or all_finite(piece):
                continue
            bad = (~torch.isfinite(piece)).reshape(len(piece), -1)
            row = int(bad.any(1).nonzero()[0])
            place, entry = first + row, int(bad[row].nonzero()[0])
            column = f" in {self.feature_names[entry]!r}" if self.feature_names else ""
            where = self._locate_sample(samples, place)
            raise DataError(
                f"{what} have NaN or infinity in the inputs (first{column} {where}); fill or drop "
                "them"
            )
        if not self.classes:
            if not all_finite(samples.y):
                place = int(
                    (~torch.isfinite(samples.y)).reshape(len(samples), -1).any(1).nonzero()[0]
                )
                where = self._locate_sample(samples, place)
                raise DataError(
                    f"{what} have NaN or infinity in the targets (first {where}); drop those "
                    "samples"
                )
        elif (
            len(samples.y) and not 0 <= int(samples.y.min()) <= int(samples.y.max()) < self.classes
        ):
            low, high = int(samples.y.min()), int(samples.y.max())
            place = int(((samples.y < 0) | (samples.y >= self.classes)).nonzero()[0])
            raise DataError(
                f"{what} have labels from {low} to {high}; expected 0 to {self.classes - 1}: raise "
                "`classes` or map "
                f"the labels (the first other one is {self._locate_sample(samples, place)})"
            )

    def _locate_sample(self, samples: Samples, place: int) -> str:
        """Describe where a sample is."""
        if not self.clients or self.clients not in samples.columns:
            return f"in sample {place}"
        client = int(samples.columns[self.clients][place])
        who = repr(self.client_name(client)) if self.client_names else str(client)
        return f"in sample {place}, of client {who}"


def _compute_moments(x: Shaped[Tensor, "samples *features"] | StoredRows) -> Constants:
    """Compute mean and deviation of each channel of uint8 images scaled to [0, 1]."""
    # From a histogram: exact, and without a float copy of all images.
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.zeros(x.shape[1], 256, dtype=torch.int64)
    for _, piece in iterate_pieces(x):
        for channel, own in enumerate(counts):
            own += torch.bincount(piece[:, channel].flatten(), minlength=256)
    mean, std = [], []
    for own in counts:
        weight = own.to(torch.float64)
        weight = weight / weight.sum()
        center = float((weight * values).sum())
        # Four digits, as the constants of papers have. The least of them keeps a channel of one
        # value from dividing by 0.
        mean.append(round(center, 4))
        std.append(round(max(1e-4, float((weight * (values - center) ** 2).sum()) ** 0.5), 4))
    return tuple(mean), tuple(std)


def make_samples(x: Any, y: Any, classes: int | None) -> Samples:
    """Make samples from arrays or tensors.

    Args:
        x: uint8 images ([samples, height, width] or [samples, channels, height, width]) or numbers
            of any shape. Integers become int32, float16 stays, other floats become float32. A large
            array on disk stays there; see `data.rows`.
        y: integers, one class a sample or several, or float targets, of any shape.
        classes: 0 where a target is not one class; None to infer it from y: one integer a sample is
            a class.

    Raises:
        DataError: when the arrays cannot be used.
    """
    x, y = _open_input(x), _to_tensor(y, "y")
    if len(x) != len(y):
        raise DataError(
            f"there are {len(x)} inputs and {len(y)} targets; expected one target for each input"
        )
    return Samples(x, _convert_targets(y, classes))


def _match_dtypes(pool: Samples, held: Samples) -> tuple[Samples, Samples]:
    """Give both numbers of one type: integers become floats where the other has floats."""
    if pool.is_images != held.is_images:
        raise DataError(
            f"training inputs are {pool.x.dtype}, test inputs {held.x.dtype}; make both uint8 "
            "images, or both numbers"
        )
    # One fraction makes floats of what are integers in the other.
    if pool.x.dtype != held.x.dtype:
        pool, held = replace(pool, x=pool.x.float()), replace(held, x=held.x.float())
    if pool.y.is_floating_point() != held.y.is_floating_point():
        pool, held = replace(pool, y=pool.y.float()), replace(held, y=held.y.float())
    return pool, held


def _convert_targets(
    y: Shaped[Tensor, "samples *targets"], classes: int | None
) -> Shaped[Tensor, "samples *kept"]:
    """Convert targets: integers to int64, floats to float32."""
    if y.is_floating_point():
        if not classes:
            return y.float()
        if not bool((y == y.round()).all()):
            raise DataError(
                "y has fractions; expected whole numbers as classes, or classes=0 for regression"
            )
    # A column of one class a sample is a list of classes.
    one = y.squeeze(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    if one.ndim == 1:
        return y.float() if classes == 0 else one.long()
    if classes:
        raise DataError(
            f"y has shape {tuple(y.shape)}; expected one class for each sample: leave classes out "
            "where a target is "
            "several integers"
        )
    return y.long()


def _open_input(value: Any) -> Shaped[Tensor, "samples *features"] | StoredRows:
    """Convert one tensor of inputs; of a large array on disk, rows are converted when read."""
    if isinstance(value, StoredRows):
        return value
    if is_stored(value):
        return StoredRows.open(value, partial(_convert_input, name="x"))
    return _convert_input(value, "x")


def _convert_input(value: Any, name: str) -> Shaped[Tensor, "samples *features"]:
    """Convert one tensor of inputs to the type in which it is stored."""
    x = _to_tensor(value, name)
    if x.dtype == torch.bool:
        # Numbers: as an image its pixels would be black and nearly black.
        return x.float() if x.ndim > 2 else x.to(torch.uint8)
    if x.dtype == torch.uint8:
        # Samples x height x width x channels is the usual mistake with images.
        if x.ndim == 4 and x.shape[1] > 4 and x.shape[3] in (1, 3, 4):
            raise DataError(
                f"{name} has shape {tuple(x.shape)}, channels last; expected channels first: "
                f"{name}.transpose(0, 3, 1, 2)"
            )
        # Gray images get a channel axis.
        return x[:, None] if x.ndim == 3 else x
    if x.is_floating_point():
        return x if x.dtype == torch.float16 else x.float()
    largest = 0
    # `aminmax` refuses an empty tensor.
    if x.numel():
        low, high = map(int, torch.aminmax(x))
        largest = max(abs(low), abs(high))
    if largest > LARGEST:
        raise DataError(
            f"{name} has whole numbers up to {largest:,}; expected at most {LARGEST:,}, beyond "
            "which models do not see them exactly: subtract a start and scale them"
        )
    # Half of int64, and enough for LARGEST.
    return x.to(torch.int32)


def _name_parts(x: Any) -> dict[Any, Any]:
    """Return the parts of an input of several tensors, by name or number; none of one tensor."""
    if isinstance(x, Mapping):
        return {str(key): value for key, value in x.items()}
    # A tuple of numbers is one array, as a list is.
    several = isinstance(x, tuple) and bool(x) and all(getattr(one, "ndim", 0) for one in x)
    return dict(enumerate(x)) if several else {}


def _order_parts(x: Any, parts: Sequence[InputPart]) -> Any:
    """Return inputs of the same names in the order of the parts; other inputs as they are.

    The constants of images, and the columns of a packed input, are found by their place.
    """
    names = [part.name for part in parts]
    if not isinstance(x, Mapping) or set(map(str, x)) != set(names):
        return x
    return select_keys(_name_parts(x), names)


def _warn_about_parts(x: Any) -> None:
    """Warn where an input may mean something else than it is taken for."""
    columns = column_names(x)
    named = {f"x[{key!r}]": value for key, value in _name_parts(x).items()}
    for name, value in (named or {"x": x}).items():
        kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
        # The first rows show what an array on disk is.
        seen = value[:_SEEN] if is_stored(value) else value
        warn_about_inputs(_to_tensor(seen, name), name, kind, columns)


def _convert_inputs(
    x: Any, normalize: str, constants: Mapping[int, Constants] | None = None
) -> tuple[Any, tuple[InputPart, ...], Mapping[int, Constants]]:
    """Convert inputs to one tensor: several are packed as numbers, and their images normalized.

    Args:
        x: an array; or a tuple or table of arrays.
        normalize: of images: "half", "standard" or "none".
        constants: mean and deviation of the channels of each part that is images; found here when
            not given.
    """
    named = _name_parts(x)
    if not named:
        return x, (), {}
    found = dict(constants or {})
    tensors, parts = [], []
    for place, (key, value) in enumerate(named.items()):
        part = _convert_input(value, f"x[{key!r}]")
        whole, mean, std = not part.is_floating_point(), (), ()
        if part.dtype == torch.uint8 and part.ndim == 4:
            # Any targets do: only the images are measured.
            pixels = Samples(part, part[:, 0, 0, 0])
            mean, std = found.setdefault(
                place, Source("x", pixels, pixels, 0).channel_constants(normalize)
            )
            part, whole = part.float() / 255, False
            if mean:
                # Of shape channels x 1 x 1.
                center = torch.tensor(mean).reshape(-1, 1, 1)
                part = (part - center) / torch.tensor(std).reshape(-1, 1, 1)
        # Parts without a name are numbered, and become positional arguments.
        name = key if isinstance(key, str) else ""
        parts.append(InputPart(name, tuple(part.shape[1:]), whole, mean, std))
        # All parts travel in one tensor of float32, which holds whole numbers up to LARGEST
        # exactly.
        tensors.append(part.reshape(len(part), -1).float())
    lengths = list(map(len, tensors))
    if len(set(lengths)) > 1:
        raise DataError(
            f"the parts of x hold {lengths} samples; expected as many in each: an input is one of "
            "each"
        )
    return torch.cat(tensors, 1), tuple(parts), found


def pack_inputs(x: Any, parts: Sequence[InputPart]) -> Shaped[Tensor, "samples *features"]:
    """Return inputs as those of a source with the same parts were read: whole where there are none.

    Args:
        x: an array; or a tuple or table of arrays, of which images of bytes are normalized as
            there.
        parts: of the source.

    Raises:
        DataError: when the inputs are not these parts.
    """
    if not parts:
        return _convert_input(x, "x")
    if isinstance(x, Mapping) and all(part.name for part in parts):
        # In the order of training, whatever the order given; what training had not is left.
        named = _name_parts(x)
        for part in parts:
            if part.name not in named:
                raise DataError(f"x has no {part.name!r}; expected {describe_parts(parts)}")
        x = select_keys(named, [part.name for part in parts])
    constants = {place: (part.mean, part.std) for place, part in enumerate(parts)}
    flat, found, _ = _convert_inputs(x, "none", constants)
    if not found:
        return _convert_input(flat, "x")
    if list(map(_find_form, found)) != list(map(_find_form, parts)):
        raise DataError(f"x is {describe_parts(found)}; expected {describe_parts(parts)}")
    return flat


def _find_form(part: InputPart) -> tuple[tuple[int, ...], bool]:
    # Without the name, which a tuple of inputs does not give, and the constants of an image.
    return part.shape, part.whole


def describe_parts(parts: Sequence[InputPart]) -> str:
    """Describe the parts of an input."""
    texts = []
    for part in parts:
        name = f"{part.name}: " if part.name else ""
        shape = " x ".join(map(str, part.shape)) or "1"
        numbers = "whole numbers" if part.whole else "numbers"
        texts.append(f"{name}{shape} {numbers}")
    return " + ".join(texts) or "one tensor"


def column_names(x: Any) -> tuple[str, ...]:
    """The names of the columns of a table of pandas, polars or arrow."""
    # In arrow `columns` are the data, so that its names come first.
    names = getattr(x, "column_names", getattr(x, "columns", ()))
    return tuple(map(str, names)) if len(getattr(x, "shape", ())) == 2 else ()


def _to_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_complex() or value.layout != torch.strided:
            found = str(value.dtype if value.is_complex() else value.layout).removeprefix("torch.")
            raise DataError(
                f"{name} is {found}; expected real numbers, all of them there: torch.view_as_real "
                "or .to_dense() makes them"
            )
        tensor = torch.atleast_1d(value.detach().cpu())
        # These two types say what numbers are: a mask, or bytes of an image.
        kept = (torch.bool, torch.uint8)
        return tensor if tensor.is_floating_point() or tensor.dtype in kept else tensor.long()
    if hasattr(value, "toarray"):
        raise DataError(f"{name} is a sparse {type(value).__name__}; give {name}.toarray()")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError(
            f"{name} is masked in {int(np.ma.count_masked(value))} places; fill or drop them"
        )
    array = to_array(value, name)
    if array.dtype.kind not in "buif":
        advice = ": coterie.from_table reads tables with text" if column_names(value) else ""
        raise DataError(f"{name} has type {array.dtype}; expected numbers{advice}")
    # Beyond this, int64 would wrap around to negative numbers.
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise DataError(
            f"{name} has whole numbers up to {int(array.max()):,}; expected at most {LARGEST:,}"
        )
    # PyTorch takes the machine's byte order only.
    kind = array.dtype.newbyteorder("=")
    if kind.kind in "ui" and kind != np.uint8:
        kind = np.dtype(np.int64)
    elif kind.itemsize > 8:
        kind = np.dtype(np.float64)  # torch has no longer floats
    array = np.ascontiguousarray(array, dtype=kind)
    # PyTorch warns about memory that may not be written. ascontiguousarray also ends negative
    # strides, which it refuses.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
