"""The report and the live page in a real browser: headless Chromium, driven by its own driver.

Skipped where Chromium is not installed (Debian: `apt-get install chromium chromium-driver`).
Screenshots are kept in the folder that COTERIE_ARTIFACTS names, else in pytest's own.
"""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.selection import full
from tests.unit.conftest import final_rows, listed, write_run

import coterie
from coterie._util import manifest
from coterie.report.page import write_report
from coterie.report.watch import WatchServer
from coterie.results.summary import summarize_study

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402 (after the check that it is there)
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.full]

VIEWS = ("overview", "pairs", "curves", "reads", "graph", "clients", "cost", "data", "provenance")
STUDY = """
name = "browser"
rounds = 6
seeds = [0, 1]
checkpoint_seconds = 0

[data]
dataset = "digits"
num_clients = 6
train = 20
validation = 10
shift = [{ kind = "rotation", degrees = [0, 90], sizes = [4, 2] }]

[model]
kind = "linear"

[[methods]]
kind = "dac"
label = "DAC (tau=30)"
num_peers = 2

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "ifca"

[[methods]]
kind = "local"
"""

THOUSAND = """
name = "thousand"
rounds = 5
seeds = [0]
engine = "vmap"

[data]
dataset = "synthetic-regression"
num_clients = 1000
train = 20
validation = 10
shift = [{ kind = "regression-targets", sizes = [250, 250, 250, 250] }]

[model]
kind = "linear"

[[methods]]
kind = "random"

[[methods]]
kind = "oracle"

[[methods]]
kind = "local"
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A real study, small: its folder."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "browser.toml").write_text(STUDY)
    return coterie.run_study(folder / "browser.toml", out=folder / "runs").folder


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    named = os.environ.get("COTERIE_ARTIFACTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wait(browser, condition, message=""):
    """Wait until a condition in the page's own words holds."""
    return WebDriverWait(browser, 60, poll_frequency=0.05).until(
        lambda driver: driver.execute_script(f"return {condition}"), message or condition
    )


def load(browser, address, view="overview"):
    """Open a page afresh and wait until a view of it is drawn; earlier logs are dropped."""
    browser.get("about:blank")
    logs(browser)
    browser.get(f"{address}#{view}")
    wait(
        browser,
        f"document.body.dataset.ready === 'true' && document.body.dataset.open === '{view}'",
    )


def logs(browser):
    """Console messages, and the addresses that were asked for, since the last call."""
    console = [entry["message"] for entry in browser.get_log("browser")]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    return console, asked


def visible(browser, css):
    return [
        element for element in browser.find_elements(By.CSS_SELECTOR, css) if element.is_displayed()
    ]


