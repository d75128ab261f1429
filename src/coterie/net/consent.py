"""Consent: what a member looks at before it approves a study, and rules that approve without it.

The data of the study's role are compared with what the study says of them, and a report says what
would leave the member. No module that a study names is imported here unless a person has said so.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from coterie.data.federation import Federation
from coterie.data.schema import TableSchema
from coterie.errors import ConfigError
from coterie.methods.base import Method
from coterie.methods.cost import CostSetting
from coterie.methods.registry import all_settings
from coterie.net import nodefile
from coterie.net.head import describe_difference
from coterie.net.nodefile import NodeFile
from coterie.net.payload import escape_text
from coterie.net.servicefile import Rules
from coterie.net.statements import Proposal, find_code, parse_proposed
from coterie.results.traffic import ENVELOPE, predict_network_bytes, predict_run_cost
from coterie.studies.config import StudyConfig
from coterie.studies.definition import MethodConfig

_SHOWN = 12  # tensors in words


def list_objections(proposal: Proposal, rules: Rules) -> list[str]:
    """Return why no rule approves a study; empty when the rules approve it.

    Args:
        proposal: the study.
        rules: this member's.
    """
    if not rules.proposers or not rules.methods:
        return ["no rule approves anything: [rules] names no proposers, or no methods"]
    if code := find_code(proposal.study):
        return [f"it would load {code[0]}: a person decides on that"]
    study, found = parse_proposed(proposal.study), list[str]()
    entry = _find_entry(study)
    if proposal.by not in rules.proposers:
        found.append(f"{proposal.by} is none of [rules] proposers")
    if entry.kind not in rules.methods:
        found.append(f"its method is {entry.kind}, none of [rules] methods")
    rounds = entry.settings.rounds
    if entry.settings.new_clients is not None:
        rounds += entry.settings.new_client_rounds
    if rounds > rules.rounds:
        found.append(f"it has {rounds} rounds; [rules] allow {rules.rounds}")
    local = entry.settings.local
    if local.epochs > rules.epochs:
        found.append(f"it has {local.epochs} epochs; [rules] allow {rules.epochs}")
    if local.steps is not None:
        found.append(
            f"it trains {local.steps} steps a round; [rules] allow epochs: a person decides"
        )
    found += _list_longer_training(entry.method, rules)
    if rules.secure_aggregation and entry.settings.secure_terms is None:
        found.append("it has no secure_aggregation, which [rules] require")
    private = entry.settings.local.dp_settings
    noise = 0.0 if private is None else private.noise_multiplier
    if noise < rules.noise:
        found.append(f"its noise_multiplier is {noise:g}; [rules] require {rules.noise:g}")
    return found


def _find_entry(study: StudyConfig) -> MethodConfig:
    """Return the one method of a study as it runs: with its rounds times the study's `scale`."""
    return study.scale_method(study.methods[0].label)


def _list_longer_training(method: Method, rules: Rules) -> list[str]:
    """Return why settings of a method of its own, such as `personal_epochs`, train for too long."""
    usual, found = {item.name: item.default for item in fields(method)}, list[str]()
    for name, value in all_settings(method).items():
        kind = name.rpartition("_")[2]
        if kind == "epochs" and value is not None and value > rules.epochs:
            found.append(f"its {name} are {value}; [rules] allow {rules.epochs} epochs")
        # How many steps are an epoch depends on the data.
        if kind == "steps" and value != usual.get(name, value):
            found.append(f"its {name} are {value}; [rules] allow epochs: a person decides")
    return found


def describe_data(federation: Federation) -> dict[str, Any]:
    """Return what a study says of the data that it needs: the fields of a proposal."""
    schema = TableSchema.from_federation(federation)
    return {
        "features": list(federation.features),
        "classes": federation.classes,
        "outputs": federation.outputs,
        "table": {} if schema is None else dict(schema.list_coding()),
    }


def load_role(
    file: NodeFile, proposal: Proposal, study: StudyConfig, clients: tuple[int, ...]
) -> Federation:
    """Return a member's own data of a study's role, and check that they are such as it says.

    Args:
        file: of the study.
        proposal: the study.
        study: the same, parsed.
        clients: ids of this member's clients.

    Raises:
        ConfigError: when the data differ, with what differs.
        DataError: when they cannot be used.
    """
    federation = nodefile.load_own_rows(file, study, clients, len(proposal.members))
    check_data(describe_data(federation), proposal)
    return federation


