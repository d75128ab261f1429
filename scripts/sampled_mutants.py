"""Put faults into the code that a program draws at random, and count those that the tests notice.

    python scripts/sampled_mutants.py --seed 7 --count 30              the packages of the aim
    python scripts/sampled_mutants.py --seed 7 --count 10 net results  other packages
    python scripts/sampled_mutants.py --seed 7 --list net              print the faults, try none
    python scripts/sampled_mutants.py --join A.json B.json             packages that were tried apart

Nobody chooses the faults: every place of a package where one of the changes below is possible has
the same chance. So the share that is noticed is an estimate for faults that nobody thought of,
while that of `scripts/mutants.py` speaks of a list. The changes:

    comparison         < and <=, > and >=, == and !=, `in` and `not in`, `is` and `is not`
    off by one         a whole number is larger by one
    constant           True and False; a decimal number is doubled
    operator           + and -, * and /, // and %, & and |; a minus is left out
    condition          the condition of an if, a loop or a choice is negated
    and, or            one for the other, or without one operand
    swapped arguments  the first two arguments of a call change places
    left-out call      sorted(x), abs(x), x.clone() and the like become x
    left-out step      a call without a result, a raise, a break, a `+=`, a change of a field or an entry
    no result          a function returns None

What messages say, assertions, decorators and annotations are not changed. A fault is tried with the
tests of `make test` that belong to its module: its own examples, those that name it, the one that
tests/unit/test_tree.py lists for it, those of its package, and those that tests/mutants names for
the package. A change after which the program does the same is listed
in tests/mutants/equivalent with its reason and counts neither as noticed nor as survived. The exit
status is 0 when each package reaches the aim, 1 when not, 2 when the tests cannot be used.
"""

import argparse
import ast
import copy
import json
import os
import signal
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutants

ROOT = mutants.ROOT
STORED = "docs/reference/runs/reliability/sampled-mutants.json"
EQUIVALENT = "tests/mutants/equivalent"
AIM = 0.85
"""The share of the faults of each package that the tests should notice."""
PACKAGES = ("engine/native", "net", "cluster", "simulation")
ROOM = 2.0
"""How many times what the tests take without a fault the time limit is at least."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
# Functions whose result does not depend on the order of their arguments.
COMMUTATIVE = {"min", "max", "minimum", "maximum", "equal", "gcd"}
LEFT_OUT_FUNCTIONS = {"sorted", "abs", "reversed", "set", "round", "int", "float", "max", "min"}
LEFT_OUT_METHODS = {"clone", "clamp", "copy", "strip", "resolve", "sort", "lower"}
# Of these parts of a node nothing is changed: what types say, and what wraps a function.
NOT_CHANGED = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Change:
    """A possible fault: bytes `start` to `end` of a file become `text`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str


