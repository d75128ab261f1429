"""Tasks train and measure the same with every engine, and as plain PyTorch does."""

import copy
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tests.selection import first_only
from torch import nn
from torch.nn import functional

from coterie.data.build import build_federation
from coterie.engine._batches import draw_batches
from coterie.engine._loop import LoopEngine
from coterie.engine._work import step_keys
from coterie.engine.task import LocalTraining, Task
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.exchange.base import Message, make_inbox
from coterie.methods.fedavg import FedAvg
from coterie.methods.pfedme import PFedMe
from coterie.methods.pooled import Pooled
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


class Custom(nn.Module):
    """Dropout, batch normalization, a reused layer and a skip connection: what users bring."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        h = h + torch.tanh(self.shared(self.shared(h)))
        return self.head(h)


def task(engine="vmap", model=Custom, federation=None, **kwargs):
    return build_task(
        (federation or tiny_federation()).host(range(6)),
        model,
        engine=engine,
        dtype=torch.float64,
        **kwargs,
    )


def ragged():
    """Clients with 12, 11, 7, 5, 3 and 2 training samples."""
    federation = tiny_federation()
    split = federation.split.clone()
    for client, count in enumerate((12, 11, 7, 5, 3, 2)):
        split[client, count:12] = -1
    return replace(federation, split=split)


@pytest.mark.full
@pytest.mark.parametrize("engine", first_only(["compiled", "loop", "vmap"], slow=True))
def test_two_threads_train_and_measure_with_one_task_at_once(engine):
    """From two models, ten times each: the bits are those of one thread that does it alone."""
    shared, local = task(engine), LocalTraining(epochs=3, batch_size=4, optimizer="adam", lr=0.01)
    starts = [shared.initial_models(Rng(seed)).clone() for seed in range(2)]
    assert not torch.equal(*starts)
    together = threading.Barrier(2)

    def results(number, alone):
        out = []
        for _ in range(10):
            if not alone:
                together.wait(60)
            params, info, _ = shared.train(starts[number], Rng(number), local)
            out.append((params, info["losses"], *shared.evaluate(params).values()))
        return out

    expected = [results(number, True) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(results, range(2), [False] * 2))
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("data", [tiny_federation, ragged])
def test_loop_and_vmap_agree_on_a_users_module(optimizer, data):
    """Dropout, running statistics and batches of unequal size included; to 1e-10 in float64."""
    local = LocalTraining(epochs=2, batch_size=5 if data is tiny_federation else 4, optimizer=optimizer, lr=0.01,
                          momentum=0.9 if optimizer == "sgd" else 0.0, weight_decay=0.01,
                          drop_last=data is not tiny_federation)  # fmt: skip
    results = []
    for engine, block in (("loop", None), ("vmap", None), ("vmap", 4)):
        t = task(engine, federation=data(), block=block)
        start = t.initial_models(Rng(0))
        params, info, _ = t.train(start, Rng(0).at_round(0), local)
        results.append(
            (params, info["loss"], t.loss(params, "validation"), t.evaluate(params)["accuracy"])
        )
        assert torch.equal(start, t.initial_models(Rng(0))), "training changed its argument"
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert float((a - b).abs().max()) < 1e-10


class Residual(nn.Module):
    """Convolutions, batch normalization and a skip connection, on one-channel images made of four numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 5, 3, padding="valid")
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        image = x.unflatten(1, (1, 2, 2)).repeat(1, 1, 3, 3)
        h = torch.relu(self.norm(self.first(image)))
        return self.head((self.second(h) + h[..., 1:-1, 1:-1]).mean((2, 3)))


@pytest.mark.full
@pytest.mark.parametrize("model", [Residual, Custom, "mlp-c"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_block_changes_no_bit(model, dtype, loss_table):
    """Training, scores and evaluation, with clients of unequal size."""
    results = []
    for block in (1, 2, 5, 6):
        t = build_task(ragged().host(range(6)), model, engine="vmap", dtype=dtype, block=block)
        local = LocalTraining(batch_size=4, weight_decay=0.01, drop_last=True)
        params, info, _ = t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), local)
        losses = info["losses"].nan_to_num(0)
        results.append((params, losses, loss_table(t, params), t.evaluate(params)["loss"]))
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours, theirs)


