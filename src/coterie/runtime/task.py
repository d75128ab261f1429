"""Build the task of a run: its model with the data of the hosted clients."""

import warnings
from functools import partial

from coterie._util.importing import import_function
from coterie._util.settings import custom_functions
from coterie.data.federation import Federation
from coterie.data.source import describe_parts
from coterie.engine.task import EngineOptions, ModelSpec, Task, Workload
from coterie.errors import ConfigError
from coterie.functional import metrics
from coterie.functional.losses import default_loss
from coterie.methods.base import Method
from coterie.methods.server import explain_single_models
from coterie.models.layout import ModelSource, find_adapter, find_output_name, resolve_model
from coterie.models.pretrained import AdapterConfig
from coterie.runtime.settings import DTYPES, Settings


class StandsStill(UserWarning):
    """A run would leave a part of what its method does undone, although it looks like others."""


def make_task(
    federation: Federation,
    method: Method,
    model: ModelSource,
    settings: Settings,
    secret: int | None = None,
    pool: Federation | None = None,
    *,
    follows_phases: bool = False,
) -> Task:
    """Check everything that a run needs, and return its task for all clients of a federation.

    Args:
        federation: the data; the task has its planted clusters only if the method declares that it
            needs them.
        method: a method.
        model: a name of `models.NETS`, an import path, an nn.Module, or a factory of modules.
        settings: the settings of the run.
        secret: seed of the draws of private training, see `Task`.
        pool: the samples of all clients as those of one, for methods that need them; made of
            `federation` when None.
        follows_phases: whether who trains this task changes it where the data change.

    Raises:
        ConfigError: when the method needs planted clusters and there are none, or a name is
            unknown.
        ModelError: when the module cannot be trained on such data.
    """
    if settings.secure_terms is not None and (reason := explain_single_models(method)):
        raise ConfigError(f"secure_aggregation is set; {method.kind} cannot have it: {reason}")
    if settings.peer_sampling is not None and (reason := method.reads_everybody):
        raise ConfigError(f"peer_sampling is set; {method.kind} cannot have it: {reason}")
    if method.sums_groups:
        for name in ("acceptance", "attacks"):
            if getattr(settings, name):
                raise ConfigError(
                    f"{name} is set; {method.kind} cannot have it: its clients see means of "
                    "groups, and no single model"
                )
    if federation.phases and not follows_phases:
        raise ConfigError(
            "data.drift is set, and this follows no change of the data over the rounds; expected "
            "data without it: simulations alone have it"
        )
    local = settings.local
    # Imports fail here, before anything is written, and with the name of the setting.
    for name, path in custom_functions(method).items():
        import_function(path, f"{method.kind}: {name} {path!r}")
    clusters = None
    if "truth" in method.needs:
        if federation.truth is None:
            raise ConfigError(f"{method.kind} needs the planted clusters; this federation has none")
        clusters = federation.truth.cluster
    later = [phase.truth and phase.truth.cluster for phase in federation.phases]
    if clusters is None:
        later = [None for _ in later]
    local.check_imports()
    if local.custom_augment and federation.parts:
        raise ConfigError(
            f"local.augment {local.custom_augment!r} takes inputs of one tensor; found "
            f"{describe_parts(federation.parts)}: transform them before, or leave augment out"
        )
    # The first two axes are clients and samples; a loss sees samples.
    targets = federation.y.flatten(0, 1)
    loss = settings.custom_loss or default_loss(targets, federation.classes)
    for name in (metrics.TRAIN_PRIOR_ACCURACY.name, metrics.GLOBAL_ACCURACY.name):
        # They are made of the accuracy that is measured with the loss.
        judged = loss.metric == metrics.ACCURACY.name and federation.classes > 0
        if name in settings.metrics and not judged:
            raise ConfigError(
                f"metric {name!r} needs classes, and a loss that is measured with the accuracy; "
                f"found loss {loss.kind!r} and {federation.classes or 'no'} classes: take "
                "'cross-entropy' or 'binary', or leave the metric out"
            )
    outputs = loss.num_outputs(targets, federation.classes)
    if loss.can_be_negative and (reason := method.needs_positive_loss):
        raise ConfigError(
            f"loss {loss.kind!r} can be below 0; {method.kind} cannot have it: {reason}"
        )
    said = method.describe_standstill(
        federation.population, settings.participation, settings.rounds
    )
    if said:
        warnings.warn(f"{method.kind}: {said}", StandsStill, stacklevel=3)
    spec = ModelSpec(
        method.build_model(resolve_model(model, federation.features, outputs, federation.parts)),
        init=settings.init,
        buffers=settings.buffers,
        shared=settings.shared,
        similarity_on=settings.similarity_on,
        local_tensors=method.personal_tensors,
        owner=method.kind,
        loss=loss,
        metrics=settings.output_metrics,
        output=find_output_name(model, settings.output),
        adapter=find_adapter(model),
    )
    _check_ranks(spec.adapter, method, settings)
    options = EngineOptions(
        engine=settings.engine,
        block=settings.block,
        dtype=DTYPES[settings.dtype],
        device=settings.device,
        precision=settings.precision,
        cuda_graphs=settings.cuda_graphs,
        portable=settings.portable,
    )
    work = Workload.of_run(local, settings.rounds, federation, settings.participation)
    build = partial(Task.build, model=spec, options=options, workload=work, secret=secret)
    pooled = None
    # The pooled clients are one more task of the same model.
    if "pool" in method.needs:
        if pool is None:
            pool = federation.pool_clients()
        pooled = build(pool)
        pooled.trainer.check_batches(local, "the pool of all clients")
    # `host` removes planted clusters; the task gets them only where the method declares them.
    task = build(federation.host(federation.ids), clusters=clusters, pool=pooled)
    task.trainer.check_batches(local)
    task.trainer.check_private(local)
    return task.with_phases(later) if later else task


def _check_ranks(adapter: AdapterConfig | None, method: Method, settings: Settings) -> None:
    """Refuse what takes it that adapters of all clients have the same rank."""
    if adapter is None or adapter.has_one_rank:
        return
    if "pool" in method.needs:
        raise ConfigError(
            f"{method.kind} trains one model for all clients, and model.adapter.r has several ranks"
        )
    if settings.acceptance_rules is not None:
        raise ConfigError(
            "acceptance compares models by their distances, which adapters of different ranks have "
            "in any case: give one rank, or leave acceptance out"
        )
