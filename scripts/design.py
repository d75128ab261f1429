"""Draw the packages of docs/design.md and what they import from one another, read from the code; with --check, compare.

    python scripts/design.py

An arrow is left out where a longer way says the same: what A imports through B needs no arrow of
its own.
"""

import ast
import sys
from collections.abc import Collection, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PICTURE = ROOT / "src/coterie", ROOT / "docs/assets/packages.svg"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
WIDTH, HEIGHT, GAP, RISE = 190, 56, 24, 30  # of the boxes, in pixels


def imported(source: str, known: Collection[str] = MODULES) -> set[str]:
    """Return the modules of the package that a file imports: in functions and for type checkers too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name in known and name != "coterie"}


def entry(module: str) -> str:
    """Return the entry of the package that a module belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def arrows() -> dict[str, set[str]]:
    """Return what each entry of the package imports from."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if entry(name) not in ("", "__main__"):
            found = graph.setdefault(entry(name), set())
            found |= {entry(other) for other in imported(path.read_text("utf-8"))} - {entry(name)}
    return graph


def reachable(graph: Mapping[str, set[str]], name: str) -> set[str]:
    """Return all that an entry needs, directly or not."""
    return {one for other in graph[name] for one in {other, *reachable(graph, other)}}


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that longer ways imply."""
    return {
        name: {
            one
            for one in found
            if not any(one in reachable(graph, other) for other in found - {one})
        }
        for name, found in graph.items()
    }


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return how high each entry stands: above everything that it imports."""
    return {
        name: max((levels_of for levels_of in _below(graph, name)), default=-1) + 1
        for name in graph
    }


def _below(graph: Mapping[str, set[str]], name: str) -> list[int]:
    return [max(_below(graph, other), default=-1) + 1 for other in graph[name]]


def purpose(name: str) -> str:
    """Return the first sentence of an entry's docstring, or its part before a semicolon."""
    path = MODULES[f"coterie.{name}"]
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split("; ")[0].rstrip(".").replace("`", "")


def picture() -> str:
    """Return the picture as SVG: entries from the bottom up, an arrow from each to what it imports."""
    graph = arrows()
    heights = levels(graph)
    rows = [
        sorted(name for name in graph if heights[name] == level)
        for level in range(max(heights.values()) + 1)
    ]
    width = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    height = len(rows) * (HEIGHT + RISE) - RISE + 2 * GAP
    place = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for column, name in enumerate(row):
            place[name] = (
                left + column * (WIDTH + GAP),
                height - GAP - HEIGHT - level * (HEIGHT + RISE),
            )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0L8,4L0,8z" fill="#666"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for name, found in sorted(direct(graph).items()):
        for other in sorted(found):
            (x0, y0), (x1, y1) = place[name], place[other]
            start, end = (x0 + WIDTH / 2, y0 + HEIGHT), (x1 + WIDTH / 2, y1)
            bend = (end[1] - start[1]) / 2
            lines.append(
                f'<path d="M{start[0]:g},{start[1]:g}C{start[0]:g},{start[1] + bend:g} {end[0]:g},{end[1] - bend:g} '
                f'{end[0]:g},{end[1]:g}" fill="none" stroke="#999" marker-end="url(#a)"/>'
            )
    for name, (x, y) in sorted(place.items()):
        modules = [other for other in MODULES if entry(other) == name]
        text = [
            f'<text x="{x + WIDTH / 2:g}" y="{y + 16:g}" font-size="13" font-weight="bold">{name}</text>'
        ]
        for number, line in enumerate(_wrapped(purpose(name), 36)[:3]):
            text.append(
                f'<text x="{x + WIDTH / 2:g}" y="{y + 30 + 11 * number:g}" font-size="9.5">{escape(line)}</text>'
            )
        lines += [
            f'<g text-anchor="middle" fill="#111"><title>{len(modules)} module{"s" * (len(modules) > 1)}</title>',
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3f8" stroke="#456"/>',
            *text,
            "</g>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        lines = (
            [*lines[:-1], f"{lines[-1]} {word}".strip()]
            if len(lines[-1]) + len(word) < width
            else [*lines, word]
        )
    return lines


def main() -> int:
    """Write the picture; with --check, return 1 when it is not up to date."""
    if "--check" in sys.argv:
        return int(not PICTURE.exists() or PICTURE.read_text("utf-8") != picture())
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
