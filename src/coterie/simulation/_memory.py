"""Estimate the memory of a run before it starts, and refuse a run that cannot fit."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coterie.engine.task import LocalTraining, Task
from coterie.errors import ConfigError, OutOfMemory
from coterie.methods.base import Method, PeerMethod, check_returned_state, list_tensors
from coterie.rng import Rng

try:
    import resource
except ImportError:  # not on Windows
    resource = None

Shape = tuple[tuple[int, ...], int]
"""The shape of a tensor, and the bytes of a number."""

_OF_A_STEP = 2  # temporaries of an optimizer's step on all models
_COPIES = 3  # of the models in a round: before the exchange, mixed, and in training
_BLOCK_ROWS = 4  # of a block, per client: parameters, gradients and two moments
_ENTRY = 32  # bytes of a row of the record's tables
_METRICS = 5  # rows of a client in a round's metrics: what it trained with, and its validation
_TABLES = 3  # copies of the tables: as they grow, as they are written, and as data frames
# glibc's allocator maps tensors above its largest threshold (32 MiB) on their own; below it, up to
# this many bytes may be lost between tensors
_FRAGMENTED = 64 << 20
_PACKED = 8  # members in a byte of a mask
_TRIAL_BYTES = 64 << 20  # models up to this size are used to measure a method's memory


@dataclass(frozen=True)
class Forecast:
    """Estimated bytes that a run holds at one time; `benchmarks/memory.py` measures the error.

    Args:
        models: the population's models, the best models where they are stored, copies within a
            round, and what the allocator loses between them.
        block: parameters, gradients and optimizer state of the clients trained at once.
        data: inputs and targets; in memory already when a run on a CPU starts.
        memory: what the method remembers of each client, before and after a round, and what clients
            publish of it.
        record: the tables of metrics and of reads at the end.
        writing: what writing a checkpoint takes beyond the copies of a round, which are free by
            then.
        received: models of clients that other processes host, as received and as read.
    """

    models: int
    block: int
    data: int
    memory: int = 0
    record: int = 0
    writing: int = 0
    received: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes in addition to the data."""
        return self.models + self.block + self.memory + self.record + self.writing + self.received


