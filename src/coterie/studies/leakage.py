"""Membership inference against each method of a study: what published models reveal.

Every client's training samples are halved at random, several times over. Each half trains a run;
the other half are the non-members: samples of the same client, drawn in the same way. The attacker
receives the newest model that each client published, and decides for each sample of that client
whether the model was trained on it.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.mappings import map_values
from coterie.data.build import build_federation
from coterie.data.federation import SPLITS, Federation
from coterie.engine.privacy import DPSGD
from coterie.errors import ConfigError, DataError, require
from coterie.exchange.overheard import OverheardExchange
from coterie.functional import membership
from coterie.functional.metrics import EPSILON, REGISTRY, Metrics
from coterie.rng import Rng
from coterie.runtime.extensions import Unprotected
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.studies.definition import MethodConfig, StudyConfig

_DRAWS = 200  # of the bootstrap
# The mark of padding in `split`: such a sample is in no part of the run.
_HELD_OUT = -1


@dataclass(frozen=True)
class LeakageResult:
    """The success of an attack on a method, with 95 % bootstrap intervals over samples.

    Args:
        label: of the method.
        noise_multiplier: of DP-SGD; None without.
        epsilon: the largest of any client; None without privacy, infinite without noise.
        score: the main metric of the models, mean over clients and runs.
        target: "published": the newest models that clients sent; "unpublished": the last models, of
            a method in which no client sends any. "part": only a part is sent, which was not
            attacked.
        attack: "loss", a threshold on the loss, or "lira", a likelihood ratio with shadow models.
        auc: how often a member is ranked before a non-member: 0.5 for guessing; with `auc_low` and
            `auc_high`.
        tpr: share of members that are found at 1 % false alarms; guessing finds 1 %.
    """

    label: str
    noise_multiplier: float | None
    epsilon: float | None
    score: float
    target: str
    attack: str
    auc: float = math.nan
    auc_low: float = math.nan
    auc_high: float = math.nan
    tpr: float = math.nan
    tpr_low: float = math.nan
    tpr_high: float = math.nan


def draw_halves(
    federation: Federation, runs: int, rng: Rng
) -> Bool[Tensor, "runs clients samples"]:
    """Draw which training samples are members in each run.

    They are one half of each client's samples; the second run of a pair has the other half.

    Args:
        federation: the data.
        runs: an even number.
        rng: the random streams.

    Raises:
        DataError: for a client with a single training sample.
    """
    train = federation.split == SPLITS["train"]
    counts = train.sum(1)
    if bool((counts < 2).any()):
        alone = federation.client_name(int((counts < 2).nonzero()[0]))
        raise DataError(
            f"{alone} has one training sample; expected two or more, to hold out half of them"
        )
    member = torch.zeros(runs, *train.shape, dtype=torch.bool)
    for row, client in enumerate(federation.ids.tolist()):
        # A stream for each client, so that its halves do not depend on who else is there.
        places = train[row].nonzero().flatten()
        stream = rng.generator("leakage.draw_halves", client)
        for pair in range(runs // 2):
            order = places[torch.from_numpy(stream.permutation(len(places)))]
            member[2 * pair, row, order[: len(order) // 2]] = True
            member[2 * pair + 1, row, order[len(order) // 2 :]] = True
    return member


def audit_study(
    study: StudyConfig,
    *,
    shadows: int = 8,
    private: DPSGD | None = None,
    federation: Federation | None = None,
    model: Any = None,
    data_dir: Path | None = None,
    notify: Callable[[str], None] = lambda _text: None,
) -> Iterator[LeakageResult]:
    """Attack each method of a study, without DP-SGD and with it.

    Args:
        study: the study; its first seed draws the federation.
        shadows: runs of each method, an even number, 6 or more. Each is attacked with the help of
            the others.
        private: DP-SGD of methods for which the study sets none; when None they are attacked
            without it alone.
        federation: the data; those of the study when None.
        model: the model; that of the study when None.
        data_dir: where datasets are.
        notify: called with a line on what is being done.

    Yields:
        For each method, without and with DP-SGD: the attack by the loss, and the one by likelihood
        ratios.
    """
    require(shadows >= 6 and shadows % 2 == 0, "shadows", shadows, "an even number, 6 or more")
    seed = study.seeds[0]
    whole = federation or build_federation(study.data, seed, data_dir)
    member = draw_halves(whole, shadows, Rng(seed))
    network = model if model is not None else study.model.named_model
    for label in [entry.label for entry in study.methods]:
        entry = study.scale_method(label)
        if entry.settings.secure_terms is not None or entry.method.sums_groups:
            raise ConfigError(
                f"audit-privacy attacks the models that clients send, and with {label} nobody sees "
                "a single one (secure_aggregation, or means of groups)"
            )
        own = entry.settings.local
        levels = [replace(own, dp=None)]
        if own.dp_settings or private:
            levels.append(replace(own, dp=own.dp_settings or private))
        for local in levels:
            settings = replace(entry.settings, local=local)
            yield from _attack_method(entry, settings, network, whole, member, notify)


def _attack_method(
    entry: MethodConfig,
    settings: Settings,
    model: Any,
    federation: Federation,
    member: Bool[Tensor, "runs clients samples"],
    notify: Callable[[str], None],
) -> Iterator[LeakageResult]:
    """Run one method with each half, and attack it."""
    task = make_task(federation, entry.method, model, settings)
    dp = settings.local.dp_settings
    epsilons, scores, losses, target = [], [], [], "published"
    for run in range(len(member)):
        notify(f"{entry.label}{'' if dp is None else ', private'}: run {run + 1} of {len(member)}")
        left_out = (federation.split == SPLITS["train"]) & ~member[run]
        split = federation.split.masked_fill(left_out, _HELD_OUT)
        ear = OverheardExchange(federation.ids, federation.population)
        # This audit measures what the warning is about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Unprotected)
            # A seed for each run, so that shadow models share no random draws.
            done = simulate(
                replace(federation, split=split),
                entry.method,
                model=model,
                settings=settings,
                seed=run,
                exchange=ear,
            )
        tests = select_final_tests(done.metrics)
        values = {}
        for name, rows in tests.groupby("metric", observed=True):
            values[str(name)] = rows["value"].to_numpy(float)
        if EPSILON.name in values:
            # Taken out, so that epsilon is not chosen as the main metric.
            epsilons.append(float(values.pop(EPSILON.name).max()))
        scores.append(float(values[Metrics(REGISTRY).choose_main(values)].mean()))
        rows = []
        for row, client in enumerate(federation.ids.tolist()):
            rows.append(ear.published_models.get(client, done.params[row]))
        if not ear.published_models:
            target = "unpublished"
        elif any(len(row) != task.layout.size for row in rows):
            # The attack needs whole models.
            target = "part"
            break
        losses.append(task.evaluator.sample_losses(torch.stack(rows)))
    common: dict[str, Any] = {
        "label": entry.label,
        "noise_multiplier": None if dp is None else dp.noise_multiplier,
        # Not `max`, which finds NaN or not by the order of the runs.
        EPSILON.name: float(np.max(epsilons)) if epsilons else None,
        "score": sum(scores) / len(scores),
        "target": target,
    }
    if target == "part":
        yield LeakageResult(**common, attack="loss")
        return
    train = federation.split == SPLITS["train"]
    # Of shape (runs, samples), with the training samples of all clients one after another.
    truth = torch.stack([each[train] for each in member])
    counts = train.sum(1)
    # Losses have a row for each client, padded to the longest.
    used = torch.arange(losses[0].shape[1]) < counts[:, None]
    seen = torch.stack([each[used] for each in losses])
    if not bool(seen.isfinite().all()):
        # Equal scores would be an AUC of 0.5, as of a method that reveals nothing.
        notify(f"{entry.label}: a published model has no finite loss; its leakage is not defined")
        for name in ("loss", "lira"):
            yield LeakageResult(**common, attack=name)
        return
    found = membership.logit_confidence(seen)
    for name, values in (("loss", found), ("lira", membership.likelihood_ratio(found, truth))):
        yield LeakageResult(**common, attack=name, **rate_attack(values, truth))


def rate_attack(
    values: Float[Tensor, "runs samples"], member: Bool[Tensor, "runs samples"]
) -> dict[str, Any]:
    """Return how well scores separate members from others, with intervals over samples.

    The samples of all runs are rated together.
    """
    draws: Int[Tensor, "times samples"] = membership.draw_bootstrap(values.shape[1], _DRAWS)
    out = {}
    for name, measure in (("auc", membership.attack_auc), ("tpr", membership.true_positive_rate)):
        out[name] = measure(values.flatten(), member.flatten())
        # A draw takes a sample with its values of all runs.
        every = [measure(values[:, draw].flatten(), member[:, draw].flatten()) for draw in draws]
        # The middle 95 % of the draws.
        ends = torch.tensor([0.025, 0.975]).double()
        low, high = torch.tensor(every, dtype=torch.float64).quantile(ends).tolist()
        out |= {f"{name}_low": low, f"{name}_high": high}
    return out


def make_table(attacks: list[LeakageResult]) -> list[Mapping[str, Any]]:
    """Return results as plain values for JSON: NaN and infinity become None and "infinite"."""

    def to_plain(value: Any) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return "infinite" if math.isinf(value) else None

    return [map_values(to_plain, asdict(one)) for one in attacks]
