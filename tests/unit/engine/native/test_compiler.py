"""Which compiler is found, what programs are compiled for, and what is said when that fails."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.engine.native import compiler
from coterie.engine.native.compiler import CompilerError

ANSWER = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder in which alone compilers are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    compiler.find_compiler.cache_clear()
    compiler.describe_target.cache_clear()


def install(folder: Path, name: str, text: str = "#!/bin/sh\n") -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    forget()
    return str(path)


def test_the_compiler_that_is_named_comes_before_the_usual_ones(tools, monkeypatch):
    with pytest.raises(
        CompilerError, match=r"no C\+\+ compiler was found .*; install one, or name"
    ):
        compiler.find_compiler()
    for name in ("clang++", "g++", "c++", "own"):
        path = install(tools, name)
        if name == "own":
            monkeypatch.setenv("CXX", "own")
            forget()
        assert compiler.find_compiler() == path
    monkeypatch.setenv("CXX", "none-of-this-name")
    forget()
    assert compiler.find_compiler() == str(tools / "c++")


@pytest.mark.parametrize(
    ("features", "expected"),
    [("__AVX512F__ 1\n#define __AVX__ 1", 64), ("__AVX__ 1", 32), ("__SSE2__ 1", 16), ("__AVX2__ 1", 16)],
)  # fmt: skip
def test_registers_are_as_wide_as_the_compiler_says(tools, features, expected):
    text = f"#!/bin/sh\n/bin/cat <<END\n#define {features}\nEND\n"
    path = install(tools, "c++", text)
    assert compiler.vector_bytes() == expected
    found = compiler.describe_machine()
    assert (found[0], found[1]) == (path, compiler._processor_flag())
    assert features in found[-1]


FAKE = """#!/bin/sh
case "$*" in *-dM*) exit 0 ;; esac
{}
"""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'x.cpp:1: error: wrong' >&2; echo more >&2; exit 1", r"failed: x\.cpp:1: error: wrong$"),
        ("exit 1", "failed: no message$"),
        ("exit 0", "failed: no message$"),  # and no program
        ("exec /bin/sleep 20", "took more than 0.2 seconds"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_said_and_leaves_nothing(tools, cache, monkeypatch, does, said):
    install(tools, "c++", FAKE.format(does))
    compiler.describe_machine()
    monkeypatch.setattr(compiler, "_SECONDS", 0.2)
    with pytest.raises(CompilerError, match=said):
        compiler.load(ANSWER)
    assert list((cache / "compiled").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(cache):
    cache.mkdir(exist_ok=True)
    (cache / "compiled").write_text("a file")
    with pytest.raises(CompilerError, match="the compiled program cannot be kept or loaded: "):
        compiler.load(ANSWER)


def test_a_program_and_its_digest_are_their_owners_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        compiler.load(ANSWER)
    finally:
        os.umask(before)
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in (cache / "compiled").iterdir()}
    assert modes == {".so": 0o600, ".sha256": 0o600}
    assert (cache / "compiled").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_to_which_a_group_or_others_may_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(CompilerError, match=f"belongs to user {os.geteuid()} with mode {mode:o};"):
        compiler._check_private(tmp_path)
    tmp_path.chmod(0o755)
    compiler._check_private(tmp_path)


def test_programs_of_other_text_flags_or_machines_are_other_files(cache, monkeypatch):
    def files() -> int:
        return len(list((cache / "compiled").glob("*.so")))

    compiler.load(ANSWER)
    compiler.load(ANSWER, ("-DMORE",))
    assert files() == 2
    compiler.load(ANSWER + "\n")
    assert files() == 3
    here = compiler.describe_machine()
    monkeypatch.setattr(
        compiler, "describe_machine", lambda: (*here[:-1], here[-1] + "#define A\n")
    )
    compiler.load(ANSWER)
    assert files() == 4


def test_options_reach_the_compiler(cache):
    text = 'extern "C" int answer() { return NUMBER; }'
    program, seconds = compiler.load(text, ("-DNUMBER=7",))
    assert program.answer() == 7
    assert 0 < seconds < 60