class _Finder:
    """Finds every possible change of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def change(self, node: Any, kind: str, new: str | ast.AST) -> Change:
        """Return the change that puts a text or an expression in the place of a node."""
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        return Change(self.file, node.lineno, kind, start, end, text)

    def walk(self, node: ast.AST) -> Iterator[Change]:
        """Yield the changes of a node and of all that is in it."""
        if isinstance(node, ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield from self.change_statement(node)
        # The rest of a raise is what its message says.
        if isinstance(node, ast.Raise):
            return
        yield from self.change_expression(node)
        for name, value in ast.iter_fields(node):
            if name in NOT_CHANGED:
                continue
            for child in value if isinstance(value, list) else [value]:
                # A stack level says where a warning is shown.
                if isinstance(child, ast.keyword) and child.arg == "stacklevel":
                    continue
                if isinstance(child, ast.AST):
                    yield from self.walk(child)

    def change_statement(self, node: ast.AST) -> Iterator[Change]:
        """Yield the changes of a statement as a whole."""
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        is_store = isinstance(node, ast.Assign) and isinstance(
            node.targets[0], ast.Attribute | ast.Subscript
        )
        steps = (ast.Raise, ast.AugAssign, ast.Break, ast.Continue, ast.Delete)
        if is_call or is_store or isinstance(node, steps):
            yield self.change(node, "left-out step", "pass")
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            other = copy.copy(node)
            other.op = OPERATORS[type(node.op)]()
            yield self.change(node, "operator", ast.unparse(other))
        if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
            yield self.change(node, "no result", "return None")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield self.negate(node.test)
        if isinstance(node, ast.comprehension):
            yield from map(self.negate, node.ifs)

    def negate(self, test: ast.expr) -> Change:
        return self.change(test, "condition", f"(not ({ast.unparse(test)}))")

    def change_expression(self, node: ast.AST) -> Iterator[Change]:
        """Yield the changes of an expression."""
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                other = copy.copy(node)
                other.ops = [*node.ops]
                other.ops[place] = COMPARISONS[type(operator)]()
                yield self.change(node, "comparison", other)
        elif isinstance(node, ast.BoolOp):
            swapped = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield self.change(node, "and, or", ast.BoolOp(swapped, node.values))
            for place in range(len(node.values)):
                rest = [value for at, value in enumerate(node.values) if at != place]
                without = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield self.change(node, "and, or", without)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            other = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            yield self.change(node, "operator", other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield self.change(node, "operator", node.operand)
        elif isinstance(node, ast.Constant):
            yield from self.change_constant(node)
        elif isinstance(node, ast.Call):
            yield from self.change_call(node)

    def change_constant(self, node: ast.Constant) -> Iterator[Change]:
        if isinstance(node.value, bool):
            yield self.change(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            yield self.change(node, "off by one", str(node.value + 1))
        elif isinstance(node.value, float):
            yield self.change(node, "constant", repr(node.value * 2 or 1.0))

    def change_call(self, node: ast.Call) -> Iterator[Change]:
        first, name = node.args[:2], node.func
        starred = any(isinstance(one, ast.Starred) for one in first)
        called = getattr(name, "id", getattr(name, "attr", ""))
        differ = len(first) == 2 and ast.dump(first[0]) != ast.dump(first[1])
        if differ and not starred and called not in COMMUTATIVE:
            other = copy.copy(node)
            other.args = [first[1], first[0], *node.args[2:]]
            yield self.change(node, "swapped arguments", ast.unparse(other))
        alone = len(node.args) == 1 and not starred
        if isinstance(name, ast.Name) and name.id in LEFT_OUT_FUNCTIONS and alone:
            yield self.change(node, "left-out call", node.args[0])
        if isinstance(name, ast.Attribute) and name.attr in LEFT_OUT_METHODS:
            yield self.change(node, "left-out call", name.value)


def find_changes(root: Path, package: str) -> list[Change]:
    """Return every possible change of a package, without those of packages in it that are tried."""
    changes = []
    for path in sorted((root / "src/coterie" / package).rglob("*.py")):
        file = str(path.relative_to(root))
        if any(
            file.startswith(f"src/coterie/{other}/")
            for other in PACKAGES
            if other != package and other.startswith(package)
        ):
            continue
        source = path.read_bytes()
        changes += sorted(
            set(_Finder(file, source).walk(ast.parse(source))),
            key=lambda one: (one.start, one.end, one.kind, one.text),
        )
    return changes


def draw_changes(root: Path, package: str, seed: int, count: int) -> list[Change]:
    """Return a random sample of the possible changes of a package, in the order of its files."""
    # Not above: a process that runs tests imports this module, and must load the package itself.
    from coterie.rng import Rng

    changes = find_changes(root, package)
    order = Rng(seed).generator(f"faults in {package}").permutation(len(changes))
    return [changes[place] for place in sorted(order[:count])]


def find_tests(root: Path, package: str, file: str) -> tuple[str, ...]:
    """Return the tests of a module, those named after it and its own examples first."""
    stem = Path(file).stem.strip("_")
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    folder = root / "tests/unit" / package
    near, named, mentioning, others = [], [], [], []
    listed = load_listed_tests(root).get(file.removeprefix("src/coterie/").removesuffix(".py"))
    if listed is not None:
        named.append(f"tests/{listed}")
    for path in sorted((root / "tests").glob("*/**/test_*.py")):
        name = str(path.relative_to(root))
        if name.split("/")[1] not in ("unit", "contract", "properties"):
            continue
        text = path.read_text("utf-8")
        parent, _, last = module.rpartition(".")
        if stem in path.stem and path.is_relative_to(folder):
            named.append(name)
        elif module in text or f"from {parent} import {last}" in text:
            mentioning.append(name)
        elif path.is_relative_to(folder):
            near.append(name)
    for fault in mutants.load(root):
        if fault.file.startswith(f"src/coterie/{package}/"):
            others += fault.tests
    if ">>> " in (root / file).read_text("utf-8"):
        named.append(file)
    found = dict.fromkeys([*named, *mentioning, *near])
    for test in others:
        if test.partition("::")[0] not in found:
            found[test] = None
    return tuple(found)


def load_listed_tests(root: Path) -> dict[str, str]:
    """Return the test of each module that has none beside its name, as tests/unit/test_tree.py lists it."""
    path = root / "tests/unit/test_tree.py"
    if not path.exists():  # another project than this one
        return {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE":
            return ast.literal_eval(node.value)
    raise mutants.Unusable(f"{path}: expected a table ELSEWHERE")


def load_reasons(root: Path) -> dict[tuple[str, str, str], str]:
    """Return the reasons of changes after which the program does the same.

    Each is an entry of a TOML file of tests/mutants/equivalent: the `file`, the text of its lines
    `before` and `after` the change, and the `reason`.
    """
    reasons = {}
    for path in sorted((root / EQUIVALENT).glob("*.toml")):
        for entry in tomllib.loads(path.read_text("utf-8")).get("change", ()):
            if entry.keys() != {"file", "before", "after", "reason"}:
                raise mutants.Unusable(
                    f"{path}: a change has the keys {', '.join(entry)}; expected file, before, "
                    "after and reason"
                )
            reasons[entry["file"], entry["before"], entry["after"]] = entry["reason"]
    return reasons


def describe_change(root: Path, change: Change) -> tuple[str, str]:
    """Return the text of the lines of a change before and after it, in one line each."""
    source = (root / change.file).read_bytes()
    begin = source.rfind(b"\n", 0, change.start) + 1
    end = source.find(b"\n", change.end)
    old = source[begin:end].decode()
    new = (source[begin : change.start] + change.text.encode() + source[change.end : end]).decode()
    return " ".join(old.split()), " ".join(new.split())


def make_fault(root: Path, package: str, change: Change) -> mutants.Fault:
    """Return a change as a fault that `scripts/mutants.py` can try."""
    source = (root / change.file).read_bytes()
    changed = source[: change.start] + change.text.encode() + source[change.end :]
    before, after = describe_change(root, change)
    return mutants.Fault(
        package=package,
        name=f"{change.file}:{change.line}: {change.kind}: {before} -> {after} ({change.start})",
        file=change.file,
        old=source.decode(),
        new=changed.decode(),
        tests=find_tests(root, package, change.file),
    )


def try_packages(
    root: Path, packages: Sequence[str], seed: int, count: int, workers: int, limit: float
) -> list[dict[str, Any]]:
    """Try a sample of the faults of each package; return a row for each of them."""
    reasons, rows = load_reasons(root), []
    for package in packages:
        changes = draw_changes(root, package, seed, count)
        faults = {make_fault(root, package, one): one for one in changes}
        texts = {fault: describe_change(root, one) for fault, one in faults.items()}
        known = {fault: reasons.get((fault.file, *texts[fault])) for fault in faults}
        tried = [fault for fault, reason in known.items() if reason is None]
        results = mutants.everything(tried, root, workers, limit, room=ROOM)
        for fault, change in faults.items():
            result = results.get(fault.name, {"outcome": "equivalent", "reason": known[fault]})
            before, after = texts[fault]
            rows.append(
                {
                    "package": package, "file": fault.file, "line": change.line,
                    "kind": change.kind, "before": before, "after": after, **result,
                }
            )  # fmt: skip
    return rows


def count_outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Count outcomes by package, and of all; equivalent changes are in no share."""
    counted = mutants.totals([row for row in rows if row["outcome"] != "equivalent"])
    for package, counts in counted.items():
        counts["equivalent"] = sum(
            row["outcome"] == "equivalent" and package in (row["package"], "all") for row in rows
        )
    return counted


