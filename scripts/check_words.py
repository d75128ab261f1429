"""Find words of the repository's old dialect in its code and pages, and print what to write instead.

    python scripts/check_words.py [PATH ...]

Without a path the script reads the package (comments, docstrings and other strings), the pages of
docs, README.md, CHANGELOG.md and CONTRIBUTING.md. It prints `file:line: word: write X instead` for
each word that it finds and exits with status 1. Code in backticks, code blocks of pages and the
expressions in f-strings are names, not prose, so they are not read. scripts/words.toml lists the
words.
"""

import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = Path(__file__).with_name("words.toml")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
# Stored results: measured once and never edited.
DATA = "docs/reference/runs/"


@dataclass(frozen=True)
class Word:
    """A word that is not used.

    Args:
        pattern: finds it.
        instead: what to write.
    """

    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True)
class Finding:
    """A place where a word is used.

    Args:
        path: the file, relative to the repository.
        line: its line, from 1.
        text: the word as it stands there.
        instead: what to write.
    """

    path: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}: write {self.instead} instead"


def load_words(path: Path = WORDS) -> list[Word]:
    """Load the list of words; the first pattern that matches at a place is the one reported."""
    entries = tomllib.loads(path.read_text("utf-8"))["word"]
    return [Word(compile_pattern(entry["pattern"]), entry["instead"]) for entry in entries]


def compile_pattern(pattern: str) -> re.Pattern[str]:
    r"""Compile a pattern of the list.

    Example:
        >>> bool(compile_pattern("those that").search("Those\n    that"))
        True
        >>> bool(compile_pattern("told").search("untold"))
        False
    """
    spaced = pattern.replace(" ", r"\s+")
    return re.compile(rf"\b(?:{spaced})\b", re.IGNORECASE | re.DOTALL)


def select_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file: the line on which each piece begins, and its text."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from _select_python_prose(text)
    else:
        yield 1, _blank(r"`[^`\n]*`", _blank(r"^ *```.*?^ *```", text))


def _select_python_prose(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _blank(r"`[^`\n]*`", token.string)
        # A string without a space is a key or a name.
        elif token.type == tokenize.STRING and re.search(r"\s", token.string):
            piece = _blank(r"`[^`\n]*`", token.string)
            prefix = piece[: piece.index(piece[-1])]
            yield token.start[0], _blank(r"\{[^{}]*\}", piece) if "f" in prefix.lower() else piece


def _blank(pattern: str, text: str) -> str:
    """Replace each match by blanks, line by line, so that line numbers stay."""
    return re.sub(
        pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE
    )


def load_stored_phrases(path: Path = WORDS) -> list[str]:
    """Load the phrases that are not checked, since stored data contain them."""
    return tomllib.loads(path.read_text("utf-8")).get("stored_phrases", [])


def find_words(path: Path, words: Sequence[Word], root: Path = ROOT) -> list[Finding]:
    """Find the words in a file, in the order of its lines."""
    name = path.relative_to(root).as_posix()
    stored = "|".join(map(re.escape, load_stored_phrases()))
    findings = []
    for first, text in select_prose(path):
        prose = _blank(stored, text) if stored else text
        taken: set[int] = set()
        for word in words:
            for match in word.pattern.finditer(prose):
                # "told apart" is listed before "told", and is reported once.
                if not taken.isdisjoint(range(*match.span())):
                    continue
                taken |= set(range(*match.span()))
                line = first + prose.count("\n", 0, match.start())
                findings.append(Finding(name, line, " ".join(match[0].split()), word.instead))
    return sorted(findings, key=lambda finding: finding.line)


def find_files(root: Path = ROOT) -> list[Path]:
    """Return the files that are checked, in order."""
    pages = [root / name for name in PAGES]
    paths = [*(root / "src").rglob("*.py"), *(root / "docs").rglob("*.md"), *pages]
    return sorted(
        path
        for path in paths
        if path.is_file() and not path.relative_to(root).as_posix().startswith(DATA)
    )


def format_folder(path: str) -> str:
    """Return the folder that counts are by: a package of the source, or a folder of docs.

    Example:
        >>> format_folder("src/coterie/net/node.py"), format_folder("docs/how-to/run.md")
        ('src/coterie/net', 'docs/how-to')
    """
    parts = Path(path).parts
    depth = 3 if parts[0] == "src" else 2
    return "/".join(parts[: min(depth, len(parts) - 1)]) or "."


def split_allowed(
    findings: Iterable[Finding], allowed: Sequence[str]
) -> tuple[list[Finding], Counter[str]]:
    """Separate the findings that fail the check from the number in each folder that is allowed."""
    failing, counts = [], Counter[str]()
    for finding in findings:
        folder = format_folder(finding.path)
        if folder in allowed:
            counts[folder] += 1
        else:
            failing.append(finding)
    return failing, counts


def main(arguments: Sequence[str] = ()) -> int:
    """Check the given files, or all of them; return the exit status."""
    words, files = load_words(), [Path(path).resolve() for path in arguments] or find_files()
    allowed = tomllib.loads(WORDS.read_text("utf-8")).get("allowed_for_now", [])
    findings = [finding for path in files for finding in find_words(path, words)]
    failing, counts = split_allowed(findings, () if arguments else allowed)
    for finding in failing:
        print(finding)
    for folder, count in sorted(counts.items()):
        print(f"allowed for now: {folder}: {count}", file=sys.stderr)
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
