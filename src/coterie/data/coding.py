"""Clients and classes as numbers: each id is a text of its own, and each class a value that occurs.

What cannot be decided from the values alone, such as whether two floats are classes, is asked.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from coterie._util.mappings import number_items
from coterie.data.guesses import warn_about_lookalikes, warn_about_targets
from coterie.errors import ConfigError, DataError, require

# More are an id, or numbers to be predicted: an entry for each would make a model of them alone.
MOST = 1000
"""The most classes that whole numbers are taken for; and categories with an entry each."""

WHOLE = re.compile(r"-?(0|[1-9]\d*)")
"""A whole number, as Python writes it: no sign or zero is lost when it is read."""

EMPTY = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null", "<NA>", "None",
)  # fmt: skip
"""Words that programs write where there is no value, as pandas reads them."""

# Of at most so many whole numbers as floats it is said that they are no classes. Digits are ten.
_FEW_WHOLE = 10

# Beyond it float64 skips whole numbers.
_EXACT = 1 << 53


def code_targets(
    targets: Sequence[Any],
    classes: int | None = None,
    names: Sequence[Any] = (),
    what: str = "y",
    most: int = MOST,
) -> tuple[list[Any], tuple[str, ...], int]:
    """Return targets with classes as numbers from 0, the name of each class, and their number.

    Args:
        targets: arrays that share their classes, such as those for training and for testing.
        classes: number of classes: the labels are whole numbers below it; 0 for a regression. When
            not given, the labels that occur are the classes.
        names: all labels in order: text, true and false, or whole numbers. Other names are those of
            the numbers from 0.
        what: the targets, as errors name them.
        most: so many different whole numbers are taken for classes without a question.

    Returns:
        The targets; the names, empty where classes are the numbers from 0; the number of classes, 0
        where a target is not one class.

    Raises:
        ConfigError: when names and the number of classes contradict each other.
        DataError: when labels are missing or not among the names, or it must be asked what they
            are.

    Example:
        >>> [found], names, classes = code_targets([[20, 10, 20]])
        >>> found.tolist(), names, classes
        ([1, 0, 1], ('10', '20'), 2)
    """
    # Names are compared as text: a study file may have 0 and 1, or true and false.
    names = tuple(map(str, names))
    require(not (names and classes == 0), "class_names", names, "none for a regression")
    coded, known, number = _code_targets(targets, classes, names, what, most)
    # Only a regression: classes are whole numbers, however they are spread.
    if not number and not known:
        first = coded[0]
        warn_about_targets(first if isinstance(first, Tensor) else to_array(first, what), what)
    return coded, known, number


def _code_targets(
    targets: Sequence[Any], classes: int | None, names: tuple[str, ...], what: str, most: int
) -> tuple[list[Any], tuple[str, ...], int]:
    arrays = _to_arrays(targets, what)
    single = all(map(_has_one_value_each, arrays))
    if any(map(_has_text, arrays)):
        if classes == 0 and single:
            raise DataError(f"{what} is text; expected numbers, as classes = 0 is a regression")
        # Text is coded for targets of any shape; only one label a sample makes classes of them.
        coded, known = encode_labels(targets, names, what)
        if classes is None and not names and single:
            _warn_about_constant(np.array(known, object), coded[0], what)
        return coded, known, _check_number(known, classes) if single else 0
    if not single:
        return list(targets), names, classes or 0
    # From here on each target is one number.
    values = list(map(_to_values, arrays))
    # The classes are those of the first; others may lack some, and have no further ones.
    found = np.unique(values[0] if len(values[0]) else np.concatenate(values))
    kinds = {one.dtype.kind for one in values}
    floats, truths = "f" in kinds, kinds == {"b"}
    if classes is None and not names:
        _warn_about_constant(found, values[0], what)
        if floats:
            _ask_about_floats(found, sum(map(len, values)), what)
            return list(targets), (), 0
        # False and true are 0 and 1, also where only one of them occurs.
        if truths:
            return list(targets), (), 2
        _ask_about_numbers(found, what, most)
        # An empty pool has one class, so that it is no regression.
        if np.array_equal(found, np.arange(len(found))):
            return list(targets), (), max(1, len(found))
        _warn_about_negative(found, what)
        # The labels themselves name the classes where these are not the numbers from 0.
        names = tuple(map(str, found.tolist()))
    if not names:
        return list(targets), (), classes or 0
    # Whole numbers as floats are what pandas makes of a column of classes with gaps.
    if floats and not np.array_equal(found, found.round()):
        raise DataError(f"{what} has fractions; expected whole numbers, as class_names are given")
    number = _check_number(names, classes)
    return _place_labels(values, names, what), names, number


def _to_arrays(targets: Sequence[Any], what: str) -> list[np.ndarray | Tensor]:
    """Return targets as arrays; tensors stay, as they may be on a device."""
    arrays = []
    for one in targets:
        arrays.append(one if isinstance(one, Tensor) else to_array(one, what))
    return arrays


def _has_one_value_each(array: np.ndarray | Tensor) -> bool:
    # A second axis of one entry is a column of a table, and one value for each sample all the same.
    return array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)


def _check_number(names: Sequence[str], classes: int | None) -> int:
    """Return the number of names, which must be that of the classes."""
    if classes is not None:
        require(
            len(names) == classes, "class_names", tuple(names), f"{classes}, one for each class"
        )
    return len(names)


def _to_values(array: np.ndarray | Tensor) -> np.ndarray:
    """Return one label or number for each sample."""
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (array.double() if array.is_floating_point() else array).numpy()
    return array.reshape(-1)


def _warn_about_constant(found: np.ndarray, values: np.ndarray, what: str) -> None:
    if len(found) == 1 and len(values) > 1:
        warnings.warn(
            f"{what} is {found[0]!s} in all samples, which leaves nothing to learn; say which "
            "classes could occur (classes = 2, or class_names), or classes = 0 for a regression",
            stacklevel=4,
        )


def _warn_about_negative(found: np.ndarray, what: str) -> None:
    """Warn of a label below 0 next to classes from 0: it is written where nothing is known."""
    others = found[found >= 0]
    if found[0] < 0 and len(others) > 1 and np.array_equal(others, np.arange(len(others))):
        warnings.warn(
            f"{what} has the label {found[0]}, which is a class of its own here; if it stands for "
            "an unknown one, leave those samples out",
            stacklevel=5,
        )


def _ask_about_floats(found: np.ndarray, number: int, what: str) -> None:
    """Refuse floats of two values, which are hardly a regression's; warn of a few whole ones.

    Raises:
        DataError: which asks what they are.
    """
    if not np.isfinite(found).all():
        return
    # Of a few samples of a regression, too, all may be whole.
    repeated = number >= 5 * len(found)
    if repeated and 2 < len(found) <= _FEW_WHOLE and np.array_equal(found, found.round()):
        words = [f"{value:.0f}" for value in found]
        listed = ", ".join(words)
        advice = f"class_names = {words}".replace("'", '"')
        if np.array_equal(found, np.arange(len(found))):
            advice = f"classes = {len(found)}"
        warnings.warn(
            f"{what} has the numbers {listed} alone, as floats: they are taken for a regression, "
            f"as classes = 0 says without this line; for classes say {advice}",
            stacklevel=5,
        )
    if len(found) != 2:
        return
    advice = "make them text for classes"
    if np.array_equal(found, [0, 1]):
        advice = "classes = 2 for classes"
    elif np.array_equal(found, found.round()):
        advice = f'class_names = ["{found[0]:.0f}", "{found[1]:.0f}"] for classes'
    raise DataError(
        f"{what} has the two numbers {found[0].item()} and {found[1].item()} alone, as floats; say "
        f"what they are: {advice}, or classes = 0 for a regression"
    )


def _ask_about_numbers(found: np.ndarray, what: str, most: int) -> None:
    """Refuse whole numbers of too many values.

    Raises:
        DataError: which asks what they are.
    """
    # Tables set a lower limit: their whole numbers are often counts.
    if len(found) <= most:
        return
    advice = "class_names = [...] or text for classes"
    if found[0] >= 0:
        advice = f"classes = {int(found[-1]) + 1} for classes from 0"
    raise DataError(
        f"{what} has {len(found):,} different whole numbers, from {found[0]:,} to {found[-1]:,}: "
        f"as classes these are too many to guess; say what they are: classes = 0 for a regression, "
        f"{advice}"
    )


def _place_labels(
    values: Sequence[np.ndarray], names: Sequence[str], what: str
) -> list[Int[np.ndarray, " samples"]]:
    """Return the place of each label among the names.

    Which labels names mean is decided by the names alone, so that it is the same in every file:
    true and false are 1 and 0, whole numbers themselves, and other names those of 0, 1, ...
    """
    # Names that are truths stand for labels that are booleans, or 0 and 1.
    words = {"false": 0, "true": 1}
    folded = list(map(str.casefold, names))
    if set(folded) <= set(words):
        place_of = {words[name]: place for place, name in enumerate(folded)}
    elif any(map(WHOLE.fullmatch, names)):
        place_of = {}
        for place, name in enumerate(names):
            if WHOLE.fullmatch(name):
                place_of[int(name)] = place
    else:
        place_of = number_items(range(len(names)))
    coded = []
    for own in values:
        # Each distinct label is looked up once, not each sample.
        labels, index = np.unique(own, return_inverse=True)
        places = [place_of.get(int(label), -1) for label in labels]
        if -1 in places:
            label, largest = labels[places.index(-1)].item(), int(labels.max())
            if list(place_of) == list(range(len(names))) and labels.min() >= 0:
                raise ConfigError(
                    f"class_names is {tuple(names)!r}, and {what} has the label {label}; expected "
                    f"{largest + 1} names, one for each class from 0, or the labels themselves: "
                    f'class_names = ["{label}", ...]'
                )
            raise DataError(
                f"{what} has the label {label}; expected one of {', '.join(names[:20])}: name all "
                "labels, as they are written, in class_names"
            )
        # Without any label there is no place: [0] keeps the lookup legal.
        coded.append(np.array(places or [0], np.int64)[index.reshape(-1)])
    return coded


def encode_labels(
    targets: Sequence[Any], names: Sequence[str] = (), what: str = "y"
) -> tuple[list[Any], tuple[str, ...]]:
    """Return targets with numbers in place of text, and the name of each number.

    Args:
        targets: arrays that share their labels, such as those for training and for testing.
        names: the labels in order; all that occur, sorted, when not given (the categories of
            categorical data).
        what: the targets, as errors name them.

    Raises:
        DataError: when labels are missing, or not among `names`.

    Example:
        >>> [found], names = encode_labels([["b", "a", "b"]])
        >>> found.tolist(), names
        ([1, 0, 1], ('a', 'b'))
    """
    arrays = _to_arrays(targets, what)
    if not any(map(_has_text, arrays)):
        return list(targets), tuple(names)
    arrays = list(map(np.asarray, arrays))
    texts = [one.reshape(-1).tolist() for one in arrays]
    # Before labels are sorted, which fails where text meets None or numbers.
    for flat in texts:
        for place, label in enumerate(flat):
            if isinstance(label, str):
                continue
            found = f"{label!r}, which is no text, among labels that are"
            # NaN is unequal to itself.
            if label is None or label != label:
                found = "no label"
            raise DataError(
                f"{what} has {found} in sample {place}; expected a label for each sample: fill or "
                "drop it"
            )
    valid = tuple(names)
    if not valid:
        valid = _find_labels(targets, texts)
        _warn_about_untrained(valid, texts, what)
        warn_about_lookalikes(valid, f"{what}: the labels")
        words = [label for label in valid if label.strip() in EMPTY]
        if words:
            warnings.warn(
                f"{what} has the label {words[0]!r}, which programs write where there is none, and "
                "which is a class of its own here; drop those samples, or name all labels in "
                "class_names",
                stacklevel=4,
            )
    code_of = number_items(valid)
    coded = []
    for flat, array in zip(texts, arrays, strict=True):
        codes = [code_of.get(label, -1) for label in flat]
        if -1 in codes:
            raise DataError(
                f"{what} has the label {flat[codes.index(-1)]!r}; expected one of class_names: "
                f"{', '.join(valid[:20])}"
            )
        coded.append(np.array(codes, np.int64).reshape(array.shape))
    return coded, valid


def _has_text(values: np.ndarray | Tensor) -> bool:
    # Text of one length, objects, and NumPy's text of any length.
    return isinstance(values, np.ndarray) and values.dtype.kind in "UOT" and values.size > 0


def _find_labels(targets: Sequence[Any], texts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the categories of the first categorical targets, or all labels, sorted."""
    for one in targets:
        categories = getattr(getattr(one, "dtype", None), "categories", None)
        if categories is not None:
            return tuple(map(str, categories))
    # Sorted: the classes must not depend on the order of the rows.
    return tuple(sorted(set().union(*texts)))


