"""Native programs compute what the loop engine does, whatever the block, the threads and who is hosted."""

import json
import math
import re
import warnings
from dataclasses import replace
from threading import Thread
from typing import ClassVar

import pytest
import torch
from tests.selection import first_only
from torch import nn

from coterie import engine as engines
from coterie._util.files import write_atomically
from coterie.engine import _choice
from coterie.engine._augment import CropFlip
from coterie.engine._base import cross_entropy, squared_error
from coterie.engine._loop import LoopEngine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import compiler
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.trace import NotTraceableError, record
from coterie.engine.native.traced import trace_module
from coterie.engine.task import LocalTraining, Workload
from coterie.methods import METHODS
from coterie.models.layout import Layout, build_model
from coterie.models.simplex_layers import simplex_head
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation


def stack_of_everything():
    """Padding, kernels and windows that are not square, no bias, tanh, both kinds of dropout, rows left over."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(5, 7, (3, 2), padding=(0, 1)), nn.Tanh(),
        nn.MaxPool2d((2, 3)), nn.Dropout2d(0.3), nn.Conv2d(7, 4, 2), nn.ReLU(), nn.MaxPool2d(1), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(4 * 3 * 2, 9), nn.Tanh(), nn.Linear(9, 3, bias=False),
    )  # fmt: skip


def samples(features, classes, dtype, number=40, uint8=False):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(number, *features, generator=stream)
    if uint8:
        x = torch.randint(0, 256, (number, *features), generator=stream, dtype=torch.uint8)
    y = torch.randn(number, 2, generator=stream)
    if classes:
        y = torch.randint(0, classes, (number,), generator=stream)
    mean = tuple(0.1 * c + 0.3 for c in range(features[0])) if uint8 else ()
    return RawSamples(x, y, dtype, mean, tuple(m / 2 for m in mean))


def training(layout, data, local, clients=3, steps=4, prox=0.0):
    """Clients with full, smaller and missing batches."""
    stream = torch.Generator().manual_seed(2)
    rows = layout.own_values().repeat(clients, 1)
    rows = rows + 0.01 * torch.randn(rows.shape, generator=stream).to(rows)
    length = torch.full((clients, steps), local.batch_size)
    length[1, 2], length[0, 1], length[2, -1] = max(1, local.batch_size - 3), 1, 0
    places = torch.randint(0, len(data), (clients, steps, local.batch_size), generator=stream)
    keys = torch.randint(0, 1 << 62, (clients,), generator=stream)
    anchor = rows + 0.1 if prox else None
    inputs = mixtures(layout, clients, steps)
    return rows, TrainingWork(
        data, places, length, local, anchor=anchor, prox=prox, draw_keys=keys, inputs=inputs
    )


def mixtures(layout, *shape):
    """Weights for the endpoints of a simplex layer, other ones for every client and step."""
    stream = torch.Generator().manual_seed(3)
    known = layout.zero_inputs(1)
    size = {name: value.shape[-1] for name, value in known.items()}
    draws = {
        name: torch.rand(*shape, count, generator=stream, dtype=layout.dtype)
        for name, count in size.items()
    }
    return {name: draw / draw.sum(-1, keepdim=True) for name, draw in draws.items()}


def pairs(data):
    places = torch.arange(len(data)).reshape(2, -1)
    return EvaluationPairs(
        data, places, torch.tensor([20, 17]), torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 1, 0])
    )


def both(model, features, classes, dtype, local, prox=0.0, uint8=False):
    """Train and measure with the loop engine and with the native program; return the largest differences."""
    layout = Layout(model, dtype)
    objective = cross_entropy if classes else squared_error
    data = samples(features, classes, dtype, uint8=uint8)
    x, y = data.prepare_inputs(torch.arange(2)), data.prepare_targets(torch.arange(2))
    results = []
    for engine in (LoopEngine(layout, objective), CompiledEngine(layout, objective, x, y)):
        rows, work = training(layout, data, local, prox=prox)
        losses = engine.train(rows, work, 2)
        values = engine.measure_pairs(
            rows, pairs(data), layout.zero_inputs(3) | mixtures(layout, 3), 2
        )
        results.append((rows, losses, *values.values()))
    assert torch.equal(results[0][1].isnan(), results[1][1].isnan())
    scale = max(1.0, float(results[0][0].abs().max()))
    return (
        max(float((a - b).nan_to_num(0).abs().max()) for a, b in zip(*results, strict=True)) / scale
    )


@pytest.mark.parametrize(
    ("local", "prox"),
    [
        (LocalTraining(lr=0.01, batch_size=8, weight_decay=0.02), 0.3),
        (LocalTraining(lr=0.1, batch_size=19, optimizer="sgd", momentum=0.9), 0.0),
    ],
)
def test_a_stack_of_every_layer_trains_as_the_loop_engine_does(local, prox):
    """To 1e-10 in float64: optimizers, penalties, batches above and below 8 samples."""
    assert both(stack_of_everything(), (2, 10, 9), 3, torch.float64, local, prox) < 1e-10


@pytest.mark.full
@pytest.mark.parametrize("width", first_only([5, 8, 13, 31], slow=True))
@pytest.mark.parametrize("dtype", first_only([torch.float32, torch.float64], slow=True))
def test_rows_and_layers_that_leave_registers_part_full_are_computed_alike(width, dtype):
    """Convolutions with and without pooling on rows of even and odd width, linear layers of 17 and 38 inputs or more.

    In float32 a register may hold two places of a row, or inputs of one sample, and a row ends
    within it.
    """
    wide, high = ((width - 2) // 2 + 1) // 2, ((10 - 2) // 2 + 1) // 2
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 2, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 7, 1), nn.Flatten(), nn.Linear(7 * high * wide, 38), nn.Tanh(), nn.Linear(38, 17), nn.ReLU(),
        nn.Linear(17, 3),
    )  # fmt: skip
    local = LocalTraining(lr=0.05, optimizer="sgd", momentum=0.5, batch_size=11)
    assert both(model, (2, 10, width), 3, dtype, local) < (
        1e-5 if dtype == torch.float32 else 1e-10
    )


@pytest.mark.slow
def test_a_convolution_without_pooling_reads_rows_of_any_width_in_float32():
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2),
        nn.Tanh(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 3),
    )
    local = LocalTraining(lr=0.05, optimizer="sgd", batch_size=8)
    assert both(model, (1, 7, 7), 3, torch.float32, local) < 1e-5
    assert both(stack_of_everything(), (2, 10, 9), 3, torch.float32, local) < 1e-5


@pytest.mark.slow
def test_leaky_relu_is_compiled_also_where_it_changes_places_with_pooling():
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3, padding=1), nn.LeakyReLU(0.3),
        nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 4 * 3, 9), nn.LeakyReLU(), nn.Linear(9, 3),
    )  # fmt: skip
    local = LocalTraining(lr=0.05, optimizer="sgd", batch_size=9)
    assert both(model, (2, 10, 9), 3, torch.float64, local) < 1e-10


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    first_only([{"gain": 3.0}, {"bias": False}, {}], slow=True),
    ids=["a gain", "one bias", "own biases"],
)
def test_a_simplex_head_is_compiled_with_weights_of_the_endpoints_that_change(options):
    local = LocalTraining(lr=0.1, optimizer="sgd", momentum=0.5, batch_size=11)
    source = simplex_head(lambda: build_model("cnn-b", (1, 8, 8), 4), 3, **options)
    assert both(source(), (1, 8, 8), 4, torch.float64, local, prox=0.2) < 1e-10


@pytest.mark.full
def test_a_simplex_model_without_given_weights_mixes_its_endpoints_alike():
    layout = Layout(simplex_head(lambda: nn.Sequential(nn.Linear(5, 3)), 4)(), torch.float64)
    data = samples((5,), 3, torch.float64)
    x, y = data.prepare_inputs(torch.arange(2)), data.prepare_targets(torch.arange(2))
    rows, work = training(layout, data, LocalTraining(lr=0.1, optimizer="sgd"))
    alike = replace(
        work, inputs={"0.alpha": torch.full((3, work.num_steps, 4), 0.25, dtype=torch.float64)}
    )
    results = []
    for given in (replace(work, inputs={}), alike):
        trained = rows.clone()
        CompiledEngine(layout, cross_entropy, x, y).train(trained, given, 2)
        results.append(trained)
    assert torch.equal(*results)


@pytest.mark.full
def test_mixtures_of_single_samples_are_trained_without_the_program():
    """And with the loop engine's numbers."""
    layout = Layout(simplex_head(lambda: nn.Sequential(nn.Linear(5, 3)), 4)(), torch.float64)
    data = samples((5,), 3, torch.float64)
    x, y = data.prepare_inputs(torch.arange(2)), data.prepare_targets(torch.arange(2))
    results = []
    for engine in (LoopEngine(layout, cross_entropy), CompiledEngine(layout, cross_entropy, x, y)):
        rows, work = training(layout, data, LocalTraining(lr=0.1, optimizer="sgd"))
        engine.train(
            rows,
            replace(work, inputs=mixtures(layout, 3, work.num_steps, work.sample_indices.shape[2])),
            2,
        )
        results.append(rows)
    assert torch.allclose(*results, atol=1e-12)