def test_a_client_that_trains_alone_ends_with_the_bits_it_has_among_others():
    """Seventeen samples in batches of eight: a last batch of one, whose products round by where their input lies."""
    study = config.parse_study_text(
        'rounds = 1\nmodel = { kind = "cnn-b" }\n[data]\ndataset = "digits"\nnum_clients = 2\ntrain = 17\n'
        'validation = 5\n[[methods]]\nkind = "local"\n'
    )
    data, local = build_federation(study.data, 0), LocalTraining(lr=0.01)

    def trained(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        t = build_task(data.host(ids), "cnn-b", engine="loop")
        params, _, _ = t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), local)
        return params, t.loss(params, "validation")

    together, losses = trained([0, 1])
    for client in (0, 1):
        alone, loss = trained([client])
        assert torch.equal(alone[0], together[client])
        assert torch.equal(loss[0], losses[client])


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(epochs=2, batch_size=5, optimizer="adam", lr=0.02, weight_decay=0.1),
        LocalTraining(epochs=3, batch_size=8, optimizer="sgd", lr=0.1, momentum=0.8),
        LocalTraining(steps=4, batch_size=5, optimizer="sgd", lr=0.1, drop_last=True),
    ],
)
def test_local_training_is_that_of_torch_optim(local):
    """A module trained by hand with torch.optim on the same batches ends with the same parameters."""
    t = task("vmap", model="mlp-c" if local.steps else "linear")
    if local.steps:
        t = task("vmap", model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    start = t.initial_models(Rng(1))
    params, info, _ = t.train(start, Rng(1).at_round(2), local)
    federation = tiny_federation()
    schedule = draw_batches(local, t.count_samples("train"), t.ids, Rng(1).at_round(2), "batches")
    for client in (0, 5):
        module = copy.deepcopy(t.layout.build_module(start[client], dtype=t.dtype)).train()
        if local.optimizer == "adam":
            optimizer = torch.optim.Adam(
                module.parameters(),
                lr=local.lr,
                weight_decay=local.optimizer_arguments["weight_decay"],
            )
        else:
            optimizer = torch.optim.SGD(
                module.parameters(),
                lr=local.lr,
                momentum=local.momentum,
                weight_decay=local.optimizer_arguments["weight_decay"],
            )
        losses = []
        for step in range(schedule.num_steps):
            order = schedule.sample_order[client, step][: int(schedule.batch_sizes[client, step])]
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                module(federation.x[client][order]), federation.y[client][order]
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert torch.allclose(params[client], t.layout.flatten_module(module), atol=1e-12)
        assert info["losses"][client].tolist() == pytest.approx(losses, abs=1e-12)


def test_the_optimizer_starts_fresh_in_every_call():
    """Two calls with one epoch differ from one with two for Adam, and not for plain SGD (spec invariant 8)."""
    t = task(model="linear")
    start = t.initial_models(Rng(0))
    for optimizer, same in (("sgd", True), ("adam", False)):
        local = LocalTraining(epochs=1, batch_size=12, optimizer=optimizer, lr=0.05)
        once, _, _ = t.train(start, Rng(0).at_round(0), replace(local, epochs=2))
        twice, _, _ = t.train(
            t.train(start, Rng(0).at_round(0), local)[0], Rng(0).at_round(1), local
        )
        assert torch.allclose(once, twice, atol=1e-9) is same


def test_the_proximal_term_pulls_towards_the_anchor():
    t = task(model="linear")
    start = t.initial_models(Rng(0))
    local = LocalTraining(epochs=2, optimizer="sgd", lr=0.05)
    distances = [
        float((t.train(start, Rng(0).at_round(0), local, anchor=start, prox=mu)[0] - start).norm())
        for mu in (0.0, 1.0, 5.0)
    ]
    assert distances[0] > distances[1] > distances[2]
    free, _, _ = t.train(start, Rng(0).at_round(0), local)
    zero, _, _ = t.train(start, Rng(0).at_round(0), local, anchor=start + 1, prox=0.0)
    assert torch.equal(free, zero)


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_the_proximal_term_has_the_gradient_of_half_the_squared_distance(engine):
    """A step of SGD with the anchor at distance 1 of each parameter: lr x mu towards it beside the step of the loss."""
    t = task(engine, model="linear")
    start = t.initial_models(Rng(0)).clone()
    local = LocalTraining(steps=1, batch_size=12, optimizer="sgd", lr=0.1)
    free, _, _ = t.train(start, Rng(0).at_round(0), local)
    pulled, _, _ = t.train(start, Rng(0).at_round(0), local, anchor=start + 1, prox=0.6)
    assert torch.allclose(pulled - free, torch.full_like(start, 0.1 * 0.6), atol=1e-12)


def test_a_second_training_in_a_round_draws_batches_of_its_own():
    t = task(model="linear")
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1)
    start, rng = t.initial_models(Rng(0)), Rng(0).at_round(0)
    first, again, other = (
        t.train(start, rng, local, purpose=name)[0] for name in ("batches", "batches", "personal")
    )
    assert torch.equal(first, again)
    assert bool((first != other).any(1).all())


