"""A look at the machines of a cluster before the first run: what differs from this one, and whether bytes may.

Another Coterie, torch or Python is refused: the same run would be another one. Other processors,
compilers or numpy give results that agree within an engine's tolerance; that bytes may differ is
said.
"""

import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
"""What is compared, and how it is called."""
# for the machines to answer: the first import of torch from a network file system is slow
_SECONDS = 300.0


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster.

    Args:
        name: its host.
        facts: what there is, by the keys of `SETTING_TITLES`; "" where there is none. Empty where it did not
            answer.
    """

    name: str
    facts: Facts


def make_probe() -> Callable[[], dict[str, str]]:
    """Return a function that tells the facts of the machine that calls it.

    It needs nothing of this package there: what is not the same Coterie must be able to say so.
    """
    text = (PACKAGE / "cluster" / "_facts.py").read_text("utf-8")

    def facts():  # a plain function, which is sent as it is
        names = {}
        exec(text, names)
        return names["facts"]()

    return facts


def here() -> Machine:
    """Return this machine."""
    return Machine("here", _facts.facts())


def look_at_machines() -> list[Machine]:
    """Return the machines of the Ray cluster that this process is connected to: those with processors for tasks.

    Raises:
        ConfigError: when there is none, or one does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    facts = make_probe()
    task = ray.remote(num_cpus=0, max_retries=0)(facts)
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU", 0):
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[task.options(scheduling_strategy=where).remote()] = node["NodeManagerHostname"]
    if not asked:
        raise ConfigError(
            "no machine of the Ray cluster has processors for tasks; `ray status` tells what it has"
        )
    ray.wait([*asked], num_returns=len(asked), timeout=_SECONDS)
    found = []
    for answer, name in asked.items():
        try:
            found.append(Machine(name, ray.get(answer, timeout=1)))
        except Exception as error:  # Ray's, and whatever its worker could not do
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"{name}, a machine of the cluster, does not answer as it should: {reason}"
            ) from error
    return found


def describe_differences(
    machines: Iterable[Machine], own: Machine, keys: Sequence[str] = tuple(NAMES)
) -> list[str]:
    """Say in which facts machines differ from this one, a line for each; machines that differ alike share it.

    Example:
        >>> far = [Machine(name, {"torch": "2.6.0"}) for name in ("a", "b")]
        >>> differences(far, Machine("here", {"torch": "2.7.1"}))
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
            listed = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
            who = (
                " and ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else listed[0]
            )
            has = "has" if len(names) == 1 else "have"
            out.append(
                f"{NAMES[key]}: {who} {has} {value or 'none'}, this machine has {own.facts.get(key) or 'none'}"
            )
    return out


def check_equal_software(machines: Sequence[Machine], own: Machine | None = None) -> None:
    """Refuse machines on which runs would be others; warn where their bytes may differ.

    Raises:
        ConfigError: when one has another Coterie, torch or Python than this one.
    """
    own = here() if own is None else own
    if wrong := describe_differences(machines, own, REFUSED):
        raise ConfigError(
            f"the cluster has other software ({'; '.join(wrong)}); install the same on all machines"
        )
    rest = [key for key in NAMES if key not in REFUSED]
    if unequal := describe_differences(machines, own, rest):
        warnings.warn(
            f"{'; '.join(unequal)}: results agree within the tolerance of an engine, but bytes may differ from those "
            "of this machine",
            stacklevel=2,
        )


def check_same_software(wanted: Facts) -> None:
    """Refuse this machine where it has other software than the one that asked, which has the facts `wanted`.

    Raises:
        ConfigError: when it has.
    """
    own = Machine(platform.node(), _facts.facts())
    if wrong := describe_differences(
        [own], Machine("here", wanted), [key for key in REFUSED if key in wanted]
    ):
        text = "; ".join(wrong).replace("this machine has", "the one that asked has")
        raise ConfigError(f"other software ({text}); install the same on all machines")
