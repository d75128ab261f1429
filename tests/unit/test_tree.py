"""Tests lie beside what they test: `unit/net/test_wire.py` and `test_wire_TOPIC.py` are of `coterie/net/wire.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "src/coterie", ROOT / "tests"
ABOUT_THE_WHOLE = {"conftest", "imports", "tree"}
"""Tests in tests/unit itself that are about no single module."""

ELSEWHERE = {
    # files whose neighbor cannot be tested without them: one test for both
    "cli/_audit": "unit/cli/test_app.py",
    "cli/_catalog": "unit/cli/test_app.py",
    "cli/_compare": "unit/papers/test_compare.py",
    "cli/_options": "unit/cli/test_app.py",
    "cli/_report": "unit/cli/test_app.py",
    "cli/_stopping": "unit/cli/test_app.py",
    "cli/_tables": "unit/papers/test_compare.py",
    "cluster/_facts": "unit/cluster/test_doctor.py",
    "data/arrow_items": "unit/data/test_items_stored.py",
    "data/plan": "unit/data/test_shifts.py",
    "papers/dac": "unit/methods/test_registry_published.py",
    "papers/fedgwc": "unit/methods/test_registry_published.py",
    "papers/sosicfl": "unit/methods/test_registry_published.py",
    "net/consent": "unit/net/test_service.py",
    "net/payload": "unit/net/test_wire.py",
    "net/post": "unit/net/test_exchange.py",
    "net/servicefile": "unit/net/test_service.py",
    "net/setup": "unit/cli/test_net.py",
    "report/data/cost": "unit/report/test_data.py",
    "report/data/curves": "unit/report/test_data.py",
    "report/data/packing": "unit/report/test_data.py",
    "report/data/reads": "unit/report/test_data.py",
    "report/network": "unit/report/test_watch.py",
    "runtime/_frozen": "unit/studies/test_run_frozen_weights.py",
    "runtime/_given_data": "unit/runtime/test_translation.py",
    "runtime/_plain": "unit/runtime/test_translation.py",
    "runtime/_random_layers": "unit/runtime/test_translation.py",
    "runtime/_trained": "unit/runtime/test_translation.py",
    "runtime/checkpoint": "unit/runtime/test_loop.py",
    "runtime/client_choice": "unit/runtime/test_newcomers.py",
    "runtime/extensions": "unit/runtime/test_loop_private.py",
    "runtime/taken_home": "unit/runtime/test_translation.py",
    "runtime/task": "unit/runtime/test_settings.py",
    "simulation/_publishing": "unit/simulation/test_sequential.py",
    "studies/definition": "unit/studies/test_config.py",
    "studies/inputs": "unit/studies/test_run.py",
    "studies/jobs": "unit/studies/test_run.py",
    # engines are tested by what a task computes with each of them; the native ones by what their
    # programs compute
    "engine/_agreement": "unit/engine/native/test_compiled.py",
    "engine/_base": "unit/engine/test_task.py",
    "engine/_choice": "unit/engine/test_task.py",
    "engine/_client_axis": "unit/engine/test_shared_backbone.py",
    "engine/_flat": "unit/engine/test_loop.py",
    "engine/_vmap": "unit/engine/test_task.py",
    "engine/_work": "unit/engine/test_task_samples_passed.py",
    "engine/client_data": "unit/engine/test_task.py",
    "engine/evaluation": "unit/engine/test_task.py",
    "engine/options": "unit/engine/test_task.py",
    "engine/training": "unit/engine/test_optim_persistent.py",
    "engine/kernels/lower": "unit/engine/kernels/test_programs.py",
    "engine/kernels/rules": "unit/engine/kernels/test_update.py",
    "engine/native/simple": "unit/engine/native/test_pooling.py",
    # what keeps one contract is tested by it
    "exchange/validity": "contract/test_server_validity.py",
    "net/local": "contract/test_exchanges.py",
    "testing/_promises": "contract/test_pieces.py",
    "testing/data": "contract/test_pieces.py",
    "testing/exchanges": "contract/test_exchanges.py",
    "testing/models": "contract/test_pieces.py",
    "testing/rules": "contract/test_pieces.py",
    "testing/tiny": "contract/test_methods.py",
    "testing/transports": "contract/test_transports.py",
    "methods/cost": "unit/results/test_traffic.py",
    # methods with a server are tested by what their papers claim
    "methods/apfl": "paper/test_personalized.py",
    "methods/ditto": "paper/test_averaging.py",
    "methods/fedavg": "paper/test_averaging.py",
    "methods/pooled": "paper/test_averaging.py",
    "methods/feddrift": "paper/test_feddrift.py",
    "methods/fedgwc": "paper/test_fedgwc.py",
    "methods/fesem": "paper/test_clustered.py",
    "methods/oneshot": "paper/test_clustered.py",
    "methods/perfedavg": "paper/test_personalized.py",
    "methods/pfedme": "paper/test_personalized.py",
    "methods/sosicfl": "paper/test_sosicfl.py",
    "net/decisions": "unit/net/test_federation_page.py",
    "report/server": "unit/report/test_watch.py",
    "models/simplex_layers": "paper/test_sosicfl.py",
    # taken home in whole runs
    "cli/_export": "e2e/test_take_home.py",
    "data/inputs": "unit/runtime/test_models.py",
    "results/export": "e2e/test_take_home.py",
    # used by nearly every test
    "__main__": "e2e/test_cli.py",
    "errors": "unit/cli/test_app.py",
    "_util/facts": "unit/methods/test_dac.py",
}
"""Modules without a test beside their name, and the test that covers each."""


def public(path: Path) -> str:
    """The path of a module without its suffix, and without an underscore in front of its name."""
    return path.with_name(path.stem.removeprefix("_")).as_posix()


def modules(folder: Path) -> set[str]:
    """The modules below a folder by their paths, packages too."""
    return {
        public(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix == ".py" or path.is_dir()
    }


def subjects(test: Path) -> set[str]:
    """The modules that a test may be about: `a/test_b_c.py` is about `a/b_c` or `a/b`."""
    folder, words = test.parent.as_posix(), test.stem.removeprefix("test_").split("_")
    names = {"_".join(words[: i + 1]) for i in range(len(words))}
    return names if folder == "." else {f"{folder}/{name}" for name in names}


FOUND = [path.relative_to(TESTS / "unit") for path in sorted((TESTS / "unit").rglob("test_*.py"))]


def test_every_test_of_a_unit_names_what_is_there():
    known = modules(PACKAGE) | {
        f"{other}/{name}" for other in ("benchmarks", "scripts") for name in modules(ROOT / other)
    }
    known |= ABOUT_THE_WHOLE
    assert [path.as_posix() for path in FOUND if not subjects(path) & known] == []


def test_every_module_has_its_test_beside_its_name_or_is_listed_with_the_one_that_covers_it():
    """A module that gets its own test leaves the list."""
    own = set().union(*map(subjects, FOUND))
    files = [
        path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
    ]
    bare = {path.with_suffix("").as_posix() for path in files if public(path) not in own}
    assert bare == set(ELSEWHERE)
    assert [test for test in ELSEWHERE.values() if not (TESTS / test).exists()] == []


def test_names_of_tests_are_read_as_written():
    """Otherwise the tests above could not fail."""
    assert subjects(Path("net/test_grpc_transport.py")) == {"net/grpc", "net/grpc_transport"}
    assert subjects(Path("test_rng.py")) == {"rng"}
    assert {"net/wire", "engine/vmap", "engine/native/trace"} <= modules(PACKAGE)
