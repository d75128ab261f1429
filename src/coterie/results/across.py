"""Compare the methods of one study with those of another, paired by seed and client."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from coterie._util.mappings import drop_keys, flatten
from coterie.functional.metrics import Metric
from coterie.results import pairs
from coterie.results.pairs import Pair
from coterie.results.selection import collect_seeds, select_compared_runs, select_seeds
from coterie.results.stored_runs import (
    StoredRun,
    collect_metrics,
    group_by_label,
    load_cluster_names,
    main_metric,
)
from coterie.results.summary import compare_methods

# Settings of how results are stored and made, which do not change them.
_NO_DIFFERENCE = ("checkpoint_seconds", "check", "record_similarities", "block", "cuda_graphs")
# Names, seeds and methods, which are compared apart from the settings.
_OF_STUDIES = ("name", "description", "paper", "seeds", "methods")
_MOST_DIFFERENCES = 3  # settings that a name or a note lists; more are counted

_Difference = tuple[str, Any, Any]  # the path of a setting, and its values in two studies


@dataclass(frozen=True)
class CrossComparison:
    """The methods of two studies, compared in pairs.

    Args:
        studies: the names of the two.
        metric: by which they are compared; None where nothing can be.
        pairs: of a method of the first and one of the second, corrected for their number.
        notes: what differs between the studies, and what stands in the way.
    """

    studies: tuple[str, str]
    metric: Metric | None
    pairs: Sequence[Pair]
    notes: Sequence[str]

    @property
    def verdicts(self) -> list[str]:
        """The notes, and what is established of each pair."""
        lines = list(self.notes)
        if self.metric is not None:
            for pair in self.pairs:
                lines.append(pairs.describe_pair(pair, self.metric))
        return lines


def compare_across(
    first: tuple[str, Sequence[StoredRun]],
    second: tuple[str, Sequence[StoredRun]],
    *,
    metric: str | None = None,
    cluster: str = "all",
    baseline: str | None = None,
    share: float = 0.0,
) -> CrossComparison:
    """Compare each method of a study with the method of that label in another.

    Studies without a label in common are compared in all pairs of a method of one and a method of
    the other.

    Args:
        first: a name for a study, and its runs.
        second: another.
        metric: by which; the one by which the methods of a study are compared when None.
        cluster: over which clients; see `pairs.select_pairs`.
        baseline: a label: compare only the methods of the two studies that have it.
        share: see `pairs.widen_intervals`.
    """
    names = first[0], second[0]
    groups = [select_compared_runs(first[1]), select_compared_runs(second[1])]
    seeds = collect_seeds(groups[0]) & collect_seeds(groups[1])
    groups = [select_seeds(group, seeds) for group in groups]
    if obstacle := _find_obstacle(names, groups):
        return CrossComparison(names, None, (), (obstacle,))
    labels = [list(group_by_label(group)) for group in groups]
    name = metric or main_metric([*groups[0], *groups[1]])
    # Which metrics are computed is no difference where both have the one that is compared.
    ignored = _NO_DIFFERENCE
    if _has_metric(groups[0], name) and _has_metric(groups[1], name):
        ignored = (*ignored, "metrics", "extra_metrics")
    differences = _list_differences(groups[0][0].config, groups[1][0].config, ignored)
    own_settings = set()
    for run in chain.from_iterable(groups):
        own_settings |= set(run.method_settings)
    own_settings -= {"kind", "label", "paper"}
    titles = _name_studies(names, differences, own_settings)
    shared = []
    for label in labels[0]:
        if label in labels[1] and baseline in (None, label):
            shared.append(label)
    changed = dict[str, list[_Difference]]()
    for label in shared:
        one, other = _find_method(groups[0], label), _find_method(groups[1], label)
        changed[label] = _list_differences(one, other, ignored)
    # Methods of both studies may have one label: what is behind it keeps them apart.
    called: list[dict[str, str]] = []
    for place in (0, 1):
        behind = dict.fromkeys(labels[place], titles[place])
        # Studies that are equal but for a method: that one is named by its own settings.
        if not differences:
            for label, own_differences in changed.items():
                behind[label] = _name_methods(names, own_differences)[place]
        called.append({label: f"{label} ({title})" for label, title in behind.items()})
    # As methods of one study, within which pairs are made; labels say which study they are of.
    renamed = []
    for name_of, group in zip(called, groups, strict=True):
        for run in group:
            renamed.append(_rename_run(run, name_of[run.label]))
    # Without an order, since a pair has the better method first.
    wanted = set()
    for a in labels[0]:
        for b in labels[1]:
            if (a == b and a in shared) or (not shared and baseline is None):
                wanted.add(frozenset((called[0][a], called[1][b])))
    known = collect_metrics(renamed)[name]
    any_run = groups[0][0]
    planted = load_cluster_names(any_run.folder.parent.parent, any_run.known_clusters)
    found = [pair for pair in compare_methods(renamed, planted) if pair.key in wanted]
    wider = pairs.widen_intervals(found, share)
    own = pairs.select_pairs(wider, metric=known.name, cluster=cluster)
    both = f"{names[0]} and {names[1]}"
    notes = _describe_differences(both, groups, differences, changed)
    if not own:
        over = describe_clients(cluster)
        notes.append(f"{both}: there is no pair of methods to compare by {known.name} {over}.")
    return CrossComparison(names, known, own, notes)


def _describe_differences(
    both: str,
    groups: Sequence[Sequence[StoredRun]],
    differences: Sequence[_Difference],
    changed: Mapping[str, Sequence[_Difference]],
) -> list[str]:
    """Describe in which settings and data two studies differ, and in those of their methods.

    Args:
        both: the names of the two.
        groups: the runs of each.
        differences: outside the methods.
        changed: of each method that both have, by label.
    """
    notes = [f"{both}: {_list_texts(differences)}."] if differences else []
    if _have_other_data(groups) and not any(path.startswith("data.") for path, *_ in differences):
        notes.append(f"{both}: their data differ, though their settings of data do not.")
    for label, own_differences in changed.items():
        if own_differences:
            notes.append(f"{both}: {label}: {_list_texts(own_differences)}.")
    return notes


def correct_together(found: Sequence[CrossComparison]) -> list[CrossComparison]:
    """Correct for the pairs of all comparisons, which are read as one."""
    asked = list(chain.from_iterable(one.pairs for one in found))
    corrected = iter(pairs.correct_p_values(asked))
    comparisons = []
    for one in found:
        comparisons.append(replace(one, pairs=list(islice(corrected, len(one.pairs)))))
    return comparisons


def _has_metric(runs: Iterable[StoredRun], name: str) -> bool:
    """Whether any of the runs recorded a metric."""
    return any((run.metrics["metric"] == name).any() for run in runs)


def _find_obstacle(names: tuple[str, str], groups: Sequence[Sequence[StoredRun]]) -> str:
    """Describe why runs of two studies cannot be paired by seed and client; "" where they can."""
    head = f"{names[0]} and {names[1]} cannot be paired: "
    if not groups[0] or not groups[1]:
        return head + "they have no seed in common that all their methods have finished."
    a, b = groups[0][0], groups[1][0]
    sources = [(run.config.get("data") or {}).get("dataset") for run in (a, b)]
    if sources[0] != sources[1]:
        return head + f"their data are {sources[0]!r} and {sources[1]!r}."
    # Pairs are of one client under both: other names or clusters show other clients.
    for one in groups[0]:
        for other in groups[1]:
            if one.seed != other.seed:
                continue
            if one.client_names != other.client_names:
                return head + "their clients have other names."
            if not one.client_clusters.equals(other.client_clusters):
                return head + (
                    f"with seed {one.seed} they have other clients, or clients in other clusters."
                )
    return ""


def _have_other_data(groups: Sequence[Sequence[StoredRun]]) -> bool:
    """Whether runs of two studies noted other data for one seed: a file or a function changed."""
    others = _collect_digests(groups[1])
    for seed, digest in _collect_digests(groups[0]).items():
        other = others.get(seed)
        if digest and other and digest != other:  # runs of nodes note none
            return True
    return False


def _collect_digests(runs: Iterable[StoredRun]) -> dict[int, str | None]:
    """Return the digest of the data of each seed; None where no run noted it."""
    return {run.seed: run.provenance.get("data") for run in runs}


def describe_clients(cluster: str) -> str:
    """Return over which clients methods are compared, in words.

    Example:
        >>> describe_clients("all"), describe_clients("clusters"), describe_clients("rotation 90")
        ('over all clients', 'over clusters', "over cluster 'rotation 90'")
    """
    known = {"all": "over all clients", "clusters": "over clusters"}
    return known.get(cluster, f"over cluster {cluster!r}")


def _find_method(runs: Sequence[StoredRun], label: str) -> dict[str, Any]:
    """Return the settings of a method of a study, but for its name in it."""
    found = next(run.method_settings for run in runs if run.label == label)
    return drop_keys(found, ("label", "paper"))


def _rename_run(run: StoredRun, label: str) -> StoredRun:
    """Return a run as that of another method."""
    method = {**run.method_settings, "label": label}
    return replace(run, config={**run.config, "methods": [method], "name": ""})


def _list_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], ignored: Sequence[str]
) -> list[_Difference]:
    """Return the settings outside the methods in which two runs differ, with both values."""
    first, second = (flatten(drop_keys(one, _OF_STUDIES)) for one in (a, b))
    out = []
    for key in {**first, **second}:
        if key not in ignored and first.get(key) != second.get(key):
            out.append((key, first.get(key), second.get(key)))
    return out


def _name_studies(
    names: tuple[str, str], differences: Sequence[_Difference], own_settings: Set[str]
) -> tuple[str, str]:
    """Name two studies by a few settings in which they differ, else by their own names.

    Args:
        names: of the studies.
        differences: the settings in which they differ, with both values.
        own_settings: what methods set for themselves: these were not trained with the study's.
    """
    keys = [path.rpartition(".")[-1] for path, *_ in differences]
    if not 0 < len(keys) <= _MOST_DIFFERENCES or not own_settings.isdisjoint(keys):
        return names
    return _name_by_settings(differences)


def _name_methods(names: tuple[str, str], differences: Sequence[_Difference]) -> tuple[str, str]:
    """Name two methods of one label by a few settings that differ, else by their studies."""
    # A setting that one of them lacks is that of its study, which the method does not say.
    lacking = any(None in (a, b) for _, a, b in differences)
    if lacking or not 0 < len(differences) <= _MOST_DIFFERENCES:
        return names
    return _name_by_settings(differences)


def _name_by_settings(differences: Sequence[_Difference]) -> tuple[str, str]:
    """Return the settings that differ, by the last word of their paths, with the values of each."""
    texts = []
    for place in (1, 2):
        parts = [f"{one[0].rpartition('.')[-1]}={one[place]}" for one in differences]
        texts.append(", ".join(parts))
    return texts[0], texts[1]


def _list_texts(differences: Sequence[_Difference]) -> str:
    shown = [f"{key} is {a} and {b}" for key, a, b in differences[:_MOST_DIFFERENCES]]
    more = len(differences) - len(shown)
    return "; ".join([*shown, *([f"{more} more settings differ"] if more else [])])
