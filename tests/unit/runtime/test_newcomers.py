"""Clients that join at the end: nobody saw them, nobody changes for them, and each is served as its method says."""

import copy
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from tests.selection import one_of_each_family
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.results.summary import summarize_study
from coterie.runtime import newcomers
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

NEW, OTHERS = [1, 4], [0, 2, 3, 5, 6, 7]
OPTIONS = {
    "random": {"num_peers": 2},
    "dac": {"num_peers": 2},
    "oracle": {"num_peers": 2},
    "fix-topology": {"num_peers": 2},
    "pens": {"num_sampled": 3, "num_kept": 1},
    "ifca": {"clusters": 2, "start": "resample", "resample_share": 0.3},
    "fedper": {"personal_layers": 0},  # the model has one layer
    "fedrep": {"personal_layers": 0},
    "dfedalt": {"personal_layers": 0, "num_peers": 2},
    "fesem": {"clusters": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
}
OPTIONS["sosicfl-plus"] = OPTIONS["sosicfl-all"] = OPTIONS["sosicfl"]


def federation():
    """Eight clients in two clusters, with names."""
    names = tuple("abcdefgh")
    return dataclasses.replace(tiny_federation(num_clients=8), client_names=names)


def settings(**changes):
    return tiny_settings(
        **{"rounds": 2, "engine": "loop", "new_clients": NEW, "new_client_rounds": 2, **changes}
    )


def run_of(kind, folder=None, data=None, **changes):
    method = METHODS[kind](**OPTIONS.get(kind, {}))
    return simulate(
        data or federation(),
        method,
        model=lambda: torch.nn.Linear(4, 3),
        settings=settings(**changes),
        seed=3,
        folder=folder,
    )


def joined(run, metric="accuracy", model=None):
    """The value of each newcomer."""
    rows = run.metrics[(run.metrics["split"] == "new_clients") & (run.metrics["metric"] == metric)]
    rows = rows[rows["model"] == model] if model else rows[rows["model"] != "received"]
    return rows.set_index("client")["value"]


GO_ON = sorted(
    METHODS.keys()
    - {"pooled", "cfl", "feddrift", "fedgwc", "fesem", "sosicfl", "sosicfl-all", "sosicfl-plus"}
)
# which no client joins late
EVERY = [(kind, "frozen") for kind in sorted(METHODS.keys() - {"pooled"})]
EVERY += [(kind, "training") for kind in GO_ON]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "others"), one_of_each_family(EVERY, slow=True))
def test_the_others_do_what_they_do_without_newcomers(kind, others):
    """Every method: their tables are those of a federation that never had the newcomers."""
    found = run_of(kind, evaluate="final", new_client_others=others)
    data = federation().select_clients(torch.tensor(OTHERS))
    alone = run_of(kind, data=data, new_clients=None, evaluate="final")
    ids = np.array(OTHERS)
    table = alone.metrics.assign(client=ids[alone.metrics["client"]].astype(np.int32))
    own = found.metrics[found.metrics["split"] != "new_clients"]
    for name in ("round", "client", "cluster", "split", "model", "metric", "value"):
        left, right = own[name].reset_index(drop=True), table[name].reset_index(drop=True)
        if isinstance(left.dtype, pd.CategoricalDtype):
            left, right = left.astype(str), right.astype(str)
        pd.testing.assert_series_equal(left, right, check_exact=True)
    assert found.edges["reader"].isin(OTHERS).all()
    assert found.edges["read"].isin(OTHERS).all()
    assert torch.equal(found.params, alone.params)
    values = joined(found)
    assert sorted(values.index) == NEW
    assert bool(np.isfinite(joined(found, "loss")).all())


