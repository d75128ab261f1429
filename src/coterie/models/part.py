"""Part: which columns of the clients' rows are shared, which stay at home, and which are compared.

A row is always whole where a client is. What stays at home never leaves it: messages hold the
shared columns alone, and a merge leaves the client's own values in the others.
"""

import difflib
import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from coterie.errors import ConfigError
from coterie.models.layout import Layout, Slot


@dataclass(frozen=True)
class ColumnSet:
    """Some of the columns of rows.

    Args:
        ranges: where they lie: (start, stop), ascending and apart from each other.
        size: how many columns a row has.

    Example:
        >>> columns = ColumnSet(((0, 1), (2, 4)), 5)
        >>> columns.num_columns, columns.select_from(torch.arange(5)[None])
        (3, tensor([[0, 2, 3]]))
    """

    ranges: tuple[tuple[int, int], ...]
    size: int

    @staticmethod
    def from_mask(mask: Bool[Tensor, " params"]) -> "ColumnSet":
        """Return the columns for which a mask is true."""
        # A zero on both sides: the differences are not 0 at starts and stops in turn.
        zero = mask.new_zeros(1)
        edges = torch.cat([zero, mask, zero]).int().diff().nonzero().flatten().tolist()
        return ColumnSet(tuple(zip(edges[::2], edges[1::2], strict=True)), len(mask))

    @property
    def num_columns(self) -> int:
        """How many they are."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def mask(self) -> Bool[Tensor, " params"]:
        """Whether each column of a row is one of them."""
        out = torch.zeros(self.size, dtype=torch.bool)
        for start, stop in self.ranges:
            out[start:stop] = True
        return out

    def select_from(self, rows: Shaped[Tensor, "rows params"]) -> Shaped[Tensor, "rows columns"]:
        """Return these columns of rows; a view where they lie side by side."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return rows[:, start:stop]
        # Without any columns there is one empty part: `torch.cat` takes no empty list.
        return torch.cat(
            [rows[:, start:stop] for start, stop in self.ranges] or [rows[:, :0]], dim=1
        )

    def replace_in(
        self, rows: Shaped[Tensor, "rows params"], values: Shaped[Tensor, "rows columns"]
    ) -> Shaped[Tensor, "rows params"]:
        """Return a copy of rows with other values in these columns."""
        return self._fill_rows(rows.clone(), values)

    def expand_to_rows(
        self, values: Shaped[Tensor, "rows columns"]
    ) -> Shaped[Tensor, "rows params"]:
        """Return rows with these values, and 0 in all other columns."""
        return self._fill_rows(values.new_zeros(len(values), self.size), values)

    def _fill_rows(self, rows: Tensor, values: Tensor) -> Tensor:
        # The values of all ranges lie side by side.
        place = 0
        for start, stop in self.ranges:
            rows[:, start:stop] = values[:, place : place + stop - start]
            place += stop - start
        return rows


@dataclass(frozen=True)
class ParameterSharing:
    """What clients share of their rows.

    Args:
        shared: the columns that messages hold.
        local: all others.
        trained: the shared ones that are trained.
        compared: those of `trained` in which models and updates are compared.
    """

    shared: ColumnSet
    local: ColumnSet
    trained: ColumnSet
    compared: ColumnSet

    def list_slots(self, layout: Layout, *, packed: bool = False) -> tuple[Slot, ...]:
        """Return the tensors that are shared.

        Args:
            layout: how models lie in rows.
            packed: whether their positions are those among the shared columns, side by side;
                otherwise those in a whole row.
        """
        return _list_slots(layout, self.shared.mask, packed)

    def list_compared_slots(self, layout: Layout) -> tuple[Slot, ...]:
        """Return the tensors in which models are compared, with their positions in a whole row."""
        return _list_slots(layout, self.compared.mask, False)

    @property
    def shares_all(self) -> bool:
        """Whether everything is shared."""
        # The usual case, in which callers leave out all copies of columns.
        return not self.local.ranges

    @staticmethod
    def from_patterns(
        layout: Layout,
        shared: Sequence[str] = (),
        similarity_on: Sequence[str] = (),
        home: Sequence[str] = (),
        owner: str = "the method",
    ) -> "ParameterSharing":
        """Return the part that settings and a method choose.

        Args:
            layout: how models lie in rows.
            shared: patterns of what is shared; see `match_patterns`.
            similarity_on: patterns of what is compared, of that.
            home: patterns of what the method keeps at home, whatever else is shared.
            owner: how messages call the method.

        Raises:
            ConfigError: when a pattern matches nothing, or nothing is left to share or to compare.
        """
        if not (shared or similarity_on or home):  # the usual case, without a pass over a row
            everything = ColumnSet(((0, layout.size),), layout.size)
            trained = ColumnSet(((0, layout.trainable),), layout.size)
            return ParameterSharing(everything, ColumnSet((), layout.size), trained, trained)
        mask = match_patterns(layout, shared, "shared")
        if home:
            mask = mask & ~match_patterns(layout, home, f"what {owner} keeps at home")
        if not bool(mask.any()):
            kept = ""
            if home:
                kept = f", and {owner} keeps {', '.join(home)} at home"
            raise ConfigError(
                f"nothing is left to share: shared is {list(shared)}{kept}; share a layer at least"
            )
        # Running statistics are shared, but not compared: they lie behind the trained entries.
        trained = mask & (torch.arange(layout.size) < layout.trainable)
        compared = trained & match_patterns(layout, similarity_on, "similarity_on")
        if similarity_on and not bool(compared.any()):
            raise ConfigError(
                f"similarity_on is {list(similarity_on)}, which names nothing that is trained and "
                "shared; similarities compare what peers receive"
            )
        return ParameterSharing(*map(ColumnSet.from_mask, (mask, ~mask, trained, compared)))

    def keep_local(
        self, before: Shaped[Tensor, "clients params"], merged: Shaped[Tensor, "clients params"]
    ) -> Shaped[Tensor, "clients params"]:
        """Return merged rows with what stays at home as it was before."""
        if self.shares_all:
            return merged
        return self.local.replace_in(merged, self.local.select_from(before))


