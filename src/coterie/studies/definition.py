"""Studies: a set of methods and seeds over one federation, checked when it is created."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from annotated_types import Gt, Le, MinLen

from coterie._util.settings import Configurable, NonNegativeInt, parse_settings, to_plain
from coterie.data.build import DataConfig
from coterie.errors import ConfigError, require
from coterie.methods import registry
from coterie.methods.base import Method
from coterie.models.layout import NamedModel, find_output_name
from coterie.models.pretrained import AdapterConfig
from coterie.runtime.settings import Settings

OWN = "own"
"""The name of a dataset or model that is passed in Python."""
LABEL = (
    "letters of any script, digits and ' ._+=,()-', at most 200 bytes; no dot or space at its "
    "ends, '_' not first"
)
"""What a label of a method may be: it names a folder. So does each part of a study's name."""
_MAX_LABEL_BYTES = 200
# Files of a study's folder, where labels are folders.
_RESERVED_NAMES = {"config.toml", "federation.json", "summary.json", "report.html", "b2sums"}


def normalize_name(name: str) -> str:
    """Return a name in its stored form: a letter and its accent are one character (NFC)."""
    return unicodedata.normalize("NFC", name)


def fold_name(name: str) -> str:
    """Return a name without case, since some file systems ignore case."""
    # Folding the case can undo the composed form, so that is made again.
    return normalize_name(normalize_name(name).casefold())


def match_methods(name: str, methods: Sequence[tuple[str, str]]) -> list[int]:
    """Return which methods of a study a name selects: those of that label, or else of that kind.

    A label or kind that matches exactly takes precedence over one that differs by case: with the
    labels FedGWC and coterie of the kind fedgwc, `FedGWC` selects the first and `fedgwc` both.

    Args:
        name: the name to match.
        methods: the label and the kind of each.

    Returns:
        Their indices, in order; empty when no method matches.

    Example:
        >>> methods = [("FedGWC", "fedgwc"), ("coterie", "fedgwc"), ("IFCA", "ifca")]
        >>> [match_methods(name, methods) for name in ("FedGWC", "fedgwc", "Fedgwc", "local")]
        [[0], [0, 1], [0], []]
    """
    # Exact names win over folded ones, and labels over kinds.
    for read in (normalize_name, fold_name):
        for names in zip(*methods, strict=True):
            found = [place for place, own in enumerate(names) if read(own) == read(name)]
            if found:
                return found
    return []


def is_label(name: str) -> bool:
    """Return whether a method can have this label.

    Example:
        >>> names = ("DAC, τ=30", "Größe 2", "../a", "a/b", ".a", "a.", "")
        >>> [name for name in names if is_label(name)]
        ['DAC, τ=30', 'Größe 2']
    """
    # Major categories of Unicode: L for letters, M for marks, N for numbers.
    kinds = [unicodedata.category(sign)[0] for sign in name]
    fits = all(kind in "LMN" or sign in " ._+=,()-" for kind, sign in zip(kinds, name, strict=True))
    # Windows drops a dot or a space at the end of the name of a folder.
    ends = bool(name) and kinds[0] in "LN" and name[-1] not in ". "
    return (
        fits
        and ends
        and len(name.encode()) <= _MAX_LABEL_BYTES
        and fold_name(name) not in _RESERVED_NAMES
    )