@pytest.mark.full
def test_the_reference_network_agrees_in_float32_on_bytes_and_in_regression():
    local = LocalTraining(lr=0.001)
    # of some, Adam turns a gradient that is all rounding into a whole step
    with Rng(0).temporary_torch_seed("model"):
        network = build_model("cnn-b", (1, 8, 8), 4)
    assert both(network, (1, 8, 8), 4, torch.float32, local, uint8=True) < 1e-5
    assert (
        both(
            build_model("linear", (7,), 2),
            (7,),
            0,
            torch.float64,
            LocalTraining(optimizer="sgd", lr=0.1),
        )
        < 1e-12
    )


@pytest.mark.parametrize("uint8", [False, True])
def test_augmented_batches_are_those_of_the_loop_engine(uint8):
    layout = Layout(build_model("cnn-b", (1, 8, 8), 4), torch.float32)
    data = samples((1, 8, 8), 4, torch.float32, uint8=uint8)
    x, y = data.prepare_inputs(torch.arange(2)), data.prepare_targets(torch.arange(2))
    results = []
    for engine in (LoopEngine(layout, cross_entropy), CompiledEngine(layout, cross_entropy, x, y)):
        rows, work = training(layout, data, LocalTraining(batch_size=11, optimizer="sgd", lr=0.1))
        plain = rows.clone()
        engine.train(plain, work, 2)
        crops = CropFlip(torch.tensor([3, 1 << 60, 77]), 2, data.black_pixel())
        results.append((engine.train(rows, replace(work, augment=crops), 2).nan_to_num(0), rows))
        assert float((rows - plain).abs().max()) > 1e-3
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_no_result_depends_on_threads_or_on_who_is_trained_beside():
    layout = Layout(stack_of_everything(), torch.float64)
    data = samples((2, 10, 9), 3, torch.float64)
    engine = CompiledEngine(
        layout,
        cross_entropy,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    start, work = training(layout, data, LocalTraining(), clients=5)
    together, alone = start.clone(), start.clone()
    engines.use_threads(3)
    try:
        losses = engine.train(together, work, 5)
    finally:
        engines.use_threads(0)
    for client in range(5):
        part = slice(client, client + 1)
        row = alone[part]
        assert torch.equal(
            engine.train(row, work.select_clients(part), 1).nan_to_num(0),
            losses[part].nan_to_num(0),
        )
    assert torch.equal(together, alone)


@pytest.mark.full
def test_subnormal_numbers_are_zero_in_a_program_and_nowhere_else():
    """They make training that fits its samples several times as long; see `samples.h`."""
    layout, tiny = Layout(nn.Sequential(nn.Linear(3, 2)), torch.float32), torch.tensor([1e-39])
    data = RawSamples(tiny.expand(4, 3), torch.tensor([0, 1, 1, 1]), torch.float32)
    local = LocalTraining(optimizer="sgd", lr=1.0, batch_size=4)
    work = TrainingWork(data, torch.arange(4).reshape(1, 1, 4), torch.full((1, 1), 4), local)
    x, y = data.prepare_inputs(torch.arange(2)), data.prepare_targets(torch.arange(2))
    trained = []
    for engine in (LoopEngine(layout, cross_entropy), CompiledEngine(layout, cross_entropy, x, y)):
        rows = torch.zeros(1, layout.size)
        engine.train(rows, work, 1)
        trained.append(rows[0])
        assert (tiny * 0.5 > 0).all()
    loop, native = trained
    assert ((loop != 0) & (loop.abs() < 1e-38)).sum() == 6
    assert torch.equal(native, torch.where(loop.abs() < 1e-38, 0, loop))


def test_a_diverged_model_has_no_finite_loss_and_leaves_others_alone():
    layout = Layout(stack_of_everything(), torch.float64)
    data = samples((2, 10, 9), 3, torch.float64)
    engine = CompiledEngine(
        layout,
        cross_entropy,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    rows, work = training(layout, data, LocalTraining())
    rows[1, 3] = math.nan
    losses = engine.train(rows, work, 3)
    assert bool(losses[1].isnan().all())
    assert bool(rows[[0, 2]].isfinite().all())
    values = engine.measure_pairs(rows, pairs(data), {}, 3)
    assert values["loss"].isnan().tolist() == [False, True, False, True]


class Settled(nn.Linear):
    """Notes whether PyTorch may use oneDNN while it runs."""

    seen: ClassVar[list[bool]] = []

    def forward(self, input):
        self.seen.append(torch._C._get_mkldnn_enabled())
        return super().forward(input)


def test_settings_of_a_trace_do_not_reach_what_other_threads_train():
    """Another thread begins to train in the middle of a recorded step; it waits for the end of the trace."""
    Settled.seen.clear()
    layout = Layout(nn.Sequential(Settled(7, 3)))
    trainer = LoopEngine(layout, cross_entropy)
    batch = (torch.zeros(1, 2, 7), torch.zeros(1, 2, dtype=torch.int64), {})
    threads = []

    class Meanwhile(nn.Linear):
        def forward(self, input):
            threads.append(
                Thread(target=trainer.compute_gradients, args=(torch.zeros(1, layout.size), *batch))
            )
            threads[-1].start()
            threads[-1].join(0.1)
            return super().forward(input)

    record(Layout(nn.Sequential(Meanwhile(7, 3))), cross_entropy, batch[0][0], batch[1][0])
    for thread in threads:
        thread.join()
    assert Settled.seen == [True] * len(threads)


def test_without_a_compiler_or_for_other_modules_the_vmap_engine_runs_and_one_line_says_so(
    monkeypatch, cache
):
    layout = Layout(nn.Sequential(nn.Linear(3, 2)))
    x, y = torch.randn(2, 3), torch.tensor([0, 1])

    def none():
        raise compiler.CompilerError("no C++ compiler was found")

    monkeypatch.setattr(compiler, "find_compiler", none)
    compiler.describe_target.cache_clear()
    with pytest.warns(
        UserWarning, match=r"the vmap engine is used: the module cannot be compiled: no C\+\+"
    ) as lines:
        assert engines.make_engine("compiled", layout, cross_entropy, x, y).name == "vmap"
    assert len(lines) == 1
    compiler.describe_target.cache_clear()


def test_programs_are_kept_and_a_failing_compiler_is_quoted(cache):
    text = 'extern "C" int answer() { return 42; }'
    first, again = compiler.load(text), compiler.load(text)
    assert first[0].answer() == again[0].answer() == 42
    assert first[1] > 0
    assert again[1] == 0
    with pytest.raises(compiler.CompilerError, match=r"the C\+\+ compiler failed: .*error"):
        compiler.load("this is no program")


ANSWER = 'extern "C" int answer() { return %d; }'


@pytest.mark.parametrize("damage", ["garbage", "another program", "no digest", "no program"])
def test_a_program_that_is_not_the_one_written_here_is_compiled_again(cache, damage):
    """A file that lies in the cache is loaded only when its digest says that it was compiled here and is whole."""
    compiler.load(ANSWER % 42)
    (library,) = (cache / "compiled").glob("*.so")
    if damage == "garbage":
        write_atomically(library, b"no program")
    elif damage == "another program":
        compiler.load(ANSWER % 7)
        (other,) = set((cache / "compiled").glob("*.so")) - {library}
        write_atomically(library, other.read_bytes())
    elif damage == "no digest":
        library.with_suffix(".sha256").unlink()
    else:
        library.unlink()
    program, seconds = compiler.load(ANSWER % 42)
    assert seconds > 0
    assert program.answer() == 42


@pytest.mark.parametrize("which", ["folder", "file"])
def test_programs_that_others_may_write_are_not_loaded(cache, which):
    compiler.load(ANSWER % 42)
    (library,) = (cache / "compiled").glob("*.so")
    (library.parent if which == "folder" else library).chmod(0o777)
    with pytest.raises(
        compiler.CompilerError,
        match="mode 777; compiled programs are loaded only from what is yours",
    ):
        compiler.load(ANSWER % 42)


@pytest.mark.full
def test_a_wrong_program_is_not_used(monkeypatch):
    data = samples((7,), 3, torch.float64)
    layout = Layout(nn.Sequential(nn.Flatten(), nn.Linear(7, 3)), torch.float64)
    right = CompiledEngine.train

    def wrong(self, rows, work, block):
        return right(self, rows, replace(work, local=replace(work.local, lr=2.0)), block)

    monkeypatch.setattr(CompiledEngine, "train", wrong)
    with pytest.raises(NotTraceableError, match="does not compute what it does"):
        CompiledEngine(
            layout,
            cross_entropy,
            data.prepare_inputs(torch.arange(2)),
            data.prepare_targets(torch.arange(2)),
        )


@pytest.mark.full
def test_auto_compiles_where_it_pays_whatever_was_compiled_before():
    layout = Layout(nn.Sequential(nn.Flatten(), nn.Linear(7, 3)), torch.float64)
    x, y = torch.zeros(2, 7, dtype=torch.float64), torch.tensor([0, 1])
    chosen = [
        engines.make_engine(
            "auto", layout, cross_entropy, x, y, Workload(train_samples=expected)
        ).name
        for expected in (None, 1e3, 1e5, 1e7)
    ]
    assert chosen == ["vmap", "vmap", "vmap", "compiled"]


def test_a_larger_graph_takes_longer_to_compile_and_saves_more():
    """By hand: 2.3 s to begin, 4 ms and five runs of 0.3 for a node, 0.1 s for a convolution; 4 us for a call."""

    def forecast(module: nn.Module, samples: float, batch_size: int | None) -> tuple[float, float]:
        layout, y = Layout(module), torch.tensor([0, 1, 2, 0])
        x = torch.rand(4, 1, 6, 6)
        traces = trace_module(layout, cross_entropy, x, y)
        nodes = len(traces.train.nodes), len(traces.judge.nodes)
        products = _choice.count_products(layout, x)
        work = Workload(train_samples=samples, batch_size=batch_size, runs=5)
        found = _choice.CompilingForecast.predict(traces, products, work)
        some = sum(
            n.name.startswith("convolution") for n in (*traces.train.nodes, *traces.judge.nodes)
        )
        # Forward in both graphs, and its gradient in that of the step.
        assert some == 3 * sum(isinstance(part, nn.Conv2d) for part in module)
        assert found.cost == pytest.approx(2.3 + sum(nodes) * (0.004 + 5 * 0.0003) + some / 10)
        calls = 4e-6 * nodes[0] / (batch_size or 32)
        assert found.saving == pytest.approx(samples * (calls + 5e-11 * products))
        assert found.is_worthwhile == (found.saving > found.cost)
        return found.cost, found.saving

    small = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    large = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    for samples, batch_size in ((1e4, 8), (1e6, None)):
        one, other = forecast(small, samples, batch_size), forecast(large, samples, batch_size)
        assert one[0] < other[0]
        assert one[1] < other[1]
    # A step costs its calls, so smaller batches have more of them to save.
    assert forecast(small, 1e4, 8)[1] > 3 * forecast(small, 1e4, 64)[1]


def test_graphs_that_many_short_runs_would_record_again_are_not_recorded_to_choose(monkeypatch):
    """40 runs of 50 steps: a node saves 4 us a step, 8 ms in all; it takes 4 ms once and 0.3 a run, 16 in all."""
    layout = Layout(nn.Sequential(nn.Flatten(), nn.Linear(7, 3)), torch.float64)
    x, y = torch.zeros(2, 7, dtype=torch.float64), torch.tensor([0, 1])

    def make(runs):
        work = Workload(train_samples=40 * 50 * 32, batch_size=32, runs=runs)
        return engines.make_engine("auto", layout, cross_entropy, x, y, work).reason

    assert "which takes about 2." in make(1)
    monkeypatch.setattr(_choice, "trace_module", None)
    assert "would save at most 50.0% of what it takes" in make(40)


@pytest.mark.parametrize(("batch_size", "name"), [(None, "vmap"), (8, "vmap"), (400, "loop")])
def test_auto_batches_clients_where_their_products_are_small(batch_size, name):
    """A kernel of 2 x 9 numbers at 26 x 26 places and a layer of 1352 x 4: 17,576 products, in a batch of 8 or 400.

    Half a million products in a batch are the limit.
    """
    layout = Layout(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(1352, 4)))
    x, y = torch.zeros(2, 1, 28, 28), torch.tensor([0, 1])
    assert _choice.count_products(layout, x) == 17_576
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            engines.make_engine(
                "auto", layout, cross_entropy, x, y, Workload(batch_size=batch_size)
            ).name
            == name
        )


