"""Contract test of methods."""

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from coterie._util.tensors import index_optional
from coterie.data.federation import Federation
from coterie.data.rows import read_inputs
from coterie.engine.task import EngineOptions, ModelSpec, Task, Workload
from coterie.exchange.base import Exchange, Inbox, Message
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.functional.selection import cohort_size
from coterie.methods.base import Method, PeerMethod, State, list_report_metrics, map_tensors
from coterie.models.layout import ModelSource, find_adapter, find_output_name, resolve_model
from coterie.rng import EVERYONE, Rng
from coterie.runtime.loop import Loop, Undeclared
from coterie.runtime.record import Record
from coterie.runtime.settings import DTYPES, Settings
from coterie.simulation.run import select_loop, simulate
from coterie.testing._promises import assert_accepted
from coterie.testing.tiny import tiny_federation, tiny_settings


def check_method(
    method: Method,
    *,
    federation: Federation | None = None,
    model: ModelSource = "linear",
    settings: Settings | None = None,
    relabel: bool = True,
) -> None:
    """Check the guarantees that every method must give.

    Arguments stay unchanged. All that a later round depends on is in the state: two runs side by
    side do not disturb each other, and a resumed run equals an uninterrupted one. The same seed
    gives the same bytes, another seed another result. Every grouping of the clients over hosts
    gives the same bytes. The state stays finite with small cohorts. A peer that never answers has
    no influence. A server's model for newcomers depends on nothing that a client keeps to itself.
    Relabeling the clients relabels the result.

    Args:
        method: the method.
        federation: the data; a tiny federation by default.
        model: the model to train.
        settings: the settings of the runs; float64, so that results can be compared closely.
        relabel: whether relabeling the clients must relabel the result (False for methods whose
            server draws by position).

    Raises:
        AssertionError: naming the broken guarantee and, for results that differ, by how much.
    """
    federation = federation or tiny_federation()
    settings = settings or tiny_settings()
    make = _RunFactory(federation, method, model, settings)
    _check_description(method)
    with assert_accepted("its functions return what they promise"):
        whole = _check_arguments(make)
    # All later checks compare with this one run, so that each of them costs one run and not two.
    _check_hidden(make, whole)
    _check_repeats(make, whole)
    _check_grouping(make, whole)
    _check_cohorts(make)
    if isinstance(method, PeerMethod):
        _check_silence(make)
    if method.server:
        _check_newcomer_model(make)
    if relabel:
        _check_relabeling(make, whole)


@dataclasses.dataclass(frozen=True)
class _RunFactory:
    """Makes runs of one method."""

    federation: Federation
    method: Method
    model: ModelSource
    settings: Settings

    def make_task(self, ids: Sequence[int]) -> Task:
        federation = self.federation
        clusters = pool = None
        # A method gets what it declares that it needs, as in a run.
        if "truth" in self.method.needs and federation.truth is not None:
            clusters = federation.truth.cluster[list(ids)]
        if "pool" in self.method.needs:
            pool = self._task_of(federation.pool_clients())
        return self._task_of(federation.host(list(ids)), clusters=clusters, pool=pool)

    def _task_of(self, federation: Federation, **more: Any) -> Task:
        settings, method = self.settings, self.method
        model = resolve_model(self.model, federation.features, federation.outputs, federation.parts)
        spec = ModelSpec(
            method.build_model(model),
            init=settings.init,
            buffers=settings.buffers,
            shared=settings.shared,
            similarity_on=settings.similarity_on,
            local_tensors=method.personal_tensors,
            owner=method.kind,
            loss=settings.custom_loss,
            output=find_output_name(self.model, settings.output),
            adapter=find_adapter(self.model),
        )
        options = EngineOptions(engine=settings.engine, dtype=DTYPES[settings.dtype])
        work = Workload(
            settings.rounds,
            # The cohort of a run: "auto" chooses by it, and a task is compared with a run.
            clients=cohort_size(self.federation.population, settings.participation),
            custom_optimizer=settings.local.custom_optimizer,
        )
        return Task.build(federation, spec, options, workload=work, **more)

    def make_loop(
        self,
        exchange: Exchange | None = None,
        rng: Rng | None = None,
        ids: Sequence[int] | None = None,
    ) -> Loop:
        if ids is None:
            ids = self.federation.ids.tolist()
        exchange = exchange or InMemory(torch.tensor(ids), self.federation.population)
        # No planted clusters: the record is not looked at.
        record = Record(torch.full((self.federation.population,), -1))
        # Seed 3 unless another is given: that of the runs of `simulate` with which it is compared.
        return select_loop(self.settings, self.method)(
            self.make_task(ids), self.method, exchange, self.settings, rng or Rng(3), record
        )

    def run_to_end(
        self, exchange: Exchange | None = None, rng: Rng | None = None
    ) -> Float[Tensor, "clients params"]:
        return _run_to_end(self.make_loop(exchange, rng))


