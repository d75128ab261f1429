"""The documentation: its code runs, its commands are those of the program, its files are there, its pages up to date.

`sh` blocks are run, but those marked by an invisible comment, `<!-- docs: not run, REASON -->`.
`console` blocks (with a prompt) show what was run. The program's own parser reads them all.
"""

import ast
import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import tests.hugging  # noqa: F401  # before a page imports transformers
import typer
from tests.selection import full
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.data.build import build_federation
from coterie.engine.evaluation import Evaluator
from coterie.engine.task import Task
from coterie.exchange.base import Inbox
from coterie.methods.base import PeerMethod, Round
from coterie.methods.fedavg import OneModel
from coterie.methods.server import ServerMethod
from coterie.models.layout import Layout
from coterie.models.part import ParameterSharing
from coterie.net import nodefile, servicefile
from coterie.net.relay import RelayFile
from coterie.simulation.run import check_run
from coterie.studies.config import load_study, parse_study_text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FRONT = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES = [*FRONT, *sorted(path for path in DOCS.rglob("*.md") if "runs" not in path.parts)]
KINDS = ("python", "sh", "console", "toml", "json", "ini", "text")
QUICK = [
    "--scale",
    "0.05",
    "--seeds",
    "1",
    "--set",
    "local.epochs=1",
    "--set",
    "data.train=16",
    "--workers",
    "1",
    "--quiet",
]
BLOCK = re.compile(
    r"(?:<!-- docs: not run, (?P<why>[^\n]+?) -->\n+)?^```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = {
    "README.md": 2,
    "how-to/audit-log.md": 2,
    "how-to/deploy-in-three-hospitals.md": 7,
    "how-to/machines.md": 3,
    "how-to/cluster.md": 9,
    "how-to/watch-and-track.md": 2,
    "how-to/no-open-port.md": 2,
    "how-to/standing-federation.md": 4,
    "how-to/bring-a-hospital-in.md": 6,
    "how-to/fine-tune.md": 1,
}


class Block(NamedTuple):
    language: str
    title: str
    text: str
    runs: bool


def title(path):
    return path.relative_to(ROOT if path in FRONT else DOCS).as_posix()


def blocks(path, *languages):
    """The blocks of code of a page, in order; those of some languages only."""
    found = []
    for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
        name = re.search(r'title="(.*?)"', match["rest"])
        found.append(
            Block(match["language"], name[1] if name else "", match["text"], match["why"] is None)
        )
    return [block for block in found if not languages or block.language in languages]


def prose(path):
    """The text of a page without its blocks of code."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


LONG_PAGES = {
    "tutorials/first-study.md", "tutorials/paper-sweep.md", "how-to/own-aggregation.md", "how-to/watch-and-track.md",
    "how-to/own-method.md", "how-to/fine-tune.md", "how-to/new-clients.md", "how-to/take-home.md", "CONTRIBUTING.md",
    "how-to/own-data.md", "explanation/comparisons.md", "how-to/own-metric.md", "how-to/own-loss.md",
    "how-to/own-model.md", "explanation/metrics.md", "how-to/share-a-part.md", "how-to/paper-figures.md",
}  # fmt: skip
"""Pages whose code `make test` does not run."""
SLOW_PAGES = {
    "how-to/own-aggregation.md", "how-to/watch-and-track.md", "CONTRIBUTING.md", "how-to/fine-tune.md",
    "how-to/take-home.md", "how-to/new-clients.md", "explanation/comparisons.md",
}  # fmt: skip
"""Those of them whose code `make test-more` does not run either."""


def pages_with(*languages):
    return [pytest.param(path, id=title(path)) for path in PAGES if blocks(path, *languages)]


def commands(block):
    """The commands of a block as lists of words, without prompts, comments and what they print."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    parts = [part for line in lines for part in line.split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def redirected(words):
    """A command's words, and the file that its output goes to."""
    return (words[: words.index(">")], words[-1]) if ">" in words else (words, "")


