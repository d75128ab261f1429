"""The forecast of memory, and what is refused."""

import errno
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from coterie import Settings, simulate
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError, OutOfMemory
from coterie.methods import METHODS, base
from coterie.methods.base import PeerMethod
from coterie.models.layout import resolve_model
from coterie.rng import Rng
from coterie.runtime.task import make_task
from coterie.simulation import _memory, run
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task

WANTED = _memory.forecast_memory(
    clients=10, params=100, itemsize=4, block=5, data=2048, keeps_best=False
)


def test_a_forecast_is_worked_out_by_hand():
    """Ten rows of 400 bytes three times over and half of it lost; five of them with gradients and two moments."""
    assert (WANTED.models, WANTED.block, WANTED.needed_bytes) == (18000, 8000, 26000)


def test_the_allocator_loses_64_mebibytes_at_most():
    """A thousand models of a million numbers: 3 x 4e9 bytes."""
    wanted = _memory.forecast_memory(
        clients=1000, params=10**6, itemsize=4, block=1, data=0, keeps_best=False
    )
    assert wanted.models == 12 * 10**9 + 64 * 2**20


def test_what_is_remembered_is_there_before_and_after_a_round():
    """2 x 1,000 bytes, and 300 that are published; 10 clients x 4 rounds x (5 + 3) rows of 32 bytes, three times."""
    more = {"remembered": 1000, "published": 300, "rounds": 4, "reads": 3.0}
    wanted = _memory.forecast_memory(
        clients=10, params=100, itemsize=4, block=5, data=0, keeps_best=False, **more
    )
    assert (wanted.memory, wanted.record, wanted.writing) == (2300, 30720, 0)
    assert wanted.needed_bytes == WANTED.needed_bytes + 2300 + 30720


def test_a_checkpoint_takes_copies_where_a_round_takes_fewer():
    """Two moments of 10 x 400 bytes: a checkpoint of 3 x 4,000 twice, less than 3 + 4 copies; and the tables once."""
    wanted = _memory.forecast_memory(
        clients=10,
        params=100,
        itemsize=4,
        block=1,
        data=0,
        keeps_best=False,
        remembered=10**6,
        rounds=1,
        stored=True,
    )
    assert wanted.writing == (2 * 4000 + 10**6) - 18000 - 1600 + 10 * 5 * 32


def test_optimizer_states_that_are_kept_are_there_twice_in_a_round():
    """Two moments: four copies of the models of 4,000 bytes beside the three, and one of the best."""
    kept = _memory.forecast_memory(
        clients=10, params=100, itemsize=4, block=5, data=0, keeps_best=True, moments=2
    )
    assert kept.models == (3 + 1 + 2 * 2) * 4000 * 1.5


def test_servers_second_models_and_training_first_take_further_copies():
    """A server that sees everybody: one copy; a second model of each client: two more. Trained models to judge: two."""
    whole = {"whole": True, "tracks": 1, "train_first": False}
    assert _memory.count_model_copies(server=False, **whole) == 0
    assert _memory.count_model_copies(server=True, **whole) == 1
    assert _memory.count_model_copies(server=True, **{**whole, "tracks": 2}) == 3
    assert _memory.count_model_copies(server=True, **{**whole, "whole": False}) == 0
    assert _memory.count_model_copies(server=False, **{**whole, "train_first": True}) == 2
    assert _memory.count_model_copies(server=True, **{**whole, "tracks": 4}) == 7
    for server, copies in ((True, 1), (False, 0)):
        count = _memory.count_model_copies(server=server, **whole, narrowed=True)
        assert count == copies + 2, "what is sent and received apart from the models"


