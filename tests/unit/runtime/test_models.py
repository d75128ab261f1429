"""The models of a run, taken home: keys, types and values of the user's own modules, and what they say of samples."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from torch import nn

import coterie
from coterie.engine.task import LocalTraining
from coterie.errors import CheckpointError, ConfigError, DataError, ModelError
from coterie.methods import METHODS
from coterie.runtime.models import load_models
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings


class Own(nn.Module):
    """Batch normalization, dropout, a frozen layer, one tensor under two names, and a buffer of whole numbers."""

    def __init__(self, features=4, outputs=3):
        super().__init__()
        self.frozen = nn.Linear(features, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, outputs)
        self.same = self.head
        self.register_buffer("version", torch.tensor([3, 1]))

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.frozen(x)))))


def final(run, client, metric="accuracy"):
    """The value of the final test of a client."""
    table = run.metrics
    rows = table[
        (table["split"] == "test")
        & (table["round"] == table["round"].max())
        & (table["client"] == client)
    ]
    rows = rows[rows["metric"] == metric]
    best = rows[rows["model"] == "best"]
    return float((best if len(best) else rows)["value"].iloc[0])


def trained(kind="random", folder=None, model=Own, federation=None, **settings):
    options = {
        "random": {"num_peers": 2},
        "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    }
    options["sosicfl-all"] = options["sosicfl-plus"] = options["sosicfl"]
    method = METHODS[kind](**options.get(kind, {}))
    settings = {"rounds": 2, "engine": "loop", "dtype": "float32", **settings}
    return simulate(
        federation or tiny_federation(),
        method,
        model=model,
        settings=tiny_settings(**settings),
        seed=1,
        folder=folder,
    )


METHODS_TAKEN = ["local", "random", "fedavg", "ifca", "ditto", "sosicfl", "sosicfl-plus"]


@pytest.mark.full
@pytest.mark.parametrize("evaluate", ["best_val", "final"])
@pytest.mark.parametrize("kind", METHODS_TAKEN)
def test_the_module_is_the_users_own_and_gives_the_recorded_test_numbers(kind, evaluate, tmp_path):
    run = trained(kind, tmp_path, evaluate=evaluate)
    federation, fresh = tiny_federation(), Own()
    stored = load_models(tmp_path, model=Own)
    for client in (0, 5):
        module = run.model(client)
        assert type(module) is Own
        assert not any(part.training for part in module.modules())
        assert module.same is module.head
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in module.state_dict().items()}
        assert found == {
            name: (tensor.dtype, tensor.shape) for name, tensor in fresh.state_dict().items()
        }
        Own().load_state_dict(stored.state_dict(client), strict=True)
        test = federation.tests[federation.test_of[client]]
        outputs = module(test.x.float()).detach()
        right = (outputs.argmax(1) == test.y).double().mean()
        assert float(right) == pytest.approx(final(run, client), abs=1e-6)
        loss = nn.functional.cross_entropy(outputs, test.y)
        assert float(loss) == pytest.approx(final(run, client, "loss"), rel=1e-4)
        for name, tensor in stored.state_dict(client).items():
            assert torch.equal(tensor, module.state_dict()[name]), name
        assert torch.equal(stored.model(client)(test.x.float()), outputs)


def test_running_statistics_are_those_of_training_by_hand():
    """One epoch of one batch alone: the mean moves a tenth of the way to the batch's, and one batch was tracked."""
    local = LocalTraining(batch_size=100)
    run = trained(
        "local", rounds=0, warmup_epochs=1, evaluate="final", buffers="local", local=local
    )
    module, federation = run.model(2), tiny_federation()
    x = federation.x[2][federation.split[2] == 0].float()
    assert torch.allclose(module.norm.running_mean, 0.1 * module.frozen(x).mean(0), atol=1e-6)
    assert module.norm.num_batches_tracked.item() == 1
    assert module.norm.num_batches_tracked.dtype == torch.int64


def test_both_models_can_be_asked_for_where_both_are_kept(tmp_path):
    """The best is `tracker.best` and the last `state.params`, as the reference of files says."""
    trained("random", tmp_path, evaluate="best_val", rounds=3, local=LocalTraining(lr=0.3))
    models = load_models(tmp_path, model=Own)
    with safe_open(str(tmp_path / "checkpoint.safetensors"), "pt") as file:
        rows = {
            "best_val": file.get_tensor("tracker.best"),
            "final": file.get_tensor("state.params"),
        }
    assert not torch.equal(rows["best_val"], rows["final"])
    place = next(one for one in models.spec.state if one.name == "head.weight")
    for which, table in rows.items():
        wanted = table[4][place.start : place.stop].reshape(3, 6)
        assert torch.equal(models.model(4, which).head.weight, wanted)
    assert torch.equal(models.load_row(4), models.load_row(4, "best_val"))


