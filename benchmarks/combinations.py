"""What the adversary draws: studies of random methods, settings, data and models, as tables of study files.

A setting is drawn by its annotation, so a new method, setting, loss or metric is drawn as soon as
it is in its registry. `TABLES` has what an annotation cannot say: texts that name something, and
tables.
"""

import random
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from benchmarks.generated import CODES, PIECES, VALUES
from coterie._util.settings import accepts, is_importable, required_fields, settable_fields
from coterie.data.shifts import SHIFTS
from coterie.engine.optim import OPTIMIZERS, LocalTraining
from coterie.engine.privacy import DPSGD
from coterie.engine.schedules import SCHEDULES
from coterie.exchange.accepting import Acceptance
from coterie.exchange.attacking import KINDS, STRENGTHS
from coterie.functional.losses import LOSSES
from coterie.functional.metrics import GROUPS, REGISTRY
from coterie.methods import METHODS, registry
from coterie.runtime.settings import Settings

Case = dict[str, Any]
"""The table of a study file, of one method and one seed."""
Draw = Callable[[random.Random], Any]

OWN = "benchmarks.generated:"
WHOLE = (0, 1, 2, 3, 5)
NUMBERS = (0.0, 1e-6, 0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 3.0, 10.0, -2.0)
FUNCTIONS = {"aggregation": f"{OWN}median", "selection": f"{OWN}least_read"}
"""The custom function of a setting."""
ODD_NAMES = ("1.1", "1.10", "1e5", "10e4", "007", "7", "nan", "Zoë ü", "a/b", "=1+1", "12345678901234567890", "12345678901234567891")  # fmt: skip
LEFT_OUT = {"extra", "given"}
"""Fields that nobody sets."""


# ---------------------------------------------------------------- by annotation


