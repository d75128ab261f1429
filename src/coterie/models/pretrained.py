"""Models of transformers by name, and adapters of peft on any module; both are optional packages.

Neither is imported unless a model asks for it.
"""

import contextlib
import importlib
import os
import socket
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from torch import nn

from coterie._util import extras
from coterie._util.files import expand_home
from coterie._util.settings import (
    Configurable,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    accepts,
    parse_settings,
    to_plain,
)
from coterie.errors import ConfigError, ModelError, describe_unknown

PREFIX = "hf:"
"""What the name of a model of transformers begins with: "hf:PATH_OR_NAME"."""

TASKS = {
    "causal-lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "seq-cls": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "token-cls": ("AutoModelForTokenClassification", "TOKEN_CLS"),
    "image-cls": ("AutoModelForImageClassification", None),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
}
"""For each task, the class of transformers that loads a model, and the name that peft has for it.
"""

# The task of a stored model by the end of the name of its class. None of them is the end of
# another, so that their order says nothing.
_SUFFIXES = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForSequenceClassification": "seq-cls",
    "ForTokenClassification": "token-cls",
    "ForImageClassification": "image-cls",
    "ForConditionalGeneration": "seq2seq-lm",
}

_REACH_SECONDS = 5.0  # to connect; a Hub that does not answer would be asked again for a minute


@dataclass(frozen=True)
class AdapterConfig(Configurable):
    """An adapter on a model, whose own weights are then frozen: low-rank updates of some layers.

    A layer with the weight W gets two matrices, A (r x inputs) and B (outputs x r), and computes
    with W + alpha / r B A. B begins at 0. Hu et al., LoRA: low-rank adaptation of large language
    models, 2021, https://arxiv.org/abs/2106.09685

    Args:
        kind: "lora"; or "ffa-lora", whose A is drawn once for all clients and not trained, so that
            the mean of the clients' B is that of their updates (Sun et al., Improving LoRA in
            privacy-preserving federated learning, 2024, https://arxiv.org/abs/2403.12313).
        r: the rank; or a list of ranks, which clients take in turn by their number; or a table with
            the rank of each client by its name. With several ranks, what a client receives is cut
            to its own, and messages are as wide as the largest.
        alpha: see above; with several ranks r is the largest, so that updates of all clients mean
            the same.
        target: names of the layers, or the ends of their names; "all-linear" alone for all linear
            layers but the last. The default of peft for the kind of model when empty.
        dropout: probability with which an input of A is zeroed while training.
        trained: names of further layers that are trained whole, such as a new head. The head of
            "seq-cls" and "token-cls" is one of them in any case.
        options: further arguments of `peft.LoraConfig`.
    """

    kind: Literal["lora", "ffa-lora"] = "lora"
    r: PositiveInt | Annotated[Sequence[PositiveInt], MinLen(1)] | Mapping[str, Any] = 8
    alpha: PositiveFloat = 8.0
    target: Sequence[str] = ()
    dropout: NonNegativeFloat = 0.0
    trained: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Ranks are whole numbers above 0, and several of them fit the other settings."""
        if self.has_one_rank:
            return
        if isinstance(self.r, Mapping):
            ranks = self.r.values()
            if not ranks or not all(accepts(rank, PositiveInt) for rank in ranks):
                raise ConfigError(
                    f"r is {dict(self.r)}; expected the rank of each client by its name, 1 or more"
                )
        # Its A is frozen as it was drawn, and a smaller A is another one.
        if self.kind == "ffa-lora":
            raise ConfigError(
                f"r is {to_plain(self.r)}, and kind is 'ffa-lora', whose A is one for all clients: "
                "give one rank, or take kind = 'lora'"
            )
        for name in ("rank_pattern", "alpha_pattern"):
            if name in self.options:
                raise ConfigError(
                    f"options.{name} gives layers ranks of their own, and r is {to_plain(self.r)}, "
                    "ranks of clients: leave out one of them"
                )

    @property
    def has_one_rank(self) -> bool:
        """Whether all clients have the same rank."""
        return isinstance(self.r, int)

    @property
    def largest_rank(self) -> int:
        """The rank that rows have room for."""
        if isinstance(self.r, int):
            return self.r
        return max(self.r.values() if isinstance(self.r, Mapping) else self.r)

    def for_client(self, client: int, name: str) -> "AdapterConfig":
        """Return the adapter of one client: its own rank, and the same multiple of B A.

        Args:
            client: its number.
            name: its name; "" where clients are numbers.

        Raises:
            ConfigError: when a table of ranks does not have it.
        """
        if isinstance(self.r, int):
            return self
        if isinstance(self.r, Mapping):
            if name not in self.r:
                raise ConfigError(
                    f"model.adapter.r has no rank of client {name or client!r}; expected one for "
                    f"each client, found {', '.join(self.r)}"
                )
            rank = self.r[name]
        else:
            # In turn, so that a list of a few ranks serves any number of clients.
            rank = self.r[client % len(self.r)]
        # Rows have the form of the largest rank, which is also that of `alpha`.
        share = rank / self.largest_rank
        # peft multiplies B A by alpha / r, or by alpha / sqrt(r).
        if self.options.get("use_rslora"):
            share = share**0.5
        return replace(self, r=rank, alpha=self.alpha * share)


def load_pretrained(name: str, outputs: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Load a model of transformers.

    Weights that the stored model lacks, such as those of a new head, are drawn from PyTorch's
    generator.

    Args:
        name: a folder that `save_pretrained` wrote; or the name of a model on the Hugging Face Hub,
            which is taken from its cache, or downloaded where the Hub can be reached.
        outputs: the number of classes, where the task is to classify samples.
        options: `task`, one of `TASKS`, where it is not that of the stored model; all others are
            arguments of `from_pretrained`.

    Raises:
        ConfigError: when a package is missing, or the task is not known.
        ModelError: when there is no such model, or it cannot be loaded.
    """
    transformers = _import("transformers", f"model {PREFIX}{name}")
    given = dict(options or {})
    folder = expand_home(name)
    where = str(folder) if folder.is_dir() else name
    if not folder.is_dir() and _is_path(name):
        raise ModelError(
            f"model {PREFIX}{name}: there is no folder {name}; expected one that save_pretrained "
            "wrote, or the name of a model on the Hugging Face Hub"
        )
    with _quiet(transformers):
        # What is here already is taken from here: a run must not wait for the network.
        local = folder.is_dir() or _is_cached(transformers, where)
        if not local:
            _require_hub(name)
        try:
            task = given.pop("task", None)
            if task is None:
                config = transformers.AutoConfig.from_pretrained(where, local_files_only=local)
                task = _find_task(name, config)
            if task not in TASKS:
                raise ConfigError(f"model.options: {describe_unknown('task', str(task), TASKS)}")
            if task in ("seq-cls", "image-cls"):
                # As many as the data have classes, unless the options say otherwise.
                given.setdefault("num_labels", outputs)
            kind = getattr(transformers, TASKS[task][0])
            return kind.from_pretrained(where, local_files_only=local, **given)
        except ConfigError:
            raise
        # What transformers raises, of files, names and arguments alike.
        except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
            raise ModelError(
                f"model {PREFIX}{name} cannot be loaded: {' '.join(str(error).split()):.300}"
            ) from error


