"""Write the generated pages of docs/reference and cli/catalog.json from the package; with --check, compare them.

    python scripts/reference.py

What `coterie methods` shows and these pages show comes from the same docstrings and defaults.
"""

import re
import sys
from pathlib import Path
from typing import Any

import typer
from _pages import REFERENCE, write

from coterie.cli import _catalog
from coterie.cli.app import app
from coterie.data.build import DataConfig
from coterie.data.folders import FolderOptions
from coterie.data.shifts import SHIFTS
from coterie.data.tables import TableOptions
from coterie.engine.task import LocalTraining
from coterie.methods import METHODS, registry
from coterie.methods.dac import Dac
from coterie.net.nodefile import DataSource, NetworkSettings, NodeFile
from coterie.net.relay import RelayFile
from coterie.net.servicefile import Rules, ServiceFile
from coterie.runtime.settings import Settings
from coterie.runtime.virtual_time import VirtualTime
from coterie.studies import config

MADE = "<!-- made by scripts/reference.py; do not edit -->\n"

EXTENDS = """## extends

A study file can start from another and say only what differs. `extends` is the name of a built-in study, or a path
relative to the file; what is extended may extend another.

```toml
extends = "dac/cifar10-label-40-60"
use_methods = ["DAC", "Random", "Mine"]      # which run, in this order; all when not given
unset = ["paper", "methods.PENS"]            # taken out first: keys, tables, methods
rounds = 50                                  # a value replaces, lists too
local.lr = 0.001                             # tables merge key by key

[[methods]]
label = "DAC"                                # is there: its keys change
tau = 10

[[methods]]
label = "Mine"                               # is not there: added at the end, so it needs a kind
kind = "panm-loss"
```

Instead of `[[methods]]`, methods can be changed by name, as with `--set`: `methods.DAC.tau = 10`, or `DAC.tau = 10` in
a table `[methods]`. Everything is inherited but `name`. `--set` changes the merged study;
`--set 'use_methods=["DAC", "Random"]'` runs some of its methods. What is stored with a run is
complete and extends nothing; `coterie studies NAME --resolved` prints a built-in study so. Built-in files whose names
begin with `_`, such as `similarity/_base`, hold what the studies of a paper share; they are extended and not run.
"""


def rows(cls: type, base: type | None = None) -> list[str]:
    """Return the fields of a configuration class as a Markdown table; those of `base` are left out."""
    lines = ["| name | default | accepts | meaning |", "|---|---|---|---|"]
    known = [] if base is None else _catalog.list_parameters(base)
    for p in _catalog.list_parameters(cls):
        if any((p.name, p.expects) == (one.name, one.expects) for one in known):
            continue
        lines.append(f"| `{p.name}` | {code(p)} | {cell(p.expects)} | {cell(p.text)} |")
    return lines if len(lines) > 2 else ["It has no settings."]


def code(parameter: _catalog.Parameter) -> str:
    """Return a default as code; nothing for a setting whose default is made up of others."""
    if parameter.default == _catalog.REQUIRED:
        return f"**{_catalog.REQUIRED}**"
    return f"`{parameter.default}`" if len(parameter.default) <= 40 else ""


def methods() -> str:
    """Return the page of methods."""
    lines = [
        "# Methods",
        "",
        '`coterie methods` prints the same. A method is chosen with `[[methods]] kind = "..."`.',
        "",
    ]
    for kind, method in METHODS.items():
        lines += [f"## {kind}", "", _catalog.parse_description(method), "", *rows(method), ""]
        published = registry.find_published(method)
        if published is not None and method.__base__ is not Dac:  # variants have those of DAC
            lines += ["Options of published code, in the same table:", ""]
            lines += [*rows(published, method), ""]
        lines += [f"- {reference}" for reference in method.references] + [""] * bool(
            method.references
        )
    return "\n".join(lines)


def studies() -> str:
    """Return the page of built-in studies."""
    lines = [
        "# Built-in studies",
        "",
        "`coterie run NAME` runs one; `coterie studies NAME` prints its file; a file of your own starts from it with",
        '`extends = "NAME"`.',
        "",
    ]
    lines += ["| name | methods | seeds | rounds | |", "|---|---:|---:|---:|---|"]
    for name in config.find_builtin_studies():
        study = config.load_study(name)
        size = f"{len(study.methods)} | {len(study.seeds)} | {study.settings.rounds}"
        lines.append(f"| `{name}` | {size} | {study.description} |")
    return "\n".join([*lines, ""])