@dataclass(frozen=True)
class ModelConfig(Configurable):
    """The model that the clients train.

    Args:
        kind: a name of `models.NETS`; the import path of a custom one, "package.module:Net": a
            subclass of nn.Module, or a function that returns a module; or "hf:PATH_OR_NAME", a
            model of transformers from a folder or from the Hugging Face Hub.
        options: arguments of a custom one; `features` (the shape of one input) and `outputs` are
            given where it takes them. Of a model of transformers, `task` ("causal-lm", "seq-cls",
            "token-cls", "image-cls" or "seq2seq-lm", where it is not the stored one) and arguments
            of `from_pretrained`.
        output: which entry of what it returns is its output, where that is no tensor; see
            `Settings.output`.
        adapter: what is trained in place of the model's own weights: the `kind` ("lora" or
            "ffa-lora") and further settings of a `models.pretrained.AdapterConfig`.
    """

    kind: str = "cnn-b"
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str | int | None = None
    adapter: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """A place in a tuple is a number in TOML; settings of an adapter are stored in full."""
        object.__setattr__(self, "output", None if self.output is None else str(self.output))
        if self.adapter:
            adapter = parse_settings(AdapterConfig, dict(self.adapter), "model.adapter")
            object.__setattr__(self, "adapter", to_plain(adapter))

    @property
    def named_model(self) -> NamedModel:
        """The model as runs take it."""
        output = find_output_name("", self.output)
        return NamedModel(self.kind, self.options, output, self.adapter)


@dataclass(frozen=True)
class MethodConfig(Configurable):
    """One method of a study, with its settings.

    Args:
        label: its name in the study, in tables and as a folder.
        method: the method itself; its fields are its hyperparameters.
        settings: the study's settings with this method's overrides.
        paper: "method/aggregation" of the published row it is compared with, if any.
    """

    label: str
    method: Method
    settings: Settings
    paper: str | None = None

    @property
    def kind(self) -> str:
        """The name under which a study file finds the method; see `registry.find_method`."""
        method = self.method
        if isinstance(method, registry.StoredMethod):
            return method.name
        return registry.name_of(type(method))[0]

    def check(self) -> None:
        """The label can be a folder."""
        # The class is frozen; `check` runs when it is created.
        object.__setattr__(self, "label", normalize_name(self.label))
        require(is_label(self.label), "label", self.label, LABEL)


@dataclass(frozen=True)
class StudyConfig(Configurable):
    """A set of methods and seeds over one federation.

    Args:
        name: name of the study and of its folder; "a/b" is allowed.
        data: the data of the clients.
        methods: the methods; their labels differ.
        seeds: seeds; there is one run of every method for each, and the seed also draws the
            federation.
        model: the model that the clients train.
        settings: the settings of all methods, unless they override them.
        description: one sentence on the study.
        paper: "source/experiment" of the published numbers it is compared with, such as
            "similarity/synthetic_concept_3c".
        scale: factor on every number of rounds, for a quick test; 1 for the full study.
        sweep: settings to vary: a list of values for each dotted path.
        tune: the default grid of `coterie tune`, in the same form.
        trials_of: the study whose tuning wrote this one: its runs are trials, without test data.
    """

    name: str
    data: DataConfig
    methods: tuple[MethodConfig, ...]
    seeds: Annotated[Sequence[NonNegativeInt], MinLen(1)] = (0, 1, 2)
    model: ModelConfig = field(default_factory=ModelConfig)
    settings: Settings = field(default_factory=Settings)
    description: str = ""
    paper: str | None = None
    scale: Annotated[float, Gt(0), Le(1000)] = 1.0
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trials_of: str = ""

    def check(self) -> None:
        """Names can be folders; methods and seeds are there, each once."""
        object.__setattr__(self, "name", normalize_name(self.name))
        require(
            all(map(is_label, self.name.split("/"))),
            "name",
            self.name,
            f"parts with '/' between them, each of {LABEL}",
        )
        require(
            len(set(self.seeds)) == len(self.seeds), "seeds", list(self.seeds), "each seed once"
        )
        require(bool(self.methods), "methods", [], 'at least one, such as [[methods]] kind = "dac"')
        seen: set[str] = set()
        for entry in self.methods:
            if fold_name(entry.label) in seen:
                raise ConfigError(
                    f"two methods are called {entry.label!r}; give each a label of its own"
                )
            seen.add(fold_name(entry.label))
        # Tables and curves of a study have one axis, of rounds or of time. Rounds of all clients
        # that have times are on both.
        spans = {}
        for entry in self.methods:
            time, span = entry.settings.virtual_time, None
            if time is not None and entry.settings.schedule == "synchronous":
                continue
            if time is not None:
                span = time.record_seconds
            spans.setdefault(span, entry.label)
        if len(spans) > 1:
            (one, label), (other, second), *_ = spans.items()
            raise ConfigError(
                f"a round of {label!r} is {_describe_span(one)}, and of {second!r} "
                f"{_describe_span(other)}; expected the same for all methods of a study"
            )

    def select_run(self, label: str, seed: int) -> "StudyConfig":
        """Return the study of one run: this method with this seed."""
        return replace(self, methods=(self.find_method(label),), seeds=(seed,), sweep={}, tune={})

    def find_method(self, label: str) -> MethodConfig:
        """Return the method of a label."""
        return next(entry for entry in self.methods if entry.label == label)

    def scale_method(self, label: str) -> MethodConfig:
        """Return the method of a label with every number of rounds multiplied by `scale`."""
        entry = self.find_method(label)
        if self.scale == 1:
            return entry

        def scale_rounds(value: Any) -> dict[str, int]:
            scaled = {}
            for item in fields(value):
                number = getattr(value, item.name)
                # A field counts rounds if that is a word of its name. None and 0 stay as they are;
                # every other number remains at least 1.
                if "rounds" in item.name.split("_") and isinstance(number, int) and number:
                    scaled[item.name] = max(1, round(number * self.scale))
            return scaled

        method = replace(entry.method, **scale_rounds(entry.method))  # type: ignore[type-var]
        # `patience` counts rounds, too, and has no such word in its name.
        patience = entry.settings.patience and max(1, round(entry.settings.patience * self.scale))
        settings = replace(entry.settings, patience=patience, **scale_rounds(entry.settings))
        return replace(entry, method=method, settings=settings)