@pytest.mark.parametrize(
    ("method", "local", "copies"),
    [
        # The engine takes the steps, a few clients at a time.
        (METHODS["fedavg"](), {}, 0),
        # The adapted model and a gradient, Adam's two moments, and two temporaries of its step.
        (METHODS["per-fedavg"](), {}, 2 + 2 + 2),
        # Two models more on the way to the Hessian, and their gradients.
        (METHODS["per-fedavg"](hessian="free"), {}, 6 + 2 + 2),
        (METHODS["pfedme"](), {"optimizer": "sgd"}, 2 + 0 + 2),
        # Two models, so two optimizers; those that are kept between rounds count elsewhere.
        (METHODS["apfl"](), {}, 4 + 2 * 2 + 2),
        (METHODS["apfl"](), {"persistent_client_optimizer": True}, 4 + 2),
        (METHODS["apfl"](adaptive=True), {"optimizer": "sgd"}, 5 + 0 + 2),
        # The gradient of the head and its optimizer.
        (METHODS["dfedalt"](), {}, 1 + 2 + 2),
    ],
)
def test_a_method_that_takes_the_steps_itself_holds_models_of_all_clients(method, local, copies):
    local = {"optimizer": "adam", **local}
    assert _memory.count_step_copies(method, LocalTraining(**local)) == copies


def test_a_block_has_its_share_of_what_clients_remember_and_all_that_a_server_keeps():
    """DAC's three matrices of 8, 1 and 4 bytes a pair, FedGWC's two of 8 and 4; more than those is small."""
    data, settings = tiny_federation(60), Settings()
    for kind, whole, part in (
        ("dac", 13 * 60 * 60, 13 * 15 * 60),
        ("fedgwc", 12 * 60 * 60, 12 * 60 * 60),
    ):
        method = METHODS[kind]()
        task = make_task(data, method, "linear", settings)
        block = make_task(data.host(torch.arange(15, 30)), method, "linear", settings)
        assert len(block) == 15
        assert block.population == 60
        for one, pairs in ((task, whole), (block, part)):
            kept, _ = _memory.estimate_method_memory(method, one)
            assert pairs <= kept < 1.2 * pairs
    assert (
        _memory.estimate_method_memory(METHODS["dac"](), block)[1]
        == _memory.estimate_method_memory(METHODS["dac"](), task)[1] // 4
    )


def test_models_that_come_from_other_processes_count_twice():
    """Seven of 400 bytes: as they came, and as they are read."""
    wanted = _memory.forecast_memory(
        clients=10, params=100, itemsize=4, block=5, data=2048, keeps_best=False, received=7.0
    )
    assert wanted.needed_bytes == WANTED.needed_bytes + 2 * 7 * 400


def test_who_drives_blocks_holds_the_models_while_they_are_written_and_the_tables():
    """10 clients x 2 models x 400 bytes, twice; 50 bytes, twice; 10 x 3 rounds x (5 + 4) rows of 32 bytes, thrice."""
    wanted = _memory.forecast_driver_memory(
        clients=10, params=100, itemsize=4, kept=2, data=7, remembered=50, rounds=3, reads=4.0
    )
    assert (wanted.models, wanted.memory, wanted.record, wanted.block) == (16000, 100, 25920, 0)


def test_what_fits_exactly_and_what_cannot_be_told_is_let_through():
    """Of what is refused nothing fits, as far as is known."""
    _memory.check_forecast(WANTED, "cpu", 26000)
    with pytest.raises(ConfigError):
        _memory.check_forecast(WANTED, "cpu", 25999)
    _memory.check_forecast(WANTED, "cpu", None)


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    """Before anything is trained."""
    monkeypatch.setattr(_memory, "available_bytes", lambda _device: 100)
    with pytest.raises(
        ConfigError, match=r"needs about .* on cpu in addition to its data .* found 100 bytes"
    ):
        simulate(tiny_federation(), METHODS["random"](), model="mlp-c", settings=Settings(rounds=1))


def remembered(kind: str, clients: int, **options) -> tuple[int, int]:
    federation = tiny_federation(clients)
    task = build_task(federation.host(federation.ids), "linear", engine="loop", dtype=torch.float32)
    return _memory.estimate_method_memory(METHODS[kind](**options), task)