def settings() -> str:
    """Return the page of everything a study file can say."""
    lines = [
        "# Study files",
        "",
        "Everything a study file can say. Unknown keys are refused with the nearest name.",
        "",
    ]
    lines += [
        "`--set path=value` reaches every key: `--set local.lr=0.01`, `--set methods.DAC.tau=30` (by label, or all of",
        "a kind). A [[methods]] table takes `kind`, `label`, the method's own settings, and any key of `[local]` or of",
        'the top level, for that method alone. `"none"` unsets what may be unset. `[sweep]` lists values for paths:',
        '`"methods.dac.tau" = [1, 10, 100]`. Several make a grid; settings with commas between them vary together:',
        '`"data.num_clients, rounds" = [[20, 30], [40, 60]]`. Items of lists are reached by their number, from 0:',
        '`"data.shift.0.degrees" = [[0, 90], [0, 180]]`.',
        "",
    ]
    lines += [EXTENDS, ""]
    lines += ["## Top level", "", *rows(Settings), ""]
    lines += ["`patience` is written in `[stopping]`, `local` is the table `[local]`.", ""]
    lines += ["## [local]", "", *rows(LocalTraining), "", "## [time]", ""]
    lines += ['With `schedule = "asynchronous"` ([how](../how-to/asynchronous.md)).', ""]
    lines += [*rows(VirtualTime), "", "## [data]", "", *rows(DataConfig), ""]
    lines += [
        "### options: table",
        "",
        "`path`, `test` (path of a table for testing), and:",
        "",
        *rows(TableOptions),
        "",
    ]
    lines += ["### options: folder", "", "`path`, and:", "", *rows(FolderOptions), ""]
    for kind, shift in sorted(SHIFTS.items()):
        lines += [f"### shift: {kind}", "", _catalog.parse_description(shift), "", *rows(shift), ""]
    return "\n".join(lines)


def commands() -> str:
    """Return the page of the command line: every command with its help, arguments and options."""
    lines = [
        "# Commands",
        "",
        "`coterie COMMAND --help` prints the same. Results go to standard output, progress and messages to standard",
        "error. Exit status: 0; 2 for bad input, with one line that says what is wrong; 75 when there is no more",
        "room to write, and 4 when the clock is not set yet, with one line, too (the same command continues",
        "later); 130 after Ctrl-C.",
        "",
    ]
    return "\n".join([*lines, *group(typer.main.get_command(app), "coterie")])


def group(command: Any, path: str) -> list[str]:
    """Return the sections of the commands of a group."""
    lines = []
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            lines += group(inner, f"{path} {name}")
            continue
        text, _, examples = (inner.help or "").partition("[bold]Example")
        shown = re.findall(r"^ *(coterie .*)$", examples, re.MULTILINE)
        # a list of words with their meanings
        text = re.sub(r"^  (?=\S)", "    ", text.strip(), flags=re.MULTILINE)
        lines += [f"## {path} {name}", "", text, ""]
        if shown:
            lines += [
                "```console",
                *(f"$ {re.sub(' {2,}', '  # ', line)}" for line in shown),
                "```",
                "",
            ]
        given = [option(parameter) for parameter in inner.params]
        lines += ["| | default | meaning |", "|---|---|---|", *given, ""] if given else []
    return lines


def option(parameter: Any) -> str:
    """Return an argument or option of a command as a row of a table."""
    if parameter.param_type_name == "option":
        name = ", ".join(parameter.opts)
    else:
        name = parameter.metavar or parameter.name.upper()
    said = parameter.default not in (None, False, "") and not callable(parameter.default)
    default = f"`{parameter.default}`" if said else ""
    return f"| `{cell(name)}` | {cell(default)} | {cell(parameter.help or '')} |"


def cell(text: str) -> str:
    """Return a text as it may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def node_file() -> str:
    """Return the page of everything that node.toml can say."""
    lines = [
        "# Node files",
        "",
        "What `node.toml` can say: see [how to deploy](../how-to/deploy-in-three-hospitals.md).",
        "",
    ]
    top = [
        row
        for row in rows(NodeFile)
        if not row.startswith(("| `data`", "| `network`", "| `folder`"))
    ]
    lines += ["## Top level", "", "Paths are relative to the file.", "", *top, ""]
    lines += ["## [data]", "", *rows(DataSource), "", "## [network]", "", *rows(NetworkSettings)]
    relay = [row for row in rows(RelayFile) if not row.startswith("| `folder`")]
    about = "What the file of `coterie relay` can say. Paths are relative to the file."
    lines += ["", "## relay.toml", "", about, "", *relay, ""]
    inner = ("| `data`", "| `rules`", "| `network`", "| `folder`")
    service = [row for row in rows(ServiceFile) if not row.startswith(inner)]
    lines += ["## node.toml of a federation's member", ""]
    lines += ["What the file of `coterie federation serve` can say. `[network]` is that of above; "]
    lines[-1] += "`[data.ROLE]` is [data] of above, for each role."
    return "\n".join([*lines, "", *service, "", "### [rules]", "", *rows(Rules)])


def pages() -> dict[Path, str]:
    """Return the text of every generated page."""
    made = {
        "methods.md": methods(),
        "studies.md": studies(),
        "study-files.md": settings(),
        "commands.md": commands(),
        "node-files.md": node_file(),
    }
    # what `coterie methods` reads
    listed = {Path(_catalog.__file__).with_name("catalog.json"): _catalog.build_catalog()}
    return {REFERENCE / name: MADE + text.rstrip() + "\n" for name, text in made.items()} | listed


if __name__ == "__main__":
    sys.exit(write(pages()))