def _run_to_end(loop: Loop) -> Float[Tensor, "clients params"]:
    while not loop.is_finished:
        loop.run_next_round()
    return loop.state.params


def run_grouped(
    federation: Federation,
    method: Method,
    groups: Sequence[Sequence[int]],
    *,
    model: ModelSource = "linear",
    settings: Settings | None = None,
    server: int = 0,
    seed: int = 3,
) -> Float[Tensor, "clients params"]:
    """Host a population in threads that exchange over a post office; return all models by id.

    Args:
        federation: the data.
        method: the method.
        groups: the client ids of each host.
        model: the model to train.
        settings: the settings of the run.
        server: index of the host in the server role.
        seed: the seed of the run.
    """
    make = _RunFactory(federation, method, model, settings or tiny_settings())
    office = PostOffice(federation.population)
    doors = []
    for number, ids in enumerate(groups):
        doors.append(Mailbox(office, torch.tensor(ids), server=number == server))

    def run_host(number: int) -> Loop:
        loop = make.make_loop(doors[number], Rng(seed), groups[number])
        _run_to_end(loop)
        return loop

    # A thread for each host: hosts wait for each other's messages.
    with ThreadPoolExecutor(len(groups)) as pool:
        loops = list(pool.map(run_host, range(len(groups))))
    ids = torch.tensor(list(chain.from_iterable(groups)))
    params = torch.cat([loop.state.params for loop in loops])
    # Back to the order of ids, in which the simulation has them.
    return params[torch.argsort(ids)]


def run_method(
    method: Method,
    *,
    federation: Federation | None = None,
    model: ModelSource = "linear",
    settings: Settings | None = None,
    seed: int = 3,
    rng: Rng | None = None,
) -> Loop:
    """Run a method over a whole federation in this process and return its loop at the end.

    Args:
        method: the method.
        federation: the data; a tiny federation by default.
        model: the model to train.
        settings: the settings of the run.
        seed: the seed of the run.
        rng: its random streams; those of `seed` when None.
    """
    loop = _RunFactory(
        federation or tiny_federation(), method, model, settings or tiny_settings()
    ).make_loop(rng=rng or Rng(seed))
    _run_to_end(loop)
    return loop


# ---------------------------------------------------------------- the promises of a method


def _check_description(method: Method) -> None:
    assert dataclasses.is_dataclass(method), (
        "a method is a dataclass: its fields are its hyperparameters"
    )
    assert getattr(type(method), "__dataclass_params__").frozen, (  # noqa: B009
        "a method is frozen: its fields never change"
    )
    for name in ("kind", "summary"):
        assert isinstance(getattr(method, name, None), str), f"a method has a {name}"
    assert copy.copy(method) == method, "methods with equal fields are equal"
    list_report_metrics(method)


def _check_arguments(make: _RunFactory) -> Float[Tensor, "clients params"]:
    """`round` changes no argument and memory has a row per client; return the final models."""
    loop = make.make_loop()
    loop.run_next_round()
    while not loop.is_finished:
        state = loop.state
        before = copy.deepcopy(state)
        # A name that the report does not declare is a warning in a run, and a fault here.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", Undeclared)
            loop.run_next_round()
        vain = [str(one.message) for one in said if issubclass(one.category, Undeclared)]
        assert not vain, vain[0]
        for part in ("params", "memory", "shared"):
            assert _are_equal(getattr(state, part), getattr(before, part)), (
                f"round changed its argument state.{part}: return a new State, and copy what you "
                "change in place"
            )
        memory = loop.state.memory
        if memory is None:
            continue
        for item in dataclasses.fields(memory):
            value = getattr(memory, item.name)
            assert len(value) == len(loop.task), (
                f"memory.{item.name} has no clients axis: {tuple(value.shape)}"
            )
    assert bool(torch.isfinite(loop.state.params).all()), (
        "the models are not finite after the last round"
    )
    return loop.state.params


def _check_hidden(make: _RunFactory, whole: Tensor) -> None:
    """Nothing is kept outside the state: a run is the same while another one goes on."""
    # The same method object serves both runs.
    # Another seed, so that what one run leaves behind would change the other.
    one, other = make.make_loop(), make.make_loop(rng=Rng(4))
    while not one.is_finished:
        one.run_next_round()
        other.run_next_round()
    _check_equal(
        one.state.params,
        whole,
        "a run during another run gave another result: something is kept outside the State (in "
        "the object, its class "
        "or its module), or is drawn from another generator than rnd.rng",
    )