def test_the_reference_says_how_to_read_a_model_without_coterie(tmp_path, monkeypatch):
    trained("random", tmp_path, evaluate="best_val")
    page = (Path(__file__).parents[3] / "docs/reference/files.md").read_text("utf-8")
    [code] = re.findall(r"```text\n(import json, torch\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    found = {"client": 3}
    exec(code, found)
    wanted = load_models(tmp_path).state_dict(3)
    # these are in no row
    trainable = {name for name in wanted if name != "version" and not name.startswith("frozen.")}
    assert all(torch.equal(found["state"][name], wanted[name]) for name in trainable)


def test_a_model_that_was_not_kept_is_named(tmp_path):
    trained("fedavg", tmp_path, evaluate="best_val")
    with pytest.raises(
        ConfigError, match=r"kept only 'best_val': evaluate = 'final' would keep it"
    ):
        load_models(tmp_path, model=Own).model(0, "final")
    with pytest.raises(
        ConfigError, match="without a folder a run keeps only 'best_val': give simulate a folder"
    ):
        trained("random").model(0, "final")


def test_clients_are_found_by_name_or_number():
    names = ("north", "south", "Åre", "7", "e", "f")
    run = trained(federation=dataclasses.replace(tiny_federation(), client_names=names))
    for name, number in (("Åre", 2), ("7", 3), ("5", 5), ("f", 5)):
        assert torch.equal(run.models.load_row(name), run.models.load_row(number))
    with pytest.raises(ConfigError, match="unknown client 'nroth'; did you mean 'north'"):
        run.model("nroth")
    with pytest.raises(
        ConfigError, match=r"there is no client 6; the clients are 0, 1, 2, 3, 4, \.\.\."
    ):
        trained().model(6)


def test_a_module_that_was_given_is_not_changed_by_taking_models():
    given = Own()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    run = trained(model=given, init="given")
    first, second = run.model(0), run.model(0)
    with torch.no_grad():
        first.head.weight.zero_()
    assert bool(second.head.weight.abs().sum() > 0)
    assert torch.allclose(second.frozen.weight, before["frozen.weight"])
    assert given.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


def test_a_served_mean_of_predictions_is_no_module():
    method = METHODS["sosicfl"](endpoints=4, regions=2, warmup_rounds=1, test_samples=2)
    settings = tiny_settings(rounds=1, engine="loop")
    run = simulate(tiny_federation(), method, model=lambda: Own().double(), settings=settings)
    with pytest.raises(
        ModelError, match="sosicfl: with test_samples above 1 a client is served by several models"
    ):
        run.model(0)


def test_a_named_model_needs_nothing_but_the_folder_and_another_module_is_refused(tmp_path):
    run = trained(folder=tmp_path / "linear", model="linear")
    models = load_models(tmp_path / "linear")
    assert torch.equal(models.model(1)[1].weight, run.model(1)[1].weight)
    with pytest.raises(
        ModelError, match=r"'1.weight' is missing in it, and of shape \(3, 4\) in the run"
    ):
        load_models(tmp_path / "linear", model=Own).model(1)
    trained(folder=tmp_path / "own")
    models = load_models(tmp_path / "own")
    assert list(models.state_dict(0)) == list(Own().state_dict())  # weights need no module
    with pytest.raises(
        ModelError, match=r"a module of your own, a \S+\.Own, which was given from Python"
    ):
        models.model(0)


def test_the_folder_must_be_whole_and_its_checkpoint_that_of_the_end(tmp_path):
    trained(folder=tmp_path, rounds=2)
    for name in ("models.safetensors", "checkpoint.safetensors"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(kept[:-1] + b"\xff")
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            load_models(tmp_path, model=Own).load_row(0)
        (tmp_path / name).write_bytes(kept)
    method, settings = (
        METHODS["random"](num_peers=2),
        tiny_settings(rounds=4, engine="loop", dtype="float32"),
    )

    def stop(progress):
        if progress.round == 3:
            raise KeyboardInterrupt

    settings = dataclasses.replace(settings, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        simulate(
            tiny_federation(),
            method,
            model=Own,
            settings=settings,
            seed=1,
            folder=tmp_path,
            resume=True,
            observer=stop,
        )
    with pytest.raises(
        CheckpointError, match="had ended after 2 rounds and was made longer; it is at 3"
    ):
        load_models(tmp_path, model=Own).load_row(0)
    run = simulate(
        tiny_federation(),
        method,
        model=Own,
        settings=settings,
        seed=1,
        folder=tmp_path,
        resume=True,
    )
    assert torch.equal(load_models(tmp_path, model=Own).load_row(0), run.models.load_row(0))


# ---------------------------------------------------------------- predictions


def test_images_are_normalized_as_in_training_and_classes_have_names():
    stream = np.random.default_rng(0)
    x, y = (
        stream.integers(0, 256, (60, 1, 4, 4), dtype=np.uint8),
        np.array(["cat", "dog"])[np.arange(60) % 2],
    )
    data = coterie.from_arrays(x, y, clients=["a"] * 30 + ["b"] * 30, normalize="half")
    run = trained("local", model="linear", federation=data)
    module = run.model("b")
    wanted = module((torch.from_numpy(x).float() / 255 - 0.5) / 0.5).detach()
    assert torch.allclose(run.predict("b", x, batch_size=7), wanted, atol=1e-6)
    assert torch.allclose(run.predict("b", x, "probabilities"), wanted.softmax(1), atol=1e-6)
    assert run.predict("b", x, "classes").tolist() == [
        "dog" if one[1] > one[0] else "cat" for one in wanted
    ]
    test = data.tests[data.test_of[1]]
    right = np.mean(run.predict("b", test.x, "classes") == np.array(["cat", "dog"])[test.y])
    assert right == pytest.approx(final(run, 1), abs=1e-6)
    for wrong, said in (
        (x / 255, "x is float32; expected uint8 images (0 to 255), as in training"),
        (x[:0], "x has no samples; expected one or more"),
        (np.zeros((2, 3, 4, 4), np.uint8), "x is 2 x 3 x 4 x 4; expected samples x 1 x 4 x 4"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            run.predict("b", wrong)


def table(rows=90):
    stream = np.random.default_rng(3)
    found = pd.DataFrame({"site": np.array(["Lund", "Åre", "Ystad"])[np.arange(rows) % 3]})
    found["age"] = stream.normal(50, 10, rows).round(1)
    found["pulse"] = np.where(
        stream.random(rows) < 0.3, np.nan, stream.normal(70, 5, rows).round(1)
    )
    found["smokes"] = stream.choice(["never", "once", "daily"], rows)
    found["ill"] = np.where(found["age"] > 50, "yes", "no")
    return found


def test_rows_of_a_table_are_filled_and_scaled_with_the_clients_own_numbers():
    """Worked out from the client's training rows, which are found by their ages."""
    rows = table()
    data = coterie.from_table(
        rows, target="ill", client="site", impute={"pulse": "mean"}, scale="standard"
    )
    run = trained("local", model="linear", federation=data)
    new = pd.DataFrame({"smokes": ["once", "never"], "pulse": [80.0, None], "age": [41.0, 66.0]})
    row = list(data.client_names).index("Lund")
    own = rows[rows["site"] == "Lund"].iloc[:, 1:3].to_numpy()
    fitted = data.fitted[row]
    ages = data.x[row][data.split[row] == 0][:, 0] * fitted.spread[0] + fitted.center[0]
    train = own[np.isclose(own[:, :1], ages.numpy(), atol=0.01).any(1)]
    assert len(train) == len(ages)
    fill = np.nanmean(train[:, 1])
    pulses = np.where(np.isnan(train[:, 1]), fill, train[:, 1])
    entries = np.array([[41.0, 80.0, 0, 0, 1], [66.0, fill, 0, 1, 0]])  # daily, never, once
    entries[:, 0] = (entries[:, 0] - train[:, 0].mean()) / train[:, 0].std()
    entries[:, 1] = (entries[:, 1] - pulses.mean()) / pulses.std()
    wanted = run.model("Lund")(torch.from_numpy(entries).float()).detach()
    assert torch.allclose(run.predict("Lund", new), wanted, atol=1e-5)
    assert not torch.allclose(run.predict("Åre", new), wanted, atol=1e-5)
    assert set(run.predict("Lund", new, "classes")) <= {"yes", "no"}
    assert torch.equal(run.predict("Lund", new.to_dict("list")), run.predict("Lund", new))
    test = data.tests[data.test_of[row]]  # entries are filled and scaled already
    assert torch.allclose(run.predict("Lund", test.x), run.model("Lund")(test.x).detach())
    with pytest.raises(DataError, match=r"column 'age' is empty in row 0; it was full in training"):
        run.predict("Lund", new.assign(age=[None, 50.0]))
    with pytest.raises(DataError, match="column 'smokes' is 'weekly'"):
        run.predict("Lund", new.assign(smokes="weekly"))
    with pytest.raises(ConfigError, match="unknown column 'pulse'"):
        run.predict("Lund", new[["age", "smokes"]])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture, self.words = nn.Linear(4, 2), nn.Embedding(5, 2)

    def forward(self, image, words):
        return self.picture(image.flatten(1)) + self.words(words).mean(1)


def test_several_tensors_go_in_by_their_names():
    stream = np.random.default_rng(1)
    x = {
        "image": stream.integers(0, 256, (40, 1, 2, 2), dtype=np.uint8),
        "words": stream.integers(0, 5, (40, 3)),
    }
    data = coterie.from_arrays(x, np.arange(40) % 2, clients=np.arange(40) // 20)
    run = trained("local", model=Two, federation=data)
    some = {"words": x["words"][:5], "image": x["image"][:5]}
    module = run.model(0)
    wanted = module(
        (torch.from_numpy(some["image"]).float() / 255 - 0.5) / 0.5, torch.from_numpy(some["words"])
    )
    assert torch.allclose(run.predict(0, some), wanted.detach(), atol=1e-6)
    with pytest.raises(DataError, match="x has no 'words'; expected image: 1 x 2 x 2 numbers"):
        run.predict(0, {"image": some["image"]})


def test_columns_of_arrays_are_taken_by_their_names():
    frame = pd.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0) ** 0.5})
    data = coterie.from_arrays(frame, np.arange(40) % 2, clients=np.arange(40) // 20)
    run = trained("local", model="linear", federation=data)
    assert torch.equal(run.predict(1, frame[["b", "a"]]), run.predict(1, frame.to_numpy()))


@pytest.mark.parametrize("loss", ["binary", {"kind": "cross-entropy"}])
def test_one_logit_is_that_of_the_second_class(loss):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    data = coterie.from_arrays(x, y, clients=np.arange(40) // 20)
    run = trained("local", model="linear", federation=data, loss=loss)
    outputs, chances = run.predict(0, x), run.predict(0, x, "probabilities")
    assert chances.shape == (40, 2)
    assert torch.allclose(chances.sum(1), torch.ones(40))
    wanted = outputs[:, 0] > 0 if loss == "binary" else outputs[:, 1] > outputs[:, 0]
    assert run.predict(0, x, "classes").tolist() == wanted.long().tolist()


def test_labels_are_each_yes_or_no_and_numbers_have_no_probabilities():
    labels = tiny_federation(kind="labels")
    run = trained("local", model="linear", federation=labels, loss="multi-label")
    outputs = run.predict(0, labels.tests[0].x)
    assert run.predict(0, labels.tests[0].x, "classes").tolist() == (outputs > 0).long().tolist()
    data = coterie.from_arrays(np.ones((20, 2)), np.arange(20) / 7, clients=np.arange(20) // 10)
    run = trained("local", model="linear", federation=data)
    with pytest.raises(ConfigError, match="the outputs are numbers, which have no probabilities"):
        run.predict(0, np.ones((1, 2)), "classes")


def yes_or_no(outputs, targets):
    wanted = targets.to(outputs.dtype).reshape(outputs.shape)
    losses = nn.functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
    return losses.flatten(1).mean(1)


def test_labels_of_a_loss_of_ones_own_are_each_yes_or_no():
    x = np.random.default_rng(0).normal(size=(40, 3))
    labels = coterie.from_arrays(x, (x > 0.3).astype(int), clients=np.arange(40) // 20)
    loss = f"{__name__}:yes_or_no"
    run = trained("local", model=nn.Linear(3, 3), federation=labels, loss=loss)
    outputs = run.predict(0, x)
    assert torch.equal(run.predict(0, x, "probabilities"), outputs.sigmoid())
    assert run.predict(0, x, "classes").tolist() == (outputs > 0).long().tolist()


def test_one_output_of_a_loss_of_ones_own_is_no_class():
    """It may be a logit, or a probability already: nobody has said which."""
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    data = coterie.from_arrays(x, y, clients=np.arange(40) // 20)
    given = {"model": nn.Linear(3, 1), "federation": data, "loss": f"{__name__}:yes_or_no"}
    run = trained("local", **given)
    with pytest.raises(ConfigError, match="the outputs are numbers, which have no probabilities"):
        run.predict(0, x, "probabilities")
    with pytest.raises(ConfigError, match=r"'accuracy' takes outputs .*; found \(samples, 1\)"):
        trained("local", metrics=["accuracy"], **given)


def test_tokens_have_a_class_at_each_position():
    federation = tiny_federation(kind="tokens")
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    run = trained("local", model=model, federation=federation, loss="tokens")
    x = federation.tests[0].x
    outputs = run.predict(0, x)
    assert outputs.shape == (30, 4, 3)
    assert run.predict(0, x, "classes").tolist() == outputs.argmax(2).tolist()


def test_a_federation_keeps_what_it_did_to_tables_through_its_file(tmp_path):
    data = coterie.from_table(
        table(), target="ill", client="site", impute={"pulse": "mean"}, scale="standard"
    )
    data.save(tmp_path / "data.safetensors")
    again = coterie.Federation.load(tmp_path / "data.safetensors")
    assert again.table == data.table
    hosted = again.host([2, 0])
    for row, one in ((0, data.fitted[2]), (1, data.fitted[0])):
        for name in ("fill", "center", "spread"):
            assert torch.equal(getattr(hosted.fitted[row], name), getattr(one, name))
