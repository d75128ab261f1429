"""What actors and their driver do with a pretended Ray, whose actors are threads of this process."""

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coterie.cluster import actors, packing
from coterie.cluster.actors import BlockActors, BlockRuns, open_ray_blocks
from coterie.cluster.blocks import BlockDied, MachineGone, simulate_in_blocks
from coterie.cluster.exchange import BlockInterrupted
from coterie.cluster.place import Place
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.methods import METHODS
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
NODE = {"Alive": True, "Resources": {"CPU": 4.0}}


class Far:
    """The handle of an actor: each call runs in a thread, and posts have a thread of their own."""

    def __init__(self, ray: "Threads", kind: Any, arguments: Any) -> None:
        self.ray, self.arguments = ray, arguments
        self.main, self.post = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.made = self.main.submit(kind, *arguments)

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Future[Any]:
            return self.main.submit(lambda: getattr(self.made.result(), name)(*given))

        def options(**asked: Any) -> Any:
            self.ray.posts.append(asked)
            return SimpleNamespace(
                remote=lambda *given: self.post.submit(
                    lambda: getattr(self.made.result(), name)(*given)
                )
            )

        return SimpleNamespace(remote=remote, options=options)


@dataclass
class Threads:
    """Ray, as far as blocks use it."""

    machines: list[dict[str, Any]] = field(default_factory=lambda: [NODE, NODE])
    hosts: list[Far] = field(default_factory=list)
    killed: list[Far] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    posts: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)

    def remote(self, **options: Any) -> Any:
        self.options = options

        def make(kind: Any) -> Any:
            def start(*arguments: Any) -> Far:
                self.hosts.append(Far(self, kind, arguments))
                return self.hosts[-1]

            return SimpleNamespace(remote=start)

        return make

    def wait(self, calls: Any, *, num_returns: int, timeout: float) -> Any:
        assert num_returns == 1, "the death of one must be noticed while the others wait for it"
        self.timeouts.append(timeout)
        done = wait(calls, timeout=timeout, return_when=FIRST_COMPLETED).done
        ready = [one for one in calls if one in done][:1]
        return ready, [one for one in calls if one not in ready]

    def get(self, call: Future[Any]) -> Any:
        return call.result()


@pytest.fixture
def threads(monkeypatch) -> Iterator[Threads]:
    made = Threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for name, fake in (
        ("put", lambda value: value), ("nodes", lambda: made.machines), ("remote", made.remote),
        ("wait", made.wait), ("get", made.get), ("kill", made.killed.append),
        ("is_initialized", lambda: True),
    ):  # fmt: skip
        monkeypatch.setattr(ray, name, fake)
    yield made
    for host in made.hosts:
        host.main.shutdown()
        host.post.shutdown()


@pytest.mark.parametrize("cpus", [1, 2])
def test_blocks_in_actors_end_with_the_results_of_one_process(threads, monkeypatch, cpus):
    used = []
    monkeypatch.setattr(actors, "use_threads", used.append)
    method, settings = METHODS["dac"](num_peers=2), tiny_settings(rounds=1)
    given = {"model": "linear", "settings": settings, "seed": 3}
    start = actors.start_actors
    if cpus > 1:
        start = lambda given: actors.start_actors(given, cpus=cpus)  # noqa: E731
    whole = simulate(tiny_federation(), method, **given)
    split = simulate_in_blocks(tiny_federation(), method, **given, blocks=3, start=start)
    assert torch.equal(whole.params, split.params)
    assert whole.metrics.equals(split.metrics)
    assert whole.edges.equals(split.edges)
    # Three blocks on two machines of four processors: two on one of them.
    assert threads.options["num_cpus"] == cpus
    assert "num_gpus" not in threads.options
    assert threads.options["max_restarts"] == 0, "a new actor would have lost its state"
    assert threads.options["scheduling_strategy"] == "SPREAD"
    assert threads.options["concurrency_groups"] == {"post": 1}
    assert used == [cpus] * 3
    assert threads.killed == threads.hosts, "none is asked to end: it may wait for a part"
    # What is sent once more by Ray is without a result; without that, a loss would go unnoticed.
    assert {tuple(sorted(one.items())) for one in threads.posts} == {
        (("concurrency_group", "post"), ("max_task_retries", -1), ("num_returns", 0))
    }


