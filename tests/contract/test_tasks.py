"""Every method keeps its promises with tasks other than one class a sample: tokens, and several labels."""

from typing import Any

import pytest
import torch
from tests.contract.test_methods import BY_POSITION, SETTINGS
from tests.selection import first_only

from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.models.layout import ModelSource
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import TinyTokens, check_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

MODELS: dict[str, ModelSource] = {"tokens": TinyTokens, "labels": "linear"}
LOSSES = {"tokens": "tokens", "labels": "multi-label"}
OFTEN = [("dac", "labels"), ("fedavg", "tokens")]
CASES = [(kind, task) for kind in sorted(METHODS) for task in ("labels", "tokens")]
NEED_CLASSES = {"sosicfl", "sosicfl-all", "sosicfl-plus"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "task"),
    first_only([*OFTEN, *(case for case in CASES if case not in OFTEN)], 2, slow=True),
)
def test_method_keeps_the_contract(kind: str, task: Any):
    """Resumed, in any grouping of the clients, with small cohorts, with silent peers; or it says why it cannot."""
    method, federation = METHODS[kind](**SETTINGS.get(kind, {})), tiny_federation(kind=task)
    settings = tiny_settings(loss=LOSSES[task])
    if kind in NEED_CLASSES:
        with pytest.raises(ConfigError, match="class"):
            simulate(federation, method, model=MODELS[task], settings=settings)
        return
    check_method(
        method,
        federation=federation,
        model=MODELS[task],
        settings=settings,
        relabel=kind not in BY_POSITION,
    )


@pytest.mark.full
@pytest.mark.parametrize("task", first_only(MODELS))
def test_engines_agree(task: Any):
    """Training, the loss and its metric, in float64."""
    found = {}
    for engine in ("loop", "vmap", "compiled"):
        data = tiny_federation(kind=task)
        settings = tiny_settings(loss=LOSSES[task], engine=engine)
        part = build_task(
            data.host(data.ids), MODELS[task], engine=engine, dtype=torch.float64, loss=settings.custom_loss,
            train_samples=1e9, batch_size=5,
        )  # fmt: skip
        assert part.engine.name == engine
        params, info, _ = part.train(
            part.initial_models(Rng(0)), Rng(0).at_round(0), settings.local
        )
        found[engine] = [
            params,
            info["losses"],
            *part.evaluator.evaluate_split(params, "validation").values(),
        ]
        found[engine] += part.evaluate(params).values()
    for engine in ("vmap", "compiled"):
        for ours, theirs in zip(found[engine], found["loop"], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert len(found["loop"]) == 6  # the loss and a metric, on both sets