@pytest.mark.parametrize("clients", [3, 30, 300])
def test_what_a_method_remembers_is_told_from_small_populations(clients):
    """DAC: 8 + 1 + 4 bytes for each pair, and 4 + 1 published with 4 for the samples; PANM: neighbors, and no bag yet."""
    assert remembered("dac", clients) == (13 * clients**2, 5 * clients**2 + 4 * clients)
    assert remembered("panm-loss", clients, num_peers=25) == (
        clients * 8 * min(25, clients - 1),
        4 * clients,
    )
    assert remembered("random", clients) == (0, 4 * clients)
    # 4 x 3 + 3 numbers, and who has which model
    assert remembered("fedavg", clients)[0] == 15 * 4 + 8 * clients


@pytest.mark.parametrize("clients", [5, 30, 300, 100_000])
@pytest.mark.parametrize("trial", [64 << 20, 4 * 60])
def test_a_table_of_peers_grows_with_the_clients_alone(monkeypatch, clients, trial):
    """4 + 8 + 1 + 4 bytes for each of 9 columns, and 4 + 4 published with 4 for the samples.

    It is told from populations smaller than the table, too, as it has to be with large models.
    """
    monkeypatch.setattr(_memory, "_TRIAL_BYTES", trial)
    federation = tiny_federation(min(clients, 60))
    task = build_task(federation.host(federation.ids), "linear", engine="loop", dtype=torch.float32)
    table = METHODS["dac"](table=8)
    shapes = {
        size: _memory._list_memory_shapes(table, task, size)[::2]
        for size in (3, 5)
        if size <= len(task)
    }
    columns = min(9, clients)
    for part, expected in zip(range(2), (17 * columns, 8 * columns + 4), strict=True):
        found = _memory.extrapolate_bytes(shapes[3][part], shapes[5][part], (3, 5), clients, 9)
        assert found == clients * expected
    if clients <= 60:
        told = _memory.estimate_method_memory(table, task)
        assert told == (clients * 17 * columns, clients * (8 * columns + 4))


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_no_method_has_more_in_its_first_round_than_was_told(kind):
    """The bytes of the memory that `init` makes for all clients are those that small populations tell."""
    federation = tiny_federation(60)
    truth = federation.truth.cluster if "truth" in METHODS[kind].needs else None
    module = METHODS[kind]().build_model(_memory_source(federation))
    task = build_task(
        federation.host(federation.ids), module, engine="loop", dtype=torch.float32, clusters=truth
    )
    state = METHODS[kind]().init_state(task, Rng(0))
    found = sum(t.nbytes for part in (state.memory, state.shared) for t in base.list_tensors(part))
    assert _memory.estimate_method_memory(METHODS[kind](), task)[0] == found


def _estimate_for(method, clients):
    federation = tiny_federation(60)
    task = build_task(federation.host(federation.ids), "linear", engine="loop", dtype=torch.float32)
    return _memory.estimate_method_memory(method, task, clients)[0]


@pytest.mark.parametrize(
    ("method", "bytes_a_client"),
    [
        # An id and a count of four bytes for each of the two members kept in each of 20 rounds.
        (METHODS["pens"](), 2 * 4 * 40),
        (METHODS["pens"](num_kept=3, stage_one_rounds=7), 2 * 4 * 21),
        (METHODS["pens"](stage_one_rounds=0), 0),
        (METHODS["fix-topology"](), 8 * 5),
        (METHODS["dac"](table=64), (4 + 8 + 1 + 4) * 65),
        # And the round of each read.
        (METHODS["dac"](table=64, selection="a:b"), (4 + 8 + 1 + 4 + 4) * 65),
        # Nobody is read at first.
        (METHODS["random"](selection="a:b"), 0),
        # A bit for each member.
        (METHODS["oracle"](), 12_500),
        # Five neighbors; bags are empty at first.
        (METHODS["panm-loss"](), 8 * 5),
    ],
)
def test_100_000_clients_are_told_what_does_not_grow_with_pairs(method, bytes_a_client):
    assert _estimate_for(method, 100_000) == 100_000 * bytes_a_client