def _list_slots(layout: Layout, inside: Bool[Tensor, " params"], packed: bool) -> tuple[Slot, ...]:
    found, place = [], 0
    for slot in layout.slots:
        size = slot.stop - slot.start
        # Patterns choose whole tensors: none is inside in part.
        if not bool(inside[slot.start : slot.stop].all()):
            continue
        start = place if packed else slot.start
        found.append(Slot(slot.name, slot.shape, start, start + size))
        place += size
    return tuple(found)


def match_patterns(layout: Layout, patterns: Sequence[str], what: str) -> Bool[Tensor, " params"]:
    """Return which entries of a row some patterns choose.

    A pattern is the name of a tensor or of a module as the original module calls it, with `*`,
    `?` and `[...]` as in file names; a module stands for all of its tensors. `!` before a pattern
    takes out what it matches. Where all patterns take out, the rest is chosen; where there are
    none, everything is.

    Args:
        layout: how the tensors lie in a row.
        patterns: in any order.
        what: how messages call them.

    Raises:
        ConfigError: when a pattern matches nothing, with names that are near.
    """
    # What takes out comes last, whatever the order given.
    ordered = sorted(patterns, key=lambda pattern: pattern.startswith("!"))
    # True without any patterns, too: then nothing is taken out, and everything is chosen.
    takes_out_only = all(pattern.startswith("!") for pattern in patterns)
    names, mask = layout.original_names, torch.full((layout.size,), takes_out_only)
    for pattern in ordered:
        plain = pattern.removeprefix("!")
        slots = [slot for slot in layout.slots if _matches_pattern(names[slot.name], plain)]
        if not slots:
            raise ConfigError(_describe_no_match(layout, pattern, what))
        for slot in slots:
            mask[slot.start : slot.stop] = not pattern.startswith("!")
    return mask


def _matches_pattern(names: Sequence[str], pattern: str) -> bool:
    # A module's path stands for its tensors.
    pairs = itertools.product(names, (pattern, f"{pattern}.*"))
    return any(fnmatch.fnmatchcase(name, wanted) for name, wanted in pairs)


def _describe_no_match(layout: Layout, pattern: str, what: str) -> str:
    """Say that a pattern matches nothing."""
    plain = pattern.removeprefix("!")
    if any(_matches_pattern([name], plain) for name in layout.frozen):
        why = "which all clients have and nobody sends"
        return f"{what}: {pattern!r} matches frozen weights alone, {why}"
    tensors = list(itertools.chain.from_iterable(layout.original_names.values()))
    # Every module on the way to a tensor: patterns may name any of them.
    modules = set()
    for name in tensors:
        parts = name.split(".")
        modules |= {".".join(parts[:end]) for end in range(1, len(parts))}
    near = difflib.get_close_matches(
        plain.removesuffix(".*"), [*sorted(modules), *tensors], n=3, cutoff=0.4
    )
    listed = ", ".join(near or tensors[:6])
    if not near and len(tensors) > 6:
        listed += ", ..."
    listed = f"{'near names are' if near else 'it has'} {listed}"
    return f"{what}: {pattern!r} matches no tensor of the model; {listed}"
