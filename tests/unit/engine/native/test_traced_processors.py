"""Native programs of other processors and compilers: ARM v8.2 by an emulator, and clang."""

import ctypes
import shutil

import pytest
from tests.emulation import emulate_arm
from tests.unit.engine import test_loop_own_modules as modules
from tests.unit.engine.native import test_traced as kinds

from coterie.engine.native import compiler
from coterie.engine.native.compiler import vector_bytes

SIX = ["turned", "lanes", "broad", "images", "words", "table"]
"""Samples across the vector, plain layers, every layer of images, recurrent layers and attention."""
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    compiler.find_compiler.cache_clear()
    compiler.describe_target.cache_clear()


@pytest.mark.parametrize("name", SIX)
def test_on_arm_a_module_trains_and_is_measured_as_by_the_loop_engine(name, monkeypatch, tmp_path):
    programs = emulate_arm(monkeypatch, tmp_path)
    assert vector_bytes() == 16
    kinds.check_against_the_loop_engine(name)
    (program,) = programs
    assert program.calls >= 4, "twice trained and twice measured, all by the emulator"


def test_on_arm_images_and_noise_are_prepared_and_draws_are_the_loop_engines(monkeypatch, tmp_path):
    """Bytes, crops, flips and noise of inputs; dropout; and normal noise, whose logarithms are the system's."""
    emulate_arm(monkeypatch, tmp_path)
    kinds.test_images_of_bytes_are_prepared_augmented_and_disturbed_as_by_the_loop_engine()
    for name in ("asks for types", "noise: normal"):
        modules.test_a_program_draws_for_a_large_batch_what_the_loop_engine_draws(name)


@pytest.mark.parametrize("name", SIX)
def test_clang_compiles_the_same_program(name, monkeypatch):
    if shutil.which("clang++") is None:
        pytest.skip("no other compiler: clang++ is not installed")
    monkeypatch.setenv("CXX", "clang++")
    compiler.find_compiler.cache_clear()
    compiler.describe_target.cache_clear()
    made = []
    load = compiler.load

    def note(text: str, flags: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, float]:
        made.append(load(text, flags))
        return made[-1]

    monkeypatch.setattr(compiler, "load", note)
    assert "__clang__" in compiler.describe_machine()[-1]
    kinds.check_against_the_loop_engine(name)
    assert made