def parse(words):
    """Have the program's own parser read a command; an unknown command, option or value is an error."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words, "a group of commands is not a command"
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))


def check(words):
    """A command of another program names what this repository has."""
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert words[1] in ("install", "download"), words
        named = re.findall(r"\[([\w,]+)\]", " ".join(words))
        assert {name for group in named for name in group.split(",")} <= set(extras), words
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "python":
        place = words[2].replace(".", "/") if words[1] == "-m" else words[1]
        assert (ROOT / place).exists() or (words[1] == "-m" and (ROOT / f"{place}.py").exists()), (
            words
        )
    elif words[0] == "export":
        assert words[1:] in (["PYTHONPATH=."], ["RAY_AUTH_MODE=token"]), words
    else:
        known = ("coterie", "ray", "tensorboard", "sudo", "git", "cd")
        assert words[0] in known, f"these tests know no program {words[0]!r}"


def test_the_parser_of_the_tests_refuses_what_the_program_refuses():
    """Otherwise the tests below could not fail."""
    parse(["run", "--seeds", "5"])
    parse(["net", "join", "north", "192.0.2.7:7447"])
    usage = typer.BadParameter.__mro__[2]
    for wrong in (
        ["run", "--sedes", "5"],
        ["rum"],
        ["net"],
        ["net", "join", "north"],
        ["run", "--scale", "much"],
    ):
        with pytest.raises((AssertionError, usage)):
            parse(wrong)


@pytest.mark.parametrize("path", pages_with("sh", "console"))
def test_the_commands_of_a_page_are_those_of_the_program(path):
    """Every command, option and kind of value exists; other programs' commands name extras and targets that do."""
    for block in blocks(path, "sh", "console"):
        for words in commands(block):
            check(words)
            if words[0] == "coterie":
                parse(redirected(words[1:])[0])


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """What `coterie run` leaves, shortened; several pages begin with it."""
    folder = tmp_path_factory.mktemp("bundled")
    told = CliRunner().invoke(app, ["run", *QUICK, "--out", str(folder)])
    assert told.exception is None, told.exception
    return folder


def quick(arguments):
    """What makes the study that is run short; folds, and data of a function, use all samples."""
    if not arguments or arguments[0].startswith("-"):
        return QUICK
    data = load_study(arguments[0]).data
    if data.folds is not None or ":" in str(data.dataset):
        return [*QUICK[:6], *QUICK[8:]]
    return QUICK


