"""Faults are drawn from all places where the code can be changed, tried, and counted as they ended."""

import ast
import json
from pathlib import Path

import pytest
import sampled_mutants

import mutants

SOURCE = '''"""A module."""


def choose(a: int, b: int, *, strict: bool = True) -> int:
    """Return one of two numbers."""
    assert a != b, "differ"
    if a < b and strict:
        raise ValueError(f"{a + 1} is too small")
    print(a)
    return max(a, b) - 1


def keep(known, name, value):
    known[name] = value
    known[name] += 0.5
    return sorted(known)
'''
TESTS = """import tiny


def test_choose():
    assert tiny.choose(3, 2) == 2
"""
EXPECTED = [
    ("comparison", "if a < b and strict:", "if (a <= b) and strict:"),
    ("and, or", "if a < b and strict:", "if (a < b or strict):"),
    ("and, or", "if a < b and strict:", "if (strict):"),
    ("and, or", "if a < b and strict:", "if (a < b):"),
    ("condition", "if a < b and strict:", "if (not (a < b and strict)):"),
    ("constant", "strict: bool = True", "strict: bool = False"),
    ("left-out step", 'raise ValueError(f"{a + 1} is too small")', "pass"),
    ("left-out step", "print(a)", "pass"),
    ("no result", "return max(a, b) - 1", "return None"),
    ("operator", "return max(a, b) - 1", "return (max(a, b) + 1)"),
    ("off by one", "return max(a, b) - 1", "return max(a, b) - 2"),
    ("left-out step", "known[name] = value", "pass"),
    ("left-out step", "known[name] += 0.5", "pass"),
    ("operator", "known[name] += 0.5", "known[name] -= 0.5"),
    ("constant", "known[name] += 0.5", "known[name] += 1.0"),
    ("no result", "return sorted(known)", "return None"),
    ("left-out call", "return sorted(known)", "return (known)"),
]
"""Every change of the module above, by hand; what is asserted and what a message says stays."""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "WARM", ("pytest",))
    root = tmp_path / "project"
    for folder in ("tests/mutants/equivalent", "tests/unit/own", "src/coterie/own"):
        (root / folder).mkdir(parents=True)
    (root / "src/coterie/own/tiny.py").write_text(SOURCE)
    (root / "tests/unit/own/test_tiny.py").write_text(
        TESTS.replace(
            "import tiny", "import sys\nsys.path.insert(0, 'src/coterie/own')\nimport tiny"
        )
    )
    return root


def test_every_place_is_changed_in_every_way(tiny):
    found = sampled_mutants.find_changes(tiny, "own")
    texts = [(one.kind, *sampled_mutants.describe_change(tiny, one)) for one in found]
    for kind, before, after in EXPECTED:
        assert any(
            (kind, before, after) == (own, old[old.find(before) :][: len(before)], new)
            or (own == kind and before in old and after in new)
            for own, old, new in texts
        ), (kind, before, after)
    assert len(found) == len(EXPECTED)
    for one in found:
        fault = sampled_mutants.make_fault(tiny, "own", one)
        ast.parse(fault.new)
        assert fault.applied(tiny) == fault.new != SOURCE


def test_commutative_arguments_do_not_change_places():
    finder = sampled_mutants._Finder("a.py", b"f(a, b)\nmin(a, b)\ng(a, a)\n")
    tree = ast.parse("f(a, b)\nmin(a, b)\ng(a, a)\n")
    swapped = [one for one in finder.walk(tree) if one.kind == "swapped arguments"]
    assert [(one.line, one.text) for one in swapped] == [(1, "f(b, a)")]