def join_results(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Return the stored content of packages that several commands have tried.

    A survivor that has been found, and listed, to be the same program since then counts as such.

    Raises:
        Unusable: when they are not of one commit, one seed and one number of faults.
    """
    parts = [json.loads(path.read_text("utf-8")) for path in files]
    joined = parts[0]
    first = joined["origin"]
    for path, part in zip(files[1:], parts[1:], strict=True):
        origin = part["origin"]
        for name, one, other in (
            ("commit", first["commit"], origin["commit"]),
            ("seeds", first["seeds"], origin["seeds"]),
            ("count", first["config"]["count"], origin["config"]["count"]),
        ):
            if one != other:
                raise mutants.Unusable(
                    f"{path}: {name} is {other}; expected {one} as in {files[0]}"
                )
        if twice := {*origin["config"]["packages"]} & {*first["config"]["packages"]}:
            raise mutants.Unusable(f"{path}: {min(twice)} is there twice")
        first["config"]["packages"] += origin["config"]["packages"]
        first["speaks_of"] = sorted(first["speaks_of"] + origin["speaks_of"])
        joined["results"] += part["results"]
    reasons = load_reasons(root)
    for row in joined["results"]:
        reason = reasons.get((row["file"], row["before"], row["after"]))
        if row["outcome"] == "survived" and reason is not None:
            row |= {"outcome": "equivalent", "reason": reason}
    names = " ".join(first["config"]["packages"])
    seed, count = first["seeds"][0], first["config"]["count"]
    # One command gives the same: the sample of a package depends on no other.
    first["command"] = f"python scripts/sampled_mutants.py --seed {seed} --count {count} {names}"
    joined["totals"] = count_outcomes(joined["results"])
    return joined


def parse_words(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "packages", nargs="*", help=f"folders of src/coterie (default: {' '.join(PACKAGES)})"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="the seed of the samples")
    what.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE", help="stored results of several packages"
    )
    parser.add_argument(
        "--count", type=int, default=30, help="faults of each package (default: 30)"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="tests run at once"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=2400.0,
        help="seconds for the tests of a fault (default: 2400)",
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--out", type=Path, help=f"where results are kept (default: {STORED})")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    found = parser.parse_args(words)
    if min(found.workers, found.count) < 1 or (found.seed or 0) < 0:
        parser.error("--workers and --count are at least 1, --seed at least 0")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Draw and try faults, store the results and return the exit status."""
    arguments = parse_words(words)
    root, packages = arguments.root.resolve(), arguments.packages or list(PACKAGES)
    path = arguments.out or root / STORED
    if arguments.join:
        try:
            content = join_results(arguments.join, root)
        except mutants.Unusable as error:
            print(error, file=sys.stderr)
            return 2
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return show_outcomes(content["results"], content["totals"])
    for package in packages:
        if not (root / "src/coterie" / package).is_dir():
            print(f"there is no package src/coterie/{package}", file=sys.stderr)
            return 2
    if arguments.list:
        for package in packages:
            for change in draw_changes(root, package, arguments.seed, arguments.count):
                before, after = describe_change(root, change)
                print(f"{change.file}:{change.line}: {change.kind}\n  {before}\n  {after}")
        return 0
    try:
        rows = try_packages(
            root, packages, arguments.seed, arguments.count, arguments.workers, arguments.limit
        )
    except mutants.Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    counted = count_outcomes(rows)
    if not arguments.dry:
        from coterie._util.origin import describe_machine, write_results

        settings = {"packages": packages, "count": arguments.count, "limit": arguments.limit}
        write_results(
            path, rows, packages, settings,
            seeds=(arguments.seed,), where=describe_machine("pytest"), totals=counted,
        )  # fmt: skip
    return show_outcomes(rows, counted)


def show_outcomes(
    rows: Sequence[Mapping[str, Any]], counted: Mapping[str, Mapping[str, Any]]
) -> int:
    """Print the faults that survived and the share of each package; return the exit status."""
    for row in rows:
        if row["outcome"] == "survived":
            place = f"{row['file']}:{row['line']}: {row['kind']}"
            print(f"survived: {place}\n  {row['before']}\n  {row['after']}", file=sys.stderr)
    for package, counts in counted.items():
        print(f"{package}: {counts['kill_rate']:.1%} of {counts['faults']} were noticed")
    return int(any(counted[package]["kill_rate"] < AIM for package in counted if package != "all"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
