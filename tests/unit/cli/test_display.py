"""What a command writes: its progress where there is no terminal, and the tables at the end."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from coterie.cli import _compare, _display
from coterie.functional.metrics import ACCURACY, LOSS
from coterie.results.pairs import Pair
from coterie.simulation.run import Note, Progress
from coterie.studies import config
from coterie.studies.run import FoundTable, run_study
from coterie.testing import tiny_federation


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until a test moves it."""
    now = [100.0]
    monkeypatch.setattr(_display.time, "monotonic", lambda: now[0])
    return now


def lines(text):
    return text.getvalue().splitlines()


def test_in_a_pipe_a_run_takes_one_line(clock):
    """Three quick runs of forty rounds: three lines, each at the end of a run."""
    text = io.StringIO()
    with _display.show_progress([], Console(file=text), quiet=False) as observe:
        for seed in range(3):
            for number in range(-1, 40):
                observe(Progress("DAC", seed, number, 40, 0.5, 0.875, 0.1))
    assert lines(text) == [
        f"DAC, seed {seed}: round 40/40, val. acc. 87.5 % (0 s)" for seed in range(3)
    ]


def test_the_schema_of_a_table_is_told_plainly(clock):
    """With --quiet there is nothing."""
    told = FoundTable(("target: ill, 2 classes (no, yes)", "numbers: [bold]age, weight"))
    for quiet in (False, True):
        text = io.StringIO()
        with _display.show_progress([], Console(file=text), quiet=quiet) as observe:
            observe(told)
        expected = ["table: target: ill, 2 classes (no, yes)", "table: numbers: [bold]age, weight"]
        assert lines(text) == expected * (not quiet)


def test_each_engine_that_trains_is_told_once_before_the_rounds(clock):
    """Two methods over two seeds, one with a model that takes another engine; a long reason is wrapped."""
    text, reasons = (
        io.StringIO(),
        {"Local": "compiled, a native program", "SosicFL": "loop: " + 20 * "a reason "},
    )
    with _display.show_progress([], Console(file=text, width=80), quiet=False) as observe:
        for seed in range(2):
            for label, why in reasons.items():
                for number in range(2):
                    observe(Progress(label, seed, number, 2, 0.5, float("nan"), 0.1, engine=why))
    engines = [f"engine: {why}".split() for why in reasons.values()]
    rounds = [
        f"{label}, seed {seed}: round 2/2, val. loss 0.5 (0 s)"
        for seed in range(2)
        for label in reasons
    ]
    found = lines(text)
    assert max(map(len, found)) <= 80
    words = " ".join(found).split()
    assert words == [*engines[0], *rounds[0].split(), *engines[1], *" ".join(rounds[1:]).split()]


@pytest.mark.parametrize("lively", [False, True])
def test_compiling_is_told_before_the_first_round(lively, clock, monkeypatch):
    """In a pipe, and above the live lines of a terminal; the engine is told after it, once."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=lively, width=80)
    monkeypatch.setattr(_display, "is_live_terminal", lambda _: lively)
    with _display.show_progress(
        [config.load_study("rotated-digits")], console, quiet=False
    ) as observe:
        observe(Note("DAC", 0, "compiling the model (once for this machine)"))
        for number in (18, 19):
            observe(
                Progress("DAC", 0, number, 20, 0.5, 0.875, 0.1, engine="compiled, a native program")
            )
    before, _, after = text.getvalue().partition("engine: compiled, a native program")
    assert "DAC, seed 0: compiling the model (once for this machine) ..." in before
    assert "engine:" not in after


def test_further_metrics_are_those_beside_the_main_one():
    """Of a segmentation: the overlap is in the first table, the share of right pixels in the further one."""
    text = io.StringIO()
    rows = [
        {"label": "Local", "cluster": "all", "metric": name, "mean": 0.5, "seeds": 2}
        for name in ("iou", "pixel_accuracy", "loss")
    ]
    _display.print_further_metrics(rows, Console(file=text, width=80))
    head = next(line for line in lines(text) if "pixel" in line)
    assert head.split() == ["n", "pixel", "accuracy,", "%"]
    _display.print_further_metrics([], Console(file=text, width=80))


def test_in_a_pipe_a_long_run_is_heard_of_every_ten_seconds(clock):
    """Ten rounds of four seconds each: at 12, 24 and 36 s, and at the end."""
    text = io.StringIO()
    with _display.show_progress([], Console(file=text), quiet=False) as observe:
        for number in range(10):
            clock[0] += 4
            observe(Progress("Local", 0, number, 10, 0.25, float("nan"), 4.0))
    assert lines(text) == [
        f"Local, seed 0: round {number}/10, val. loss 0.25 ({4 * number} s)"
        for number in (3, 6, 9, 10)
    ]


def test_a_round_without_validation_tells_its_number_only(clock):
    """Clients may have no validation set, or be validated every few rounds; the run is one of a sweep."""
    text = io.StringIO()
    with _display.show_progress([], Console(file=text), quiet=False) as observe:
        observe(Progress("Local", 0, 9, 10, float("nan"), float("nan"), 4.0, point="lr=2"))
    assert lines(text) == ["Local, seed 0, lr=2: round 10/10 (0 s)"]


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"CI": "true"}, {}),
        ({"NO_COLOR": "1"}, {}),
        ({"TERM": "dumb"}, {}),
        ({}, {"legacy_windows": True}),
        ({}, {"force_terminal": False}),
    ],
)
def test_where_a_terminal_is_plain_there_are_lines_without_codes(
    clock, monkeypatch, environment, options
):
    """Continuous integration, NO_COLOR, a dumb terminal, a console of old Windows, a pipe."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    text = io.StringIO()
    with _display.show_progress(
        [], Console(file=text, **{"force_terminal": True, "width": 80, **options}), False
    ) as observe:
        observe(Progress("DAC", 0, 0, 1, 0.5, 0.875, 0.1))
    assert lines(text) == ["DAC, seed 0: round 1/1, val. acc. 87.5 % (0 s)"]
    assert "\x1b" not in text.getvalue()