def attach_adapter(module: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
    """Return a model of peft: a module whose own weights are frozen, with a new adapter.

    Args:
        module: it becomes a part of the model.
        adapter: the settings of an `AdapterConfig`.

    Raises:
        ConfigError: when peft is missing, or a setting is not known.
        ModelError: when the module has no such layers.
    """
    config = parse_settings(AdapterConfig, dict(adapter), "model.adapter")
    peft = _import("peft", f"model.adapter {config.kind!r}")
    target: Any = list(config.target) or None
    # peft takes this word as a text, and names of layers as a list.
    if target == ["all-linear"]:
        target = "all-linear"
    given: dict[str, Any] = {
        "r": config.largest_rank,
        "lora_alpha": config.alpha,
        "target_modules": target,
        "lora_dropout": config.dropout,
        "task_type": _find_peft_task(module),
        **config.options,
    }
    if config.trained:
        given["modules_to_save"] = list(config.trained)
    try:
        with warnings.catch_warnings():
            # Of peft about names that transformers deprecates: nothing a user can change.
            warnings.simplefilter("ignore", FutureWarning)
            made = peft.get_peft_model(module, peft.LoraConfig(**given))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"model.adapter cannot be attached: {' '.join(str(error).split()):.300}"
        ) from error
    if config.kind == "ffa-lora":
        for path, parameter in made.named_parameters():
            # Frozen A, trained B: a mean of products B A is then the product of the mean of B with
            # A.
            if ".lora_A." in path or ".lora_embedding_A." in path:
                parameter.requires_grad_(False)
    return made


def _import(name: str, what: str) -> Any:
    try:
        # Imported here alone: both packages take seconds, and most runs need neither.
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {name}, which cannot be imported "
            f"({' '.join(str(error).split()):.120}): {extras.install_command('adapters')}"
        ) from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep progress bars and remarks of transformers out of the output of a run."""
    logs = transformers.utils.logging
    verbosity, shown = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if shown:
            logs.enable_progress_bar()


def _is_path(name: str) -> bool:
    """Return whether a name can only be a folder: names on the Hub have one "/" at most."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def _is_cached(transformers: Any, name: str) -> bool:
    try:
        transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return True


def _require_hub(name: str) -> None:
    """Refuse a name that would be downloaded where the Hub cannot be reached."""
    if any(key.lower() in ("https_proxy", "all_proxy") for key in os.environ):
        return  # the Hub is then reached through another machine
    place = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        with socket.create_connection((place.hostname or "", place.port or 443), _REACH_SECONDS):
            return
    except OSError as error:
        raise ModelError(
            f"model {PREFIX}{name}: there is no folder of this name, it is not in the cache of the "
            f"Hugging Face Hub, and {place.hostname} cannot be reached ({error}); give the folder "
            "that save_pretrained wrote"
        ) from error


def _find_task(name: str, config: Any) -> str:
    for written in getattr(config, "architectures", None) or ():
        for suffix, task in _SUFFIXES.items():
            if written.endswith(suffix):
                return task
    raise ConfigError(
        f"model {PREFIX}{name} does not say what it is for ({config.model_type}); set "
        f"model.options.task to one of {', '.join(TASKS)}"
    )


def _find_peft_task(module: nn.Module) -> str | None:
    """Return what peft calls the task of a model of transformers; None for other modules."""
    if not hasattr(module, "prepare_inputs_for_generation") and not hasattr(module, "config"):
        return None
    for suffix, task in _SUFFIXES.items():
        if type(module).__name__.endswith(suffix):
            return TASKS[task][1]
    return None
