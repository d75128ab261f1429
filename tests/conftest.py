"""What several test files share, and the one place that decides what a test without its tool or data comes to."""

import gc
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

IN_CI = os.environ.get("COTERIE_CI") == "1"
"""Set by .ci/run, which installs every tool that tests use: there, what is absent is an error."""
OPTIONAL = ("mlflow", "wandb", "hub")
"""Extras that requirements-dev.txt leaves out: tests that need one skip, in CI too."""
MAY_SKIP = (
    *(f"the extra {name} is not installed" for name in OPTIONAL),
    "no flwr_datasets: it takes no newest datasets",
    "no history: the clone is shallow",
    "no emulator of ARM",
    "no timm: it is in no extra",
    "no other compiler",
    "no namespaces: they need the rights of root",
)


def pytest_configure() -> None:
    """Hear Ctrl-C: a job in the background is started so that it ignores it, and all that tests start would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


COLLECTED: pytest.StashKey[dict[str, bool]] = pytest.StashKey()
"""Each test that was collected, by its node id, and whether `make test` runs it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note every test before `-m` and `-k` leave some out."""
    left_out = ("full", "slow", "gpu")
    config.stash[COLLECTED] = {
        item.nodeid: not any(item.get_closest_marker(name) for name in left_out) for item in items
    }


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Search millions of objects for garbage once: pytest does it five times, for some seconds each."""
    gc.collect()
    gc.freeze()


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def refuse_skip(report: Report) -> Report:
    """Turn a report of something skipped into one of a failure, in CI, unless it needs an extra that is left out."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        *_, reason = (
            report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
        )
        if not reason.removeprefix("Skipped: ").startswith(MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = f"skipped where COTERIE_CI=1 says that everything is there: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that would skip."""
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that would skip."""
    return refuse_skip((yield))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: one worker more than cores, as tests that start processes wait for a third of the time."""
    from coterie.simulation.workers import count_cores

    return count_cores() + 1


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Give a test the same random modules and numbers each time, where it draws them as users do."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(20261)


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> dict[str, bool]:
    """Each test that was collected, and whether `make test` runs it."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real datasets: COTERIE_DATA, or shared/data beside the checkout."""
    chosen = os.environ.get("COTERIE_DATA")
    folder = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(
            f"the real datasets are not here: {folder} does not exist; set COTERIE_DATA to their folder"
        )
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, so that nothing decoded earlier is used."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("COTERIE_CACHE", str(folder))
    return folder


def blocks_of_ports(worker: int, workers: int) -> Iterator[int]:
    """The first ports of blocks of a hundred, no two workers' the same, whoever of them runs which test.

    Below 32768, from where on systems give ports to outgoing connections.
    """
    each = 120 // workers
    while True:
        yield from range(20_000 + 100 * each * worker, 20_000 + 100 * each * (worker + 1), 100)


def is_free(first: int) -> bool:
    """Whether nobody on this machine, such as another run of the tests, listens on a block's ports."""
    with ExitStack() as stack:
        try:
            for port in range(first, first + 100):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
    return True


def next_free(blocks: Iterator[int]) -> int:
    return next(first for first in blocks if is_free(first))


@pytest.fixture(scope="session")
def ports() -> Callable[[], int]:
    """Each call gives the first of a hundred ports of 127.0.0.1 that no other test has."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    blocks = blocks_of_ports(worker, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return lambda: next_free(blocks)


@pytest.fixture
def port(ports: Callable[[], int]) -> int:
    """The first of a hundred ports of 127.0.0.1 for one test."""
    return ports()


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    """A headless Chromium, driven by its own driver, that records its console and every request."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = (
        shutil.which("chromium") or shutil.which("chromium-browser"),
        shutil.which("chromedriver"),
    )
    if not (program and driver):
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1200,1400",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()