def test_a_module_that_cannot_be_batched_falls_back_with_one_warning_that_names_the_layer():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight if x.sum() > 0 else x @ self.weight * 2

    model = nn.Sequential(nn.Linear(4, 4), Decides())
    with pytest.warns(
        UserWarning, match="the loop engine is used: Decides '1' cannot be run over many"
    ) as caught:
        t = task("auto", model=model)
    assert len(caught) == 1
    assert t.engine.name == "loop"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task("loop", model=model).engine.name == "loop"


def test_dropout_draws_anew_in_each_of_many_steps_and_its_keys_wrap():
    """From step 9 on the product of step and constant has more than 64 bits."""
    steps = (0, 1, 4, 9, 1000)
    found = torch.cat([step_keys(torch.tensor([7, 1 << 62]), step) for step in steps]).tolist()
    wanted = [
        (key + step * 0x1F123BB5159A55E5) % (1 << 64) for step in steps for key in (7, 1 << 62)
    ]
    assert [key % (1 << 64) for key in found] == wanted
    loop, vmap = (task(engine) for engine in ("loop", "vmap"))
    local = LocalTraining(steps=20, batch_size=5, optimizer="sgd", lr=0.1)
    results = [
        t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), local)[0] for t in (loop, vmap)
    ]
    assert torch.allclose(*results, atol=1e-10)