def _check_repeats(make: _RunFactory, whole: Tensor) -> None:
    """The same seed gives the same bytes, interrupted or not; another seed gives another result."""
    federation, method, settings = make.federation, make.method, make.settings
    # Stopped in the middle, then resumed to the full number of rounds.
    half = dataclasses.replace(settings, rounds=settings.rounds // 2)
    with tempfile.TemporaryDirectory() as name:
        once, parts = Path(name) / "once", Path(name) / "parts"
        simulate(federation, method, model=make.model, settings=settings, seed=3, folder=once)
        again = load_file(once / "checkpoint.safetensors")["state.params"]
        _check_equal(again, whole, "the same seed gave another result: draw from rnd.rng alone")
        simulate(federation, method, model=make.model, settings=half, seed=3, folder=parts)
        simulate(
            federation,
            method,
            model=make.model,
            settings=settings,
            seed=3,
            folder=parts,
            resume=True,
        )
        for file in ("checkpoint.safetensors", "metrics.parquet", "edges.parquet"):
            assert (once / file).read_bytes() == (parts / file).read_bytes(), (
                f"a resumed run has another {file}: what a later round depends on is not in the "
                "State"
            )
    assert not torch.equal(make.run_to_end(rng=Rng(4)), whole), (
        "another seed gave the same result: no client trains, and nothing is drawn from rnd.rng"
    )


def _check_grouping(make: _RunFactory, whole: Tensor) -> None:
    """Hosting clients in any grouping, with the server anywhere, gives the simulation's bytes."""
    number = make.federation.population
    ids = list(range(number))
    # The server is at another host each time.
    groupings = {
        "one client a host": ([[i] for i in ids], number - 1),
        "uneven blocks": ([ids[:1], ids[1 : number // 2 + 1], ids[number // 2 + 1 :]], 1),
        "mixed order": ([ids[::2][::-1], ids[1::2]], 0),
    }
    for name, (groups, place) in groupings.items():
        # Without a server role any host may come first.
        server = place * make.method.server
        result = run_grouped(
            make.federation,
            make.method,
            groups,
            model=make.model,
            settings=make.settings,
            server=server,
        )
        _check_equal(
            result,
            whole,
            f"hosting {name} (server at host {server}) changes the result: a client's result "
            "depends on which other "
            "clients are hosted with it. Even a sum over parameters does, such as (g * "
            "p).sum(1): use "
            "coterie.functional.sums.sum_rows",
        )


def _check_cohorts(make: _RunFactory) -> None:
    """With some of the clients in a round, and with one, the state stays finite."""
    # Half of the clients, and a single one.
    for participation in (0.5, 1 / make.federation.population):
        settings = dataclasses.replace(make.settings, participation=participation)
        params = dataclasses.replace(make, settings=settings).run_to_end()
        assert bool(torch.isfinite(params).all()), (
            f"with participation {participation:.2f} models are not finite"
        )
        if make.method.server:  # clients outside the cohort must stay in step
            groups = [make.federation.ids.tolist()[::2], make.federation.ids.tolist()[1::2]]
            result = run_grouped(
                make.federation, make.method, groups, model=make.model, settings=settings, server=1
            )
            _check_equal(
                result,
                params,
                f"with participation {participation:.2f} hosting in groups changes the result",
            )


def _check_silence(make: _RunFactory) -> None:
    """A peer that never answers has no influence; when nobody answers, the state stays finite."""
    # Every message is lost.
    alone = Faulty(InMemory(make.federation.ids, make.federation.population), drop=1.0)
    assert bool(torch.isfinite(make.run_to_end(alone)).all()), (
        "when nothing arrives the models are not finite"
    )
    # The last client, so that the rows of the others are the same with and without it.
    silent = make.federation.population - 1
    # The silent client's data change: nobody else may notice.
    x = read_inputs(make.federation.x).clone()
    other = x[silent].flip(0)
    # Whole numbers (images, tokens) stay in their range.
    x[silent] = other * 3 + 1 if other.is_floating_point() else x.max() - other
    changed = dataclasses.replace(make.federation, x=x)
    results = []
    for federation in (make.federation, changed):
        run = dataclasses.replace(make, federation=federation)
        results.append(run.run_to_end(_SilentPeer(federation, silent))[:silent])
    _check_equal(
        results[0],
        results[1],
        "a peer that never answers has influence: give slots whose inbox.mask is False no "
        "weight, and remember nothing "
        "of them",
    )


def _check_newcomer_model(make: _RunFactory) -> None:
    """A newcomer's model is the server's, one per cluster, with no client's own model or memory."""
    loop = make.make_loop()
    _run_to_end(loop)
    # Columns that a newcomer does not receive are not compared.
    trained = loop.task.sharing.trained

    def newcomer_models(state: State) -> Tensor:
        return trained.select_from(loop.newcomer_models(state))

    models = newcomer_models(loop.state)
    # Everything that clients keep moves; the server's state stays.
    moved = dataclasses.replace(
        loop.state,
        params=loop.state.params + 1,
        memory=map_tensors(loop.state.memory, lambda t: t + 1 if t.is_floating_point() else t),
    )
    _check_equal(
        newcomer_models(moved),
        models,
        "newcomer_model depends on the model or the memory of a client, which a newcomer does "
        "not have: return a "
        "model of the server",
    )
    _, info = loop.served_models()
    label = info.get("label", torch.zeros(len(models), dtype=torch.int64))
    # argmax finds the first client with the same label.
    first_of_cluster = (label[:, None] == label).to(torch.int8).argmax(1)
    given = loop.newcomer_models()
    _check_equal(
        # Adapters of clients may be of different ranks: two of them are compared in the lower one.
        trained.select_from(loop.task.select_clients(first_of_cluster).cut_to_ranks(given)),
        trained.select_from(loop.task.cut_to_ranks(given[first_of_cluster.to(given.device)])),
        "newcomer_model gives clients of one cluster different models: return the server's model "
        "of the cluster, and "
        "report the clusters that it finds as `label` in serving_model",
    )


def _check_relabeling(make: _RunFactory, whole: Tensor) -> None:
    """Relabeling the clients relabels the result."""
    order = torch.from_numpy(
        Rng(5).generator("testing.relabel").permutation(make.federation.population)
    )
    moved = relabel_clients(make.federation, order)
    # The streams move with the clients, so that only a dependence on ids is left.
    rng = RelabeledRng(3, -1, tuple(order.tolist()))
    result = dataclasses.replace(make, federation=moved).run_to_end(rng=rng)
    gap = float((result - whole[order]).abs().max())
    # Sums over clients run in the order of ids: another order rounds differently.
    assert gap < 1e-9, (
        f"relabeling the clients changes the result by {gap:.3g}: something depends on ids or on "
        "the order of rows"
    )


def relabel_clients(federation: Federation, order: Int[Tensor, " clients"]) -> Federation:
    """Return the federation with other ids: client i has the data of client `order[i]`."""
    truth, names = federation.truth, federation.client_names
    if truth is not None:
        truth = dataclasses.replace(truth, cluster=truth.cluster[order])
    if names:
        names = tuple(names[place] for place in order.tolist())
    return dataclasses.replace(
        federation,
        x=federation.x[order],
        y=federation.y[order],
        split=federation.split[order],
        test_of=federation.test_of[order],
        noise=index_optional(federation.noise, order),
        client_names=names,
        truth=truth,
    )


@dataclasses.dataclass(frozen=True)
class RelabeledRng(Rng):
    """The streams of clients that were given new ids: client i draws what `order[i]` drew."""

    order: tuple[int, ...] = ()

    def _locate(self, purpose: str, client: int) -> tuple[int, int]:
        if client != EVERYONE:
            client = self.order[client]
        return super()._locate(purpose, client)

    def pairs(
        self, purpose: str, ids: Int[Tensor, " clients"], population: int
    ) -> Float[Tensor, "clients population"]:
        """Return the draws of the old pairs."""
        # `ids` are mapped by `_locate`; the columns are the other members, which moved too.
        return super().pairs(purpose, ids, population)[:, list(self.order)]


class _SilentPeer(Faulty):
    """An exchange in which no message of one client arrives."""

    def __init__(self, federation: Federation, silent: int) -> None:
        super().__init__(InMemory(federation.ids, federation.population))
        self.silent = silent

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Pull, but drop the message of the silent client."""
        inbox = super().pull(message, peers)
        arrived = inbox.mask & (inbox.peers != self.silent)
        table = inbox.table.clone()
        # NaN spreads to every result that the model has any part in.
        table[self.silent] = torch.nan
        return dataclasses.replace(inbox, table=table, mask=arrived, bytes=inbox.bytes * arrived)


def _check_equal(found: Tensor, expected: Tensor, message: str) -> None:
    """Raise an AssertionError with the message and the difference, unless all bits are equal."""
    assert torch.equal(found, expected), f"{message} ({describe_difference(found, expected)})"


def describe_difference(found: Tensor, expected: Tensor) -> str:
    """Say how far two results of one shape are apart.

    Example:
        >>> describe_difference(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]))
        'differs by up to 0.5 in 1 of 3 numbers'
    """
    unknown = found.isnan() & expected.isnan()
    differs = (found != expected) & ~unknown
    if bool(unknown.any()) and not bool(differs.any()):
        return f"both are NaN in {int(unknown.sum())} of {unknown.numel()} numbers"
    gaps, largest = (found - expected).abs()[differs], 0.0
    if len(gaps):
        largest = float(gaps.max())
    return f"differs by up to {largest:.2g} in {int(differs.sum())} of {differs.numel()} numbers"


def _are_equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, Tensor) and a.is_floating_point():
        # NaN equals NaN here.
        return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return all(_are_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