def screenshot(browser, path):
    """The whole page, not only what fits the window."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.set_window_size(1200, min(4000, height + 160))
    browser.save_screenshot(str(path))
    browser.set_window_size(1200, 1400)


@pytest.mark.parametrize("theme", ["light", full("dark", slow=True)])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws_without_an_error_or_a_request(browser, study, artifacts, view, theme):
    """From disk: something is drawn in every chart, the console is silent, and only the file itself was asked for."""
    load(browser, write_report(study).as_uri(), view)
    if browser.execute_script("return document.documentElement.dataset.theme") != theme:
        browser.find_element(By.ID, "theme").click()
    screenshot(browser, artifacts / f"report-{view}-{theme}.png")
    panel = f"#view-{view}"
    assert len(visible(browser, ".view")) == 1
    assert len(browser.find_element(By.CSS_SELECTOR, panel).text) > 100
    blank = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' canvas')].filter((c) => {"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return d.every((v, i) => v === d[i % 4]); }).length",
        panel,
    )
    assert blank == 0
    assert (
        view in ("pairs", "provenance")
        or len(browser.find_elements(By.CSS_SELECTOR, f"{panel} canvas")) > 0
    )
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' [role=img], ' + arguments[0] + ' img')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.alt)).length",
        panel,
    )
    assert unnamed == 0
    console, asked = logs(browser)
    assert console == []
    assert [
        address
        for address in asked
        if not address.startswith(("file://", "data:", "blob:", "about:"))
    ] == []


def test_the_numbers_in_the_page_are_those_of_the_summary(browser, study):
    """Read out of the page as drawn, exact value and text, and compared with summary.json."""
    load(browser, write_report(study).as_uri())
    expected = [row for row in summarize_study(study)["rows"] if row["metric"] == "accuracy"]
    stored = json.loads((study / "summary.json").read_text())["rows"]
    assert [row for row in stored if row["metric"] == "accuracy"] == expected
    table = browser.find_element(By.CSS_SELECTOR, "table.results[data-metric=accuracy]")
    cells = table.find_elements(By.CSS_SELECTOR, "td[data-value]")
    assert [float(cell.get_attribute("data-value")) for cell in cells] == [
        row["mean"] for row in expected
    ]
    texts = [f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}" for row in expected]
    assert [cell.text.rstrip("*") for cell in cells] == texts
    assert "DAC (tau=30)" in table.text


def test_the_slider_moves_through_the_rounds(browser, study):
    """To the first round by keyboard: the text, the description and the pixels change."""
    load(browser, write_report(study).as_uri(), "reads")
    canvas = browser.find_element(By.CSS_SELECTOR, "#heatmaps canvas")
    pixels = "return document.querySelector('#heatmaps figure:nth-child(2) canvas').toDataURL()"
    before, whole = browser.execute_script(pixels), canvas.get_attribute("aria-label")
    assert "rounds 0 to 5" in whole
    slider = browser.find_element(By.CSS_SELECTOR, "#view-reads input[type=range]")
    slider.send_keys(Keys.HOME)
    assert "rounds 0 to 0" in canvas.get_attribute("aria-label")
    assert slider.get_attribute("aria-valuetext") == "rounds 0 to 0"
    assert browser.execute_script(pixels) != before


def test_a_heatmap_is_read_by_keyboard(browser, study):
    """Arrow keys walk over the cells and name them."""
    load(browser, write_report(study).as_uri(), "reads")
    canvas = browser.find_element(By.CSS_SELECTOR, "#heatmaps canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    readout = browser.find_element(By.ID, "heatmaps").text
    assert "client 0 (rotation 0) used the model of client 1 (rotation 0)" in readout


def test_the_table_of_clients_sorts_and_opens_a_client(browser, study):
    """By a method, down and up again; Enter on a row shows that client's curve, peers and labels."""
    load(browser, write_report(study).as_uri(), "clients")

    def column(place):
        return [
            row.find_elements(By.TAG_NAME, "td")[place].text
            for row in visible(browser, "#view-clients tr.pick")
        ]

    heads = visible(browser, "#view-clients th button")
    place = next(i for i, head in enumerate(heads) if head.text == "DAC (tau=30)")
    heads[place].click()
    down = [float(text) for text in column(place)]
    heads[place].click()
    up = [float(text) for text in column(place)]
    assert down == sorted(down, reverse=True)
    assert up == sorted(down)
    assert (
        browser.find_elements(By.CSS_SELECTOR, "#view-clients th")[place].get_attribute("aria-sort")
        == "ascending"
    )
    row = visible(browser, "#view-clients tr.pick")[0]
    client = row.find_elements(By.TAG_NAME, "td")[0].text
    row.send_keys(Keys.ENTER)
    detail = browser.find_element(By.ID, "client-detail")
    assert f"Client {client}" in detail.text
    assert "Most used peers: DAC (tau=30)" in detail.text
    assert "Labels of the training data" in detail.text
    assert logs(browser)[0] == []