def forecast_memory(
    *,
    clients: int,
    params: int,
    itemsize: int,
    block: int,
    data: int,
    keeps_best: bool,
    moments: int = 0,
    further: int = 0,
    remembered: int = 0,
    published: int = 0,
    rounds: int = 0,
    reads: float = 0.0,
    stored: bool = False,
    received: float = 0.0,
) -> Forecast:
    """Return the estimated memory of a run.

    Args:
        clients: number of clients hosted here.
        params: numbers in a model.
        itemsize: bytes of a number.
        block: clients trained at once.
        data: bytes of inputs and targets.
        keeps_best: whether each client's best model is stored in addition to its current one.
        moments: optimizer values per parameter that are kept between rounds; a round has two
            copies.
        further: copies of the models beyond those of a round that ends with training; see
            `count_model_copies`.
        remembered: bytes of the method's memory and of what its server role keeps.
        published: bytes of what clients publish in addition to their models.
        rounds: of the run; each leaves rows in the record.
        reads: models that a client requests in a round.
        stored: whether checkpoints are written.
        received: models of clients hosted elsewhere that come in a round.

    Example:
        >>> small = {"clients": 10, "params": 100, "itemsize": 4, "block": 5, "data": 7}
        >>> forecast_memory(**small, keeps_best=True)
        Forecast(models=24000, block=8000, data=7, memory=0, record=0, writing=0, received=0)
    """
    row = params * itemsize
    held = _COPIES + keeps_best + 2 * moments + further
    record = int(_TABLES * _ENTRY * clients * rounds * (_METRICS + reads))
    kept = clients * row * (1 + keeps_best + moments)
    models = clients * row * held
    # What the allocator may lose between tensors: at most half of the models, and `_FRAGMENTED`.
    models += min(models // 2, _FRAGMENTED)
    trained = min(block, clients) * row * _BLOCK_ROWS
    # A round holds what clients remember before it and after it.
    memory = 2 * remembered + published
    # A checkpoint needs a copy of the stored rows; the copies of a round are free by then.
    writing = 0
    if stored:
        writing = max(0, 2 * kept + remembered - models - trained) + record // _TABLES
    return Forecast(models, trained, data, memory, record, writing, int(2 * received * row))


def forecast_driver_memory(
    *,
    clients: int,
    params: int,
    itemsize: int,
    kept: int,
    data: int,
    remembered: int,
    rounds: int,
    reads: float,
) -> Forecast:
    """Return the estimated memory of a process that hosts no clients and writes all results.

    Args:
        clients: of the population.
        params: numbers in a model.
        itemsize: bytes of a number.
        kept: models that a checkpoint has of each client, its best one and optimizer values
            included.
        data: bytes of inputs and targets.
        remembered: bytes of the method's memory and of what its server role keeps.
        rounds: of the run.
        reads: models that a client requests in a round.
    """
    models = 2 * clients * params * itemsize * kept  # as they come, and as one
    record = int(_TABLES * _ENTRY * clients * rounds * (_METRICS + reads))
    return Forecast(models, 0, data, 2 * remembered, record)


def extrapolate_bytes(
    small: Sequence[Shape],
    larger: Sequence[Shape],
    sizes: tuple[int, int],
    population: int,
    widest: int | None = None,
) -> int:
    """Return the size of tensors in a population, extrapolated from two small populations.

    A dimension that grows with every further member keeps growing, and so does one that grows by one
    with eight members, as of masks with eight members in a byte; another one that grows by less has
    reached its limit.

    Args:
        small: shape and bytes of a number of each tensor in the first.
        larger: those in the second.
        sizes: of the two populations.
        population: the size that is asked for.
        widest: the most columns that a table reaches; None for no limit.

    Example:
        >>> small, larger = [((4, 4), 8), ((4, 5), 1)], [((6, 6), 8), ((6, 5), 1)]
        >>> extrapolate_bytes(small, larger, (4, 6), 100)
        80500
    """
    total, step = 0, sizes[1] - sizes[0]
    for (first, itemsize), (second, _) in zip(small, larger, strict=True):
        entries = 1
        for axis, (a, b) in enumerate(zip(first, second, strict=True)):
            # `rest`: the dimension grew by less than the step, so it has reached its limit.
            slope, rest = divmod(b - a, step)
            if not rest:
                b += slope * (population - sizes[1])
            elif (b - a) * _PACKED == step:
                b += -(-(population - sizes[1]) // _PACKED)
            # The first axis is that of the clients. In a small population all members fit a table.
            if widest is not None and axis and slope:
                b = min(b, widest)
            entries *= b
        total += entries * itemsize
    return total


def estimate_method_memory(
    method: Method, task: Task, population: int | None = None
) -> tuple[int, int]:
    """Return the bytes of a method's memory, and of what clients publish besides models.

    The method's own `init_state` and `publish` are called for two small populations, and the shapes
    of their tensors are extrapolated, so nothing large is allocated. A task of a block of the
    population counts its clients' share of what they remember and publish, and all of what a server
    keeps.

    Args:
        method: the method.
        task: of the clients.
        population: as if all clients of so large a population were in the task; that of the task
            when None.
    """
    share = 1.0 if population is not None else len(task) / task.population
    population = population or task.population
    # Small integers among the hyperparameters may be limits of a table, such as a number of peers:
    # both trial populations should be larger than all of them.
    # By `type`, since True is an int too.
    settings = dataclasses.asdict(method).values()
    limits = [value for value in settings if type(value) is int and value < 1000]
    most = min(
        task.population, len(task), max(4, _TRIAL_BYTES // (task.layout.size * task.dtype.itemsize))
    )
    # The smaller population is then above the largest limit too.
    larger = min(max([16, *limits]) + 2 * _PACKED, most)
    # Two members apart, so that growth by every member shows; eight where there are as many, so that
    # growth by every eighth shows.
    step = 2
    if larger >= 2 * _PACKED:
        step = _PACKED
        if larger < population:
            larger -= larger % _PACKED
    sizes = max(1, larger - step), larger
    # One client alone: nothing can be extrapolated.
    if sizes[0] == larger:
        return 0, 0
    last = _list_memory_shapes(method, task, larger)
    first = last  # of the whole population the shapes are there as they are
    if larger < population:
        first = _list_memory_shapes(method, task, sizes[0])
    pairs = zip(first, last, strict=True)
    widest = method.memory_bound
    own, server, sent = [extrapolate_bytes(a, b, sizes, population, widest) for a, b in pairs]
    return int(share * own) + server, int(share * sent)


def _list_memory_shapes(method: Method, task: Task, size: int) -> tuple[list[Shape], ...]:
    """List the shapes of a small population's memory, server state and published extras."""
    part = task.first_clients_alone(size)
    state = check_returned_state(method, "init_state", method.init_state(part, Rng(0)), part)
    # Peers publish extras; with a server there are none to count.
    sent: list[Tensor] = []
    if isinstance(method, PeerMethod):
        sent = list(method.publish(part, state).fields.values())
    return tuple(map(_list_shapes, (list_tensors(state.memory), list_tensors(state.shared), sent)))


def _list_shapes(tensors: Sequence[Tensor]) -> list[Shape]:
    return [(tuple(tensor.shape), tensor.element_size()) for tensor in tensors]


def count_model_copies(
    *, server: bool, whole: bool, tracks: int, train_first: bool, narrowed: bool = False
) -> int:
    """Return how many copies of all models a round needs in addition to the usual ones.

    Args:
        server: whether the method has a server: models sent to it are copies of the clients'
            models.
        whole: whether all clients take part; otherwise nothing is counted for a server.
        tracks: models that each client trains; each further one needs two copies.
        train_first: whether training comes first: the trained, the mixed and the previous models
            exist together.
        narrowed: whether a part of the models is not shared: sent and received models are then
            further copies.

    Example:
        >>> count_model_copies(server=True, whole=True, tracks=2, train_first=False)
        3
    """
    if server:
        return (1 + 2 * (tracks - 1)) * whole + 2 * narrowed
    return 2 * train_first + 2 * narrowed


def count_step_copies(method: Method, local: LocalTraining) -> int:
    """Return how many copies of all models a method needs that takes the steps of training itself.

    Such steps are those of all clients at once, and not of a block.
    """
    # Optimizers that are kept between rounds are counted as such.
    kept = local.persistent_client_optimizer
    rows = method.count_step_models(0 if kept else local.num_moments)
    return rows + _OF_A_STEP if rows else 0


def available_bytes(device: str) -> int | None:
    """Return the bytes available on a device now; None where this is unknown.

    On a CPU that is the least of three: the system's free memory, what the control groups of the
    process leave, and what the limits on its address space and data leave (`ulimit -v`, `-d`).
    """
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    if device != "cpu":
        return None
    found = [*_iterate_system_limits(), *_iterate_cgroup_limits(), *_iterate_process_limits()]
    if not found:
        return None
    return max(0, min(found))  # more may be in use already than a limit allows


def _parse_numbers(path: Path) -> dict[str, int]:
    """Parse a file of lines "name number ...", or of a single number, which has the name ""."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *rest = line.replace(":", " ").split() or [""]
        if not rest:
            name, rest = "", [name]
        # "max" and other words are no numbers, and so no limit.
        if rest[0].isdigit():
            found[name] = int(rest[0])
    return found


def _iterate_system_limits() -> Iterator[int]:
    table = _parse_numbers(Path("/proc/meminfo"))
    if "MemAvailable" in table:
        # In units of 1,024 bytes. Not what is free: the kernel gives up caches when it must.
        yield table["MemAvailable"] * 1024


def _iterate_cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yield what each control group of this process leaves it, in version 2 and in version 1."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, name in lines:
        if controllers not in ("", "memory"):
            continue
        base = root / controllers
        if controllers:  # version 1 has a hierarchy for each controller
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            limit, used = "memory.max", "memory.current"
        folder = base / name.lstrip("/")
        # A group has the limits of all groups above it.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                continue
            most, now = _parse_numbers(place / limit).get(""), _parse_numbers(place / used).get("")
            if most is not None and now is not None:
                table = _parse_numbers(place / "memory.stat")
                # Inactive pages of files count as used, and the kernel frees them when memory is
                # short.
                yield most - now + table.get("total_inactive_file", table.get("inactive_file", 0))


def _iterate_process_limits() -> Iterator[int]:
    if resource is None:
        return
    used = _parse_numbers(Path("/proc/self/status"))
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY and name in used:
            # /proc counts in units of 1,024 bytes, limits are in bytes.
            yield soft - used[name] * 1024


def check_forecast(wanted: Forecast, device: str, limit: int | None) -> None:
    """Refuse a run that cannot fit into the available memory.

    Args:
        wanted: the estimate.
        device: the device of the run.
        limit: available bytes; None for unknown.

    Raises:
        ConfigError: with the numbers.
    """
    if limit is None or wanted.needed_bytes <= limit:
        return
    names = {
        "models": "models", "received": "models of others", "block": "the clients trained at once",
        "memory": "what the method "
                  "remembers", "record": "the tables of results", "writing": "writing checkpoints",
    }  # fmt: skip
    parts = []
    for name, text in names.items():
        if getattr(wanted, name):
            parts.append(f"{_format_bytes(getattr(wanted, name))} for {text}")
    what = "a smaller model or a smaller block"
    if wanted.memory > wanted.models:
        what = "a method that remembers less"
    raise ConfigError(
        f"this run needs about {_format_bytes(wanted.needed_bytes)} of memory on {device} in "
        f"addition to its data ({_format_bytes(wanted.data)}): "
        f"{', '.join(parts)}; found {_format_bytes(limit)}. Take fewer clients, {what}, or a "
        "machine with more"
    )


@contextmanager
def translate_memory_errors(device: str) -> Iterator[None]:
    """Raise `OutOfMemory` in place of any library's out-of-memory error inside the block.

    Args:
        device: the device of the run.

    Raises:
        OutOfMemory: in the place of the library's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not OutOfMemory.matches(error):
            raise
        raise OutOfMemory(
            f"{device} has no more memory: set a smaller block, use fewer workers, or take a "
            "smaller model; the run "
            "goes on from its checkpoint"
        ) from error


def _format_bytes(number: int) -> str:
    """Return bytes as text.

    Example:
        >>> _format_bytes(3 * 2**29), _format_bytes(2048)
        ('1.5 GiB', '2.0 KiB')
    """
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{number / (1 << power):.1f} {name}"
    return f"{number} bytes"