def test_auto_batches_clients_where_there_are_some():
    """A batched program takes as long for eight clients as for one: sixteen in a round are the least."""
    layout = Layout(nn.Linear(7, 3))
    x, y = torch.zeros(2, 7), torch.tensor([0, 1])

    def reason(clients, name="auto"):
        work = Workload(batch_size=8, clients=clients)
        return engines.make_engine(name, layout, cross_entropy, x, y, work).reason

    vmap, loop = "vmap, many clients at once: ", "loop, one client after another: "
    little = "too little work to compile"
    assert reason(16) == vmap + little
    assert reason(15) == f"{loop}{little}; 15 clients in a round are too few for many at once"
    assert reason(1, "vmap") == vmap + "as set"


@pytest.mark.full
def test_a_run_that_is_resumed_goes_on_with_the_engine_it_began_with(tmp_path):
    federation = tiny_federation()
    method = METHODS["local"]()

    def run(engine, rounds):
        settings = Settings(rounds=rounds, engine=engine, local=LocalTraining(batch_size=5))
        simulate(
            federation, method, model="linear", settings=settings, folder=tmp_path, resume=True
        )
        return json.loads((tmp_path / "provenance.json").read_text())["engine"]

    assert run("compiled", 1)["name"] == "compiled"
    assert run("compiled", 1)["reason"] == "compiled, a native program of the whole step: as set"
    assert run("auto", 2)["name"] == "compiled"
    assert run("vmap", 3)["name"] == "vmap"