def run_commands(block, bundled):
    """Run what a block says to this program; `coterie run` with one round and seed, and few samples."""
    for words in commands(block):
        if words[0] != "coterie":
            continue
        arguments, out = redirected(words[1:])
        if arguments in (["run"], ["run", "rotated-digits"]):
            # a second time goes on, with nothing left to do
            shutil.copytree(bundled, "runs", dirs_exist_ok=True)
            continue
        told = CliRunner().invoke(
            app, [*arguments, *quick(arguments[1:])] if arguments[0] == "run" else arguments
        )
        assert told.exception is None, f"{shlex.join(words)}: {told.exception!r}"
        if out:
            Path(out).write_text(told.stdout, encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        full(*page.values, slow=page.id in SLOW_PAGES, id=page.id)
        if page.id in LONG_PAGES
        else page
        for page in pages_with("python", "sh")
        if page.values[0] != README
    ],
)
def test_the_code_of_a_page_runs_from_top_to_bottom(path, bundled, tmp_path, monkeypatch):
    """As a reader would go through it, in an empty folder with the page's titled files. (README has its own test.)"""
    monkeypatch.chdir(tmp_path)
    # of a program that is started there, or with PYTHONPATH=.
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType(f"docs_{path.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(path):
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        if block.runs and block.language == "sh":
            run_commands(block, bundled)
        elif block.runs and block.language == "python":
            exec(compile(block.text, str(path), "exec"), vars(module))


@pytest.mark.parametrize("path", pages_with("sh"))
def test_a_page_says_where_the_modules_are_that_its_studies_name(path):
    """The tests above have the page's folder in their path; a reader's program has not."""
    files, exported = {}, False
    for block in blocks(path):
        if block.title:
            files[block.title] = block.text
        if block.language != "sh":
            continue
        for words in commands(block):
            exported |= words[:2] == ["export", "PYTHONPATH=."]
            study = files.get(words[2], "") if words[:2] == ["coterie", "run"] and words[2:] else ""
            modules = [name.removesuffix(".py") for name in files if name.endswith(".py")]
            named = [name for name in modules if f'"{name}:' in study]
            assert exported or not named, f"{words}: {named} are not found without PYTHONPATH=."


@pytest.mark.parametrize("path", [full(*one.values, id=one.id) for one in pages_with("toml")])
def test_the_studies_of_a_page_can_be_run(path, tmp_path, monkeypatch):
    """What `coterie run` checks before its first run: settings that do not go together are refused there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks(path, "python"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    for block in blocks(path, "toml"):
        if block.title.endswith(("node.toml", "relay.toml")):
            continue
        study = parse_study_text(block.text)
        if study.data.dataset != "digits":  # other data are not here
            continue
        federation = build_federation(study.data, study.seeds[0])
        for entry in study.methods:
            quick = replace(entry.settings, engine="loop", portable=False)
            check_run(federation, entry.method, study.model.named_model, quick, study.seeds)


def test_what_is_not_run_is_counted():
    """A block that cannot run here says why, in a comment; a new one needs the table above to change."""
    marked = {title(path): sum(not block.runs for block in blocks(path)) for path in PAGES}
    assert {page: count for page, count in marked.items() if count} == NOT_RUN


QUOTED = re.compile(r"`coterie ([a-z][^`\n\\]*)`")
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")


def test_commands_and_links_are_found():
    """Otherwise the tests of each page could not fail."""
    assert QUOTED.findall("Use `coterie run STUDY --resume`, not `coterie`.") == [
        "run STUDY --resume"
    ]
    assert LINK.findall("See [a](b.md#c), [d](e.md) and [f](#g).") == [
        ("b.md", "c"),
        ("e.md", ""),
        ("", "g"),
    ]
    assert sum(len(QUOTED.findall(prose(path))) for path in PAGES) > 20
    assert sum(len(LINK.findall(prose(path))) for path in PAGES) > 100


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_commands_in_running_text_exist(path):
    """`coterie ...` between backquotes: the command and each option are the program's."""
    for code in QUOTED.findall(prose(path)):
        words, command = code.split(), typer.main.get_command(app)
        while hasattr(command, "commands") and words and words[0].islower():
            assert words[0] in command.commands, code
            command, words = command.commands[words[0]], words[1:]
        known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
        assert {word for word in words if word.startswith("--")} <= known, code


OWNERS = {
    "inbox": Inbox, "layout": Layout, "rnd": Round, "rnd.task": Task, "rnd.task.evaluator": Evaluator,
    "rnd.task.layout": Layout, "rnd.task.sharing": ParameterSharing,
}  # fmt: skip
"""What a method of one's own is given, by what pages call it."""


def find_missing_names(text):
    """The names of `OWNERS` in a text that these do not have."""
    missing = set()
    for name in re.findall(r"(?<![\w.])(?:rnd|layout|inbox)(?:\.\w+)+", text):
        words = name.split(".")
        owner = max(place for place in range(1, len(words)) if ".".join(words[:place]) in OWNERS)
        kind = OWNERS[".".join(words[:owner])]
        if not hasattr(kind, words[owner]) and words[owner] not in kind.__annotations__:
            missing.add(name)
    return missing


def find_unknown_hooks(text):
    """The functions of methods in a program that override nothing: no round would call them."""
    unknown = set()
    for part in ast.walk(ast.parse(text)):
        bases = {base.id for base in getattr(part, "bases", ()) if isinstance(base, ast.Name)}
        known = [kind for kind in (PeerMethod, ServerMethod, OneModel) if kind.__name__ in bases]
        for inner in part.body if known else ():
            if isinstance(inner, ast.FunctionDef) and not hasattr(known[0], inner.name):
                unknown.add(inner.name)
    return unknown


def test_missing_names_and_unknown_hooks_are_found():
    assert find_missing_names("`rnd.task.score(inbox)`, `layout.layers()`, `inbox.mask`") == {
        "layout.layers"
    }
    program = "class A(OneModel):\n    def home(self): ...\n    def publish(self): ...\n"
    assert find_unknown_hooks(program) == {"home"}


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_what_a_page_says_of_methods_is_there(path):
    """A hook of another name is no error: the method would run without it."""
    assert find_missing_names(path.read_text(encoding="utf-8")) == set()
    for block in blocks(path, "python"):
        assert find_unknown_hooks(block.text) == set()


@pytest.mark.parametrize("path", pages_with("toml"))
def test_the_files_of_a_page_are_valid(path, tmp_path, monkeypatch):
    """Unknown keys and wrong values would be refused. What a file names by import path is on the page."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks(path, "python"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    for block in blocks(path, "toml"):
        if block.title.endswith("node.toml"):
            (tmp_path / "node.toml").write_text(block.text, encoding="utf-8")
            if "[data.heart]" in block.text:  # of a federation's member
                assert servicefile.load(tmp_path / "node.toml").data.keys() == {"heart"}
            else:
                assert nodefile.load(tmp_path / "node.toml").data != nodefile.DataSource()
        elif block.title == "relay.toml":
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            assert RelayFile.load(tmp_path / block.title).tunnels
        else:
            assert parse_study_text(block.text).methods


@pytest.mark.parametrize("path", pages_with("json"))
def test_the_json_of_a_page_is_json(path):
    for block in blocks(path, "json"):
        assert json.loads(block.text)


def test_every_block_of_code_is_of_a_kind_that_is_tested():
    """A block without a language, or of another one, would be a promise that nobody keeps."""
    found = {(title(path), block.language) for path in PAGES for block in blocks(path)}
    assert {(page, language) for page, language in found if language not in KINDS} == set()


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_every_file_that_a_page_links_to_exists(path):
    """Links to other sites are left alone; those into a page name one of its headings."""
    for target, anchor in LINK.findall(prose(path)):
        if "://" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings
            }


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_a_page_names_no_folder_of_the_machine_that_it_was_written_on(path):
    """Readers do not have them."""
    assert (
        re.findall(
            r"(?<![\w./])/(?:home|root|tmp|work|opt|Users)/\S*", path.read_text(encoding="utf-8")
        )
        == []
    )


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_files_and_tests_that_a_page_names_exist(path):
    """Between backquotes: paths from the root of the repository, and names of tests, which are sentences."""
    text = prose(path)
    named = re.findall(r"`((?:src|tests|scripts|docs)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    tests = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")
    )
    assert [
        name for name in re.findall(r"`(test_\w+_\w+_\w+)`", text) if f"def {name}(" not in tests
    ] == []


def test_the_citation_names_the_version_of_the_package():
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [coterie.__version__]


def test_the_contents_name_every_page():
    """Every page is in the navigation of mkdocs.yml, and every page named there exists."""
    listed = re.findall(r"- ([\w./-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    # scripts/site_notebooks.py writes them
    notebooks = [path.with_suffix(".md") for path in DOCS.rglob("*.ipynb")]
    assert sorted(listed) == sorted(
        title(path) for path in [*PAGES, *notebooks] if path not in FRONT
    )


@pytest.mark.parametrize("script", ["reference", "api"])
def test_the_generated_pages_are_up_to_date(script):
    pages = importlib.import_module(script).pages()
    changed = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert changed == [], "run make docs"


def test_the_page_on_four_hospitals_is_up_to_date():
    hospitals = importlib.import_module("hospitals")
    assert hospitals.PAGE.read_text("utf-8") == hospitals.page(), "run make docs"


def test_the_page_on_python_has_every_public_name():
    assert importlib.import_module("api").find_missing() == set(), "name it in scripts/api.py"
