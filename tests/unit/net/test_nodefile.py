"""node.toml: strict, and five ways to give a node its own data."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.arrays import from_arrays
from coterie.errors import ConfigError, DataError
from coterie.exchange.accepting import Acceptance
from coterie.methods import METHODS
from coterie.net import nodefile
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.testing import tiny_federation, tiny_settings

STUDY = config.parse_study_text(
    'rounds = 2\nseeds = [4]\n[data]\ndataset = "digits"\nnum_clients = 3\n[[methods]]\nkind = "random"\n'
)
DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(30, 5)).astype(np.float32), DRAW.integers(0, 3, 30)


def made_here():
    return X, Y


def made_with_test():
    return (X, Y), (X[:6], Y[:6])


def made_badly():
    return [1, 2, 3]


def written(folder: Path, text: str) -> nodefile.NodeFile:
    path = folder / "node.toml"
    path.write_text(text)
    return nodefile.load(path)


def rows(folder: Path, text: str, client: int = 1, population: int = 3):
    return nodefile.load_own_rows(
        written(folder, f"[data]\n{text}\n"), STUDY, (client,), population
    )


def test_paths_are_seen_from_the_file(tmp_path):
    file = written(tmp_path, 'roster = "../r.toml"\n[network]\ndeadline = 3\n')
    assert file.resolve_path(file.roster) == tmp_path.resolve() / "../r.toml"
    assert file.network.terms.deadline == 3.0
    assert file.network.patience.start == 60.0


def test_a_node_may_wait_for_new_clients_without_limit(tmp_path):
    assert written(tmp_path, "[network]\nlinger = 'unlimited'\n").network.patience.linger == float(
        "inf"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rooster = 1", "unknown key 'rooster'; did you mean 'roster'"),
        ("role = 'boss'", "role is 'boss'"),
        ("data = 3", "data is 3; expected a table"),
        ("[network]\ndeadlin = 3", "unknown key 'deadlin'; did you mean 'deadline'"),
        (
            "[network]\nchunk = 1000000",
            "chunk is 1000000; expected a whole number, from 1024 to 262144",
        ),
        ("[network]\nlease = 0.1", "lease is 0.1"),
        ('folder = "elsewhere"', "unknown key 'folder'"),
        ("x = ", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, found):
    with pytest.raises(ConfigError, match=found):
        written(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        nodefile.load(tmp_path / "node.toml")


def test_rows_of_the_studys_own_data_are_those_of_the_simulation(tmp_path):
    federation = rows(tmp_path, 'study = "own rows"')
    whole = nodefile.build_federation(STUDY.data, 4)
    assert federation.ids.tolist() == [1]
    assert torch.equal(federation.x[0], whole.x[1])
    assert federation.truth is None


def test_arrays_get_their_place_in_the_population(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=Y, x_test=X[:6], y_test=Y[:6])
    federation = rows(tmp_path, 'arrays = "d.npz"\nclasses = 3')
    assert (federation.ids.tolist(), federation.population, federation.classes) == ([1], 3, 3)
    assert federation.count_samples("train").tolist() == [24]
    assert len(federation.tests[0].x) == 6


def test_a_saved_federation_keeps_its_ids_or_takes_those_of_the_roster(tmp_path):
    alone = from_arrays(X, Y, clients=["a"] * 30, classes=3)
    alone.save(tmp_path / "f.safetensors")
    assert rows(tmp_path, 'federation = "f.safetensors"', client=2).ids.tolist() == [2]
    whole = replace(from_arrays(X, Y, num_clients=3, classes=3), truth=None)
    whole.save(tmp_path / "f.safetensors")
    chosen = rows(tmp_path, 'federation = "f.safetensors"', client=2)
    assert chosen.ids.tolist() == [2]
    assert torch.equal(chosen.y[0], whole.y[2])


@pytest.mark.parametrize(("name", "tests"), [("made_here", 1), ("made_with_test", 6)])
def test_a_function_may_make_the_data(tmp_path, monkeypatch, name, tests):
    monkeypatch.setitem(
        __import__("sys").modules, "own_module", __import__("sys").modules[__name__]
    )
    federation = rows(tmp_path, f'function = "own_module:{name}"\nclasses = 3')
    assert federation.ids.tolist() == [1]
    assert len(federation.tests[0].x) >= tests


@pytest.mark.parametrize(
    ("text", "error", "found"),
    [
        ("", ConfigError, "gives nothing; expected exactly one of"),
        ('arrays = "a"\nfolder = "b"', ConfigError, "gives arrays, folder"),
        ('study = "all rows"', ConfigError, "expected 'own rows'"),
        ('arrays = "none.npz"\nclasses = 3', DataError, "cannot read the arrays"),
        ('arrays = "half.npz"\nclasses = 3', DataError, "expected both of x and y"),
        ('arrays = "pickled.npz"\nclasses = 3', DataError, "cannot read the arrays"),
        ('arrays = "good.npz"', ConfigError, "classes is missing"),
        ('function = "nowhere"', ConfigError, "expected 'package.module:name'"),
        (
            'function = "no.such:thing"',
            ConfigError,
            "data.function 'no.such:thing': there is no module 'no'",
        ),
        ('function = "math:pi"', ConfigError, "is 3.14.*; expected a function"),
        ('function = "own_module:made_badly"', DataError, "returned list"),
    ],
)
def test_data_that_cannot_be_used_are_refused(tmp_path, monkeypatch, text, error, found):
    """Arrays of objects would be unpickled: they are refused like any other file that is not plain numbers."""
    monkeypatch.setitem(
        __import__("sys").modules, "own_module", __import__("sys").modules[__name__]
    )
    np.savez(tmp_path / "half.npz", x=X)
    np.savez(tmp_path / "good.npz", x=X, y=Y)
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object), y=Y)
    with pytest.raises(error, match=found):
        rows(tmp_path, text)


def test_one_run_of_a_study_is_chosen():
    many = config.parse_study_text(
        'seeds = [0, 1]\n[data]\ndataset = "digits"\n[[methods]]\nkind = "random"\n[[methods]]\nkind = "local"\n'
    )
    with pytest.raises(ConfigError, match="the study has the methods random, local; say which"):
        nodefile.select_run(many)
    with pytest.raises(ConfigError, match=r"the study has the seeds \[0, 1\]; say which"):
        nodefile.select_run(many, "local")
    with pytest.raises(ConfigError, match="no method 'dac'"):
        nodefile.select_run(many, "dac")
    study, label, seed = nodefile.select_run(many, "local", 1)
    assert (label, seed, len(study.methods), list(study.seeds)) == ("local", 1, 1, [1])


def test_a_node_with_arrays_is_called_as_the_roster_says(tmp_path):
    """Its federation of one client has no name for it: that of all members comes from the roster."""
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    assert rows(tmp_path, 'arrays = "own.npz"\nclasses = 3').names_by_id == {}


def test_the_names_of_a_federation_that_a_node_reads_are_kept(tmp_path):
    named = replace(
        from_arrays(X, Y, clients=np.repeat([0, 1, 2], 10), classes=3),
        client_names=("Oslo", "Lima", "Rio"),
    )
    named.save(tmp_path / "all.safetensors")
    assert rows(tmp_path, 'federation = "all.safetensors"').names_by_id == {1: "Lima"}


TABLE = "age,color,site,ill\n" + "\n".join(
    f"{place},{'red' if place % 2 else 'blue'},{'Åre' if place < 20 else 'Malmö'},{'yes' if place % 3 else 'no'}"
    for place in range(40)
)


def table_rows(folder: Path, client: int = 1, **change: str):
    """The rows of a node with a table of its own; `change` says options as TOML."""
    (folder / "t.csv").write_text(TABLE)
    options = {
        "path": '"t.csv"', "target": '"ill"', "features": '["age", "color"]', "class_names": '["no", "yes", "maybe"]',
        "categories": '{ color = ["green", "red", "blue"] }', **change,
    }  # fmt: skip
    lines = "\n".join(f"{key} = {value}" for key, value in options.items() if value)
    return rows(folder, f'dataset = "table"\n[data.options]\n{lines}', client)


def test_a_table_beside_the_file_is_a_clients_own_data(tmp_path):
    federation = table_rows(tmp_path, client=2)
    assert (federation.ids.tolist(), federation.population, federation.classes) == ([2], 3, 3)
    assert federation.feature_names == ("age", "color=green", "color=red", "color=blue")
    assert federation.count_samples("train").tolist() == [26]  # 40: 8 tests, 6 validation
    with pytest.raises(
        DataError, match="the data hold 2 clients; the roster says that this node hosts 1"
    ):
        two_clients(tmp_path)


def test_a_table_is_tested_on_the_fold_of_the_seed(tmp_path):
    """The study's seed is 4: of five folds the last, of four the first of the second division."""
    (tmp_path / "t.csv").write_text(TABLE)
    options = 'path = "t.csv"\ntarget = "ill"\nfeatures = ["age"]\nclass_names = ["no", "yes"]'
    made = rows(tmp_path, f'dataset = "table"\nfolds = 4\n[data.options]\n{options}')
    assert made.count_samples("train").tolist() == [24]  # 40: 10 tests, 6 validation
    assert len(made.tests[0].y) == 10
    again = rows(tmp_path, f'dataset = "table"\nfolds = 4\n[data.options]\n{options}', client=2)
    assert not torch.equal(made.tests[0].x, again.tests[0].x), (
        "a client draws from the stream of its id"
    )
    with pytest.raises(ConfigError, match=r"data\.folds is given without data\.dataset"):
        rows(tmp_path, 'folds = 4\nstudy = "own rows"')


