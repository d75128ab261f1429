"""What a round costs: the samples that models are trained and measured on, counted beside what must be."""

from dataclasses import replace

import pytest
import torch

from coterie.engine import _work
from coterie.engine._loop import LoopEngine
from coterie.engine._work import RawSamples, first_equal_rows
from coterie.engine.native.compiled import CompiledEngine
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

TRAIN = torch.tensor([12, 11, 7, 5, 3, 2])  # samples of the six clients, 40 in all
VALIDATION = 4
EVERYBODY = torch.arange(6)


class Counted:
    """A run whose engine counts: samples trained on, and samples passed forward by models that are measured."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, engine: str, kind: str, options: dict, **settings
    ):
        federation = tiny_federation()
        split = federation.split.clone()
        for client, count in enumerate(TRAIN.tolist()):
            split[client, count:12] = -1
        self.federation, method = replace(federation, split=split), METHODS[kind](**options)
        self.task = build_task(
            self.federation.host(range(6)), "linear", engine=engine, dtype=torch.float64
        )
        assert self.task.engine.name == engine
        self.trained = self.passed = self.gathered = 0
        self._watch(monkeypatch)
        door, record = InMemory(EVERYBODY, 6), Record(torch.zeros(6).long())
        self.loop = Loop(self.task, method, door, tiny_settings(**settings), Rng(1), record)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def watch(owner: object, name: str, note) -> None:
            inner = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args: (note(*args), inner(*args))[1])

        if isinstance(self.task.engine, CompiledEngine):
            program = self.task.engine.program
            watch(program, "train", lambda rows, work: self._train(int(work.batch_sizes.sum())))
            watch(
                program,
                "measure",
                lambda rows, pairs, inputs: self._pass(int(pairs.set_sizes[pairs.sets].sum())),
            )
            return
        if isinstance(self.task.engine, LoopEngine):
            watch(
                self.task.engine, "_run_backward", lambda model, x, y, inputs: self._train(len(x))
            )
        else:
            watch(
                self.task.engine,
                "compute_gradients",
                lambda rows, x, y, inputs: self._train(len(rows) * x.shape[1]),
            )
        watch(
            self.task.engine, "forward", lambda rows, x, inputs: self._pass(len(rows) * x.shape[1])
        )
        inner = RawSamples.prepare_inputs

        def inputs(samples: RawSamples, places: torch.Tensor) -> torch.Tensor:
            self.gathered += places.numel()
            return inner(samples, places)

        monkeypatch.setattr(RawSamples, "prepare_inputs", inputs)

    def _train(self, samples: int) -> None:
        self.trained += samples

    def _pass(self, samples: int) -> None:
        self.passed += samples

    def step(self) -> tuple[int, int]:
        """Do a round; return the samples trained on, and those passed forward."""
        self.trained = self.passed = self.gathered = 0
        self.loop.run_next_round()
        return self.trained, self.passed

    def cohort(self, index: int) -> torch.Tensor:
        """Return who takes part in a round."""
        return self.loop._choose_cohort(Rng(1).at_round(index))


ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])


@ENGINES
def test_a_round_of_dac_trains_each_client_once_and_scores_each_peer_once_on_its_data(
    engine, monkeypatch
):
    """40 samples trained on; two peers' models on them, 80; validation, 6 x 4 = 24. The warm-up scores nobody."""
    run = Counted(monkeypatch, engine, "dac", {"num_peers": 2})
    assert run.step() == (40, 24)
    for _ in range(2):
        assert run.step() == (40, 80 + 24)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_own_data_are_gathered_once_however_many_models_are_scored_on_them(engine, monkeypatch):
    """40 for training, 40 for the scores of five peers, 24 for validation."""
    run = Counted(monkeypatch, engine, "dac", {"num_peers": 5})
    run.step()
    assert run.step() == (40, 5 * 40 + 24)
    assert run.gathered == 40 + 40 + 24


@ENGINES
def test_clients_that_stopped_cost_nothing(engine, monkeypatch):
    """Without those of 11 and 3 samples 26 are left, and four validation sets."""
    run = Counted(monkeypatch, engine, "dac", {"num_peers": 2})
    run.step()
    run.step()
    stopped = torch.tensor([False, True, False, False, True, False])
    run.loop.tracker = replace(run.loop.tracker, stopped=stopped)
    run.loop.exchange.retire_clients(EVERYBODY[stopped], run.loop.tracker.best[stopped])
    assert run.step() == (26, 2 * 26 + 4 * VALIDATION)


@ENGINES
def test_clients_outside_the_cohort_cost_nothing(engine, monkeypatch):
    """Three of six take part: their samples, once trained on and twice scored, and their validation."""
    run = Counted(monkeypatch, engine, "dac", {"num_peers": 2}, participation=3)
    run.step()
    for index in range(2):
        here = int(TRAIN[run.cohort(index)].sum())
        assert here < 40
        assert run.step() == (here, 2 * here + 3 * VALIDATION)