def _warn_about_untrained(labels: Sequence[str], texts: Sequence[Sequence[str]], what: str) -> None:
    """Warn of labels that the first targets, those for training, do not have."""
    trained = set(texts[0])
    untrained = set().union(*texts[1:]) - trained
    alone = [label for label in labels if label in untrained]
    if trained and alone:
        shown = ", ".join(map(repr, alone[:5])) + ", ..." * (len(alone) > 5)
        warnings.warn(
            f"{what} is {shown} in the test data alone: a class that no client trains on; correct "
            "the data, or name all labels in class_names",
            stacklevel=4,
        )


def number_clients(
    clients: Any, samples: int, clusters: Sequence[int] | Mapping[Any, int] | None = None
) -> tuple[dict[str, Int[Tensor, " samples"]], tuple[str, ...]]:
    """Number the clients in sorted order; return the columns of samples, and their names.

    Clients whose values are 0 to n - 1 have no names. Numbers of any size, and texts with zeros or
    spaces at an end, are kept apart.

    Raises:
        DataError: when a sample has no client, or values cannot be distinguished.

    Example:
        >>> number_clients(["1.1", "1.10"], 2)[1]
        ('1.1', '1.10')
    """
    # NumPy would turn None among words into a word, and cut or round other values.
    owners = np.asarray(clients, object if isinstance(clients, list | tuple) else None)
    if owners.ndim != 1 or len(owners) != samples:
        raise DataError(
            f"clients has shape {owners.shape}; expected one value for each of the {samples} "
            "samples"
        )
    if owners.dtype.kind in "iu":
        values, owner = np.unique(owners, return_inverse=True)
        found, owner = values.tolist(), owner.astype(np.int64)
    else:
        # As objects of Python, whose whole numbers have any size and whose text keeps its ends.
        found, owner = _sort_clients(owners.tolist())
    # True equals 1, and is another id as text.
    truths = isinstance(found[0], bool) if found else False
    counted = found == list(range(len(found))) and not truths
    names = () if counted else tuple(map(str, found))
    warn_about_lookalikes(names, "clients")
    columns = {"client": torch.from_numpy(owner)}
    if clusters is None:
        return columns, names
    if isinstance(clusters, Mapping):
        by_client, clusters = clusters, []
        for name in found:
            # The keys of a table in a study file are always text.
            key = name if name in by_client else str(name)
            if key not in by_client:
                raise DataError(
                    f"clusters has nothing for client {name!r}; give the cluster of every client"
                )
            clusters.append(by_client[key])
    elif names and isinstance(found[0], str):
        # A list could follow the order in which the clients occur, or that of their names.
        occurring = list(dict.fromkeys(owner.tolist()))
        if occurring != sorted(occurring):
            raise DataError(
                f"clusters is a list, and clients occur as {names[occurring[0]]}, "
                f"{names[occurring[1]]}, ..., not in the order of their names; give the cluster of "
                f"each by its name, such as {{{names[0]!r}: 0, ...}}"
            )
    if len(clusters) != len(found):
        raise DataError(
            f"clusters has {len(clusters)} values; expected one for each of the {len(found)} "
            "clients"
        )
    columns["cluster"] = torch.as_tensor(np.asarray(clusters), dtype=torch.int64)[columns["client"]]
    return columns, names