def test_with_a_server_a_newcomer_receives_the_global_model_and_trains_it():
    """Checked with the served module on the newcomer's test set, and by gradient descent by hand."""
    data = federation()
    local = coterie.LocalTraining(epochs=1, batch_size=100, optimizer="sgd", lr=0.1, momentum=0.0)
    run = run_of("fedavg", evaluate="final", new_client_rounds=3, local=local)
    models = dataclasses.replace(run.models)
    place = data.test_of[NEW[0]]
    x, y = data.tests[place].x, data.tests[place].y
    state = models.load_row("a").double()
    linear = torch.nn.Linear(4, 3).double()
    with torch.no_grad():
        linear.weight.copy_(state[:12].reshape(3, 4))
        linear.bias.copy_(state[12:])
    received = float((linear(x).argmax(1) == y).double().mean())
    assert joined(run, model="received")[NEW[0]] == pytest.approx(received)
    mine = data.x[NEW[0]][data.split[NEW[0]] == 0], data.y[NEW[0]][data.split[NEW[0]] == 0]
    for _ in range(3):
        linear.zero_grad()
        torch.nn.functional.cross_entropy(linear(mine[0]), mine[1]).backward()
        with torch.no_grad():
            for tensor in linear.parameters():
                tensor -= 0.1 * tensor.grad
    loss = torch.nn.functional.cross_entropy(linear(x), y).item()
    assert joined(run, "loss", "current")[NEW[0]] == pytest.approx(loss, rel=1e-6)


def test_with_clusters_a_newcomer_takes_the_model_with_the_least_loss_on_its_data():
    data = federation()
    run = run_of("ifca", evaluate="final", rounds=4)
    models = {tuple(run.models.load_row(name).tolist()) for name in "acdfgh"}
    assert len(models) == 2
    for client in NEW:
        mine = data.split[client] == 0
        x, y = data.x[client][mine], data.y[client][mine]
        test = data.tests[data.test_of[client]]
        best = []
        for row in models:
            weight, bias = (
                torch.tensor(row[:12]).double().reshape(3, 4),
                torch.tensor(row[12:]).double(),
            )
            loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
            right = ((test.x @ weight.T + bias).argmax(1) == test.y).double().mean()
            best.append((float(loss), float(right)))
        assert joined(run, model="received")[client] == pytest.approx(min(best)[1], abs=1e-9)


class Watched(InMemory):
    """Notes whom the newcomers read."""

    seen: list = []  # noqa: RUF012

    def pull(self, message, peers):
        Watched.seen.append((self.active.tolist(), peers.tolist()))
        return super().pull(message, peers)


@pytest.mark.parametrize("kind", ["random", "oracle"])
def test_a_newcomer_reads_clients_of_the_run_only_and_of_its_cluster_where_the_method_knows(
    kind, monkeypatch
):
    monkeypatch.setattr(newcomers, "InMemory", Watched)
    Watched.seen = []
    run_of(kind)
    read = {6: set(), 7: set()}  # numbered behind the six others
    rounds = Watched.seen[-2:]  # before them Oracle learns the clusters
    for active, peers in rounds:
        assert active == list(range(8))
        for client in read:
            read[client] |= {peer for peer in peers[client] if peer >= 0}
    assert all(peers and max(peers) < 6 for peers in read.values())
    # odd clients are of one cluster: 3, 5 and 7 of the run, numbered 2, 3 and 5
    if kind == "oracle":
        assert read[6] <= {2, 3, 5}
        assert read[7] <= {0, 1, 4}


def by_hand(linear, data, client):
    """One step of gradient descent, lr 0.1, on all training samples of a client, as a row."""
    own = copy.deepcopy(linear)
    mine = data.split[client] == 0
    torch.nn.functional.cross_entropy(own(data.x[client][mine]), data.y[client][mine]).backward()
    return torch.cat([(t - 0.1 * t.grad).detach().flatten() for t in own.parameters()]), int(
        mine.sum()
    )


def linear_of(row):
    linear = torch.nn.Linear(4, 3).double()
    torch.nn.utils.vector_to_parameters(row.double(), linear.parameters())
    return linear