@ENGINES
def test_pens_scores_in_stage_one_only(engine, monkeypatch):
    """Three peers on 40 samples, then none."""
    run = Counted(monkeypatch, engine, "pens", {"num_sampled": 3, "stage_one_rounds": 1})
    run.step()
    assert run.step() == (40, 3 * 40 + 24)
    assert run.step() == (40, 24)


@ENGINES
def test_ifca_measures_each_model_on_each_clients_data_once_a_round(engine, monkeypatch):
    """Two models on 40 samples after the merge, to serve everybody; the next offer has the same, and costs nothing."""
    run = Counted(monkeypatch, engine, "ifca", {"clusters": 2})
    assert run.step() == (0, 2 * 40 + 24)
    for _ in range(2):
        assert run.step() == (40, 2 * 40 + 24)


@ENGINES
def test_a_server_costs_absent_clients_their_validation_in_the_rounds_that_have_one(
    engine, monkeypatch
):
    """Half of the clients, validation in every second round: else the two models on the cohort's samples alone."""
    run = Counted(monkeypatch, engine, "ifca", {"clusters": 2}, participation=3, validate_every=2)
    run.step()
    cohorts = [int(TRAIN[run.cohort(index)].sum()) for index in range(3)]
    assert run.step() == (cohorts[0], 0)  # the offer was measured before the first round
    assert run.step() == (cohorts[1], 2 * cohorts[1] + 2 * 40 + 24)
    assert run.step() == (cohorts[2], 0)


@ENGINES
def test_equal_models_are_tested_once_on_each_test_set(engine, monkeypatch):
    """FedAvg: six clients have one model, and there are two test sets of 30 samples."""
    run = Counted(
        monkeypatch, engine, "fedavg", {}, evaluate="final", metrics=["balanced_accuracy"]
    )
    run.step()
    run.step()
    params, _ = run.loop._fetch_served_models(0)
    alike, apart = params.clone(), torch.cat([params[:1], params[1:2] + 1]).repeat(3, 1)
    for rows, samples in (
        (params, 60),
        (alike, 60),
        (apart, 60),
        (apart.roll(1, 0)[[0, 0, 1, 1, 2, 2]], 120),
    ):
        run.passed = 0
        run.task.evaluate(rows)
        assert run.passed == samples
        values, recall, _ = run.task.evaluator.evaluate_by_class(rows)
        assert run.passed == 2 * samples
        alone = [
            run.task.select_clients(EVERYBODY[i : i + 1]).evaluator.evaluate_by_class(
                rows[i : i + 1]
            )[1][0]
            for i in range(6)
        ]
        assert torch.equal(recall, torch.stack(alone))
        apiece = run.task.evaluate(rows)
        assert torch.equal(values["accuracy"], apiece["accuracy"])
        torch.testing.assert_close(values["loss"], apiece["loss"], rtol=1e-12, atol=0)


@ENGINES
@pytest.mark.parametrize(
    "extra", [[], ["balanced_accuracy"], ["balanced_accuracy", "train_prior_accuracy"]]
)
def test_test_sets_are_passed_once_whatever_is_asked_of_them(engine, extra, monkeypatch):
    """Six clients with models of their own on 30 samples each, and 4 for validation: in a round, and in the end."""
    run = Counted(monkeypatch, engine, "local", {}, eval_every=1, metrics=extra)
    run.step()
    assert run.step() == (40, 6 * (4 + 30))
    run.passed = 0
    run.loop.evaluate_final()
    assert run.passed == 6 * (4 + 30)


def test_rows_that_are_equal_are_found_also_where_their_sums_agree():
    rows = torch.tensor(
        [[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [torch.nan, 0.0], [torch.nan, 0.0], [2.0, 1.0]]
    )
    assert first_equal_rows(rows).tolist() == [0, 1, 0, 3, 4, 1]
    assert first_equal_rows(torch.zeros(0, 3)).tolist() == []
    assert first_equal_rows(torch.ones(1, 3).expand(4, 3)).tolist() == [0, 0, 0, 0]


def test_different_rows_of_one_sum_are_not_compared_pair_by_pair(monkeypatch):
    """Linear models of softmax, whose sums gradient descent leaves as they were: 1 + k - k."""
    compared = []
    compare = _work._compare_rows

    def note(rows, pairs):
        compared.extend(pairs)
        return compare(rows, pairs)

    monkeypatch.setattr(_work, "_compare_rows", note)
    steps = torch.arange(40.0)
    rows = torch.stack([torch.ones(40), steps, -steps], dim=1)
    rows = torch.cat([rows, rows[[7]]])
    assert first_equal_rows(rows).tolist() == [*range(40), 7]
    assert compared == [(40, 7)]
