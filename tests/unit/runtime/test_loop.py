"""The run loop: early stopping, cohorts, schedules, checkpoints, what is recorded."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from coterie.cluster.blocks import ThreadBlocks, simulate_in_blocks
from coterie.engine.task import LocalTraining
from coterie.errors import CheckpointError, ConfigError, OutOfMemory, RunExistsError
from coterie.exchange.in_memory import InMemory
from coterie.methods import Local, PanmLoss
from coterie.methods.random_gossip import Random
from coterie.models.layout import NamedModel
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.loop import Loop, Tracker
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.simulation.run import Progress, simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


def run(method=None, **changes):
    return simulate(
        tiny_federation(),
        method or Random(2),
        model="linear",
        settings=tiny_settings(**changes),
        seed=1,
    )


def losses(result, client, model="current"):
    m = result.metrics
    rows = m[
        (m.client == client) & (m.split == "validation") & (m.metric == "loss") & (m.model == model)
    ]
    return rows.sort_values("round").value.tolist()


@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
def test_the_best_model_is_that_of_the_lowest_recorded_validation_loss(order):
    """Spec invariant 7, first part; where training comes first, what is judged is the model before the exchange."""
    result = run(rounds=8, order=order)
    for client in range(6):
        assert losses(result, client, "best")[0] == pytest.approx(
            min(losses(result, client)), abs=1e-9
        )


def test_a_client_stops_after_exactly_patience_rounds_without_improvement():
    """Spec invariant 7: counted by hand on recorded losses 3, 2, 2, 2.5, 1 with patience 2."""
    tracker = Tracker.start(torch.zeros(1, 1))
    everyone, none = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    stops = []
    for number, loss in enumerate((3.0, 2.0, 2.0, 2.5)):
        tracker = tracker.observe(
            torch.full((1, 1), float(number)), torch.tensor([loss]), everyone, none, 2
        )
        stops.append(bool(tracker.stopped))
    assert stops == [False, False, False, True]
    assert float(tracker.best) == 1.0
    assert float(tracker.best_loss) == 2.0


def test_patience_counts_rounds_however_seldom_they_are_validated():
    """An ever worse model, validated every fifth round: patience 4 ends at the first of them, 6 at the next."""
    stops = []
    for patience in (4, 6):
        tracker = Tracker.start(torch.zeros(1, 1))
        everyone, none = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
        for number in range(5):
            loss = torch.tensor([float(number)])
            tracker = tracker.observe(torch.zeros(1, 1), loss, everyone, none, patience, rounds=5)
            if bool(tracker.stopped):
                break
        stops.append(5 * number)
    assert stops == [5, 10]
    worse = LocalTraining(optimizer="sgd", lr=50.0)
    table = run(rounds=25, validate_every=5, patience=4, local=worse).metrics
    table = table[table["metric"] == "loss"]
    for _, own in table.groupby("client"):
        measured = own[own["split"] == "validation"].sort_values("round")
        best = measured["value"].cummin().shift()
        first = measured["round"][(measured["value"] >= best).to_numpy()].min()
        assert own[own["split"] == "train"]["round"].max() == first


def test_stopped_clients_rest_their_broadcast_never_changes_and_the_loop_ends_when_all_stopped():
    settings = tiny_settings(rounds=60, patience=2, local=LocalTraining(optimizer="sgd", lr=0.5))
    federation = tiny_federation()
    exchange = InMemory(federation.ids, 6)
    loop = Loop(
        _task(federation, settings),
        Random(2),
        exchange,
        settings,
        Rng(1),
        Record(torch.zeros(6).long()),
    )
    broadcasts: dict[int, torch.Tensor] = {}
    while not loop.is_finished:
        before = loop.state.params.clone()
        stopped = loop.tracker.stopped.clone()
        loop.run_next_round()
        assert torch.equal(loop.state.params[stopped], before[stopped]), (
            "a stopped client neither merges nor trains"
        )
        for client, row in exchange.stopped.items():
            assert torch.equal(broadcasts.setdefault(client, row.clone()), row)
            assert torch.equal(row, loop.tracker.best[client])
    assert loop.next_round < 60
    assert len(broadcasts) == 6


def _task(federation, settings):

    return build_task(federation.host(federation.ids), "linear", dtype=torch.float64)


def test_no_rounds_is_the_warm_up_and_no_peers_is_local_training():
    """Spec invariant 5."""
    federation = tiny_federation()
    only = run(rounds=0)
    assert len(only.edges) == 0
    task = _task(federation, None)
    expected, _, _ = task.train(
        task.initial_models(Rng(1)), Rng(1).at_round(-1), tiny_settings().local
    )
    assert torch.allclose(only.params, expected)
    alone = simulate(federation, Random(2), model="linear", settings=tiny_settings(rounds=3, evaluate="final"), seed=1,
                     exchange=_deaf(federation))  # fmt: skip
    params = expected
    for index in range(3):
        params, _, _ = task.train(params, Rng(1).at_round(index), tiny_settings().local)
    assert torch.allclose(alone.params, params)


def _deaf(federation):
    from coterie.exchange.faulty import Faulty

    return Faulty(InMemory(federation.ids, len(federation)), drop=1.0)


def test_measuring_more_often_does_not_change_the_trajectory():
    """Spec invariant 6: evaluation uses no randomness."""
    assert torch.equal(run(evaluate="final").params, run(evaluate="final", eval_every=1).params)


@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
def test_no_metric_is_stored_twice_when_the_last_models_are_evaluated(order):
    """The last round has measured them already, before its exchange where training comes first."""
    rows = run(evaluate="final", eval_every=1, order=order).metrics
    assert not rows.duplicated(["round", "client", "split", "model", "metric"]).any()


def test_tests_happen_in_rounds_of_validation_and_both_end_with_the_last_round():
    rows = run(evaluate="final", rounds=5, validate_every=2, eval_every=2).metrics
    current = rows[(rows["metric"] == "loss") & (rows["model"] == "current")]
    happened = {
        split: sorted(current[current["split"] == split]["round"].unique())
        for split in ("validation", "test")
    }
    assert happened == {"validation": [-1, 1, 3, 4], "test": [1, 3, 4]}


def test_the_last_round_is_validated_so_that_its_models_can_be_the_best():
    """Five rounds, every second of them validated: the fifth all the same, before the best models are tested."""
    rows = run(rounds=5, validate_every=2).metrics
    current = rows[
        (rows["split"] == "validation") & (rows["model"] == "current") & (rows["metric"] == "loss")
    ]
    assert sorted(current["round"].unique()) == [-1, 1, 3, 4]


@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
def test_who_rests_in_the_round_that_validates_is_measured_as_it_trained_before(order):
    """Two of six clients a round, every fifth round validated: what each has by then, and the best of these."""
    changes = {"rounds": 10, "participation": 2, "order": order}
    every, seldom = run(**changes), run(validate_every=5, **changes)
    rested = 0
    for client in range(6):
        # Each round measures who took part in it, so that all values are of the newest models.
        known = dict(zip(range(-1, 10), losses(every, client), strict=True))
        found = losses(seldom, client)
        if order == "exchange_first":
            assert found == [known[-1], known[4], known[9]]
            assert losses(seldom, client, "best") == [min(found)]
        changed = {round: known[round] != known[round - 1] for round in range(10)}
        late = not changed[9] and any(changed[round] for round in range(5, 9))
        rested += late
        assert not late or found[2] != found[1]
    assert rested


def test_clients_that_rest_when_a_run_is_killed_or_split_are_measured_all_the_same(tmp_path):
    """Killed after any round and resumed, or hosted in two blocks: the bytes of a run in one go."""
    changes = {"rounds": 7, "participation": 2, "validate_every": 3, "checkpoint_seconds": 0.0}
    settings, data = tiny_settings(**changes), tiny_federation()

    def go(folder, at=None, resume=False):
        def kill(progress):
            if progress.round == at:
                raise KeyboardInterrupt

        return simulate(
            data, Random(2), model="linear", settings=settings, folder=tmp_path / folder,
            resume=resume, observer=kill,
        )  # fmt: skip

    whole = go("whole")
    for at in range(7):
        with pytest.raises(KeyboardInterrupt):
            go("killed", at, resume=at > 0)
    assert torch.equal(go("killed", resume=True).params, whole.params)
    for name in ("metrics.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        go("split", 4)
    split = simulate_in_blocks(
        data, Random(2), model="linear", blocks=2, start=ThreadBlocks.start, settings=settings,
        folder=tmp_path / "split", resume=True,
    )  # fmt: skip
    assert torch.equal(split.params, whole.params)
    assert split.metrics.equals(whole.metrics)


def test_a_client_stops_in_a_round_that_it_is_in_so_that_its_messages_go_on():
    """Half of the clients a round, every third round validated, ever worse models."""
    settings = tiny_settings(
        rounds=60,
        patience=2,
        participation=3,
        validate_every=3,
        local=LocalTraining(optimizer="sgd", lr=50.0),
    )
    data = tiny_federation()
    exchange = InMemory(data.ids, 6)
    record = Record(torch.zeros(6).long())
    loop = Loop(_task(data, settings), Random(2), exchange, settings, Rng(1), record)
    seen = 0
    while not loop.is_finished:
        gone = set(loop.tracker.stopped.nonzero().flatten().tolist())
        loop.run_next_round()
        if loop.next_round > 0 and len(exchange.active):
            assert gone <= set(exchange.last[0].ids.tolist())
            seen += bool(gone)
    assert seen


def test_tests_between_validations_are_refused():
    with pytest.raises(
        ConfigError, match=r"eval_every is 3; expected a multiple of validate_every \(2\)"
    ):
        tiny_settings(validate_every=2, eval_every=3)


def test_train_first_trains_before_the_exchange_and_has_no_warm_up():
    result = run(order="train_first", rounds=3, evaluate="final")
    assert result.timing["train_samples"] == 3 * 6 * 12
    assert run(rounds=3).timing["train_samples"] == 4 * 6 * 12


def test_the_warm_up_has_the_epochs_that_it_is_given():
    """Six clients of 12 samples train in two rounds, and before them for no epoch, for two, or as in a round."""
    for epochs, passes in ((0, 2), (2, 4), (None, 3)):
        assert run(rounds=2, warmup_epochs=epochs).timing["train_samples"] == passes * 6 * 12


def test_noise_that_is_drawn_at_every_access_is_another_in_each_round():
    """With a learning rate of 0 nothing else changes a validation loss from round to round."""
    federation = dataclasses.replace(
        tiny_federation(), noise=torch.tensor([0.0, 0.5] * 3, dtype=torch.float64)
    )
    settings = tiny_settings(rounds=3, local=LocalTraining(lr=0.0))
    result = simulate(federation, Random(2), model="linear", settings=settings, seed=1)
    for client in range(6):
        # of the warm-up and three rounds
        found = {round(loss, 9) for loss in losses(result, client)}
        assert len(found) == (4 if client % 2 else 1)


def test_mixing_conserves_mean_and_convexity_with_a_learning_rate_of_zero():
    """Spec invariants 1 and 3: with lr = 0 each parameter stays within the first range over the clients."""
    federation = tiny_federation()
    settings = tiny_settings(
        init="per_client", local=LocalTraining(lr=0.0), rounds=6, evaluate="final"
    )

    first = build_task(
        federation.host(federation.ids), "linear", dtype=torch.float64, init="per_client"
    ).initial_models(Rng(1))
    result = simulate(federation, Random(2), model="linear", settings=settings, seed=1)
    low, high = first.min(0).values, first.max(0).values
    assert bool(((result.params >= low - 1e-12) & (result.params <= high + 1e-12)).all())
    spread = (result.params.max(0).values - result.params.min(0).values).max()
    assert float(spread) < float((high - low).max())
    weights = result.edges.groupby(["round", "reader"]).weight.sum()
    assert ((weights - 2 / 3).abs() < 1e-9).all(), (
        "two peers of equal size weigh two thirds beside oneself"
    )


def test_only_the_cohort_takes_part_and_only_the_cohort_is_read():
    result = run(participation=0.5, rounds=20)
    for _, edges in result.edges.groupby("round"):
        cohort = set(edges.reader)
        assert len(cohort) == 3
        assert set(edges["read"]) <= cohort
    counts = result.edges.groupby("reader").size()
    assert set(counts.index) == set(range(6))


@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_sequential_schedules_let_later_clients_read_merged_models(schedule):
    """With lr = 0 and everyone reading everyone, only the first client to act merges the original models."""
    federation = tiny_federation()
    settings = tiny_settings(
        schedule=schedule,
        init="per_client",
        local=LocalTraining(lr=0.0),
        rounds=1,
        evaluate="final",
        warmup_epochs=0,
    )

    start = build_task(
        federation.host(federation.ids), "linear", dtype=torch.float64, init="per_client"
    ).initial_models(Rng(1))
    result = simulate(federation, Random(5), model="linear", settings=settings, seed=1)
    order = Rng(1).at_round(0).generator("order").permutation(6).tolist()
    live = start.clone()
    for client in order:
        live[client] = live.mean(0)
    assert torch.allclose(result.params, live)


def test_a_run_is_made_longer_and_not_shorter(tmp_path):
    """Five rounds can follow three; three would be those of another run than what the folder holds."""
    federation = tiny_federation()
    for rounds in (3, 5):
        settings = tiny_settings(rounds=rounds)
        simulate(
            federation,
            Random(2),
            model="linear",
            settings=settings,
            folder=tmp_path / "run",
            resume=True,
        )
    with pytest.raises(CheckpointError, match="is that of round 5; expected at most rounds = 3"):
        simulate(
            federation, Random(2), model="linear", settings=tiny_settings(rounds=3), folder=tmp_path / "run",
            resume=True,
        )  # fmt: skip


def test_the_newest_checkpoint_is_taken(tmp_path):
    """Nothing is trained when a finished run goes on: the one before would need its last round again."""
    federation, heard = tiny_federation(), []
    settings = tiny_settings(rounds=3, checkpoint_seconds=0)
    for _ in range(2):
        simulate(
            federation, Random(2), model="linear", settings=settings, folder=tmp_path / "run", resume=True,
            observer=heard.append,
        )  # fmt: skip
    assert len(heard) == 4, "the warm-up and three rounds"
    assert (tmp_path / "run" / checkpoint.BEFORE).exists()


def test_the_end_of_memory_is_one_line_and_no_reason_for_another_engine(monkeypatch):
    """torch says it in a RuntimeError, in a round or while an engine is tried."""
    from coterie.engine._loop import LoopEngine

    def full(*_, **__):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
        )

    for name in ("train", "compute_gradients"):
        with monkeypatch.context() as patch:
            patch.setattr(LoopEngine, name, full)
            with pytest.raises(
                OutOfMemory, match="cpu has no more memory: set a smaller block"
            ) as told:
                run(rounds=1, engine="loop")
        assert "\n" not in str(told.value)


def test_faults_are_masks_and_counted():
    from coterie.exchange.faulty import Faulty

    federation = tiny_federation()
    door = Faulty(InMemory(federation.ids, 6), drop=0.3, delay=0.3, duplicate=0.3)
    result = simulate(
        federation,
        Random(3),
        model="linear",
        settings=tiny_settings(rounds=40),
        seed=1,
        exchange=door,
    )
    edges = result.edges
    missing = edges[edges.purpose == "missing"]
    assert (missing.bytes == 0).all()
    assert (missing.weight == 0).all()
    # dropped 0.3; of the rest nothing else is missing after round 0, when there is no older message
    # to be late
    later = edges[edges["round"] > 0]
    assert 0.25 < (later.purpose == "missing").mean() < 0.35
    single = edges[edges.bytes > 0].bytes.min()
    assert 0.25 < (edges[edges.bytes > 0].bytes == 2 * single).mean() < 0.35


def test_a_diverged_run_is_recorded_as_such():
    local = LocalTraining(optimizer="sgd", lr=1e308)
    result = run(local=local, rounds=3)
    # A model that is not finite reaches nobody, so that two clients are left as they are.
    m = result.metrics
    trained = m[(m.split == "train") & (m.metric == "loss")]
    lost = sorted(set(trained.client[~trained.value.map(math.isfinite)]))
    assert lost == [0, 2, 3, 5]
    # Client 1 keeps a finite model, whose outputs are not.
    measured = m[(m.split != "train") & (m.metric == "loss")]
    worthless = set(measured.client[~measured.value.map(math.isfinite)])
    assert worthless >= {1}
    assert result.diverged == tuple(sorted({*lost, *worthless}))


@pytest.mark.parametrize("blocks", [None, 2])
def test_the_progress_of_a_run_hides_no_client_that_diverged(blocks):
    """Four of six clients are lost in the end: no mean over the others, and their number is said."""
    seen, local = [], LocalTraining(optimizer="sgd", lr=1e308)
    settings = tiny_settings(local=local, rounds=2)
    given = {"model": "linear", "settings": settings, "seed": 1, "observer": seen.append}
    if blocks:
        simulate_in_blocks(
            tiny_federation(), Random(2), blocks=blocks, start=ThreadBlocks.start, **given
        )
    else:
        simulate(tiny_federation(), Random(2), **given)
    steps = [step for step in seen if isinstance(step, Progress)]
    assert [step.diverged for step in steps] == [1, 1, 4]  # the warm-up, and two rounds
    for step in steps:
        assert math.isnan(step.loss)
        assert math.isnan(step.score)
        assert math.isnan(step.reported.get("loss", math.nan))


def test_means_of_validation_are_over_the_clients_with_validation_data():
    """Client 1 of six has none: the other five are averaged, and nobody has diverged."""
    data = tiny_federation()
    rows = (data.ids == 1).nonzero().flatten()
    split = data.split.clone()
    split[rows] = torch.where(split[rows] == 1, 0, split[rows])
    seen = []
    result = simulate(
        dataclasses.replace(data, split=split), Random(2), model="linear",
        settings=tiny_settings(rounds=1), seed=1, observer=seen.append,
    )  # fmt: skip
    table = result.metrics
    own = table[(table.split == "validation") & (table.metric == "loss") & (table["round"] == 0)]
    own = own[own.model == "current"]
    values = own.sort_values("client").value.tolist()
    assert [math.isnan(value) for value in values] == [False, True] + [False] * 4
    last = [step for step in seen if isinstance(step, Progress)][-1]
    assert last.loss == pytest.approx(sum(v for v in values if v == v) / 5, rel=1e-12)
    assert last.diverged == 0


def test_a_memory_of_another_form_is_not_read_as_todays(tmp_path, monkeypatch):
    """PANM's bag is a list of ids; a mask of the same name has other numbers, and so has a single list."""
    federation, folder, load = tiny_federation(), tmp_path / "run", checkpoint._load_tensors
    method = PanmLoss(num_peers=1, num_candidates=2, stage_one_rounds=1, interval=1)
    mask = torch.zeros(6, federation.population, dtype=torch.bool)

    def run(rounds):
        settings = tiny_settings(rounds=rounds)
        given = {"model": "linear", "settings": settings, "folder": folder, "resume": True}
        return simulate(federation, method, **given)

    run(2)
    for other, said in (
        (
            mask,
            r"members' as torch\.bool with 2 axes; expected torch\.int32 with 2 axes: it was written",
        ),
        (mask.int()[None], r"as torch\.int32 with 3 axes; expected torch\.int32 with 2 axes"),
    ):
        monkeypatch.setattr(
            checkpoint,
            "_load_tensors",
            lambda *of, bag=other: {**load(*of), "state.memory.members": bag},
        )
        with pytest.raises(CheckpointError, match=said):
            run(3)
    monkeypatch.setattr(checkpoint, "_load_tensors", load)
    run(3)


