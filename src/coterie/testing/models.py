"""Contract test of models."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from coterie.data.federation import Federation
from coterie.engine import ENGINES
from coterie.errors import ModelError
from coterie.methods.local import Local
from coterie.models.layout import (
    Layout,
    ModelSource,
    draw_initial_params,
    make_template,
    resolve_model,
)
from coterie.rng import Rng
from coterie.runtime.settings import DTYPES, Settings
from coterie.runtime.task import make_task
from coterie.runtime.translation import check_translation
from coterie.simulation.run import simulate
from coterie.testing._promises import assert_accepted
from coterie.testing.methods import run_grouped
from coterie.testing.tiny import tiny_federation, tiny_settings


def check_model(
    model: ModelSource,
    *,
    federation: Federation | None = None,
    settings: Settings | None = None,
    engines: Sequence[str] = tuple(ENGINES),
) -> dict[str, str]:
    """Check the guarantees that every model must give, and say which engine runs it.

    It can be made and trained on the data. Made again from the same random stream it has the same
    weights, and trained again with the same seed it is the same model: nothing random is hidden.
    All that training changes is in its parameters and floating-point buffers, so that clients that
    share a process do not share anything else. Every engine that takes it ends where the loop
    engine does, up to rounding, and computes what the untouched module does in plain PyTorch, see
    `runtime.translation`.

    Args:
        model: an import path, a name, a module or a factory, as in `simulate`.
        federation: the data; a tiny federation of 4 numbers an input and 3 classes by default.
        settings: of the runs; float64, so that engines can be compared closely.
        engines: the engines to try.

    Returns:
        For each of them, and for "auto", which engine runs the model and why, or why it is refused.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    federation = federation or tiny_federation()
    # The loop engine is the reference: it runs every module, one client after another.
    settings = replace(settings or tiny_settings(rounds=2), engine="loop", evaluate="final")
    with assert_accepted("it can be made for the data"):
        made = resolve_model(model, federation.features, federation.outputs, federation.parts)
        layout = Layout(make_template(made), DTYPES[settings.dtype])
        # A module is used as it is; only a factory draws weights.
        if not isinstance(made, nn.Module):
            first = draw_initial_params(made, layout, Rng(0))
            second = draw_initial_params(made, layout, Rng(0))
            assert torch.equal(first, second), (
                "made again from the same random stream it has other weights: draw them from "
                "torch's generator alone"
            )
    with assert_accepted("it can be trained on the data"):
        whole = _train_models(model, federation, settings)
        again = _train_models(model, federation, settings)
    assert torch.equal(whole, again), (
        "trained again with the same seed it is another model: it draws random numbers by "
        "itself; draw from torch's generator alone"
    )
    # One client a host: state outside the parameters would leak only between clients of one
    # process.
    groups = torch.arange(len(federation))[:, None].tolist()
    alone = run_grouped(federation, Local(), groups, model=model, settings=settings)
    assert torch.equal(whole, alone), (
        "trained with other clients it is another model: it keeps something outside its "
        "parameters and floating-point buffers (register_buffer)"
    )
    said, scale = {}, float(whole.abs().max())
    # The tolerance of engines in this library, relative for large weights.
    limit = {"float64": 1e-10, "float32": 1e-4}[settings.dtype] * max(scale, 1.0)
    for name in (*engines, "auto"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what a warning says is in the reason
            wanted = replace(settings, engine=name)
            try:
                task = make_task(federation, Local(), model, wanted)
            except ModelError as error:
                # One that does not take the model may refuse it instead of leaving it to another.
                said[name] = str(error)
                continue
            engine = task.engine
            said[name] = engine.reason
            with assert_accepted(f"the {engine.name} engine trains the module as it is"):
                check_translation(task, federation, wanted.local, Rng(3))
            # An engine that does not take the model falls back to another one: nothing to compare.
            if engine.name == name != "loop":
                gap = float((_train_models(model, federation, wanted) - whole).abs().max())
                assert gap <= limit, (
                    f"with the {name} engine it ends {gap:.3g} away from the loop engine"
                )
    return said


def _train_models(model: ModelSource, federation: Federation, settings: Settings) -> Tensor:
    """The models of all clients in the end."""
    return simulate(federation, Local(), model=model, settings=settings, seed=3).params