def test_pairs_are_shown_with_intervals_and_in_words(browser, study):
    """Numbers are those of summary.json; a method leaves its own pairs; Enter on a pair shows its clients."""
    load(browser, write_report(study).as_uri(), "pairs")
    stored = [
        one
        for one in json.loads((study / "summary.json").read_text())["pairs"]
        if one["cluster"] == "all"
    ]
    expected = {
        f"{one['method_a']} over {one['method_b']}": one
        for one in stored
        if one["metric"] == "accuracy"
    }
    rows = visible(browser, "#view-pairs tr.pick")
    assert {row.find_element(By.TAG_NAME, "th").text for row in rows} == set(expected)
    for row in rows:
        cells = [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        one = expected[row.find_element(By.TAG_NAME, "th").text]
        assert float(cells[0].split()[0]) == pytest.approx(100 * one["difference"], abs=0.051)
        assert cells[2] == ("yes" if one["established"] else "no")
        established = row.find_elements(By.CSS_SELECTOR, "svg.sure") != []
        bold = row.find_elements(By.CSS_SELECTOR, "td.best") != []
        assert established == bold == one["established"]
    Select(visible(browser, "#view-pairs select")[1]).select_by_visible_text("local")
    rows = visible(browser, "#view-pairs tr.pick")
    assert len(rows) == 3
    rows[0].send_keys(Keys.ENTER)
    detail = browser.find_element(By.ID, "pair-detail")
    assert rows[0].find_element(By.TAG_NAME, "th").text in detail.text
    assert len(detail.find_elements(By.TAG_NAME, "canvas")) == 1
    assert browser.execute_script("return location.hash").startswith("#pair=")
    visible(browser, "#view-pairs summary")[0].click()
    assert r"\begin{tabular}" in visible(browser, "#view-pairs pre")[0].text
    assert logs(browser)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "view", "shown", "said"),
    [
        ("pair=random,DAC%20(tau%3D30)", "pairs", "#pair-detail h3", "random"),
        ("method=local", "pairs", "#view-pairs tr.pick th", "over local"),
        ("client=3", "clients", "#client-detail h2", "Client 3"),
        ("pair=random,nobody", "pairs", "#view-pairs h2", "Methods in pairs"),
        ("client=99", "clients", "#view-clients h2", "of each client"),
        ("nonsense", "overview", "#view-overview h2", "The study"),
    ],
)
def test_links_into_the_page_open_what_they_name(browser, study, link, view, shown, said):
    """Also where the page is open already; what is not there leaves the view itself."""
    address = write_report(study).as_uri()
    for first in (f"{address}#{link}", f"{address}#cost"):
        browser.get("about:blank")
        logs(browser)
        browser.get(first)
        wait(browser, "document.body.dataset.ready === 'true'")
        browser.execute_script("location.hash = arguments[0]", link)
        wait(browser, f"document.body.dataset.open === '{view}'")
        wait(browser, f"document.querySelector('{shown}') !== null")
        text = " ".join(element.text for element in visible(browser, shown))
        assert said in text
        assert logs(browser)[0] == []


@pytest.mark.parametrize(
    "planted", ["none known", pytest.param("a single one", marks=pytest.mark.slow)]
)
def test_a_report_without_planted_clusters_does_not_speak_of_them(browser, tmp_path, planted):
    """No word of clusters in any view, nor in what screen readers are told."""
    text = "\n".join(line for line in STUDY.splitlines() if not line.startswith("shift"))
    own = None
    if planted == "none known":
        text = text.replace('dataset = "digits"', 'dataset = "own"')
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((180, 8)).astype("float32"), rng.integers(0, 3, 180)
        own = coterie.from_arrays(
            torch.from_numpy(x), torch.from_numpy(y), clients=[i % 6 for i in range(180)]
        )
    (tmp_path / "plain.toml").write_text(text)
    folder = coterie.run_study(
        tmp_path / "plain.toml", out=tmp_path / "runs", federation=own
    ).folder
    address = write_report(folder).as_uri()
    for view in VIEWS:
        load(browser, address, view)
        for closed in (
            browser.find_elements(By.CSS_SELECTOR, "details:not([open]) summary")
            if view == "overview"
            else ()
        ):
            closed.click()
        panel = browser.find_element(By.ID, f"view-{view}")
        labels = browser.execute_script(
            "return [...arguments[0].querySelectorAll('[aria-label]')].map((e) => e.getAttribute('aria-label'))",
            panel,
        )
        text = " ".join(
            [panel.text, *labels, browser.find_element(By.CSS_SELECTOR, "header").text]
        ).lower()
        assert "cluster" not in text, view
        assert logs(browser)[0] == []