def two_clients(folder: Path):
    (folder / "t.csv").write_text(TABLE)
    options = 'path = "t.csv"\ntarget = "age"\nclient = "site"\nclasses = 0\nfeatures = ["color"]'
    return rows(
        folder,
        f'dataset = "table"\n[data.options]\n{options}\ncategories = {{ color = ["red", "blue"] }}',
    )


def test_text_means_the_same_on_every_node_or_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="the categories of 'color' are missing; every machine must name the same"
    ):
        table_rows(tmp_path, categories="")
    with pytest.raises(ConfigError, match="the classes of 'ill' are missing"):
        table_rows(tmp_path, class_names="")
    with pytest.raises(
        ConfigError,
        match=r"dataset is 'mnist'; expected 'table', 'folder' or 'package.module:name'",
    ):
        rows(tmp_path, 'dataset = "mnist"')


def test_arrays_of_a_node_give_its_client_no_name(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    assert rows(tmp_path, 'arrays = "d.npz"\nclasses = 3').client_names == ()


def test_what_nodes_agree_on_names_the_model_with_its_arguments():
    text = "seeds = [0]\ndata = { dataset = 'digits' }\nmethods = [{ kind = 'random' }]\nmodel = "
    kinds = (
        "{ kind = 'linear' }",
        "{ kind = 'a.b:Net' }",
        "{ kind = 'a.b:Net', options = { width = 3 } }",
    )
    agreed = [
        nodefile.make_run_spec(config.parse_study_text(text + kind)).common_settings(3)["model"]
        for kind in kinds
    ]
    assert agreed == ["linear", "a.b:Net", 'a.b:Net {"width": 3}']


def test_members_judge_what_they_receive_unless_the_study_says_no():
    """A server judges steps, and no number of samples; a method without exchanges has nothing to judge."""
    text = "seeds = [0]\ndata = { dataset = 'digits' }\nmodel = { kind = 'linear' }\n"

    def rules(rest):
        return nodefile.make_run_spec(
            config.parse_study_text(text + rest)
        ).settings.acceptance_rules

    assert rules("methods = [{ kind = 'dac' }]") == Acceptance()
    assert rules("acceptance = { clip = 7 }\nmethods = [{ kind = 'dac' }]") == Acceptance(clip=7.0)
    assert rules("acceptance = false\nmethods = [{ kind = 'dac' }]") is None
    assert rules("methods = [{ kind = 'fedavg' }]").samples > 1e6
    assert rules("methods = [{ kind = 'local' }]") is None


@pytest.mark.option("Settings.acceptance", None, False, True)
@pytest.mark.parametrize(
    ("value", "simulated", "nodes"), [(None, 0, 1), (False, 0, 0), (True, 1, 1)]
)
def test_who_judges_where(value, simulated, nodes):
    """Unset, clients judge between machines and not in a simulation."""
    settings, method = tiny_settings(rounds=1, acceptance=value), METHODS["random"](num_peers=1)
    run = simulate(tiny_federation(), method, model="linear", settings=settings)
    assert ("refused" in {*map(str, run.metrics["metric"])}) == bool(simulated)
    assert (
        nodefile.between_machines(method, settings).acceptance_rules_for(method) is not None
    ) == bool(nodes)