def draw_value(hint: Any, stream: random.Random, name: str = "") -> Any:
    """Draw a value that an annotation takes; None where it has none to draw.

    Args:
        hint: the annotation.
        stream: the random stream.
        name: of the setting.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_importable(hint):
        return FUNCTIONS.get(name)
    if origin in (types.UnionType, typing.Union):
        return draw_value(stream.choice(inner), stream, name)
    if origin is Literal:
        return stream.choice(inner)
    if hint is bool:
        return stream.random() < 0.5
    base = inner[0] if origin is Annotated else hint
    if base in (int, float):
        known = WHOLE if base is int else NUMBERS
        return stream.choice([one for one in known if accepts(one, hint)] or [None])
    listed = typing.get_origin(base)
    if isinstance(listed, type) and issubclass(listed, Sequence):
        least = max([one.min_length for one in inner[1:] if isinstance(one, MinLen)], default=0)
        found = [
            draw_value(typing.get_args(base)[0], stream, name)
            for _ in range(stream.randint(least, 2 + least))
        ]
        return None if None in found else found
    return None


def draw_fields(
    cls: type[Any], stream: random.Random, names: Sequence[str], owner: str = ""
) -> dict[str, Any]:
    """Draw some fields of a class of settings, and those that it needs.

    Args:
        cls: the class.
        stream: the random stream.
        names: which fields.
        owner: its name in `TABLES`.
    """
    hints, found = settable_fields(cls), {}
    for name in dict.fromkeys([*sorted(required_fields(cls)), *names]):
        special = TABLES.get((owner or cls.__name__, name))
        value = special(stream) if special else draw_value(hints[name], stream, name)
        if value is not None:
            found[name] = value
    return found


def draw_some(cls: type[Any], stream: random.Random, mean: float, owner: str = "") -> Case:
    """Draw a random number of fields of a class; see `draw_fields`."""
    names = sorted(set(settable_fields(cls)) - LEFT_OUT)
    chosen = [name for name in names if stream.random() < mean / len(names)]
    return draw_fields(cls, stream, chosen, owner)


def cannot_be_drawn(hint: Any) -> bool:
    """Return whether no value of an annotation is drawn: `TABLES` must have the setting."""
    if is_importable(hint) or hint is type(None):
        return False
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return all(cannot_be_drawn(one) for one in inner if one is not type(None))
    if origin is Annotated:
        return cannot_be_drawn(inner[0])
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return cannot_be_drawn(inner[0])
    return not (hint in (bool, int, float) or origin is Literal)


# ---------------------------------------------------------------- what annotations do not say


def _pick(*values: Any) -> Draw:
    return lambda stream: stream.choice(values)


def _draw_schedule(stream: random.Random) -> Any:
    if stream.random() < 0.1:
        return f"{OWN}half_rate"
    kinds = sorted(SCHEDULES)
    tables = [
        {"kind": kind, **draw_some(SCHEDULES[kind], stream, 2.0)}
        for kind in stream.sample(kinds, stream.choice([1, 1, 2]))
    ]
    return tables[0] if len(tables) == 1 else tables


def _draw_attacks(stream: random.Random) -> list[Case]:
    found = []
    for _ in range(stream.choice([1, 1, 2])):
        kind = stream.choice([*KINDS, f"{OWN}halve"])
        table: Case = {"kind": kind, "clients": stream.choice([0.3, 1, 2, [0], [1, 2]])}
        if kind in STRENGTHS and stream.random() < 0.5:
            table["strength"] = stream.choice([0.1, 1.0, 20.0])
        if stream.random() < 0.3:
            table["samples"] = stream.choice([1.0, 1e6])
        found.append(table)
    return found


def _draw_time(stream: random.Random) -> Case:
    table: Case = {
        "round_seconds": stream.choice([1.0, {"kind": "choice", "values": [0.5, 1.0, 3.0]}])
    }
    for name, values in {
        "latency": (0.1, 0.7), "jitter": (0.2,), "bandwidth": (1e4, 1e9), "max_staleness": (1, 3), "record_seconds": (0.5, 1.0, 2.5),
    }.items():  # fmt: skip
        if stream.random() < 0.4:
            table[name] = stream.choice(values)
    if stream.random() < 0.6:
        rules = ({"kind": "fedbuff", "buffer": 2, "server_lr": 0.5}, {"kind": "fedasync"})
        table["server"] = stream.choice(rules)
    if stream.random() < 0.2:  # for rounds in step alone: refused without them
        table["deadline_seconds"] = stream.choice([0.7, 1.0, 2.0])
    return table


def _draw_metrics(stream: random.Random) -> list[str]:
    named = [one.name for one in REGISTRY.values() if one.function or one.on_request]
    return stream.sample([*named, *GROUPS, f"{OWN}mean_output"], stream.randint(1, 3))


PATTERNS = (["first.*"], ["!last.*"], ["*.weight"], ["pieces"], ["first.weight", "last"], ["!pieces.*"])  # fmt: skip
TABLES: dict[tuple[str, str], Draw] = {
    ("LocalTraining", "augment"): _pick("none", "crop-flip", "benchmarks.generated:add_noise"),
    ("LocalTraining", "lr"): _pick(1e-3, 0.01, 0.05, 0.1, 0.0),
    ("LocalTraining", "epochs"): _pick(0, 1, 2),
    ("LocalTraining", "steps"): _pick(0, 1, 2, 5),
    ("LocalTraining", "batch_size"): _pick(1, 2, 4, 5, 8, 100),
    ("LocalTraining", "optimizer"): _pick(*OPTIMIZERS, "torch.optim:NAdam"),
    ("LocalTraining", "optimizer_options"): _pick({"momentum_decay": 0.01}),
    ("LocalTraining", "betas"): _pick([0.9, 0.999], [0.0, 0.5]),
    ("LocalTraining", "lr_schedule"): _draw_schedule,
    ("LocalTraining", "dp"): lambda stream: draw_fields(DPSGD, stream, ["delta"]),
    ("DPSGD", "delta"): _pick(1e-5, 0.01),
    ("Settings", "rounds"): _pick(0, 1, 2, 3, 4),
    ("Settings", "local"): lambda stream: {},
    ("Settings", "loss"): lambda stream: None,  # by the data, see `draw_loss`
    ("Settings", "patience"): _pick(1, 2),
    ("Settings", "new_clients"): _pick(0.3, 1, 2, [0], [1, 3]),
    ("Settings", "new_client_rounds"): _pick(0, 1, 2),
    ("Settings", "shared"): _pick(*PATTERNS),
    ("Settings", "similarity_on"): _pick(*PATTERNS),
    ("Settings", "engine"): lambda stream: None,  # the checks choose it
    ("Settings", "device"): lambda stream: None,
    ("Settings", "cuda_graphs"): lambda stream: None,
    ("Settings", "portable"): lambda stream: None,
    ("Settings", "block"): _pick(1, 2, 3, 100),
    ("Settings", "eval_every"): _pick(1, 2, 3),
    ("Settings", "validate_every"): _pick(1, 2, 3),
    ("Settings", "metrics"): _draw_metrics,
    ("Settings", "acceptance"): lambda stream: draw_some(Acceptance, stream, 2.0) or True,
    ("Settings", "secure_aggregation"): _pick(True, {"threshold": 0.51}, {"min_clients": 4}),
    ("Settings", "peer_sampling"): _pick(True, {"view": 2, "shuffle": 2}, {"view": 4}),
    ("Settings", "attacks"): _draw_attacks,
    ("Settings", "time"): _draw_time,
    ("Settings", "pace"): lambda stream: None,  # of nodes on machines
    ("Settings", "max_staleness"): lambda stream: None,
    ("Settings", "checkpoint_seconds"): _pick(0, 30),
    ("Settings", "participation"): _pick(0.2, 0.5, 0.9, 1, 2, 3),
    ("labels", "groups"): _pick([[0, 1], [1, 2]], ["0-1", "2"], [[0]]),
    ("label-swap", "swaps"): _pick([[], [[0, 1]]], [[[0, 2]], [[1, 2]]]),
    ("natural", "column"): _pick("writer"),
    ("natural", "cluster"): _pick("writer"),
    ("partition", "function"): _pick(f"{OWN}divide_samples"),
    ("rotation", "degrees"): _pick([0.0, 180.0], [0.0, 90.0, 180.0, 270.0], [45.0]),
    ("regression-targets", "clusters"): _pick(1, 2),
}
"""How settings are drawn whose annotation does not say it, or says more than is sensible."""

_TARGETS = {
    "classes": "class", "images": "class", "parts": "class", "labels": "labels", "tokens": "integers",
    "pixels": "integers", "yes-no": "labels", "numbers": "numbers", "vector": "numbers", "counts": "numbers", "times": "numbers",
}  # fmt: skip
"""The targets of each kind of data, as losses call them."""
SMALL: dict[str, Case] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}
"""Settings of methods that suit few clients, three classes and a few rounds, where the defaults do not."""
NEEDS_LOSS = {
    "labels": "multi-label",
    "yes-no": "binary",
    "tokens": "tokens",
    "pixels": "segmentation",
    "times": "cox",
}


# ---------------------------------------------------------------- whole studies


def draw_data(stream: random.Random) -> tuple[Case, str]:
    """Draw the table of the data, and the kind of its samples."""
    if stream.random() < 0.15:
        return _draw_shifted(stream)
    kind = stream.choice(sorted(_TARGETS)) if stream.random() < 0.6 else "classes"
    number = stream.choice([1, 2, 3, 4, 5, 5, 6, 8])
    train, validation = stream.choice([(12, 4), (6, 2), (1, 1), (2, 0), (9, 3), (17, 5)])
    sizes = [[train, validation] for _ in range(number)]
    if stream.random() < 0.3:  # very unequal
        sizes = [[stream.choice([1, 2, 3, 12, 70]), stream.choice([0, 1, 4])] for _ in sizes]
    options: Case = {"kind": kind, "sizes": sizes}
    if stream.random() < 0.3:
        options["clusters"] = stream.choice([1, 3])
    if stream.random() < 0.2:
        options["one_class"] = stream.sample(range(number), stream.randint(1, number))
    if stream.random() < 0.3 and number <= len(ODD_NAMES):
        options["names"] = stream.sample(ODD_NAMES, number)
    if stream.random() < 0.4:
        options["tests"] = stream.choice(["client", "all"])
    if stream.random() < 0.1:
        options["noise"] = 0.3
    if stream.random() < 0.1:
        options["truth"] = False
    return {"dataset": f"{OWN}make_data", "options": options}, kind


def _draw_shifted(stream: random.Random) -> tuple[Case, str]:
    images = stream.random() < 0.7
    kinds = sorted(SHIFTS)
    shifts = []
    for _ in range(stream.choice([1, 1, 2])):
        kind = stream.choice(kinds)
        table = draw_some(SHIFTS[kind], stream, 2.0, kind)
        shifts.append({"kind": kind, **table})
    options: Case = {"num_clients": stream.choice([2, 3, 4]), "images": images, "shift": shifts}
    if any(one["kind"] == "regression-targets" for one in shifts):
        options |= {"classes": 0, "images": False}
    is_regression = options.get("classes") == 0
    kind = "numbers" if is_regression else "images" if images else "classes"
    return {"dataset": f"{OWN}make_shifted_data", "options": options}, kind


def draw_model(stream: random.Random, kind: str) -> Case:
    """Draw the table of a model that takes a kind of samples."""
    if stream.random() < 0.25 and kind in ("classes", "numbers", "images", "vector", "labels"):
        return {"kind": stream.choice(["linear", "mlp-c", "mlp-bn"])}
    names = sorted(PIECES)
    pieces = stream.choices(names, k=stream.choice([0, 1, 1, 2, 3]))
    pieces = [
        f"{piece}:{stream.choice([0.0, 0.5, 1.0])}"
        if piece in ("dropout", "attention", "alpha-dropout") and stream.random() < 0.6
        else piece
        for piece in pieces
    ]
    options: Case = {"pieces": pieces}
    if kind == "parts":
        return {"kind": f"{OWN}TwoInputs", "options": options}
    if kind == "tokens":
        options |= {"vocabulary": CODES, "shape": [VALUES, CODES]}
    if kind == "pixels":
        options["shape"] = [2, VALUES, VALUES]
    return {"kind": f"{OWN}Net", "options": options}


def draw_loss(stream: random.Random, kind: str) -> Any:
    """Draw the loss for a kind of samples; None for the usual one."""
    needed = NEEDS_LOSS.get(kind)
    if stream.random() < (0.3 if kind == "pixels" else 0.6):
        return needed
    fitting = [one for one, cls in LOSSES.items() if cls.targets == _TARGETS[kind]]
    if kind in ("classes", "images", "parts"):
        fitting.append(f"{OWN}absolute_logits")
    if needed:
        fitting = [one for one in fitting if LOSSES[one].form == LOSSES[needed].form]
    chosen = stream.choice(fitting)
    table = draw_some(LOSSES[chosen], stream, 1.0) if chosen in LOSSES else {}
    return {"kind": chosen, **table} if table else chosen


def draw_method(stream: random.Random) -> Case:
    """Draw the table of a method; in half of the cases with options of published code, if it has any."""
    kind = stream.choice(sorted(METHODS))
    cls: type[Any] = METHODS[kind]
    published = registry.find_published(METHODS[kind])
    if published is not None and stream.random() < 0.5:
        cls = published
    return {"kind": kind, **SMALL.get(kind, {}), **draw_some(cls, stream, 2.0, kind)}


def draw_local(stream: random.Random) -> Case:
    """Draw how clients train: with arguments of the optimizer that is drawn, and no other's."""
    found: Case = {"batch_size": TABLES["LocalTraining", "batch_size"](stream), "optimizer": "sgd"}
    if stream.random() < 0.6:
        found["optimizer"] = TABLES["LocalTraining", "optimizer"](stream)
    own = set(OPTIMIZERS.get(found["optimizer"], ["optimizer_options"]))
    every = {name for arguments in OPTIMIZERS.values() for name in arguments}
    others = (every | {"optimizer_options"}) - own
    more = draw_some(LocalTraining, stream, 4.0)
    return {**{key: value for key, value in more.items() if key not in others}, **found}