def test_the_views_are_reached_by_keyboard_alone(browser, study):
    """Arrow keys and Home on the tabs, as screen readers' users expect."""
    load(browser, write_report(study).as_uri())
    browser.find_element(By.ID, "tab-overview").send_keys(Keys.ARROW_RIGHT)
    wait(browser, "document.body.dataset.open === 'pairs'")
    assert browser.switch_to.active_element.get_attribute("id") == "tab-pairs"
    browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    wait(browser, "document.body.dataset.open === 'provenance'")
    browser.switch_to.active_element.send_keys(Keys.HOME)
    wait(browser, "document.body.dataset.open === 'overview'")


def test_every_control_of_every_view_is_reached_with_tab(browser, study):
    """Tab alone comes to each button, list, slider, box, row and map that is shown."""
    address = write_report(study).as_uri()
    missed = {}
    for view in VIEWS:
        load(browser, address, view)
        controls = browser.execute_script(
            "return [...document.querySelectorAll('a, button, input, select, summary, [tabindex]')]"
            ".filter((e) => e.checkVisibility() && e.tabIndex >= 0).map((e, i) => { e.dataset.stop = i; return i; })"
        )
        reached = set()
        for _ in controls:
            browser.switch_to.active_element.send_keys(Keys.TAB)
            reached.add(
                browser.execute_script("return Number(document.activeElement.dataset.stop ?? -1)")
            )
        missed |= {view: sorted(set(controls) - reached)} if set(controls) - reached else {}
    assert missed == {}


def test_a_chart_drawn_again_leaves_the_focus_where_it_is(browser, study):
    """A window that changes its width draws its charts again, under the hands of who goes by keyboard."""
    load(browser, write_report(study).as_uri(), "curves")
    name = browser.find_element(By.CSS_SELECTOR, "#view-curves .legend button")
    name.send_keys(Keys.SPACE)
    width = "document.querySelector('#view-curves canvas').clientWidth"
    before = browser.execute_script(f"return {width}")
    browser.set_window_size(1000, 1400)
    wait(browser, f"{width} !== {before}")
    browser.set_window_size(1200, 1400)
    wait(browser, f"{width} === {before}")
    focused = browser.switch_to.active_element
    assert (focused, focused.get_attribute("aria-pressed")) == (name, "false")


def test_a_line_is_hidden_and_a_chart_zoomed_by_keyboard(browser, study):
    """Space on a name of the legend hides it and says so; + takes a fifth away from both ends, 0 brings all back."""
    load(browser, write_report(study).as_uri(), "curves")
    # A canvas is painted at the browser's next frame, which a busy machine draws late: every look
    # at it waits.
    canvas = "document.querySelector('#view-curves canvas').toDataURL()"
    browser.execute_script(
        f"[...page.charts.values()].forEach(({{drawn}}) => drawn.getZr().flush()); page.whole = {canvas}"
    )
    name = browser.find_element(By.CSS_SELECTOR, "#view-curves .legend button")
    assert (name.text, name.get_attribute("aria-pressed")) == ("DAC (tau=30)", "true")
    name.send_keys(Keys.SPACE)
    assert name.get_attribute("aria-pressed") == "false"
    wait(browser, f"{canvas} !== page.whole")
    name.send_keys(Keys.SPACE)
    wait(browser, f"{canvas} === page.whole")
    zoom = "[...page.charts.values()].at(-1).drawn.getOption().dataZoom[0]"
    chart = browser.find_element(By.CSS_SELECTOR, "#view-curves .chart")
    for key, start, end in (("+", 10, 90), (Keys.ARROW_LEFT, 0, 80), ("0", 0, 100)):
        chart.send_keys(key)
        wait(browser, f"(({{start, end}}) => start === {start} && end === {end})({zoom})")
    load(browser, browser.current_url.split("#")[0], "graph")
    graph = browser.find_element(By.CSS_SELECTOR, "#view-graph .chart")
    for key, factor in (("+", 1.25), ("0", 1)):
        graph.send_keys(key)
        wait(browser, f"[...page.charts.values()][0].drawn.getOption().series[0].zoom === {factor}")