def test_custom_modules_go_to_every_actor_and_are_collected_once(threads, monkeypatch):
    collected, installed = [], []

    def collect(names):
        collected.append(set(names))
        return {"mine.py": b""}

    monkeypatch.setattr(packing, "collect_modules", collect)
    monkeypatch.setattr(
        packing, "install_modules", lambda files, folder: installed.append((files, folder.exists()))
    )
    simulate_in_blocks(
        tiny_federation(),
        METHODS["local"](),
        model="linear",
        settings=tiny_settings(rounds=1),
        blocks=2,
        start=actors.start_actors,
    )
    assert len(collected) == 1
    assert "coterie.methods.local" in collected[0]
    assert installed == [({"mine.py": b""}, True)] * 2


def test_an_actor_that_ray_has_ended_is_not_killed(threads, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(KeyError), actors.start_actors([]):
        raise KeyError
    assert threads.killed == []


# ---------------------------------------------------------------- calls, and what goes wrong


class Actor:
    """An actor that answers each call by a test's function."""

    def __init__(self, answer: Any) -> None:
        self.meet = SimpleNamespace(remote=lambda hosts: future((None, ["met"])))
        self.call = SimpleNamespace(remote=lambda name, *given: future(answer(name, *given)))


def future(value: Any) -> Future[Any]:
    made: Future[Any] = Future()
    if isinstance(value, BaseException):
        made.set_exception(value)
    elif value is not Ellipsis:
        made.set_result(value)
    return made


def call(*answers: Any) -> Any:
    crew = BlockActors([Actor(lambda *_, one=one: one) for one in answers], lambda: False)
    return crew.call_all("anything")


def test_arguments_are_those_of_each_block_and_results_are_in_their_order(threads):
    crew = BlockActors([Actor(lambda *given: ((*given,), []))] * 2, lambda: True)
    assert crew.call_all("f", [1, 2], "ab") == [("f", 1, "a"), ("f", 2, "b")]
    assert set(threads.timeouts) == {actors._TURN}


def test_a_warning_of_blocks_is_given_once_and_none_of_their_start(threads):
    """The driver has warned already when blocks start."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        crew = BlockActors([Actor(lambda *_: (1, [UserWarning("odd"), "odd"]))] * 2, lambda: False)
        assert said == []
        assert crew.call_all("f") == [1, 1]
        crew.call_all("f")
    assert [str(one.message) for one in said] == ["odd"]


def test_the_cause_is_raised_and_not_the_interruption_of_the_others(threads):
    interrupted = BlockInterrupted("another block has ended")
    with pytest.raises(DataError, match="the cause"):
        call((interrupted, []), (DataError("the cause"), []), (interrupted, []))


def test_the_death_of_an_actor_names_its_block(threads):
    class Died(ray.exceptions.RayActorError):
        actor_init_failed = False

        def __str__(self):
            return "the actor\nhas died " + "x" * 300

    with pytest.raises(BlockDied, match=r"^block 1 of 3 has died \(.*\)$") as told:
        call((1, []), Died(), (1, []))
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 200


def test_an_actor_that_cannot_be_made_is_no_death(threads):
    class NotMade(ray.exceptions.RayActorError):
        actor_init_failed = True

        def __str__(self):
            return "many\nlines\nModuleNotFoundError: nowhere" + "x" * 500 + "\n"

    with pytest.raises(
        CoterieError, match=r"^block 0 of 1 cannot be made: ModuleNotFoundError: nowhere"
    ) as told:
        call(NotMade())
    assert not isinstance(told.value, BlockDied)
    assert len(str(told.value)) < 450


def test_a_fault_in_the_code_of_a_block_stays_itself(threads):
    fault = ray.exceptions.RayTaskError("f", "trace", KeyError("x"))
    with pytest.raises(ray.exceptions.RayTaskError):
        call(fault)


def test_a_machine_that_has_gone_before_all_started_is_noticed(threads, monkeypatch):
    """Some blocks may wait for ever; once all run, Ray raises an error where one dies."""
    monkeypatch.setattr(actors, "_TURN", 0.01)
    turns = iter([False, True])
    late = Actor(print)
    late.meet = SimpleNamespace(remote=lambda hosts: future(...))
    with pytest.raises(MachineGone, match=r"^a machine has gone$"):
        BlockActors([late], lambda: next(turns))
    crew = BlockActors([Actor(lambda *_: ...)], lambda: True)
    answer = future(...)
    crew.hosts = [SimpleNamespace(call=SimpleNamespace(remote=lambda name: answer))]
    timer = threading.Timer(0.1, answer.set_result, ((5, []),))
    timer.start()
    assert crew.call_all("f") == [5]
    timer.join()


def test_fewer_machines_than_were_counted_are_noticed(threads, monkeypatch):
    asked = []
    monkeypatch.setattr(actors, "BlockActors", lambda hosts, fewer: asked.append(fewer))
    threads.machines = [NODE, NODE, {"Alive": False, "Resources": {"CPU": 9.0}}]
    monkeypatch.setattr(
        actors, "_choose_resources", lambda machines, *_: {"num_cpus": len(machines)}
    )
    with actors.start_actors([]):
        assert threads.options["num_cpus"] == 2, "a dead machine has no room"
        assert not asked[0]()
        threads.machines = [NODE, {**NODE, "Alive": False}]
        assert asked[0]()


@pytest.mark.parametrize("error", [DataError("bad"), OSError(28, "full"), MemoryError()])
def test_an_expected_error_is_an_answer_and_warnings_go_along(error):
    def work():
        for _ in range(2):
            warnings.warn("again", stacklevel=1)
        warnings.warn("The given NumPy array is not writable", stacklevel=1)
        raise error

    found, said = actors._call_with_warnings(work)
    assert found is error
    assert [str(one) for one in said] == ["again", "again"]
    assert actors._call_with_warnings(lambda: 5) == (5, [])
    with pytest.raises(KeyError):
        actors._call_with_warnings(lambda: {}[1])


def test_an_actor_says_where_it_is(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "n7")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actors.os, "getpid", lambda: 4711)
    actor = actors.BlockActor.__new__(actors.BlockActor)
    assert actor.place() == ("n7", 4711)


@pytest.mark.parametrize(
    ("amount", "expected"), [(3.7, 3), (1.0, 1), (2 / 3, 0.6666), (0.99999, 0.9999), (0.0, 0.0)]
)
def test_shares_are_rounded_down_to_what_ray_counts(amount, expected):
    """The shares of all blocks together must fit into their machine."""
    assert actors._round_resource(amount) == expected


def test_two_thirds_of_a_machine_are_three_places_and_not_two():
    assert actors.divide_resource([2.0], 3, 1.0) == pytest.approx(2 / 3)
    assert actors.divide_resource([0.1], 3, 1.0) == pytest.approx(0.1 / 3)


# ---------------------------------------------------------------- a study in blocks


@dataclass(frozen=True)
class Work:
    """Does the runs of a study."""

    run: Any = simulate

    def __call__(self, job: Any, emit: Any) -> Any:
        emit((torch.get_num_threads(), self.run.func is simulate_in_blocks))
        return job, self.run.keywords


def test_the_runs_of_a_study_are_done_one_after_another_in_blocks_with_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        over, heard = BlockRuns(3, actors.start_actors), []
        found = list(over(Work(), ["a", "b"], 5, heard.append))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    blocks = {"blocks": 3, "start": actors.start_actors}
    assert found == [("a", ("a", blocks)), ("b", ("b", blocks))]
    assert heard == [(1, True)] * 2
    assert not over.far


def test_a_cluster_for_blocks_is_checked_before_the_first_run(monkeypatch):
    steps: list[Any] = []

    @contextmanager
    def connect(place, **started):
        steps.append((place, started))
        yield
        steps.append("closed")

    monkeypatch.setattr(actors, "connect_ray", connect)
    monkeypatch.setattr(actors.doctor, "look_at_machines", lambda: ["m"])
    monkeypatch.setattr(actors.doctor, "check_equal_software", lambda found: steps.append(found))
    with open_ray_blocks("ray:local", 1, cpus=3, gpus=0.5, num_cpus=9) as over:
        steps.append(over.blocks)
        assert over.start.func is actors.start_actors
        assert over.start.keywords == {"cpus": 3, "gpus": 0.5}
    assert steps == [(Place("ray", "local"), {"num_cpus": 9}), ["m"], 1, "closed"]
    with pytest.raises(ConfigError, match="blocks is 0"), open_ray_blocks("ray:local", 0):
        pass