def test_a_run_folder_is_never_overwritten_and_a_foreign_or_damaged_checkpoint_is_refused(tmp_path):
    federation, folder = tiny_federation(), tmp_path / "run"
    simulate(federation, Random(2), model="linear", settings=tiny_settings(), folder=folder)
    before = (folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(RunExistsError, match="holds a run already"):
        simulate(federation, Random(2), model="linear", settings=tiny_settings(), folder=folder)
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(
            federation,
            Random(3),
            model="linear",
            settings=tiny_settings(),
            folder=folder,
            resume=True,
        )
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert checkpoint.is_finished(folder)
    (folder / "checkpoint.safetensors").write_bytes(before[: len(before) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        simulate(
            federation,
            Random(2),
            model="linear",
            settings=tiny_settings(),
            folder=folder,
            resume=True,
        )
    assert not list(folder.glob("*.tmp"))


def test_resuming_after_clients_stopped_gives_the_same_bytes(tmp_path):
    federation = tiny_federation()
    settings = tiny_settings(
        rounds=12, patience=1, participation=0.7, local=LocalTraining(optimizer="sgd", lr=0.3)
    )
    whole, parts, stopped = tmp_path / "whole", tmp_path / "parts", []
    simulate(federation, Random(2), model="linear", settings=settings, folder=whole)
    for rounds in (3, 7, 12):
        part = dataclasses.replace(settings, rounds=rounds)
        simulate(federation, Random(2), model="linear", settings=part, folder=parts, resume=True)
        stopped.append(int(load_file(parts / "checkpoint.safetensors")["tracker.stopped"].sum()))
    assert 0 < stopped[1] < 6, "some, but not all, had stopped when the last part began"
    for file in ("checkpoint.safetensors", "metrics.parquet", "edges.parquet"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()


def test_bad_settings_are_refused_at_the_door():
    for change, words in (
        ({"rounds": -1}, "rounds is -1"),
        ({"participation": 0}, "participation is 0"),
        ({"patience": 0}, "patience is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Settings(**change)


def test_best_models_are_kept_only_where_somebody_needs_them():
    """Losses and stopping go on without them."""
    params, flags = torch.ones(2, 3), torch.ones(2, dtype=torch.bool)
    tracker = Tracker.start(params, keep=False)
    for loss in ([1.0, 1.0], [0.5, 2.0]):
        tracker = tracker.observe(params, torch.tensor(loss), flags, ~flags, patience=1)
    assert len(tracker.best) == 0
    assert tracker.best_loss.tolist() == [0.5, 1.0]
    assert tracker.stopped.tolist() == [False, True]


def test_a_run_does_not_go_on_with_another_seed(tmp_path):
    federation, settings = tiny_federation(), tiny_settings(rounds=2)
    simulate(federation, Random(), model="linear", settings=settings, seed=1, folder=tmp_path)
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(
            federation,
            Random(),
            model="linear",
            settings=settings,
            seed=2,
            folder=tmp_path,
            resume=True,
        )


def test_a_run_does_not_go_on_with_inputs_that_were_prepared_otherwise(tmp_path):
    """Same clients, splits and targets, other numbers: the old checkpoint is of another run."""
    federation, settings = tiny_federation(), tiny_settings(rounds=2)
    simulate(federation, Random(), model="linear", settings=settings, folder=tmp_path)
    other = dataclasses.replace(federation, x=federation.x * 2)
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(other, Random(), model="linear", settings=settings, folder=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "nowhere.rules:rule",
            "random: aggregation 'nowhere.rules:rule': there is no module 'nowhere'; install the package",
        ),
        ("math:pi", "random: aggregation 'math:pi' is 3.141592653589793; expected a function"),
        (
            "coterie:Random",
            "random: aggregation 'coterie:Random' is <class 'coterie.methods.random_gossip.Random'>; exp",
        ),
    ],
)
def test_a_rule_that_is_not_there_is_told_before_anything_is_written(path, said, tmp_path):
    with pytest.raises(ConfigError) as raised:
        simulate(
            tiny_federation(), Random(aggregation=path), model="linear", folder=tmp_path / "run"
        )
    assert said in str(raised.value)
    assert not checkpoint.has_run(tmp_path / "run")


def test_a_function_without_a_name_is_no_rule():
    with pytest.raises(
        ConfigError, match=r"random: the function is .*<lambda>.*; expected one that is defined"
    ):
        Random(aggregation=lambda received: received.before)


def test_a_run_does_not_go_on_with_another_rule_or_other_arguments_of_its_model(tmp_path):
    federation, settings = tiny_federation(), tiny_settings(rounds=2)
    model = NamedModel(f"{__name__}:tempered", {"temperature": 2.0})
    given = {"model": model, "settings": settings, "folder": tmp_path, "resume": True}
    simulate(federation, Random(), **given)
    simulate(federation, Random(), **given)
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(federation, Random(aggregation="math:sqrt"), **given)
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(
            federation, Random(), **{**given, "model": NamedModel(model.kind, {"temperature": 3.0})}
        )


class Tempered(torch.nn.Linear):
    """Its text says nothing of its temperature."""

    temperature = 1.0

    def forward(self, x):
        return super().forward(x) / self.temperature


def tempered(features, outputs, temperature):
    module = Tempered(*features, outputs)
    module.temperature = temperature
    return module


def test_validation_is_measured_and_stays_for_clients_outside_of_the_cohort():
    """A client is measured when it takes part; in other rounds its last value counts.

    The values are those of a run in which nobody trains: then they must not change at all.
    """
    result = run(Local(), rounds=8, participation=0.5, local=LocalTraining(lr=0.0))
    found = result.metrics.query(
        "split == 'validation' and metric == 'loss' and model == 'current'"
    )
    rounds = found.pivot(index="round", columns="client", values="value")
    assert len(rounds.columns) == len(result.params)
    assert rounds.notna().iloc[-1].all(), "each client took part at least once"
    for client in rounds:
        measured = rounds[client].dropna()
        assert len(measured), f"client {client} has a value"
        assert measured.nunique() == 1
        # From the first round in which it took part on, in every round.
        assert rounds[client].notna().iloc[rounds.index.get_loc(measured.index[0]) :].all()