def test_a_band_has_room_on_its_axis(browser, study):
    """The widest band of the curves lies between the ends of the axis."""
    load(browser, write_report(study).as_uri(), "curves")
    low, high, bottom, top = browser.execute_script(
        "const { drawn } = [...page.charts.values()].at(-1); const all = drawn.getOption().series;"
        "const ends = all.filter((s) => s.type === 'custom').flatMap((s) => s.data.flatMap(([, a, b]) => [a, b]));"
        "const grid = drawn.getModel().getComponent('grid').coordinateSystem;"
        "return [Math.min(...ends), Math.max(...ends), ...grid.getCartesian(0, 0).getAxis('y').scale.getExtent()]"
    )
    assert bottom <= low < high <= top


def test_text_has_enough_contrast_in_both_themes(browser, study):
    """WCAG AA: 4.5 to 1 for text and muted text on both backgrounds, and for gains and losses."""
    load(browser, write_report(study).as_uri())
    ratio = """
    const number = (name) => css(name).slice(1).match(/../g).map((v) => parseInt(v, 16) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    const light = (name) => { const [r, g, b] = number(name); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const out = {};
    const fronts = ['--text', '--muted', '--good', '--bad', '--accent'];
    for (const front of fronts) for (const back of ['--page', '--raised']) {
      const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
      out[front + ' on ' + back] = (a + 0.05) / (b + 0.05);
    }
    return out;
    """
    themes = set()
    for _ in range(2):
        ratios = browser.execute_script(ratio)
        assert len(ratios) == 10
        assert {pair: value for pair, value in ratios.items() if value < 4.5} == {}
        themes.add(browser.execute_script("return document.documentElement.dataset.theme"))
        browser.find_element(By.ID, "theme").click()
    assert themes == {"light", "dark"}


def test_hostile_names_stay_text_in_every_view(browser, study, tmp_path):
    """A label and a cluster that hold markup are shown as written; nothing of them runs."""
    evil = "<img src=x onerror=document.title=1>"
    copy = shutil.copytree(study, tmp_path / "evil")
    for path in (copy / "DAC (tau=30)").glob("*/config.toml"):
        path.write_text(path.read_text().replace('"DAC (tau=30)"', json.dumps(evil)))
    told = json.loads((copy / "federation.json").read_text())
    (copy / "federation.json").write_text(
        json.dumps(told | {"clusters": [evil, "b"], "shift": [evil] * 6, "name": evil})
    )
    for folder in (copy, *(copy / "DAC (tau=30)").iterdir()):
        manifest.replace_files(
            folder, {path.name: path.read_bytes() for path in folder.glob("[cf]*.*")}
        )
    address = write_report(copy).as_uri()
    for view in VIEWS:
        load(browser, address, view)
        assert browser.title == "browser · Coterie"
        assert browser.find_elements(By.CSS_SELECTOR, "img[src='x']") == []
        assert logs(browser)[0] == []
    load(browser, address)
    assert evil in browser.find_element(By.CSS_SELECTOR, "table.results").text