def test_a_terminal_with_colors_is_lively(monkeypatch):
    """Else the plain lines above would show nothing."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert _display.is_live_terminal(
        Console(file=io.StringIO(), force_terminal=True, legacy_windows=False)
    )


def test_quiet_says_nothing(clock):
    """Not even the end of a run."""
    text = io.StringIO()
    with _display.show_progress([], Console(file=text), quiet=True) as observe:
        observe(Progress("Local", 0, 0, 1, 0.25, 0.5, 4.0))
    assert lines(text) == []


@pytest.mark.parametrize("width", [80, 10])
def test_names_with_brackets_are_shown_whole(width):
    """As markup `[icu]` would vanish, and two wards be one; `[/er]` would end the command."""
    names = ("ward [icu]", "ward [/er]", "ward [bold]")
    same = {"label": "A", "method": "dac", "metric": "accuracy", "seeds": 1, "mean": 0.5, "std": 0}
    rows = [{**same, "cluster": name} for name in names]
    text = io.StringIO()
    console = Console(file=text, width=80)
    console.print(_display._build_results_table(rows, ACCURACY, ["A"], width))
    shown = SimpleNamespace(title="", head=names, rows=[["1", "2", "3"]], strong=set(), foot="")
    _compare._print_table(console, shown)
    assert [text.getvalue().count(name) for name in names] == [2, 2, 2]


def column(metric, established, seeds=5):
    """The mean of two methods and of Oracle, 0.25, 0.5 and 0.9 (of a loss 0.1): which are bold, and what is printed."""
    means = {"A": 0.25, "B": 0.5, "Oracle": 0.9 if metric is ACCURACY else 0.1}
    own = {"cluster": "all", "metric": metric.name, "std": 0.1, "seeds": seeds}
    rows = [
        {"method": label.lower(), "label": label, "mean": mean, **own}
        for label, mean in means.items()
    ]
    # The better one comes first.
    found = Pair(
        *(("B", "A") if metric is ACCURACY else ("A", "B")),
        metric.name,
        "all",
        0.25,
        0.1,
        0.4,
        0.01,
        0.01,
        1.0,
        0.9,
        0.1,
        seeds,
        20,
        7,
        established,
    )
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system="standard", width=80)
    console.print(_display._build_results_table(rows, metric, list(means), 80, [found]))
    return {
        line.split()[0]: "\x1b[1m" in line for line in lines(text) if line[:1] in "ABO"
    }, text.getvalue()


@pytest.mark.parametrize(("metric", "best"), [(ACCURACY, "B"), (LOSS, "A")])
def test_what_is_established_as_the_best_of_a_column_is_bold(metric, best):
    """Of losses that is the least; Oracle, which is better than both, is not ranked."""
    bold, text = column(metric, established=True)
    assert bold == {"A": best == "A", "B": best == "B", "Oracle": False}
    assert "*" not in text


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_what_cannot_be_distinguished_has_stars_and_is_not_bold(metric):
    bold, text = column(metric, established=False)
    assert not any(bold.values())
    starred = {line.split()[0] for line in text.splitlines() if line.rstrip().endswith("*")}
    assert starred == {"A", "B"}
    assert "* cannot be distinguished from the best of its column." in text


def test_of_one_seed_nothing_is_best():
    bold, text = column(ACCURACY, established=False, seeds=1)
    assert not any(bold.values())
    assert "*" not in text


def test_a_cluster_of_one_seed_has_no_deviation_beside_columns_of_three():
    """Two of three seeds do not plant it: its cell says that it is of one, and nothing diverged."""
    own = {"method": "a", "label": "A", "metric": "accuracy", "mean": 0.25}
    rows = [
        {**own, "cluster": "north", "std": None, "seeds": 1},
        {**own, "cluster": "all", "std": 0.125, "seeds": 3},
    ]
    for given in (rows, rows[::-1]):
        text = io.StringIO()
        console = Console(file=text, width=80)
        console.print(_display._build_results_table(given, ACCURACY, ["A"], 80))
        (shown,) = [line.split() for line in lines(text) if line.startswith("A ")]
        cells = ["25.0", "(n", "1)"], ["25.0", "±12.5"]
        assert shown == ["A", "3", *(cells[0] + cells[1] if given is rows else cells[1] + cells[0])]


def test_a_mean_that_the_samples_leave_undefined_is_not_called_diverged():
    own = {"method": "a", "label": "A", "metric": "accuracy", "mean": None, "std": None, "seeds": 3}
    rows = [{**own, "cluster": "north", "undefined": True}, {**own, "cluster": "all"}]
    text = io.StringIO()
    Console(file=text, width=80).print(_display._build_results_table(rows, ACCURACY, ["A"], 80))
    (shown,) = [line.split() for line in lines(text) if line.startswith("A ")]
    assert shown == ["A", "3", "undefined", "diverged"]


def test_a_gain_has_its_interval():
    row = {
        "label": "DAC",
        "lost": 0.25,
        "seeds": 3,
        "mean": 0.125,
        "mean_low": 0.1,
        "mean_high": 0.15,
    }
    row |= {"worst_tenth": -0.05, "worst_tenth_low": -0.1, "worst_tenth_high": 0.0}
    text = io.StringIO()
    gains = {"baseline": "Local", "metric": "accuracy", "confidence": 0.95, "rows": [row]}
    Console(file=text, width=80).print(
        _display._build_gain_table(gains, ACCURACY, ["Local", "DAC"])
    )
    assert "+12.5 (10.0 to 15.0)  -5.0 (-10.0 to 0.0)" in text.getvalue()


def test_the_share_of_clients_that_lost_is_in_percent():
    row = {"label": "DAC", "mean": 0.125, "worst_tenth": -0.05, "lost": 0.25, "seeds": 3}
    text = io.StringIO()
    gains = {"baseline": "Local", "metric": "accuracy", "rows": [row]}
    Console(file=text, width=80).print(
        _display._build_gain_table(gains, ACCURACY, ["Local", "DAC"])
    )
    (shown,) = [line for line in lines(text) if line.startswith("DAC")]
    assert shown.endswith(" 25 %")


def test_total_participation_is_that_of_a_run_not_of_all_seeds():
    rows = [("A", 300), ("A", 100), ("B", 50)]
    assert (
        _display._format_participation([{"label": a, "client_rounds": n} for a, n in rows])
        == "A 200, B 50"
    )


def test_clients_that_diverged_are_called_by_their_names(tmp_path):
    study = config.parse_study_text(
        'name = "lost"\nrounds = 1\nseeds = [0]\nlocal = { lr = 1e308, optimizer = "sgd" }\n'
        'model = { kind = "linear" }\ndata = { dataset = "own" }\n[[methods]]\nkind = "local"\n'
    )
    named = replace(tiny_federation(num_clients=2), client_names=("Oslo [bold]", "مستشفى"))
    done, text = run_study(study, out=tmp_path, federation=named), io.StringIO()
    _display.print_results(done, Console(file=text, width=200))
    expected = (
        "local, seed 0: 2 clients diverged (their loss became NaN or infinite): Oslo [bold], مستشفى"
    )
    assert expected in lines(text)


def test_a_method_that_diverged_has_no_share_of_clients_that_lost():
    nan = float("nan")
    row = {"label": "DAC", "seeds": 2}
    for name in ("mean", "worst_tenth", "lost"):
        row |= {name: nan, f"{name}_low": None, f"{name}_high": None}
    console = Console(file=io.StringIO(), width=80)
    gains = {"baseline": "Local", "confidence": 0.95, "rows": [row]}
    console.print(_display._build_gain_table(gains, ACCURACY, ["DAC"]))
    last = console.file.getvalue().splitlines()[-1].split()
    assert last == ["DAC", "2", "diverged", "diverged", "diverged"]
