"""The bar of a notebook: what it shows, how often, and what it says after a stop."""

import sys
from types import SimpleNamespace

import pytest

from coterie.methods import Local
from coterie.simulation import notebook
from coterie.simulation.notebook import Bar, open_bar
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings


class Display:
    """IPython's display of one thing that can be updated."""

    def __init__(self):
        self.shown, self.asked = [], []

    def __call__(self, bar, display_id):
        self.asked.append(display_id)
        self.shown.append(repr(bar))
        return self

    def update(self, bar):
        self.shown.append(repr(bar))


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(notebook, "time", SimpleNamespace(monotonic=lambda: now.time))
    return now


def test_a_bar_says_how_much_is_done_what_is_done_now_and_the_last_ten_results(clock):
    display = Display()
    bar = Bar(20, "runs", display)
    assert (display.shown, display.asked) == (["0 of 20 runs"], [True])
    bar.done = 12
    bar.results += [f"result {number}" for number in range(12)]
    bar.draw("now <b>")
    assert display.shown[1].splitlines() == [
        "12 of 20 runs",
        "now <b>",
        *(f"result {number}" for number in range(2, 12)),
    ]
    html = bar._repr_html_().split("<br>")
    assert html[0] == '<progress value="12" max="20"></progress> 12 of 20 runs'
    assert html[1:] == ["now &lt;b&gt;", *(f"result {number}" for number in range(2, 12))]


def test_frames_are_drawn_a_fifth_of_a_second_apart_and_the_newest_words_are_shown(clock):
    display = Display()
    bar = Bar(3, "rounds", display)
    clock.time = 0.2
    bar.draw_sometimes("too early")
    assert len(display.shown) == 1
    assert repr(bar) == "0 of 3 rounds\ntoo early", "the next frame has it"
    clock.time = 0.25
    bar.draw_sometimes("later")
    assert display.shown[1:] == ["0 of 3 rounds\nlater"]
    clock.time = 0.4
    bar.draw_sometimes("too early again")
    assert len(display.shown) == 2
    bar.draw("at once")
    clock.time = 0.5
    bar.draw_sometimes("counted from the frame before")
    assert len(display.shown) == 3


def test_a_display_without_a_handle_is_no_error(clock):
    Bar(1, "runs", lambda bar, display_id: None).draw("now")


def pretend(monkeypatch, shell):
    display = Display()
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return display


@pytest.mark.parametrize(
    ("error", "words"), [(KeyboardInterrupt, "stopped; "), (ValueError, "stopped by an error; ")]
)
def test_a_stop_says_how_to_go_on(monkeypatch, error, words):
    display = pretend(monkeypatch, SimpleNamespace(kernel=1))
    with pytest.raises(error), open_bar(4, "runs", "call it again"):
        raise error
    assert display.shown[-1] == f"0 of 4 runs\n{words}call it again"


def test_there_is_a_bar_in_the_kernel_of_a_notebook_alone(monkeypatch):
    display = pretend(monkeypatch, SimpleNamespace(kernel=1))
    with open_bar(4, "runs", "") as bar:
        assert isinstance(bar, Bar)
    assert display.shown == ["0 of 4 runs"], "nothing is said at a good end"
    display = pretend(monkeypatch, SimpleNamespace())
    with open_bar(4, "runs", "") as bar:
        assert bar is None
    monkeypatch.delitem(sys.modules, "IPython")
    with open_bar(4, "runs", "") as bar:
        assert bar is None
    assert display.shown == []


def test_a_run_in_a_notebook_shows_its_rounds_and_its_engine(monkeypatch):
    """Without an observer; with one nothing is shown."""
    display = pretend(monkeypatch, SimpleNamespace(kernel=1))
    given = {"model": "linear", "settings": tiny_settings(rounds=2, engine="loop"), "seed": 3}
    simulate(tiny_federation(), Local(), **given)
    first, last = display.shown[0].splitlines(), display.shown[-1].splitlines()
    assert first == ["0 of 2 rounds"]
    assert last[0] == "2 of 2 rounds"
    assert last[1].startswith("local")
    assert "round 2/2" in last[1]
    assert last[2].startswith("engine: loop, one client after another")
    assert len(last) == 3
    display.shown.clear()
    simulate(tiny_federation(), Local(), observer=lambda _: None, **given)
    assert display.shown == []