NAMES = (
    'Oslo "A"', "<img src=x onerror=document.title=1>", "مستشفى الملك", "St. Olavs " + "hospital " * 30 + "B",
    "🏥 O'Hara", "$x$ & y",
)  # fmt: skip


@pytest.fixture(scope="module")
def named(study, tmp_path_factory):
    """The study with names of its clients, features and classes, as runs and studies store them: its page."""
    copy = shutil.copytree(study, tmp_path_factory.mktemp("named") / "named")
    for path in copy.glob("*/seed-*/provenance.json"):
        stored = json.loads(path.read_text("utf-8"))
        path.write_text(
            json.dumps({**stored, "client_names": {str(i): name for i, name in enumerate(NAMES)}})
        )
        manifest.replace_files(path.parent, {path.name: path.read_bytes()})
    told = json.loads((copy / "federation.json").read_text("utf-8"))
    told |= {
        "features": ["age", "<b>ضغط</b>"],
        "classes": [f"class {NAMES[i % 6]} {i}" for i in range(10)],
    }
    manifest.replace_files(copy, {"federation.json": json.dumps(told).encode()})
    return write_report(copy).as_uri()


@pytest.mark.parametrize("view", VIEWS)
def test_names_of_clients_stay_text_in_every_view(browser, named, view):
    load(browser, named, view)
    assert browser.title == "browser · Coterie"
    assert browser.find_elements(By.CSS_SELECTOR, "img[src='x']") == []
    assert logs(browser)[0] == []