def test_foreign_randomness_in_a_module_is_reproducible():
    class Foreign(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.poisson(4 * torch.ones_like(x[:, :1]))

    with pytest.warns(UserWarning, match=r"the loop engine is used: .*\(poisson\)"):
        t = task("auto", model=lambda: Foreign(4, 3))
    start = t.initial_models(Rng(0))
    first, _, _ = t.train(start, Rng(0).at_round(0), LocalTraining())
    again, _, _ = t.train(start, Rng(0).at_round(0), LocalTraining())
    assert torch.equal(first, again)
    part = t.select_clients(torch.tensor([4]))
    alone, _, _ = part.train(start[4:5], Rng(0).at_round(0), LocalTraining())
    assert torch.equal(alone[0], first[4])


def test_unknown_engines_and_unfit_modules_are_refused():
    with pytest.raises(ConfigError, match="unknown engine 'vamp'; did you mean 'vmap'"):
        task("vamp")
    with pytest.raises(ModelError, match=r"cannot be trained on inputs of shape \(4,\): Linear"):
        task(model=lambda: nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(ModelError, match="has 2 outputs; expected 3"):
        task(model=lambda: nn.Linear(4, 2))


def test_merging_running_statistics_follows_the_policy():
    for policy in ("average", "local", "reset"):
        t = task(buffers=policy)
        before, merged = t.initial_models(Rng(0)) + 1, t.initial_models(Rng(0)) + 2
        settled = t.apply_buffer_policy(before, merged)
        start = t.layout.trainable
        assert torch.equal(settled[:, :start], merged[:, :start])
        expected = {"average": merged, "local": before, "reset": t.initial_models(Rng(0))}[policy]
        assert torch.allclose(settled[:, start:], expected[:, start:])


def test_losses_of_all_clients_are_those_of_each_client_alone(loss_table):
    t = task(model="linear", federation=ragged())
    params = t.initial_models(Rng(0)) + torch.randn(
        6, t.layout.size, generator=torch.Generator().manual_seed(1)
    )
    table = loss_table(t, params)
    assert torch.allclose(table.diagonal(), t.loss(params, "train"))


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_a_large_set_is_measured_whole(engine):
    """300 samples, more than an engine takes in one call: loss and accuracy as plain PyTorch computes them."""
    federation = tiny_federation(train=300)
    t = task(engine, model="linear", federation=federation)
    params = t.initial_models(Rng(0)) + torch.randn(
        6, t.layout.size, generator=torch.Generator().manual_seed(1)
    )
    found = t.evaluator.evaluate_split(params, "train")
    for client in range(6):
        x, y = federation.x[client, :300], federation.y[client, :300]
        outputs = t.layout.build_module(params[client], dtype=t.dtype)(x).detach()
        assert float(found["loss"][client]) == pytest.approx(
            float(functional.cross_entropy(outputs, y)), abs=1e-12
        )
        assert float(found["accuracy"][client]) == pytest.approx(
            float((outputs.argmax(1) == y).double().mean())
        )


def test_class_counts_are_those_of_training():
    federation = tiny_federation()
    expected = [torch.bincount(y[:12], minlength=3).tolist() for y in federation.y]
    assert task(model="linear").class_counts().tolist() == expected


def test_the_accuracy_on_all_test_sets_together_counts_each_sample_once():
    """A model that is right on all 30 samples of one test set and wrong on both of another: 30 of 32."""
    federation = tiny_federation()
    bias = torch.tensor([0.0, 5.0, 0.0], dtype=torch.float64)  # it always says class 1
    tests = tuple(
        replace(test, x=test.x[:size], y=torch.full((size,), label))
        for test, size, label in zip(federation.tests, (30, 2), (1, 2), strict=True)
    )
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(bias)
    t = task(model=model, federation=replace(federation, tests=tests), init="given")
    assert t.evaluator.accuracy_on_all_tests(t.initial_models(Rng(0))).tolist() == [30 / 32] * 6


def test_losses_that_were_kept_are_of_the_models_that_are_scored():
    """Models change between two scores, their number does not: the losses are those of the new ones."""
    t = task(model="linear")
    ids = torch.arange(6)
    peers = ((ids + 1) % 6)[:, None]
    for change in (0.0, 1.0):
        table = t.initial_models(Rng(0)) + change * torch.randn(
            6, t.layout.size, generator=torch.Generator().manual_seed(2)
        )
        inbox = make_inbox(Message(table, ids=ids), ids, peers, 6)
        assert torch.equal(t.score(inbox, keep=True), t.score(inbox))
        assert torch.equal(t.score(inbox, keep=True), t.score(inbox))


def test_clients_without_validation_data_have_no_validation_loss():
    federation = tiny_federation()
    split = federation.split.clone()
    split[2, 12:] = -1
    loss = task(federation=replace(federation, split=split)).loss(
        task().initial_models(Rng(0)), "validation"
    )
    assert bool(loss[2].isnan())
    assert int(loss.isnan().sum()) == 1


def small_memory(t: Task, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let the engine of a task hold no more than so many models at once."""
    for name in ("compute_gradients", "forward"):
        whole = getattr(t.engine, name)

        def limited(rows, *rest, whole=whole):
            if len(rows) > most:
                raise torch.OutOfMemoryError
            return whole(rows, *rest)

        monkeypatch.setattr(t.engine, name, limited)


def test_a_block_that_the_memory_does_not_hold_is_halved_until_it_does(monkeypatch, loss_table):
    """Six clients asked for, two fit: with the results of a machine that holds all, and a line for each halving."""
    results, local = [], LocalTraining(batch_size=4, drop_last=True)
    for most in (6, 2):
        t = build_task(ragged().host(range(6)), Custom, engine="vmap", block=6)
        small_memory(t, monkeypatch, most)
        if most == 6:
            params, info, _ = t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), local)
        else:
            with pytest.warns(UserWarning, match="out of memory: blocks of clients are"):
                params, info, _ = t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), local)
        results.append((params, info["loss"], t.loss(params, "train"), loss_table(t, params)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_measuring_goes_on_with_fewer_models_where_the_memory_is_small(monkeypatch):
    """Without a training before that found out."""
    t = build_task(tiny_federation().host(range(6)), Custom, engine="vmap", block=6)
    params = t.initial_models(Rng(0)).clone()
    wanted = t.loss(params, "train")
    small_memory(t, monkeypatch, 3)
    with pytest.warns(UserWarning, match="2 times smaller"):
        assert torch.equal(t.loss(params, "train"), wanted)


def test_a_client_that_does_not_fit_alone_is_refused_in_words(monkeypatch):
    """After halving down to one."""
    t = build_task(ragged().host(range(6)), Custom, engine="vmap", block=2)
    small_memory(t, monkeypatch, 0)
    with (
        pytest.warns(UserWarning, match="2 times smaller"),
        pytest.raises(ModelError, match="does not hold the training of one client"),
    ):
        t.train(t.initial_models(Rng(0)), Rng(0).at_round(0), LocalTraining())


def test_a_batch_of_one_sample_is_refused_with_the_client_where_the_module_normalizes_over_batches():
    """12, 11, 7, 5, 3 and 2 samples: in batches of four, 5 leaves one; in batches of two, 11, 7, 5 and 3 do."""
    hosted, names = ragged(), ("Oslo", "Lima", "Rio", "مستشفى", "Bonn", "Kyiv")
    made = task("loop", federation=replace(hosted, client_names=names))
    said = r"مستشفى has 5 training samples, so its last batch of local.batch_size = 4 holds one, .* local.drop_last = true"
    with pytest.raises(ModelError, match=said):
        made.trainer.check_batches(LocalTraining(batch_size=4))
    with pytest.raises(
        ModelError, match=r"Lima has 11 training samples.* holds one \(3 more like it\)"
    ):
        made.trainer.check_batches(LocalTraining(batch_size=2))
    with pytest.raises(
        ModelError, match=r"local.batch_size is 1, and batch normalization needs two or more"
    ):
        made.trainer.check_batches(LocalTraining(batch_size=1))
    for fine in (LocalTraining(batch_size=2, drop_last=True), LocalTraining(batch_size=3, drop_last=True),
                 LocalTraining(batch_size=8), LocalTraining(batch_size=4, steps=1)):  # fmt: skip
        made.trainer.check_batches(fine)
    task("loop", nn.Linear(4, 3), hosted).trainer.check_batches(LocalTraining(batch_size=1))


def test_the_last_batch_of_a_pool_is_looked_at_too():
    """Six clients of 12 samples: 72 in the pool, whose last batch of 71 holds one."""
    local = LocalTraining(batch_size=71)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(ModelError, match="the pool of all clients has 72 training samples"):
        make_task(tiny_federation(), Pooled(), module, Settings(local=local))
    make_task(tiny_federation(), FedAvg(), module, Settings(local=local))


class Choosy(nn.Module):
    """Takes no batch of some sizes, in training or evaluation."""

    def __init__(self, sizes: Sequence[int], training: bool, error: Exception) -> None:
        super().__init__()
        self.sizes, self.refuses_training, self.error = sizes, training, error
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.refuses_training and len(x) in self.sizes:
            raise self.error
        return self.linear(x)


@pytest.mark.parametrize("method", [FedAvg(), PFedMe(), Pooled()])
@pytest.mark.parametrize(
    "error", [ValueError("too few\nsamples"), RuntimeError("too few"), IndexError("too few")]
)
@pytest.mark.parametrize(
    ("training", "size", "said"),
    [(True, 5, "in training"), (False, 4, "in evaluation"), (False, 30, "in evaluation")],
)
def test_what_a_module_raises_in_a_run_is_one_line(method, error, training, size, said):
    """Engines try a module with eight samples; batches have five, validation sets four, test sets thirty."""
    settings = tiny_settings(rounds=1, engine="loop")
    module = Choosy([size], training, error)
    with pytest.raises(ModelError, match=f"^the module fails {said}: too few$"):
        simulate(tiny_federation(), method, model=module, settings=settings)


def test_an_error_that_is_not_the_modules_stays_as_it_is(monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("our fault")

    monkeypatch.setattr(LoopEngine, "_train_one", fail)
    with pytest.raises(ValueError, match="our fault") as raised:
        simulate(tiny_federation(), FedAvg(), model="linear", settings=tiny_settings(engine="loop"))
    assert not isinstance(raised.value, CoterieError)


def test_a_client_of_one_sample_is_refused_where_the_module_normalizes_over_batches():
    federation = tiny_federation()
    split = federation.split.clone()
    split[2, 1:12] = -1
    made = task("loop", federation=replace(federation, split=split))
    with pytest.raises(
        ModelError,
        match="client 2 has one training sample, and batch normalization needs two or more",
    ):
        made.trainer.check_batches(LocalTraining(batch_size=4, drop_last=True))


def test_normalization_over_the_places_of_one_image_takes_a_batch_of_one():
    """Sixteen values a channel: a variance can be computed."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    made = task("loop", module, tiny_federation(features=(1, 4, 4)))
    made.trainer.check_batches(LocalTraining(batch_size=1))