def loss_of(linear, data, client):
    test = data.tests[data.test_of[client]]
    return torch.nn.functional.cross_entropy(linear(test.x), test.y).item()


STEP = coterie.LocalTraining(epochs=1, batch_size=100, optimizer="sgd", lr=0.1, momentum=0.0)


def test_where_the_others_train_on_the_server_averages_all_clients_new_ones_too():
    """Two rounds of gradient descent of all eight from the final global model, averaged by hand."""
    data = federation()
    run = run_of("fedavg", evaluate="final", new_client_others="training", local=STEP)
    row = run.models.load_row("a")
    for _ in range(2):
        rows, counts = zip(
            *(by_hand(linear_of(row), data, client) for client in range(8)), strict=True
        )
        row = sum(n * one for n, one in zip(counts, rows, strict=True)) / sum(counts)
    for client in NEW:
        assert joined(run, "loss", "current")[client] == pytest.approx(
            loss_of(linear_of(row), data, client), rel=1e-6
        )


def test_where_the_others_train_on_peers_read_the_newcomers_and_those_each_other(monkeypatch):
    monkeypatch.setattr(newcomers, "InMemory", Watched)
    Watched.seen = []
    method = {"num_peers": 7}
    simulate(
        federation(), METHODS["random"](**method), model=lambda: torch.nn.Linear(4, 3), seed=3,
        settings=settings(new_client_others="training", new_client_rounds=1),
    )  # fmt: skip
    learning, others = Watched.seen  # the newcomers' pass, and that of the others
    for _, peers in (learning, others):
        for client, read in enumerate(peers):
            assert sorted(read) == sorted({*range(8)} - {client})


@pytest.mark.full
@pytest.mark.option("Settings.new_client_others", "frozen")
@pytest.mark.option("Settings.new_client_others", "training")
@pytest.mark.parametrize("kind", ["random", "dac", "pens"])
def test_a_round_is_simultaneous_where_the_others_train_on(kind):
    """A single newcomer reads in its first round what frozen clients publish; in its second they have trained."""

    def loss(others, rounds):
        return joined(
            run_of(
                kind,
                evaluate="final",
                new_clients=[4],
                new_client_rounds=rounds,
                new_client_others=others,
            ),
            "loss",
        )[4]

    assert loss("training", 1) == loss("frozen", 1)
    assert loss("training", 2) != loss("frozen", 2)


def test_where_everybody_reads_everybody_a_round_leaves_one_mean():
    """Different first models and no training: were a round not simultaneous, a second one would change the mean."""

    def loss(rounds):
        chosen = settings(
            rounds=0, init="per_client", local=dataclasses.replace(STEP, lr=1e-12), evaluate="final", new_clients=[4],
            new_client_others="training", new_client_rounds=rounds,
        )  # fmt: skip
        method = METHODS["random"](num_peers=7)
        return joined(
            simulate(
                federation(), method, model=lambda: torch.nn.Linear(4, 3), seed=3, settings=chosen
            ),
            "loss",
        )[4]

    assert loss(0) != pytest.approx(loss(1), rel=1e-3)
    assert loss(1) == pytest.approx(loss(2), rel=1e-9)


@pytest.mark.parametrize("kind", ["dac", "ditto"])
def test_optimizers_whose_state_is_kept_keep_it_where_the_others_train_on(kind):
    """With momentum and several rounds, other results than with a fresh state in each."""
    local = dataclasses.replace(STEP, momentum=0.9)
    kept = dataclasses.replace(local, persistent_client_optimizer=True)
    both = [
        joined(
            run_of(
                kind,
                new_client_others="training",
                participation=0.5,
                rounds=0,
                evaluate="final",
                local=one,
            ),
            "loss",
        )
        for one in (local, kept)
    ]
    assert np.isfinite(both[0]).all()
    assert (both[0] != both[1]).all()


