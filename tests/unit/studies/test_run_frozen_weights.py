"""Frozen weights: on the disk once for a study, in memory once for all clients, and never lost."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from coterie import LocalTraining, load_models
from coterie.cli.app import app
from coterie.errors import CheckpointError, ConfigError
from coterie.results.export import export_frozen, export_model
from coterie.runtime import _frozen, models
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.studies.sweep import run_sweep
from coterie.testing import tiny_federation, tiny_settings

STUDY = """
name = "tiny"
rounds = 1
seeds = [0, 1]
dtype = "float32"
engine = "loop"
model = { kind = "given from Python" }
data = { dataset = "digits" }
local = { batch_size = 5, optimizer = "sgd", lr = 0.1 }
warmup_epochs = 0

[[methods]]
kind = "fedavg"

[[methods]]
kind = "local"
"""
SIDE = 200  # numbers of a side of the frozen layer: 160 kB
FROZEN = 4 * (SIDE * 4 + SIDE + SIDE * SIDE + SIDE)


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))
        self.body.requires_grad_(False)
        self.head = nn.Linear(SIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def study(folder: Path, *changes: str, **more):
    parsed = config.parse_study_text(STUDY, overrides=changes)
    return run_study(
        parsed,
        out=folder,
        federation=lambda seed: tiny_federation(seed=seed),
        model=Pretrained,
        **more,
    )


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"tiny/*/seed-*/{models.FILE}"))


def disk_bytes(folder: Path, pattern: str) -> int:
    """Return the bytes of files by their contents on the disk: links count once."""
    found = {path.stat().st_ino: path.stat().st_size for path in folder.rglob(pattern)}
    return sum(found.values())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    study(folder)
    return folder


@pytest.fixture
def copied(done: Path, tmp_path: Path) -> Path:
    """A copy that keeps links, as `cp -a` makes it."""
    first: dict[int, str] = {}

    def copy(source: str, target: str) -> None:
        inode = os.stat(source).st_ino
        if inode in first:
            os.link(first[inode], target)
        else:
            first[inode] = shutil.copy2(source, target)

    shutil.copytree(done, tmp_path / "copy", copy_function=copy)
    return tmp_path / "copy"


@pytest.mark.full
def test_a_study_has_frozen_weights_once(done: Path) -> None:
    assert len(runs(done)) == 4
    assert FROZEN < disk_bytes(done, "frozen-*.safetensors") < FROZEN + 1000
    # No other file has them: each run's own are small.
    for run in runs(done):
        assert (run / models.FILE).stat().st_size < FROZEN / 10
        assert (run / "checkpoint.safetensors").stat().st_size < FROZEN / 2
        (one,) = run.glob("frozen-*.safetensors")
        assert one.stat().st_nlink == 5  # four runs and the study
    assert disk_bytes(done, "*") < 3 * FROZEN


@pytest.mark.full
def test_the_points_of_a_sweep_have_frozen_weights_once(tmp_path: Path) -> None:
    """Of two points with two runs each; a point that is moved away keeps them."""
    text = STUDY.replace('[[methods]]\nkind = "fedavg"\n', "") + '[sweep]\n"data.train" = [8, 12]\n'
    sweep = config.parse_study_text(text)
    data = {seed: tiny_federation(seed=seed) for seed in (0, 1)}
    run_sweep(sweep, out=tmp_path, federation=data.__getitem__, model=Pretrained)
    files = [*tmp_path.glob("tiny/*/*/seed-*/frozen-*.safetensors")]
    assert len(files) == 4
    assert FROZEN < disk_bytes(tmp_path, "frozen-*.safetensors") < FROZEN + 1000
    assert all(one.stat().st_nlink == 5 for one in files)  # four runs and the sweep
    wanted = load_models(tmp_path / "tiny/train=8/local/seed-0", model=Pretrained).state_dict(0)
    shutil.move(tmp_path / "tiny/train=8", tmp_path / "alone")
    shutil.rmtree(tmp_path / "tiny")
    found = load_models(tmp_path / "alone/local/seed-0", model=Pretrained)
    left = found.state_dict(0)
    assert left.keys() == wanted.keys()
    assert all(torch.equal(left[name], wanted[name]) for name in wanted)


def test_clients_share_frozen_weights_in_memory(done: Path) -> None:
    module = Pretrained()
    loaded = load_models(runs(done)[0], model=module)
    one, two = loaded.model(0), loaded.model(1)
    assert one.body[2].weight.data_ptr() == two.body[2].weight.data_ptr()
    assert one.body[2].weight.data_ptr() == loaded.state_dict(2)["body.2.weight"].data_ptr()
    assert one.head.weight.data_ptr() != two.head.weight.data_ptr()
    assert not one.body[2].weight.requires_grad
    assert one.head.weight.requires_grad
    # Those of the module that was given are its own, and stay as they are.
    assert module.body[2].weight.data_ptr() != one.body[2].weight.data_ptr()
    before = two.head.weight.clone()
    with torch.no_grad():
        one.head.weight.zero_()
    assert torch.equal(two.head.weight, before)
    # A parameter of its own: what one client trains is not what another does.
    one.body[2].weight.requires_grad_(True)
    assert not two.body[2].weight.requires_grad


def test_models_are_those_of_weights_stored_with_each_run(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frozen, "MIN_BYTES", 1 << 30)
    study(tmp_path)
    assert not list(tmp_path.rglob("frozen-*"))
    for shared, own in zip(runs(done), runs(tmp_path), strict=True):
        assert (own / models.FILE).stat().st_size > FROZEN
        one, other = load_models(shared, model=Pretrained), load_models(own, model=Pretrained)
        for client in (0, 3):
            left, right = one.model(client).state_dict(), other.model(client).state_dict()
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)


def test_folders_can_be_moved_and_copied(copied: Path, tmp_path: Path) -> None:
    wanted = load_models(runs(copied)[0], model=Pretrained).state_dict(1)
    moved = shutil.move(copied / "tiny", tmp_path / "elsewhere")
    alone = shutil.copytree(next(Path(moved).glob("*/seed-0")), tmp_path / "one")
    shutil.rmtree(moved)
    found = load_models(alone, model=Pretrained).state_dict(1)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_runs_hold_their_weights_when_others_are_deleted(copied: Path) -> None:
    first, *others = runs(copied)
    shutil.rmtree(copied / "tiny" / _frozen.FOLDER)
    for other in others:
        shutil.rmtree(other)
    load_models(first, model=Pretrained).model(0)
    study(copied)  # what is missing runs again
    assert len(runs(copied)) == 4
    for run in runs(copied):
        load_models(run, model=Pretrained).model(0)


@pytest.mark.full
def test_deleted_and_damaged_weights_are_written_again(copied: Path) -> None:
    one, two, *_ = runs(copied)
    (kept,) = one.glob("frozen-*")
    wanted = kept.read_bytes()
    kept.unlink()
    with pytest.raises(CheckpointError, match=r"frozen-.* is missing; `coterie resume` writes it"):
        load_models(one, model=Pretrained)
    study(copied)
    load_models(one, model=Pretrained).model(0)
    # Damage of the one file is damage of all that link it.
    damaged = bytearray(wanted)
    damaged[-3] ^= 1
    kept.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match=r"frozen-.* is damaged"):
        load_models(two, model=Pretrained)
    study(copied)
    for run in runs(copied):
        load_models(run, model=Pretrained).model(0)
        assert (run / kept.name).read_bytes() == wanted
    assert not list(copied.rglob("*.tmp"))


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before the link", "after the link"])
def test_a_kill_at_any_moment_leaves_a_study_to_go_on_with(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, calls = os.link, []

    def kill(source: str, target: str) -> None:
        calls.append(target)
        if moment == "after the link":
            link(source, target)
        if len(calls) == 2:  # the first run's own name for the file
            raise KeyboardInterrupt
        if moment == "before the link":
            link(source, target)

    monkeypatch.setattr(os, "link", kill)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path)
    monkeypatch.setattr(os, "link", link)
    study(tmp_path)
    assert len(runs(tmp_path)) == 4
    assert FROZEN < disk_bytes(tmp_path, "frozen-*.safetensors") < FROZEN + 1000
    assert not list(tmp_path.rglob("*.tmp"))
    for run in runs(tmp_path):
        load_models(run, model=Pretrained).model(0)


def test_without_links_each_run_has_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    study(tmp_path, "seeds=[0]")
    for run in runs(tmp_path):
        load_models(run, model=Pretrained).model(0)
    assert disk_bytes(tmp_path, "frozen-*") > 2 * FROZEN


def test_a_run_outside_a_study_has_its_own_file(tmp_path: Path) -> None:
    from coterie import FedAvg, simulate

    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1)
    settings = tiny_settings(rounds=1, dtype="float32", engine="loop", local=local)
    run = simulate(
        tiny_federation(),
        FedAvg(),
        model=Pretrained,
        settings=settings,
        folder=tmp_path / "a" / "b",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    wanted = run.model(2).state_dict()
    found = load_models(tmp_path / "a" / "b", model=Pretrained).model(2).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_adapter_and_the_frozen_weights_make_a_model(done: Path, tmp_path: Path) -> None:
    loaded = load_models(runs(done)[0], model=Pretrained)
    own = export_model(loaded, 1, tmp_path / "one.safetensors", adapter=True)
    rest = export_frozen(loaded, tmp_path / "frozen.pt")
    assert set(load_file(own)) == {"head.weight", "head.bias"}
    module = Pretrained()
    module.load_state_dict({**load_file(own), **torch.load(rest)})
    wanted = loaded.model(1).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())


def test_all_adapters_and_the_frozen_weights_once(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    with pytest.raises(SystemExit, match="0"):
        app(["export", str(runs(done)[0]), "--all", "--adapter", "--out", str(out)])
    names = sorted(path.name for path in out.iterdir())
    assert names == [*(f"client-{k}.safetensors" for k in range(6)), "frozen.safetensors"]
    assert sum(path.stat().st_size for path in out.iterdir()) < 1.2 * FROZEN
    one = str(tmp_path / "x")
    with pytest.raises(SystemExit, match="0"):
        app(["export", str(runs(done)[0]), "--client", "0", "--adapter", "--out", one])
    assert (tmp_path / "x").stat().st_size < FROZEN / 10


def test_clients_named_like_the_file_of_the_frozen_weights(tmp_path: Path) -> None:
    from coterie import FedAvg, simulate

    names = ("Frozen", "frozen-0", "a/b", "a_b", "A_B", "e")
    data = replace(tiny_federation(), client_names=names)
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1)
    settings = tiny_settings(rounds=1, dtype="float32", engine="loop", local=local)
    simulate(data, FedAvg(), model=Pretrained, settings=settings, folder=tmp_path / "run")
    out = tmp_path / "models"
    call = ["export", str(tmp_path / "run"), "--all", "--adapter", "--out", str(out)]
    with pytest.raises(SystemExit, match="0"):
        app(call)
    found = {path.stem for path in out.iterdir()}
    assert found == {"frozen", "Frozen-0", "frozen-0-1", "a_b", "a_b-3", "A_B-4", "e"}
    assert set(load_file(out / "frozen.safetensors")) == {
        f"body.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }
    # The file of the frozen weights alone is in the way: no other is written.
    for path in out.iterdir():
        if path.stem != "frozen":
            path.unlink()
    with pytest.raises(ConfigError, match=r"frozen\.safetensors exists"):
        app(call)
    assert [path.name for path in out.iterdir()] == ["frozen.safetensors"]


@pytest.mark.parametrize(("entries", "named"), [((1 << 14) - 1, False), (1 << 14, True)])
def test_frozen_weights_of_64_kibibytes_have_a_file_of_their_own(entries, named):
    """16,384 numbers of four bytes; smaller ones are stored with the other values of each run."""
    assert bool(_frozen.name_file({"weight": torch.zeros(entries)})) is named


def test_the_name_of_a_file_is_that_of_names_shapes_types_and_values():
    weight = torch.arange(1.0, 1 + (1 << 14))
    same = {"w": weight}
    others = [
        {"v": weight}, {"w": weight.reshape(2, -1)}, {"w": weight.view(torch.int32)},
        {"w": weight.clone().index_fill_(0, torch.tensor([5]), 0.0)},
    ]  # fmt: skip
    names = [_frozen.name_file(one) for one in (same, *others)]
    assert len(set(names)) == 5
    assert _frozen.name_file({"w": weight.clone()}) == names[0]