def test_100_000_clients_of_pens_were_refused_and_fit():
    """Before: eight bytes for each of 10^10 pairs, twice. Now 320 bytes a client, twice: 61 MiB."""

    def forecast(remembered):
        return _memory.forecast_memory(
            clients=100_000, params=650, itemsize=4, block=1000, data=0, keeps_best=True,
            remembered=remembered,
        )  # fmt: skip

    _memory.check_forecast(forecast(_estimate_for(METHODS["pens"](), 100_000)), "cpu", 8 << 30)
    with pytest.raises(ConfigError, match=r"149\.0 GiB for what the method remembers"):
        _memory.check_forecast(forecast(8 * 10**10), "cpu", 24 << 30)


@pytest.mark.parametrize(("rounds", "struck"), [(2, 10), (100, 39)])
def test_acceptance_is_told_by_who_can_be_refused(monkeypatch, rounds, struck):
    """Nine bytes for each of five peers a round, or for all others; a block's driver has them too."""
    asked = []
    monkeypatch.setattr(_memory, "check_forecast", lambda wanted, *_: asked.append(wanted.memory))
    federation, method = tiny_federation(40), METHODS["random"]()
    for settings in (Settings(rounds=rounds), Settings(rounds=rounds, acceptance=True)):
        task = make_task(federation, method, "linear", settings)
        run.check_memory(task, federation, method, settings)
        run.check_driver_memory(task, federation, method, settings)
    for without, judging in zip(asked[:2], asked[2:], strict=True):
        assert judging - without == 2 * 9 * 40 * struck


def _memory_source(federation):
    return resolve_model("linear", federation.features, federation.outputs)


def test_a_method_that_nobody_here_wrote_is_told_too():
    @dataclass(frozen=True)
    class Pairs:
        pairs: torch.Tensor
        own: torch.Tensor

    @dataclass(frozen=True)
    class Mine(PeerMethod):
        kind: ClassVar[str] = "mine"

        def init_memory(self, task, rng):
            return Pairs(
                torch.zeros(len(task), 2 * task.population + 1, dtype=torch.int16),
                torch.zeros(len(task), 7),
            )

        def exchange(self, rnd, state):
            return state, {}

    federation = tiny_federation(50)
    task = build_task(federation.host(federation.ids), "linear", engine="loop")
    assert _memory.estimate_method_memory(Mine(), task)[0] == 50 * (2 * 101 + 4 * 7)


REFUSED = """
import resource, sys
from coterie.methods import METHODS
from coterie.simulation.run import simulate
from coterie.runtime.settings import Settings
from coterie.testing import tiny_federation
from coterie.errors import ConfigError
federation = tiny_federation(9000, features=(2,), train=2, validation=1)
table = dict(line.split(":", 1) for line in open("/proc/self/status"))
most = int(table["VmSize"].split()[0]) * 1024 + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    simulate(federation, METHODS["dac"](), model="linear", settings=Settings(rounds=1, engine="loop"))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="what the address space holds is read from /proc"
)
def test_a_run_that_does_not_fit_into_the_address_space_is_refused_before_it_takes_it():
    """DAC of 9,000 clients with 1 GiB left: 2 x 13 + 5 bytes for each of 81 million pairs are 2.3 GiB."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True, timeout=100
    )
    assert len(done.stdout.splitlines()) == 1
    assert "2.3 GiB for what the method remembers" in done.stdout
    assert "Take fewer clients, a method that remembers less" in done.stdout
    assert done.stdout.partition("found ")[2].startswith(("1.0 GiB", "9", "10"))


