"""Compare the machines of a cluster with this one before the first run.

Another version of Coterie, torch or Python is refused: the same run would have other results. Other
processors, compilers or numpy give results that agree within an engine's tolerance; a warning says
that bytes may differ.
"""

import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coterie._util.names import shorten_error
from coterie._util.origin import PACKAGE
from coterie.cluster import _facts
from coterie.errors import ConfigError

Facts = Mapping[str, str]
REFUSED = ("coterie", "code", "torch", "python")
"""What must be the same on all machines."""
NAMES = {
    "coterie": "Coterie",
    "code": "Coterie's files",
    "torch": "torch",
    "python": "Python",
    "numpy": "numpy",
    "processor": "processor",
    "vectors": "torch's vector instructions",
    "features": "processor features of compiled programs",
    "compiler": "C++ compiler",
    "gpus": "GPUs",
}
"""The facts that are compared, and their names in messages."""
# For machines to answer: the first import of torch from a network file system takes minutes.
_SECONDS = 300.0


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster.

    Args:
        name: its host.
        facts: its facts, by the keys of `NAMES`; "" where there is none. Empty where it
            did not answer.
    """

    name: str
    facts: Facts


def make_probe() -> Callable[[], dict[str, str]]:
    """Return a function that returns the facts of the machine that calls it.

    It needs nothing of this package there: a machine with another Coterie must be able to report
    that.
    """
    text = (PACKAGE / "cluster" / "_facts.py").read_text("utf-8")

    def facts():  # a plain function, which cloudpickle sends by value
        names = {}
        exec(text, names)
        return names["collect_facts"]()

    return facts


def describe_this_machine() -> Machine:
    """Return this machine."""
    return Machine("here", _facts.collect_facts())


def look_at_machines() -> list[Machine]:
    """Return the machines of the connected Ray cluster that have processors for tasks.

    Raises:
        ConfigError: when there is none, or one does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    facts = make_probe()
    # No processors are reserved, so that a busy machine answers too; and no second try, which
    # would hide a machine that fails.
    task = ray.remote(num_cpus=0, max_retries=0)(facts)
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU", 0):
            # Exactly this machine: with soft=True another one would answer in its place.
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[task.options(scheduling_strategy=where).remote()] = node["NodeManagerHostname"]
    if not asked:
        raise ConfigError(
            "no machine of the Ray cluster has processors for tasks; `ray status` shows what it has"
        )
    # All at once: the slow import of torch happens on all machines at the same time.
    ray.wait([*asked], num_returns=len(asked), timeout=_SECONDS)
    found = []
    for answer, name in asked.items():
        try:
            found.append(Machine(name, ray.get(answer, timeout=1)))
        except Exception as error:  # of Ray, or of its worker
            raise ConfigError(
                f"{name}, a machine of the cluster, does not answer as it should: "
                f"{shorten_error(error)}"
            ) from error
    return found


def describe_differences(
    machines: Iterable[Machine], own: Machine, keys: Sequence[str] = tuple(NAMES)
) -> list[str]:
    """Describe in which facts machines differ from this one; equal differences share a line.

    Example:
        >>> far = [Machine(name, {"torch": "2.6.0"}) for name in ("a", "b")]
        >>> describe_differences(far, Machine("here", {"torch": "2.7.1"}))
        ['torch: a and b have 2.6.0, this machine has 2.7.1']
    """
    out = []
    for key in keys:
        others: dict[str, list[str]] = {}
        for one in machines:
            if one.facts.get(key, "") != own.facts.get(key, ""):
                others.setdefault(one.facts.get(key, ""), []).append(one.name)
        for value, names in others.items():
            names = list(dict.fromkeys(names))
            if len(names) > 4:
                names = [*names[:3], f"{len(names) - 3} more"]
            *first, last = names
            who = f"{', '.join(first)} and {last}" if first else last
            has = "have" if first else "has"
            out.append(
                f"{NAMES[key]}: {who} {has} {value or 'none'}, this machine has "
                f"{own.facts.get(key) or 'none'}"
            )
    return out


def check_equal_software(machines: Sequence[Machine], own: Machine | None = None) -> None:
    """Refuse machines with other software; warn where their bytes may differ.

    Raises:
        ConfigError: when one has another version of Coterie, torch or Python than this one.
    """
    own = describe_this_machine() if own is None else own
    if wrong := describe_differences(machines, own, REFUSED):
        raise ConfigError(
            f"the cluster has other software ({'; '.join(wrong)}); install the same on all machines"
        )
    rest = [key for key in NAMES if key not in REFUSED]
    if unequal := describe_differences(machines, own, rest):
        warnings.warn(
            f"{'; '.join(unequal)}: results agree within the tolerance of an engine, but bytes "
            "may differ from those "
            "of this machine",
            stacklevel=2,
        )


def check_same_software(wanted: Facts) -> None:
    """Refuse this machine if its software differs from the facts `wanted` of the asking one.

    Raises:
        ConfigError: when it differs.
    """
    own = Machine(platform.node(), _facts.collect_facts())
    if wrong := describe_differences(
        [own], Machine("here", wanted), [key for key in REFUSED if key in wanted]
    ):
        text = "; ".join(wrong).replace("this machine has", "the one that asked has")
        raise ConfigError(f"other software ({text}); install the same on all machines")