@pytest.mark.full
def test_an_engine_says_which_layer_keeps_a_faster_one_away():
    """A layer that no native program knows, one that cannot be run for many, little work, another precision."""
    x, y = torch.zeros(2, 7), torch.tensor([0, 1])

    class Decides(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(2 * x)

    class Volumes(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Conv3d(1, 1, 1)

        def forward(self, x):
            return self.part(x[:, None, :, None, None]).flatten(1)

    def reason(*parts, name="auto", expected=1e9, batch_size=None, **options):
        layout = Layout(nn.Sequential(nn.Linear(7, 7), *parts, nn.Linear(7, 3)))
        work = Workload(train_samples=expected, batch_size=batch_size)
        return engines.make_engine(name, layout, cross_entropy, x, y, work, **options).reason

    loop, vmap = "loop, one client after another: ", "vmap, many clients at once: "
    unknown = (
        "the module cannot be compiled: a transposed or three-dimensional convolution in '1.part'"
    )
    assert reason(Volumes()) == vmap + unknown
    many = "the products of a batch are too large for many clients at once"
    assert reason(Volumes(), batch_size=10**6) == f"{loop}{unknown}; {many}"
    assert reason(expected=10) == vmap + "too little work to compile"
    # What compiling would gain, in one line: a plain stack of two layers, some thousand samples.
    little = "too little work to compile, which takes over 2.3 s and would save at most "
    # 3,000 samples in batches of 32 are 94 steps: 4 us of each call against 4.3 ms to build and record it
    assert reason(expected=3000) == vmap + little + "8.7% of what it takes"
    more = r"too little work to compile, which takes about 2\.\d s and would save 0\.\d+ s"
    assert re.fullmatch(vmap + more, reason(expected=110_000))
    assert reason(precision="bf16") == vmap + "native programs compute in full precision"
    assert reason() == "compiled, a native program of the whole step"
    assert reason(name="loop") == loop + "as set"
    with pytest.warns(UserWarning, match="the loop engine is used"):
        found = reason(Decides(7, 7))
    assert found.startswith(loop + "the module cannot be compiled: ")
    assert "; Decides '1' cannot be run over many clients at once (" in found


def test_compiling_is_told_once_for_a_machine(monkeypatch, tmp_path):
    """Where the program is in the cache, nothing is; nor after the block."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    said = []
    text = 'extern "C" int answer() { return 42; }\n'
    with compiler.report_compiling(said.append):
        first, _ = compiler.load(text)
        assert said == ["compiling the model (once for this machine)"]
        again, seconds = compiler.load(text)
    assert first.answer() == again.answer() == 42
    assert seconds == 0
    compiler.load(text + "\n")
    assert len(said) == 1