def test_a_control_group_leaves_what_it_has_not_used(tmp_path):
    """Version 2: a limit of 1,000 with 600 used, of which 100 can be given back, below one without a limit."""
    own, group = tmp_path / "own", tmp_path / "cgroup/up/mine"
    own.write_text("0::/up/mine\n")
    group.mkdir(parents=True)
    for folder, most, used in ((group, "1000", "600"), (group.parent, "max", "5000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert list(_memory._iterate_cgroup_limits(tmp_path / "cgroup", own)) == [500]
    old = tmp_path / "cgroup/memory/mine"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("900\n")
    (old / "memory.usage_in_bytes").write_text("300\n")
    own.write_text("4:cpu:/mine\n2:memory:/mine\n")
    assert list(_memory._iterate_cgroup_limits(tmp_path / "cgroup", own)) == [600]
    assert list(_memory._iterate_cgroup_limits(tmp_path / "cgroup", tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        RuntimeError("can't allocate memory: 9"),
    ],
)
def test_memory_that_ends_on_the_way_is_one_line(error):
    with (
        pytest.raises(OutOfMemory, match="cpu has no more memory"),
        _memory.translate_memory_errors("cpu"),
    ):
        raise error
    with pytest.raises(OSError, match="disk"), _memory.translate_memory_errors("cpu"):
        raise OSError(errno.ENOSPC, "the disk is full")


# ---------------------------------------------------------------- what is available


def test_numbers_are_parsed_with_and_without_names_and_words_are_none(tmp_path):
    path = tmp_path / "table"
    path.write_text("MemFree:   12 kB\nanon 500\nmost max\n\n")
    assert _memory._parse_numbers(path) == {"MemFree": 12, "anon": 500}
    path.write_text("1000\n")
    assert _memory._parse_numbers(path) == {"": 1000}
    path.write_text("max\n")
    assert _memory._parse_numbers(path) == {}
    assert _memory._parse_numbers(tmp_path / "none") == {}


def test_the_least_of_all_limits_is_available(monkeypatch):
    limits = {"system": [900], "cgroup": [800, 700], "process": [750]}
    for name in limits:
        monkeypatch.setattr(
            _memory, f"_iterate_{name}_limits", lambda name=name: iter(limits[name])
        )
    assert _memory.available_bytes("cpu") == 700
    limits["process"] = [-5]
    assert _memory.available_bytes("cpu") == 0, "more is in use than a limit allows"
    limits.update(system=[], cgroup=[], process=[])
    assert _memory.available_bytes("cpu") is None
    assert _memory.available_bytes("meta") is None


def test_a_device_says_what_it_has_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (30, 80)}[device])
    assert _memory.available_bytes("cuda:1") == 30


