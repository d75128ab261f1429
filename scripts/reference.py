"""Write the generated pages of docs/reference from the package itself; with --check, say whether they are up to date.

    python scripts/reference.py

What `coterie methods` shows and these pages show comes from the same docstrings and defaults.
"""

import sys
from pathlib import Path

from coterie import catalogue, config
from coterie.data import DataConfig
from coterie.methods import METHODS
from coterie.settings import Settings
from coterie.shifts import SHIFTS
from coterie.task import LocalTraining

FOLDER = Path(__file__).resolve().parent.parent / "docs/reference"
MADE = "<!-- made by scripts/reference.py; do not edit -->\n"


def rows(cls: type) -> list[str]:
    """Return the fields of a configuration class as a Markdown table."""
    lines = ["| name | default | meaning |", "|---|---|---|"]
    for p in catalogue.parameters(cls):
        text = p.text.replace("|", "\\|")
        lines.append(f"| `{p.name}` | {code(p)} | {text} |")
    return lines if len(lines) > 2 else ["It has no settings."]


def code(parameter: catalogue.Parameter) -> str:
    """Return a default as code; nothing for a setting that must be given, or whose default is made up of others."""
    shown = catalogue.default(parameter.default)
    return f"`{shown}`" if len(shown) <= 40 else ""


def methods() -> str:
    """Return the page of methods."""
    lines = [
        "# Methods",
        "",
        '`coterie methods` prints the same. A method is chosen with `[[methods]] kind = "..."`.',
        "",
    ]
    for kind, method in METHODS.items():
        lines += [f"## {kind}", "", catalogue.description(method), "", *rows(method), ""]
        lines += [f"- {reference}" for reference in method.references] + [""] * bool(method.references)
    return "\n".join(lines)


def studies() -> str:
    """Return the page of built-in studies."""
    lines = ["# Built-in studies", "", "`coterie run NAME` runs one; `coterie studies NAME` prints its file.", ""]
    lines += ["| name | methods | seeds | rounds | |", "|---|---:|---:|---:|---|"]
    for name in config.builtin():
        study = config.load(name)
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
        '`"methods.dac.tau" = [1, 10, 100]`.',
        "",
    ]
    lines += ["## Top level", "", *rows(Settings), ""]
    lines += ["`patience` is written in `[stopping]`, `local` is the table `[local]`.", ""]
    lines += ["## [local]", "", *rows(LocalTraining), "", "## [data]", "", *rows(DataConfig), ""]
    for kind, shift in sorted(SHIFTS.items()):
        lines += [f"### shift: {kind}", "", catalogue.description(shift), "", *rows(shift), ""]
    return "\n".join(lines)


def main() -> int:
    """Write the pages; with --check, return 1 when one is not up to date."""
    stale = 0
    for name, page in {"methods.md": methods(), "studies.md": studies(), "study-files.md": settings()}.items():
        path, text = FOLDER / name, MADE + page.rstrip() + "\n"
        if "--check" in sys.argv:
            stale |= not path.exists() or path.read_text(encoding="utf-8") != text
        else:
            path.write_text(text, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