def _sort_clients(given: list[Any]) -> tuple[list[Any], Int[np.ndarray, " samples"]]:
    """Return the distinct clients, sorted, and the place of each sample's among them."""
    values, kinds = [], set()
    for place, one in enumerate(given):
        if isinstance(one, np.generic | Tensor):
            one = one.item()
        # NaN is unequal to itself.
        if one is None or one != one or not str(one).strip():
            raise DataError(f"clients has no value for sample {place}; fill it, or drop the sample")
        values.append(one)
        # A subclass of str, such as NumPy's, is text.
        kinds.add(str if isinstance(one, str) else type(one))
    if kinds == {bytes}:
        raise DataError(
            f"clients are bytes, such as {values[0]!r}; decode them: {values[0]!r}.decode()"
        )
    if len(kinds) > 1 and not kinds <= {int, float}:
        mixed = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"clients mixes {mixed}; expected values that can be sorted: make all text")
    if float in kinds:
        # 1 and 1.0 are one client, where some ids were read as floats.
        values = list(map(float, values))
        for one in values:
            if abs(one) >= _EXACT:
                raise DataError(
                    f"clients has the float {one!r}, at which several whole numbers are one; give "
                    "the ids as text"
                )
    try:
        found = sorted(set(values))
    except TypeError:
        raise DataError(
            f"clients are values of type {kinds.pop().__name__}; expected values that can be "
            "sorted: make all text"
        ) from None
    code_of = number_items(found)
    return found, np.array([code_of[one] for one in values], np.int64)