def test_the_system_leaves_what_it_can_free_and_limits_are_in_bytes(monkeypatch):
    """/proc counts in units of 1,024 bytes."""
    tables = {
        "/proc/meminfo": {"MemFree": 1, "MemAvailable": 7},
        "/proc/self/status": {"VmSize": 2, "VmData": 1},
    }
    monkeypatch.setattr(_memory, "_parse_numbers", lambda path: tables[str(path)])
    assert list(_memory._iterate_system_limits()) == [7 * 1024]
    resource = pytest.importorskip("resource")
    soft = {resource.RLIMIT_AS: 10_000, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(_memory.resource, "getrlimit", lambda kind: (soft[kind], 99))
    assert list(_memory._iterate_process_limits()) == [10_000 - 2 * 1024]
    soft[resource.RLIMIT_DATA] = 5000
    assert list(_memory._iterate_process_limits()) == [10_000 - 2 * 1024, 5000 - 1024]
    monkeypatch.setattr(_memory, "resource", None)
    assert list(_memory._iterate_process_limits()) == []
    del tables["/proc/meminfo"]["MemAvailable"]
    assert list(_memory._iterate_system_limits()) == []


def test_what_a_refusal_says_names_each_part_and_what_to_take_less_of():
    wanted = _memory.Forecast(3 << 30, 1 << 20, 5 << 10, memory=1 << 10, received=1000)
    with pytest.raises(ConfigError) as told:
        _memory.check_forecast(wanted, "cuda:0", 1 << 30)
    assert str(told.value) == (
        "this run needs about 3.0 GiB of memory on cuda:0 in addition to its data (5.0 KiB): "
        "3.0 GiB for models, 1000 bytes for models of others, 1.0 MiB for the clients trained at once, "
        "1.0 KiB for what the method remembers; found 1.0 GiB. Take fewer clients, a smaller model or "
        "a smaller block, or a machine with more"
    )
    remembers = _memory.Forecast(1 << 20, 0, 0, memory=(1 << 20) + 1)
    with pytest.raises(ConfigError, match="Take fewer clients, a method that remembers less, or"):
        _memory.check_forecast(remembers, "cpu", 0)
    equal = _memory.Forecast(1 << 20, 0, 0, memory=1 << 20)
    with pytest.raises(ConfigError, match="Take fewer clients, a smaller model"):
        _memory.check_forecast(equal, "cpu", 0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"),
     ((1 << 20) - 1, "1024.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2048.0 GiB")],
)  # fmt: skip
def test_bytes_are_written_in_the_largest_unit_that_is_reached(number, text):
    assert _memory._format_bytes(number) == text


def test_a_part_that_is_not_shared_takes_copies_of_what_is_sent_and_received():
    more = {"whole": True, "tracks": 1, "narrowed": True}
    assert _memory.count_model_copies(server=False, train_first=False, **more) == 2
    assert _memory.count_model_copies(server=False, train_first=True, **more) == 4
    assert _memory.count_model_copies(server=True, train_first=False, **more) == 3


def test_a_block_larger_than_the_clients_trains_all_at_once():
    wanted = _memory.forecast_memory(
        clients=10, params=100, itemsize=4, block=50, data=0, keeps_best=False
    )
    assert wanted.block == 10 * 400 * 4


def test_dimensions_that_reached_their_limit_stay_and_others_grow():
    """From 4 to 6 members: pairs grow; a table of five has stopped; a third of the way is no growth."""
    found = _memory.extrapolate_bytes(
        [((4, 4), 8), ((4, 5), 1), ((4,), 2)], [((6, 6), 8), ((6, 5), 1), ((5,), 2)], (4, 6), 100
    )
    assert found == 100 * 100 * 8 + 100 * 5 + 5 * 2
    # At most 9 columns: the rows are clients and have no such limit.
    assert _memory.extrapolate_bytes([((4, 4), 8)], [((6, 6), 8)], (4, 6), 100, 9) == 100 * 9 * 8
    # One that grows by two with each member.
    assert _memory.extrapolate_bytes([((8,), 1)], [((12,), 1)], (4, 6), 100) == 200


@pytest.mark.parametrize(("clients", "bytes_a_client"), [(16, 2), (17, 3), (24, 3), (100, 13)])
def test_masks_with_eight_members_in_a_byte_grow_by_one_in_eight(clients, bytes_a_client):
    small, larger = [((8, 1), 1)], [((16, 2), 1)]
    found = _memory.extrapolate_bytes(small, larger, (8, 16), clients)
    assert found == clients * bytes_a_client


def test_of_one_client_nothing_can_be_told():
    federation = tiny_federation(3)
    task = build_task(federation.host(torch.arange(1)), "linear", engine="loop")
    assert _memory.estimate_method_memory(METHODS["dac"](), task) == (0, 0)


def test_what_is_needed_is_all_but_the_data():
    """By hand; what is not given is nothing."""
    assert _memory.Forecast(1, 2, 4, 8, 16, 32, 64).needed_bytes == 1 + 2 + 8 + 16 + 32 + 64
    assert _memory.Forecast(1, 2, 4).needed_bytes == 3
