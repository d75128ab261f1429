"""Consent: what a member looks at before it approves a study, and rules that approve without it.

The data of the study's role are compared with what the study says of them, and a report says what
would leave the member. No module that a study names is imported here unless a person has said so.
"""

from collections.abc import Mapping
from typing import Any

from coterie.data.federation import Federation
from coterie.data.schema import TableSchema
from coterie.errors import ConfigError
from coterie.methods.cost import CostSetting
from coterie.net import nodefile
from coterie.net.head import describe_difference
from coterie.net.nodefile import NodeFile
from coterie.net.payload import escape_text
from coterie.net.servicefile import Rules
from coterie.net.statements import Proposal, find_code, parse_proposed
from coterie.results.traffic import ENVELOPE, predict_network_bytes, predict_run_cost
from coterie.studies.config import StudyConfig

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
    entry = study.methods[0]
    if proposal.by not in rules.proposers:
        found.append(f"{proposal.by} is none of [rules] proposers")
    if entry.kind not in rules.methods:
        found.append(f"its method is {entry.kind}, none of [rules] methods")
    rounds = entry.settings.rounds
    if entry.settings.new_clients is not None:
        rounds += entry.settings.new_client_rounds
    if rounds > rules.rounds:
        found.append(f"it has {rounds} rounds; [rules] allow {rules.rounds}")
    if entry.settings.local.epochs > rules.epochs:
        found.append(f"it has {entry.settings.local.epochs} epochs; [rules] allow {rules.epochs}")
    if rules.secure_aggregation and entry.settings.secure_terms is None:
        found.append("it has no secure_aggregation, which [rules] require")
    private = entry.settings.local.dp_settings
    noise = 0.0 if private is None else private.noise_multiplier
    if noise < rules.noise:
        found.append(f"its noise_multiplier is {noise:g}; [rules] require {rules.noise:g}")
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
    entry = study.methods[0]
    others = [name for name in proposal.members if name != own]
    private = entry.settings.local.dp_settings
    rounds = entry.settings.rounds
    lines = [
        f"study     {proposal.name}, proposed by {proposal.by}: {entry.label} ({entry.kind}), "
        f"{rounds} rounds, model {escape_text(study.model.kind, 80)}",
        f"begins    when {proposal.quorum} of {', '.join(proposal.members[:20])} have approved",
        f"data      [data.{proposal.role}]; no sample, label or result of it leaves this member",
    ]
    if entry.settings.secure_terms is not None:
        lines.append("privacy   masked sums: no single model is seen by the server")
    if private is not None:
        lines.append(
            f"privacy   differential privacy: clip {private.clip:g}, noise_multiplier "
            f"{private.noise_multiplier:g}, delta {private.delta:g}"
        )
    if private is None and entry.settings.secure_terms is None:
        lines.append("privacy   none: who receives a model can learn of the data that trained it")
    lines += [f"loads     {line}" for line in find_code(proposal.study)]
    to = f"the server {proposal.server}" if proposal.server else f"any of {', '.join(others[:20])}"
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
        f"{', '.join(slots[:_SHOWN])}{more}; the number of training samples; what the method adds "
        f"(docs/reference/privacy.md, {entry.kind})"
    )
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