def check_data(own: Mapping[str, Any], proposal: Proposal) -> None:
    """Check that data are such as a study says.

    Raises:
        ConfigError: with what differs.
    """
    for key in ("features", "classes", "outputs"):
        wanted = getattr(proposal, key)
        if own[key] != wanted:
            raise ConfigError(
                f"the data of the role {proposal.role} have {key} {own[key]}; the study "
                f"{proposal.name} expects {wanted}"
            )
    if proposal.table and own["table"] != proposal.table:
        raise ConfigError(
            f"the table of the role {proposal.role} is read otherwise than the study "
            f"{proposal.name} expects: {describe_difference(own['table'], proposal.table)}"
        )


def describe_sending(proposal: Proposal, federation: Federation | None, own: str) -> list[str]:
    """Return what would leave a member, in lines.

    Args:
        proposal: the study.
        federation: the member's rows; None to say only what can be said without its model, which
            is then not loaded.
        own: the member's name.
    """
    study = parse_proposed(proposal.study, to_run=federation is not None)
    entry = _find_entry(study)
    others = [name for name in proposal.members if name != own]
    private = entry.settings.local.dp_settings
    rounds = entry.settings.rounds
    lines = [
        f"study     {proposal.name}, proposed by {proposal.by}: {entry.label} ({entry.kind}), "
        f"{rounds} rounds, model {escape_text(study.model.kind, 80)}",
        f"begins    when {proposal.quorum} of {', '.join(proposal.members[:20])} have approved"
        + (f", {proposal.server} among them" if proposal.server else ""),
    ]
    if own not in proposal.members:
        return [*lines, "sends     nothing: this member is none of its members"]
    lines.append(
        f"data      [data.{proposal.role}]: no sample leaves this member; what is made of them does: "
        "models, and what the method adds, such as losses or counts of classes "
        f"(docs/reference/privacy.md, {entry.kind})"
    )
    if entry.settings.secure_terms is not None:
        lines.append("privacy   masked sums: no single model is seen by the server")
    if private is not None and not private.noise_multiplier:
        private = None  # gradients that are clipped alone hide nothing
    if private is not None:
        lines.append(
            f"privacy   differential privacy: clip {private.clip:g}, noise_multiplier "
            f"{private.noise_multiplier:g}, delta {private.delta:g}"
        )
    if private is None and entry.settings.secure_terms is None:
        lines.append("privacy   none: who receives a model can learn of the data that trained it")
    lines += [f"loads     {line}" for line in find_code(proposal.study)]
    to = f"the server {proposal.server}" if proposal.server else f"any of {', '.join(others[:20])}"
    if proposal.server == own:
        to = "all others, as it has the server role"
    if federation is None:
        return [*lines, f"sends     models to {to}; their size is known when its code is loaded"]
    plan = nodefile.make_run_spec(study)
    task = plan.make_task(federation)
    setting = CostSetting.from_task(task)
    slots = [f"{s.name} {list(s.shape)}" for s in task.sharing.list_slots(task.layout)]
    more = f" and {len(slots) - _SHOWN} more" if len(slots) > _SHOWN else ""
    size = setting.params * setting.number_bytes
    lines.append(
        f"message   {size} bytes of numbers and up to {ENVELOPE} around them: "
        f"{', '.join(slots[:_SHOWN])}{more}; the number of training samples; what the method adds"
    )
    if proposal.server == own:
        made = "what the method makes of the models of all, this member's among them"
        return [*lines, f"sends     to {to}: {made}"]
    try:
        cost = predict_run_cost(plan.method, setting, rounds)
        total = predict_network_bytes(plan.method, setting, rounds)
        lines.append(
            f"sends     to {to}: {cost.models:.0f} models in {rounds} rounds on average, "
            f"{total / 1e6:.3g} MB"
        )
    except ConfigError:
        lines.append(f"sends     to {to}: how many models in {rounds} rounds depends on the data")
    return lines
