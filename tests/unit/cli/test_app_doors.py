"""Every path, text and name that is given on a command line: one line when it cannot be meant."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from coterie._util import settings
from coterie.data.build import DataConfig
from coterie.engine.optim import LocalTraining
from coterie.runtime.settings import Settings
from coterie.studies.definition import ModelConfig

STUDY = """
name = "tiny"
rounds = 1
seeds = [0]
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8

[[methods]]
kind = "local"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that has run."""
    from coterie.studies import config
    from coterie.studies.run import run_study

    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(STUDY)
    run_study(config.load_study(folder / "tiny.toml"), out=folder / "runs")
    return folder


@pytest.fixture
def coterie(coterie, tmp_path, finished):
    """Call the command line in a folder with a study and a link to its runs."""
    (tmp_path / "tiny.toml").write_text(STUDY)
    (tmp_path / "runs").symlink_to(finished / "runs")
    return coterie


def refused(result: tuple[int, str, str], text: str) -> bool:
    """Whether a command ended with one line that has a text, and status 2."""
    status, out, err = result
    return (status, out) == (2, "") and len(err.splitlines()) == 1 and text in err


RUN = "runs/tiny/local/seed-0"
FILES = {
    "report": ("report", "runs/tiny", "--out"),
    "plot": ("plot", "runs/tiny", "--figure", "curves", "--format", "svg", "--out"),
    "export": ("export", RUN, "--client", "0", "--force", "--out"),
    "audit-privacy": ("audit-privacy", "tiny.toml", "--shadows", "6", "--quiet", "--out"),
}
"""The commands that write a file, without its name."""
FOLDERS = {
    "run": ("run", "tiny.toml", "--workers", "1", "--quiet", "--out"),
    "tune": ("tune", "tiny.toml", "--grid", "lr=0.01,0.02", "--workers", "1", "--out"),
    "track": ("track", "runs/tiny", "--to", "tensorboard", "--out"),
    "export": ("export", RUN, "--all", "--out"),
    "net init": ("net", "init", "--run", "a"),
    "net join": ("net", "join", "north", "127.0.0.1:7447", "--folder"),
    "net demo": ("net", "demo", "--folder"),
}
"""The commands that write into a folder, without its name."""


KINDS = ("a pipe", "a device", "a loop of links", "a folder")
# A model that is exported into a folder is named after its client.
NO_FILES = [
    (command, kind)
    for command in FILES
    for kind in KINDS
    if (command, kind) != ("export", "a folder")
]


@pytest.mark.parametrize(("command", "kind"), NO_FILES)
def test_what_is_no_regular_file_is_refused_and_left(coterie, command, kind):
    out = Path("out.svg")
    if kind == "a pipe":
        os.mkfifo(out)
    elif kind == "a folder":
        out.mkdir()
    else:
        out.symlink_to("/dev/null" if kind == "a device" else out)
    before = out.lstat()
    assert refused(coterie(*FILES[command], str(out)), f"out.svg is {kind}; expected a file")
    assert (out.lstat().st_ino, out.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("place", ["tiny.toml/out.svg", "/proc/nope/out.svg"])
@pytest.mark.parametrize("command", FILES)
def test_a_file_whose_folder_cannot_be_written_is_one_line(coterie, command, place):
    assert refused(coterie(*FILES[command], place), f"cannot write {place}: ")


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_link_stays_and_its_file_is_written(coterie, command):
    # A page replaces a page alone.
    Path("target").write_text("<!doctype html>old")
    Path("target").chmod(0o640)
    Path("link").symlink_to("target")
    assert coterie(*FILES[command], "link")[0] == 0
    assert Path("link").is_symlink()
    assert Path("target").stat().st_size > 1000
    assert stat.S_IMODE(Path("target").stat().st_mode) == 0o640


@pytest.mark.parametrize("place", ["tiny.toml", "tiny.toml/deeper", "loop", "/proc/nope"])
@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_written_is_one_line_before_any_work(
    coterie, monkeypatch, command, place
):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("coterie.studies.tune.run_studies", fail)
    monkeypatch.setattr("coterie.net.fleet.run_demo", fail)
    Path("loop").symlink_to("loop")
    assert refused(coterie(*FOLDERS[command], place), "choose another")


def test_an_empty_word_is_refused_in_every_command(coterie):
    for words in (
        ("run", "tiny.toml", "--out", ""),
        ("run", "tiny.toml", "--data-dir", ""),
        ("show", ""),
        ("export", RUN, "--client", ""),
        ("compare", "runs/tiny", "--metric", ""),
    ):
        said = coterie(*words)
        assert refused(said, f"the word after '{words[-2]}' is empty; expected a value")
    assert refused(coterie("report", "runs/tiny", "--out="), "--out is empty; expected a value")


@pytest.mark.parametrize("owner", [Settings, LocalTraining, DataConfig, ModelConfig])
def test_no_setting_is_an_empty_text(owner):
    """Except where the default itself is one."""
    needed = {"dataset": "digits", "num_clients": 2} if owner is DataConfig else {}
    texts = [
        name
        for name, hint in settings.settable_fields(owner).items()
        if settings.accepts("digits", hint) and getattr(owner, name, None) != ""
    ]
    assert texts, "at least one setting is a text"
    for name in texts:
        for empty in ("", " "):
            with pytest.raises(settings.ConfigError, match=f"{name} is '{empty}'; expected"):
                owner(**{**needed, name: empty})


@pytest.mark.parametrize("key", ["device", "engine", "model.kind", "local.optimizer"])
def test_a_setting_of_a_study_is_no_empty_text(coterie, key):
    said = coterie("run", "tiny.toml", "--set", f"{key}=''", "--out", "elsewhere")
    assert refused(said, f"{key.rpartition('.')[2]} is ''; expected")
    assert not Path("elsewhere").exists()


def test_a_study_that_is_nested_too_deeply_or_a_loop_of_links_is_one_line(coterie):
    Path("deep.toml").write_text("a = " + "[" * 3000 + "]" * 3000)
    assert refused(coterie("run", "deep.toml"), "deep.toml is not valid TOML: its tables and lists")
    Path("loop.toml").symlink_to("loop.toml")
    Path("loop").symlink_to("loop")
    assert refused(coterie("run", "loop.toml"), "loop.toml")
    Path("extends.toml").write_text('extends = "loop.toml"\n')
    assert refused(coterie("run", "extends.toml"), "loop.toml")
    for command in ("show", "resume", "report", "export", "compare"):
        assert refused(coterie(command, "loop"), "loop"), command
    assert refused(coterie("node", "loop.toml"), "loop.toml")


def test_an_account_that_does_not_exist_is_no_home(coterie):
    said = coterie(
        "run",
        "tiny.toml",
        "--set",
        "data.dataset=cifar10",
        "--data-dir",
        "~no-such-account/data",
        "--out",
        "elsewhere",
    )
    assert refused(said, "~no-such-account")


@pytest.mark.slow
def test_the_ending_of_a_file_is_its_format(coterie):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    import onnx
    import torch

    assert coterie("export", RUN, "--client", "0", "--out", "m.onnx")[0] == 0
    onnx.checker.check_model(onnx.load("m.onnx"))
    assert coterie("export", RUN, "--client", "0", "--out", "m.pt")[0] == 0
    assert torch.load("m.pt", weights_only=True)
    said = coterie("export", RUN, "--client", "0", "--out", "n.onnx", "--format", "pt")
    assert refused(said, "n.onnx has the ending of onnx, and the format is pt; leave out one")
    assert not Path("n.onnx").exists()


def test_a_file_is_checked_on_samples_of_the_run(coterie):
    from coterie import from_arrays

    given = ("export", RUN, "--client", "0", "--force", "--out", "d.pt")
    assert coterie(*given, "--data", "tiny.toml")[0] == 0
    before = Path("d.pt").read_bytes()
    from_arrays([[0.5], [1.5]] * 8, [0, 1] * 8, num_clients=2).save("other.safetensors")
    said = coterie(*given, "--data", "other.safetensors")
    assert refused(said, "--data is 'other.safetensors'; expected data of the run, with client 0")
    assert Path("d.pt").read_bytes() == before


def test_names_with_line_breaks_and_escape_codes_are_shown_on_one_line(coterie, finished):
    status, out, _ = coterie("report", "runs/tiny", "--out", "a\nb\x1b[31m.html")
    assert (status, out) == (0, "Report: a b [31m.html\n")
    assert Path("a\nb\x1b[31m.html").exists()
    assert refused(coterie("show", "no\nstudy\x1b[31m"), "no study [31m")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* is missing; the run goes on from:UserWarning")
@pytest.mark.parametrize(
    "name",
    ["models.safetensors", "metrics.parquet", "edges.parquet", "provenance.json", "config.toml"],
)
def test_a_deleted_file_of_a_run_is_written_again_by_resume(coterie, finished, name):

    Path("runs").unlink()
    shutil.copytree(finished / "runs", "runs")
    path = Path(RUN, name)
    before = path.read_bytes()
    path.unlink()
    assert coterie("resume", "runs/tiny", "--quiet", "--workers", "1")[0] == 0
    # Times and the command are in the provenance.
    if name != "provenance.json":
        assert path.read_bytes() == before
    assert path.exists()
    assert coterie("export", RUN, "--client", "0", "--out", "m.safetensors")[0] == 0


def test_models_without_a_checkpoint_are_said_to_be_lost(coterie, finished):
    Path("runs").unlink()
    shutil.copytree(finished / "runs", "runs")
    for name in ("models.safetensors", "checkpoint.safetensors"):
        Path(RUN, name).unlink()
    with pytest.warns(UserWarning, match=r"local, seed 0: models.safetensors was deleted"):
        assert coterie("resume", "runs/tiny", "--quiet", "--workers", "1")[0] == 0


@pytest.mark.parametrize("name", ["summary.json", "federation.json", "report.html"])
def test_a_deleted_file_of_a_study_is_written_again_by_resume(coterie, finished, name):
    Path("runs").unlink()
    shutil.copytree(finished / "runs", "runs")
    path = Path("runs/tiny", name)
    path.unlink(missing_ok=True)
    assert coterie("resume", "runs/tiny", "--quiet", "--workers", "1")[0] == 0
    # The other two are those of the first time.
    if name != "report.html":
        assert path.read_bytes() == (finished / path).read_bytes()
    assert path.stat().st_size > 100