def _describe_span(seconds: float | None) -> str:
    if seconds is None:
        return "one of all clients"
    return f"{seconds:g} seconds of virtual time"


def make_study(
    methods: Sequence[Method] | Mapping[str, Method],
    *,
    name: str = "mine",
    seeds: Sequence[int] | int = (0, 1, 2),
    settings: Settings | None = None,
    data: DataConfig | None = None,
    model: str | ModelConfig = OWN,
) -> StudyConfig:
    """Return a study made in Python, equal to that of a study file.

    Args:
        methods: the methods by label, or a sequence of methods with their kinds as labels.
        name: name of the study and of its folder.
        seeds: seeds, or their number; there is one run of every method for each.
        settings: the settings of the methods; the defaults when None.
        data: the data of the clients; None when the federation is passed to `run_study`.
        model: a name of `models.NETS` or an import path, or a `ModelConfig`; needed unless the
            model is passed to `run_study`.

    Example:
        >>> from coterie.methods import METHODS
        >>> make_study([METHODS["random"](), METHODS["local"]()], seeds=[0]).methods[0].label
        'random'
    """
    settings = settings or Settings()
    given = list(methods.values()) if isinstance(methods, Mapping) else methods
    for method in given:
        if not isinstance(method, Method):
            raise ConfigError(
                f"a method is {method!r}; expected a method, such as METHODS['dac'](num_peers=5)"
            )
    labels = list(methods) if isinstance(methods, Mapping) else [method.kind for method in given]
    if len(set(labels)) < len(labels):
        raise ConfigError("two methods are of one kind; give each a label: {label: method, ...}")
    entries = []
    for label, method in zip(labels, given, strict=True):
        entries.append(MethodConfig(label, method, settings))
    # A number of seeds stands for the first ones.
    if isinstance(seeds, int):
        seeds = range(seeds)
    if isinstance(model, str):
        model = ModelConfig(model)
    return StudyConfig(
        name=name,
        data=data or DataConfig(dataset=OWN),
        methods=tuple(entries),
        seeds=tuple(seeds),
        model=model,
        settings=settings,
    )