def draw_settings(stream: random.Random) -> Case:
    """Draw the settings of a run."""
    found = draw_some(Settings, stream, 4.0)
    found.pop("local", None)
    found.setdefault("rounds", 3)
    found.setdefault("dtype", stream.choice(["float64", "float64", "float64", "float32"]))
    if "patience" in found:
        found["stopping"] = {"patience": found.pop("patience")}
    return found


def draw_case(number: int) -> Case:
    """Draw the study of a trial by its number; the library may refuse it."""
    stream = random.Random(number)
    data, kind = draw_data(stream)
    case = {
        **draw_settings(stream),
        "seeds": [stream.randrange(1000)],
        "data": data,
        "model": draw_model(stream, kind),
        "local": draw_local(stream),
        "methods": [draw_method(stream)],
    }
    loss = draw_loss(stream, kind)
    return case if loss is None else {**case, "loss": loss}


def list_removals(case: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of what a case can do without, for a smaller case that shows the same."""
    needed = {"data", "model", "methods", "seeds", "local"}
    if case["data"].get("options", {}).get("kind") in NEEDS_LOSS:
        needed.add("loss")
    found: list[tuple[str, ...]] = [(key,) for key in case if key not in needed]
    found += [("methods", key) for key in case["methods"][0] if key != "kind"]
    for part in ("local", "stopping"):
        found += [(part, key) for key in case.get(part, {})]
    for part in ("data", "model"):
        found += [(part, "options", key) for key in case[part].get("options", {})]
        found += [
            (part, "options", key, str(place))
            for key, value in case[part].get("options", {}).items()
            if isinstance(value, list)
            for place in range(len(value))
        ]
    for key, value in case.items():
        if isinstance(value, dict) and key not in ("data", "model", "local", "stopping"):
            found += [(key, inner) for inner in value if inner != "kind"]
        if isinstance(value, list) and key not in ("methods", "seeds"):
            found += [(key, str(place)) for place in range(len(value))]
    return found


def remove(case: Mapping[str, Any], path: Sequence[str]) -> Case:
    """Return a case without what is at a path."""

    def without(value: Any, rest: Sequence[str]) -> Any:
        if isinstance(value, list):
            place = int(rest[0])
            more = [] if len(rest) == 1 else [without(value[place], rest[1:])]
            return [*value[:place], *more, *value[place + 1 :]]
        if len(rest) == 1:
            return {key: one for key, one in value.items() if key != rest[0]}
        return {
            key: without(one, rest[1:]) if key == rest[0] else one for key, one in value.items()
        }

    steps = [path[0], "0", *path[1:]] if path[0] == "methods" else path
    return without(dict(case), steps)