def test_clients_are_called_by_their_names(browser, named):
    """In words, under a heatmap, in the table and on a client's own page; too long ones are cut, with the whole name
    in a tooltip."""
    load(browser, named)
    assert (
        f"6 ({NAMES[0]}, {NAMES[1]}, {NAMES[2]}, "
        in browser.find_element(By.CSS_SELECTOR, "dl.words").text
    )
    load(browser, named, "reads")
    canvas = browser.find_element(By.CSS_SELECTOR, "#heatmaps canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    readout = browser.find_element(By.ID, "heatmaps").text
    assert f"{NAMES[0]} (rotation 0) used the model of {NAMES[1]} (rotation 0)" in readout
    load(browser, named, "clients")
    cells = [
        row.find_elements(By.TAG_NAME, "td") for row in visible(browser, "#view-clients tr.pick")
    ]
    assert [cell[0].get_property("textContent").strip("\u2068\u2069") for cell in cells] == list(
        NAMES
    )
    assert [cell[1].text for cell in cells] == ["0", "1", "2", "3", "4", "5"]
    assert cells[3][0].get_attribute("title") == NAMES[3]
    assert cells[3][0].get_property("scrollWidth") > cells[3][0].get_property("clientWidth")
    cells[3][0].click()
    detail = browser.find_element(By.ID, "client-detail")
    heading = detail.find_element(By.TAG_NAME, "h2")
    assert (heading.text, heading.get_attribute("title")) == (NAMES[3][:79] + "…", NAMES[3])
    assert "client 3; rotation 0" in detail.text
    assert [
        chart
        for chart in detail.find_elements(By.CSS_SELECTOR, "[role=img]")
        if NAMES[3] in chart.accessible_name
    ]


def test_the_graph_cuts_long_names_and_its_tooltip_has_them_whole(browser, named):
    load(browser, named, "graph")
    drawn = "[...page.charts.values()][0].drawn"
    shown = browser.execute_script(
        f"return {drawn}.getOption().series[0].data.map((one) => one.name)"
    )
    assert sorted(shown) == sorted(
        [
            NAMES[0],
            "<img src=x oner…",
            f"\u2068{NAMES[2]}\u2069",
            "St. Olavs hospi…",
            NAMES[4],
            NAMES[5],
        ]
    )
    for number in (1, 3):
        show = f"const at = {drawn}.getOption().series[0].data.findIndex((one) => one.id === '{number}');"
        browser.execute_script(
            show + f"{drawn}.dispatchAction({{ type: 'showTip', seriesIndex: 0, dataIndex: at }})"
        )
        wait(
            browser,
            f"document.querySelector('#view-graph .chart').textContent.includes({json.dumps(NAMES[number])})",
        )
    assert logs(browser)[0] == []


def test_features_and_classes_are_named_with_the_data(browser, named):
    load(browser, named, "data")
    assert browser.find_element(By.ID, "features").text == "2 numbers of an input\nage, <b>ضغط</b>"
    alt = visible(browser, "#view-data [role=img]")[0].accessible_name
    assert f"class {NAMES[1]} 1 " in alt


def test_a_broken_run_folder_gets_a_page_that_says_so(browser, study, tmp_path):
    """One table is cut short: the page names it and shows the rest."""
    copy = shutil.copytree(study, tmp_path / "broken")
    path = copy / "random" / "seed-1" / "metrics.parquet"
    path.write_bytes(path.read_bytes()[:100])
    load(browser, write_report(copy).as_uri())
    said = browser.find_element(By.CSS_SELECTOR, ".problem").text
    assert "random: seed 1 damaged" in said
    assert "Means are over the seeds that all have: 0; left out: " in said
    assert logs(browser)[0] == []


@pytest.mark.slow
def test_the_live_page_follows_a_run_without_reloading(browser, tmp_path, artifacts):
    """A real run, held until the page has seen it; what the reader chose stays; the run ends and starts again."""
    (tmp_path / "browser.toml").write_text(STUDY)
    go_on = threading.Semaphore(0)
    study = coterie.load_study(
        tmp_path / "browser.toml", ["seeds=[0]", "methods.random.num_peers=3"]
    )
    runs = tmp_path / "runs" / "browser"
    worker = threading.Thread(
        target=lambda: coterie.run_study(
            study, out=tmp_path / "runs", observer=lambda step: go_on.acquire()
        ),
        daemon=True,
    )
    rounds = "Math.max(0, ...page.data.methods.flatMap((m) => m.runs.map((r) => r.rounds)))"
    with WatchServer(runs) as page:
        load(browser, page.address)
        assert "Nothing to show yet" in browser.find_element(By.ID, "view-overview").text
        browser.execute_script("window.mark = 'never reloaded'")
        worker.start()
        for _ in range(3):
            go_on.release()
        wait(browser, f"{rounds} >= 2")
        browser.find_element(By.ID, "tab-curves").click()
        wait(browser, "document.body.dataset.open === 'curves'")
        Select(browser.find_element(By.CSS_SELECTOR, "#view-curves select")).select_by_visible_text(
            "train loss"
        )
        go_on.release()
        go_on.release()
        wait(browser, f"{rounds} >= 4 && document.body.dataset.open === 'curves'")
        chosen = Select(
            browser.find_element(By.CSS_SELECTOR, "#view-curves select")
        ).first_selected_option.text
        assert chosen == "train loss"
        screenshot(browser, artifacts / "live-curves.png")
        go_on.release(100)
        worker.join(timeout=60)
        wait(
            browser,
            "document.getElementById('live').textContent.includes('all runs have finished')",
        )
        assert browser.execute_script("return window.mark") == "never reloaded"
        shutil.rmtree(runs)
        wait(browser, "page.data.methods.length === 0")
        coterie.run_study(study, out=tmp_path / "runs")
        wait(browser, "page.data.methods.length === 4")
        assert browser.execute_script("return window.mark") == "never reloaded"
        console, asked = logs(browser)
        assert console == []
        assert {address.split("/")[2] for address in asked if address.startswith("http")} == {
            f"127.0.0.1:{page.port}"
        }


def test_the_live_page_says_when_its_server_is_gone(browser, study):
    """It goes on trying, and says so."""
    page = WatchServer(study)
    load(browser, page.address)
    page.close()
    wait(browser, "document.getElementById('live').textContent === 'connection lost; retrying'")


REACTION = """
const done = arguments[arguments.length - 1];
const start = performance.now();
const shown = () => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
Promise.resolve(ACTION).then(shown);
"""


def spent(browser):
    """Seconds of processor time that the page's main thread has used."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


@pytest.mark.slow
def test_a_thousand_clients_open_and_react_within_two_seconds(browser, tmp_path, artifacts):
    """A real run of 1,000 clients: the page opens, and every view, the slider, sorting and a client answer in time.

    Measured in processor time of the page's thread, which is the time a reader waits, less what
    other programs take meanwhile: the tests beside this one do not change it. The artifact holds
    the time on the clock too.
    """
    (tmp_path / "thousand.toml").write_text(THOUSAND)
    folder = coterie.run_study(tmp_path / "thousand.toml", out=tmp_path).folder
    address = write_report(folder).as_uri()
    actions = {view: f"open('{view}')" for view in VIEWS[1:]} | {
        "slider": "(() => { const s = document.querySelector('#view-reads input[type=range]'); s.value = 3; "
        "s.dispatchEvent(new Event('input')); })()",
        "sorting": "document.querySelectorAll('#view-clients th button')[3].click()",
        "a client": "document.querySelector('#view-clients tr.pick').click()",
    }
    browser.get("about:blank")
    logs(browser)
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    browser.get(address)
    wait(browser, "document.body.dataset.ready === 'true'")
    thread = {"open": 1000 * spent(browser)}  # all that this page has used, and about:blank
    clock = {
        "open": browser.execute_script("return performance.getEntriesByName('ready')[0].startTime")
    }
    for name, action in actions.items():
        before = spent(browser)
        clock[name] = browser.execute_async_script(REACTION.replace("ACTION", action))
        thread[name] = 1000 * (spent(browser) - before)
    assert logs(browser)[0] == []
    screenshot(browser, artifacts / "thousand-clients.png")
    (artifacts / "thousand-clients.json").write_text(
        json.dumps({"thread": thread, "clock": clock}, indent=1)
    )
    assert all(took > 0 for took in thread.values())
    assert {name: took for name, took in thread.items() if took > 2000} == {}


def test_a_client_that_diverged_and_names_that_are_cut_hide_nothing(browser, tmp_path):
    """Under DAC the first client diverged; the names of the others begin with the same 16 letters."""
    names = {"0": "Oslo", "1": "University hospital, ward A", "2": "University hospital, ward B"}
    for label, values in {
        "Local": [0.5, 0.502, 0.504],
        "DAC": [float("nan"), 0.503, 0.505],
    }.items():
        folder = write_run(
            tmp_path / "s" / label / "seed-0", kind=label.lower(), label=label, seed=0,
            metrics=final_rows(values, [-1] * 3) + final_rows(values, [-1] * 3, metric="loss"),
            edges=[(0, 1, 2, "mix", 0.5, 10), (1, 2, 0, "mix", 0.5, 10)] if label == "DAC" else (),
        )  # fmt: skip
        stored = json.loads((folder / "provenance.json").read_text("utf-8"))
        (folder / "provenance.json").write_text(json.dumps({**stored, "client_names": names}))
        listed(folder)
    address = write_report(tmp_path / "s").as_uri()
    load(browser, address, "clients")
    heads = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#view-clients th")]
    assert heads[:4] == ["Client", "Id", "DAC", "Local"]
    # Differences of 0.2 points have marks of their own.
    marks = browser.execute_script(
        "return [0.501, 0.502].map(tick(metricOf(page.data, 'accuracy')))"
    )
    assert marks == ["50.1 %", "50.2 %"]
    load(browser, address, "graph")
    shown = browser.execute_script(
        "return [...page.charts.values()][0].drawn.getOption().series[0].data.map((one) => one.name)"
    )
    assert sorted(shown) == ["Oslo", "University… (1)", "University… (2)"]
    assert logs(browser)[0] == []