def test_clients_that_have_stopped_stay_as_they_are_where_the_others_train_on():
    """With a learning rate of 0 everybody stops at once, and a newcomer finds the same models in either case."""
    local = dataclasses.replace(STEP, lr=1e-12)
    values = [
        joined(
            run_of(
                "random",
                rounds=6,
                patience=1,
                new_clients=[4],
                new_client_others=others,
                local=local,
            ),
            "loss",
        )
        for others in ("frozen", "training")
    ]
    assert values[0].tolist() == pytest.approx(values[1].tolist(), rel=1e-9)


@pytest.mark.parametrize("kind", ["cfl", "feddrift", "fedgwc", "fesem", "sosicfl"])
def test_a_server_that_has_no_place_for_new_members_is_told_to_stay_frozen(kind):
    with pytest.raises(
        ConfigError, match="remembers is of the clients that it knew from the start: use 'frozen'"
    ):
        run_of(kind, new_client_others="training")


class Narrow(Watched):
    """Notes how much of a model the others show."""

    def pull(self, message, peers):
        Watched.seen.append(message.params.shape[1])
        return InMemory.pull(self, message, peers)


def test_what_stays_at_home_is_not_shown_to_newcomers(monkeypatch):
    monkeypatch.setattr(newcomers, "InMemory", Narrow)
    Watched.seen = []
    run_of("random", shared=["weight"])
    assert Watched.seen == [12, 12]


def test_what_stays_at_home_a_newcomer_has_of_its_own_first_model():
    """The weights are the server's, the bias that of the given module."""
    data, model = federation(), torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([3.0, 1.0, 2.0]))
    run = simulate(
        data, METHODS["fedavg"](), model=model, seed=3,
        settings=settings(shared=["weight"], init="given", evaluate="final", new_client_rounds=0),
    )  # fmt: skip
    row = run.models.load_row("a").clone()
    assert row[12:].tolist() != [3.0, 1.0, 2.0]
    row[12:] = torch.tensor([3.0, 1.0, 2.0])
    for client in NEW:
        assert joined(run, "loss", "current")[client] == pytest.approx(
            loss_of(linear_of(row), data, client), rel=1e-6
        )


def test_what_a_client_alone_learns_does_not_depend_on_the_rounds_of_the_others():
    """Local: a newcomer trains the warm-up and its rounds, whatever the others did before."""
    first, second = (
        joined(run_of("local", rounds=rounds, evaluate="final"), "loss") for rounds in (1, 3)
    )
    assert first.tolist() == second.tolist()
    longer = joined(run_of("local", evaluate="final", new_client_rounds=5), "loss")
    assert (longer < first).all()


def test_the_best_round_on_validation_data_is_tested_where_that_is_asked_for():
    best, last = (
        run_of("random", evaluate=one, new_client_rounds=6) for one in ("best_val", "final")
    )
    kinds = {
        str(kind)
        for run in (best, last)
        for kind in run.metrics.query("split == 'new_clients'")["model"]
    }
    assert kinds == {"best", "current"}


@pytest.mark.full
@pytest.mark.parametrize("others", ["frozen", "training"])
@pytest.mark.parametrize("kind", ["dac", "ditto"])
def test_a_run_that_is_resumed_has_the_same_bytes(kind, others, tmp_path):
    run_of(kind, tmp_path / "whole", rounds=4, new_client_others=others)

    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    method = METHODS[kind](**OPTIONS.get(kind, {}))
    chosen = settings(rounds=4, checkpoint_seconds=0, new_client_others=others)
    both = {
        "model": lambda: torch.nn.Linear(4, 3),
        "settings": chosen,
        "seed": 3,
        "folder": tmp_path / "parts",
    }
    with pytest.raises(KeyboardInterrupt):
        simulate(federation(), method, observer=stop, **both)
    simulate(federation(), method, resume=True, **both)
    for name in (
        "metrics.parquet",
        "edges.parquet",
        "checkpoint.safetensors",
        "models.safetensors",
    ):
        assert (tmp_path / "parts" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(NEW, NEW), (["b", "e"], NEW), ([4], [4]), (0.25, None), (2, None), (["7", "b"], [1, 7])],
)
def test_newcomers_are_a_share_a_number_or_named(wanted, found):
    parts = [
        newcomers.separate_newcomers(
            federation(), settings(new_clients=wanted), METHODS["local"](), seed
        )
        for seed in (3, 3)
    ]
    ids = [part.ids[part.newcomer_rows].tolist() for part in parts]
    assert ids[0] == ids[1]
    assert ids[0] == found if found is not None else len(ids[0]) == 2
    assert parts[0].participants.client_names == tuple(
        "abcdefgh"[i] for i in sorted({*range(8)} - {*ids[0]})
    )


