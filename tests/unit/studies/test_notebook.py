"""Progress in a notebook, with a pretended one: what is drawn as runs end, and after Ctrl-C."""

import sys
from types import SimpleNamespace

import pytest

from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

STUDY = """
name = "small"
rounds = 2
seeds = [0, 1]
engine = "loop"
model = { kind = "linear" }
data = { dataset = "digits" }

[[methods]]
kind = "local"
label = "Alone, τ=3"
"""


@pytest.fixture
def frames(monkeypatch):
    """The frames that a notebook would show: text and HTML of each."""
    shown = []

    def draw(bar):
        shown.append((repr(bar), bar._repr_html_()))

    def display(bar, display_id):
        draw(bar)
        return SimpleNamespace(update=draw)

    fake = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()),
        display=SimpleNamespace(display=display),
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)
    return shown


@pytest.fixture
def study():
    return config.parse_study_text(STUDY)


def run(study, out, **options):
    return run_study(study, out=out, federation=tiny_federation(), **options)


def test_a_bar_counts_the_runs_and_keeps_the_result_of_each(study, tmp_path, frames):
    run(study, tmp_path)
    assert frames[0][0] == "0 of 2 runs"
    text, html = frames[-1]
    first, *rest = text.splitlines()
    assert first == "2 of 2 runs"
    assert [line.partition(": ")[0] for line in rest] == [
        "Alone, τ=3, seed 0",
        "Alone, τ=3, seed 1",
    ]
    assert all("val. acc. " in line for line in rest)
    assert html.startswith('<progress value="2" max="2"></progress> 2 of 2 runs<br>')
    frames.clear()
    run(study, tmp_path)
    assert frames[-1][0] == "2 of 2 runs\n2 of 2 runs are there"


def test_ctrl_c_leaves_a_plan_that_the_same_call_goes_on_with(study, tmp_path, frames, monkeypatch):
    from coterie.studies import run as running

    true_write = running.FilesSaved
    saved = []

    def stop(folder):
        saved.append(folder)
        if folder.name == "seed-1":
            raise KeyboardInterrupt
        return true_write(folder)

    monkeypatch.setattr(running, "FilesSaved", stop)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path)
    lines = frames[-1][0].splitlines()
    assert lines[:2] == ["1 of 2 runs", "stopped; the same call goes on where it was"]
    monkeypatch.setattr(running, "FilesSaved", true_write)
    done = run(study, tmp_path)
    assert "1 of 2 runs are there" in frames[-1][0]
    assert len(done.summary["timing"]) == 2


def test_who_observes_shows_progress(study, tmp_path, frames):
    run(study, tmp_path, observer=lambda step: None)
    assert frames == []


def test_names_are_text_and_no_tags(tmp_path, frames):
    """A label cannot have brackets; a message can."""
    from coterie.simulation.run import Note
    from coterie.studies.notebook import watch_in_notebook

    with watch_in_notebook(1) as bar:
        bar(Note("A", 0, "<b>reading</b>"))
    assert "&lt;b&gt;reading&lt;/b&gt;" in frames[1][1]


def test_a_single_run_shows_its_rounds_and_what_compiling_would_gain(frames):
    from coterie import FedAvg, Settings, simulate

    simulate(tiny_federation(), FedAvg(), model="linear", settings=Settings(rounds=3))
    assert frames[0][0] == "0 of 3 rounds"
    head, now, engine = frames[-1][0].splitlines()
    assert head == "3 of 3 rounds"
    assert now.startswith("fedavg, seed 0: round 3/3, val. acc. ")
    few = "6 clients in a round are too few for many at once"
    loop = "engine: loop, one client after another: too little work to compile"
    assert engine == f"{loop}; {few}"
    frames.clear()
    watched = []
    observed = Settings(rounds=1)
    simulate(
        tiny_federation(), FedAvg(), model="linear", settings=observed, observer=watched.append
    )
    assert watched
    assert not frames  # who observes shows progress


def test_a_single_run_that_is_stopped_says_how_to_go_on(frames, monkeypatch):
    from coterie import FedAvg, Settings, simulate
    from coterie.runtime.loop import Loop

    def stop(loop):
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "run_next_round", stop)
    with pytest.raises(KeyboardInterrupt):
        simulate(tiny_federation(), FedAvg(), model="linear", settings=Settings(rounds=3))
    assert frames[-1][0].endswith("stopped; with a folder, resume=True goes on where it was")