def match_clients(
    clients: Any, samples: int, known: Int[Tensor, " training"], names: Sequence[str]
) -> Int[Tensor, " samples"]:
    """Return the numbers of the clients of test samples, by their names.

    Args:
        clients: the client of each test sample.
        samples: number of test samples.
        known: the number of the client of each training sample.
        names: of the clients by number; empty where clients are numbers.

    Raises:
        DataError: when a client has test samples and no training samples, or the other way round.
    """
    columns, given = number_clients(clients, samples)
    held = columns["client"]
    # Clients without names are the numbers from 0.
    found = given or tuple(map(str, held.unique().tolist()))
    known_names = tuple(names) or tuple(map(str, known.unique().tolist()))
    number_of = number_items(known_names)
    for name in found:
        if name not in number_of:
            raise DataError(
                f"client {name!r} has test samples and no training samples; expected test samples "
                f"of {', '.join(known_names[:10])}: leave the others out"
            )
    # A set: a search in the tuple for each of 100,000 clients takes close to a minute.
    tested = frozenset(found)
    for name in known_names:
        if name not in tested:
            raise DataError(
                f"client {name!r} has training samples and no test samples; give it one at least, "
                "or leave it out"
            )
    return torch.tensor([number_of[name] for name in found])[held]


def write_category(value: Any) -> str:
    """Return a category as text: 1 for 1.0 and for 1, true for True."""
    # Before numbers: True is an int as well, and would become 1.
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def to_array(value: Any, name: str) -> np.ndarray:
    """Convert a value to an array; objects that are numbers become numbers."""
    try:
        array = np.asarray(value)
        # NumPy would make words of None and NaN among words.
        if array.dtype.kind == "U" and isinstance(value, list | tuple):
            array = np.asarray(value, object)
        if (
            array.dtype.kind == "O"
            and array.size
            and not any(isinstance(one, str) for one in array.flat)
        ):
            array = np.asarray(array.tolist())
    except ValueError as error:
        raise DataError(
            f"{name} has samples of different shapes ({error}); make them equal, such as by padding"
        ) from None
    return array