def test_another_seed_draws_others():
    wanted = settings(new_clients=0.5)
    drawn = {
        tuple(
            newcomers.separate_newcomers(
                federation(), wanted, METHODS["local"](), seed
            ).ids.tolist()
        )
        for seed in range(8)
    }
    assert len(drawn) > 4


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["z"], "new_clients: unknown client 'z'"),
        ([9], "new_clients is 9; expected 0 to 7"),
        (7, "of 8 clients 1 would take part; expected two or more"),
        (8, "new_clients is 8.0; expected 1 to 6 of the 8 clients"),
        (2.5, "expected a share below 1, a whole number, or a list"),
        (0.01, "expected 1 to 6 of the 8 clients"),
    ],
)
def test_what_cannot_be_is_said(wanted, said):
    with pytest.raises(ConfigError, match=said):
        run_of("local", new_clients=wanted)


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_clients_for_newcomers_are_counted(number):
    said = f"expected three or more clients with it, two of them from the start; there are {number}"
    with pytest.raises(ConfigError, match=said):
        newcomers.choose_newcomers(number, number, (), 0)


def test_a_method_of_neither_kind_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Other(Method):
        kind = "other"

        def init_state(self, task, rng):
            raise NotImplementedError

        def round(self, rnd, state):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="other is neither a PeerMethod nor a ServerMethod"):
        newcomers.separate_newcomers(federation(), settings(), Other(), 0)


@pytest.mark.full
def test_a_study_shows_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.toml").write_text(
        'name = "new"\nrounds = 1\nseeds = [0, 1]\nengine = "loop"\nnew_clients = 0.25\nnew_client_rounds = 1\n'
        'data = { dataset = "digits", num_clients = 8, train = 20 }\nmodel = { kind = "linear" }\n'
        '[[methods]]\nkind = "local"\n[[methods]]\nkind = "fedavg"\n'
    )
    study = coterie.run_study("new.toml")
    values = []
    for seed in (0, 1):
        table = pd.read_parquet(study.folder / "fedavg" / f"seed-{seed}" / "metrics.parquet")
        own = table[
            (table["split"] == "new_clients")
            & (table["metric"] == "accuracy")
            & (table["model"] == "best")
        ]
        assert own["client"].nunique() == 2
        assert not table.loc[table["split"] == "test", "client"].isin(own["client"]).any()
        values.append(own["value"].mean())
    rows = summarize_study(study.folder)["new_clients"]
    [row] = [
        r for r in rows if (r["label"], r["metric"], r["model"]) == ("fedavg", "accuracy", "joined")
    ]
    assert row["mean"] == pytest.approx(np.mean(values))
    assert row["std"] == pytest.approx(np.std(values))
    assert (row["clients"], row["rounds"], row["seeds"]) == (2, 1, 2)
    assert json.loads((study.folder / "summary.json").read_text())["new_clients"] == rows
    for words in (["show", "runs/new"], ["compare", "runs/new"]):
        told = CliRunner().invoke(app, words)
        text = " ".join(told.output.split())
        assert "New clients: 2 clients took part in no round" in text
        assert f"fedavg {100 * row['mean']:.1f} ±" in text
    coterie.write_report(study.folder)
    assert "New clients: 2 clients" in (study.folder / "report.html").read_text("utf-8")