def test_a_sample_is_that_of_its_seed(tiny):
    every = sampled_mutants.find_changes(tiny, "own")
    samples = [sampled_mutants.draw_changes(tiny, "own", seed, 5) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert all(len(set(one)) == 5 and set(one) <= set(every) for one in samples)
    assert sampled_mutants.draw_changes(tiny, "own", 3, 100) == every


def test_a_package_within_a_package_is_a_package_of_its_own():
    outer = sampled_mutants.find_changes(mutants.ROOT, "engine")
    assert outer
    assert not any("engine/native" in one.file for one in outer)


def test_the_tests_of_a_module_are_those_that_name_it_and_those_of_its_package():
    found = sampled_mutants.find_tests(mutants.ROOT, "cluster", "src/coterie/cluster/blocks.py")
    assert "tests/contract/test_blocks.py" in found
    assert "tests/unit/cluster/test_exchange.py" in found
    first = sampled_mutants.find_tests(mutants.ROOT, "net", "src/coterie/net/roster.py")[0]
    assert first == "tests/unit/net/test_roster.py"
    # `make test` runs the examples of a module.
    packing = "src/coterie/cluster/packing.py"
    assert packing in sampled_mutants.find_tests(mutants.ROOT, "cluster", packing)
    slurm = "src/coterie/cluster/slurm.py"
    assert slurm not in sampled_mutants.find_tests(mutants.ROOT, "cluster", slurm)
    # A module without a test beside its name has the one that the list of the tree names.
    setup = sampled_mutants.find_tests(mutants.ROOT, "net", "src/coterie/net/setup.py")
    assert setup[0] == "tests/unit/cli/test_net.py"


def test_listed_equivalent_changes_are_of_the_code_as_it_is():
    """A reason counts for one text; when that goes, so does the entry."""
    for (file, before, _), reason in sampled_mutants.load_reasons(mutants.ROOT).items():
        text = " ".join((mutants.ROOT / file).read_text("utf-8").split())
        assert before in text, f"{file}: {before}"
        assert len(reason) > 20


@pytest.mark.slow
def test_faults_are_tried_and_stored_with_their_shares(tiny, capsys):
    (tiny / "tests/mutants/equivalent/own.toml").write_text(
        "[[change]]\nfile = 'src/coterie/own/tiny.py'\nbefore = 'print(a)'\nafter = 'pass'\n"
        "reason = 'nobody reads it'\n"
    )
    words = ["own", "--seed", "0", "--count", "100", "--workers", "1", "--root", str(tiny)]
    assert sampled_mutants.main(words) == 1, "less than the aim"
    stored = json.loads((tiny / sampled_mutants.STORED).read_text())
    own = stored["totals"]["own"]
    # `keep` is tested by nothing; of `choose` the tests see the result, and that it does not raise.
    assert own["equivalent"] == 1
    assert own["faults"] == len(EXPECTED) - 1
    rows = {(row["kind"], row["before"], row["after"]): row for row in stored["results"]}
    assert rows["no result", "return max(a, b) - 1", "return None"]["outcome"] == "noticed"
    assert rows["left-out step", "known[name] = value", "pass"]["outcome"] == "survived"
    assert rows["left-out step", "print(a)", "pass"]["reason"] == "nobody reads it"
    assert own["kill_rate"] == round(own["noticed"] / own["faults"], 4)
    assert "survived: src/coterie/own/tiny.py:15" in capsys.readouterr().err
    assert (tiny / "src/coterie/own/tiny.py").read_text() == SOURCE
    assert sampled_mutants.main(["nowhere", "--seed", "0", "--root", str(tiny)]) == 2


def test_packages_that_were_tried_apart_are_joined_to_what_one_command_stores(tmp_path, capsys):
    def part(package, outcomes, **changes):
        origin = {"commit": "c", "seeds": [4], "made": "today", "command": f"one of {package}",
                  "config": {"packages": [package], "count": 2}, "speaks_of": [package]}  # fmt: skip
        row = {
            "package": package,
            "file": "f.py",
            "line": 1,
            "kind": "constant",
            "before": "a",
            "after": "b",
        }
        rows = [{**row, "outcome": outcome} for outcome in outcomes]
        path = tmp_path / f"{package}.json"
        path.write_text(
            json.dumps({"origin": {**origin, **changes}, "totals": {}, "results": rows})
        )
        return str(path)

    files = [part("net", ["noticed", "survived"]), part("cluster", ["noticed", "equivalent"])]
    out = tmp_path / "stored" / "all.json"
    listed = tmp_path / sampled_mutants.EQUIVALENT / "own.toml"
    listed.parent.mkdir(parents=True)
    there = ["--root", str(tmp_path)]
    entry = "[[change]]\nfile = 'f.py'\nbefore = 'a'\nafter = 'b'\nreason = 'it is the same'\n"
    listed.write_text(entry)
    # What was noticed is no program of the same kind, whatever a list says.
    assert sampled_mutants.main(["--join", *files, "--out", str(out), *there]) == 0
    stored = json.loads(out.read_text())
    assert [row["outcome"] for row in stored["results"]] == [
        "noticed", "equivalent", "noticed", "equivalent",
    ]  # fmt: skip
    assert stored["results"][1]["reason"] == "it is the same"
    assert stored["totals"]["net"]["kill_rate"] == 1.0
    capsys.readouterr()
    assert sampled_mutants.main(["--join", *files, "--out", str(out)]) == 1, "net has a half"
    stored = json.loads(out.read_text())
    assert stored["origin"]["config"] == {"packages": ["net", "cluster"], "count": 2}
    assert stored["origin"]["speaks_of"] == ["cluster", "net"]
    assert stored["origin"]["command"].endswith("--seed 4 --count 2 net cluster")
    assert [row["outcome"] for row in stored["results"]] == [
        "noticed", "survived", "noticed", "equivalent",
    ]  # fmt: skip
    assert stored["totals"]["all"] == {
        "faults": 3, "noticed": 2, "timed out": 0, "survived": 1, "kill_rate": 0.6667, "equivalent": 1,
    }  # fmt: skip
    assert "net: 50.0% of 2 were noticed" in capsys.readouterr().out
    for changes in (
        {"seeds": [5]},
        {"commit": "d"},
        {"config": {"packages": ["cluster"], "count": 3}},
    ):
        other = part("cluster", [], **changes)
        assert sampled_mutants.main(["--join", files[0], other, "--out", str(out)]) == 2
    assert sampled_mutants.main(["--join", files[0], files[0], "--out", str(out)]) == 2
    assert json.loads(out.read_text()) == stored, "nothing is overwritten"


def test_a_limit_that_slow_tests_would_reach_is_refused(tmp_path, monkeypatch):
    """Then a test that is merely slow would count as one that noticed."""
    fault = mutants.Fault("own", "f", "f.py", "a", "b", ("t.py",))
    (tmp_path / "f.py").write_text("a")
    clock = iter([0.0, 100.0])
    monkeypatch.setattr(mutants, "copied", lambda root, folder: folder)
    monkeypatch.setattr(mutants, "pytest", lambda *_: (0, ""))
    monkeypatch.setattr(mutants.time, "monotonic", lambda: next(clock))
    with pytest.raises(
        mutants.Unusable, match=r"--limit is 199; the tests take 100 s .* 200 or more"
    ):
        mutants.everything([fault], tmp_path, 1, 199.0, room=2.0)
