"""Run native programs as another processor would: compiled for ARM, and executed by qemu.

A program takes addresses. Here each call of `train` or `measure` writes what these point to into a
file, as regions of memory with the places of the pointers among them. A small main function, compiled
with the program, reads them, makes the call and writes the regions back.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from coterie.engine.native import compiler, library, traced

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MAIN = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
static int64_t next(FILE* file) { int64_t value; if (fread(&value, 8, 1, file) != 1) abort(); return value; }
int main(int, char** argv) {
  FILE* file = fopen(argv[1], "rb");
  const int64_t function = next(file), first = next(file), last = next(file), regions = next(file);
  std::vector<char*> at; std::vector<int64_t> sizes;
  for (int64_t r = 0; r < regions; r++) {
    sizes.push_back(next(file));
    at.push_back((char*)aligned_alloc(64, (sizes[r] + 64 + 63) / 64 * 64));
    if (sizes[r] && fread(at[r], sizes[r], 1, file) != 1) abort();
  }
  for (int64_t left = next(file); left > 0; left--) {
    const int64_t from = next(file), offset = next(file), to = next(file), place = next(file);
    *(char**)(at[from] + offset) = at[to] + place;
  }
  fclose(file);
  if (function) measure((const Measuring*)at[0], first, last); else train((const Training*)at[0], first, last);
  file = fopen(argv[2], "wb");
  for (int64_t r = 0; r < regions; r++) fwrite(at[r], sizes[r], 1, file);
  return fclose(file);
}
"""


class EmulatedLibrary:
    """A compiled program whose functions run in an emulator.

    Args:
        program: the executable.
        held: the tensors whose addresses were taken, which jobs point into.
    """

    def __init__(self, program: Path, held: list[Tensor]) -> None:
        self.calls = 0

        def make(number: int) -> Callable[..., None]:
            def call(job: object, first: int, last: int) -> None:
                self.calls += 1
                _run(program, number, job._obj, first, last, held)  # type: ignore[attr-defined]

            return call

        self.train, self.measure = make(0), make(1)


def _run(
    program: Path, number: int, job: ctypes.Structure, first: int, last: int, held: list[Tensor]
) -> None:
    """Run one call: copy what the job points to into the emulator, and what it left there back."""
    spans = {}
    for tensor in held:
        memory = tensor.untyped_storage()
        spans[memory.data_ptr()] = memory.nbytes()
    places = [(ctypes.addressof(job), ctypes.sizeof(job)), *sorted(spans.items())]
    moves: list[tuple[int, int, int, int]] = []

    def find(address: int) -> tuple[int, int] | None:
        for region, (start, size) in enumerate(places):
            if start <= address < start + max(size, 1):
                return region, address - start
        return None

    def follow(region: int, offset: int, address: int) -> None:
        target = find(address)
        if target is None:  # the array of pointers to inputs, which no tensor owns
            places.append((address, 8 * max(1, inputs)))
            target = len(places) - 1, 0
            for entry in range(inputs):
                value = ctypes.c_void_p.from_address(address + 8 * entry).value
                if value:
                    follow(len(places) - 1, 8 * entry, value)
        moves.append((region, offset, *target))

    def walk(structure: ctypes.Structure, base: int) -> None:
        for name, kind in structure._fields_:  # type: ignore[misc]
            offset = base + getattr(type(structure), name).offset
            value = getattr(structure, name)
            if kind is ctypes.c_void_p and value:
                follow(0, offset, value)
            elif isinstance(value, ctypes.Structure):
                walk(value, offset)

    inputs = int(program.with_suffix(".inputs").read_text())
    walk(job, 0)
    given, left = program.with_suffix(".in"), program.with_suffix(".out")
    with given.open("wb") as file:
        file.write(struct.pack("<4q", number, first, last, len(places)))
        for start, size in places:
            file.write(struct.pack("<q", size) + ctypes.string_at(start, size))
        file.write(struct.pack("<q", len(moves)))
        for move in moves:
            file.write(struct.pack("<4q", *move))
    subprocess.run([EMULATOR, str(program), str(given), str(left)], check=True, timeout=300)
    data, pointers, place = left.read_bytes(), {0}, 0
    pointers |= {region for region, *_ in moves}
    for region, (start, size) in enumerate(places):
        if region not in pointers:
            ctypes.memmove(start, data[place : place + size], size)
        place += size


def emulate_arm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[EmulatedLibrary]:
    """Let what is compiled from here on be for ARM v8.2, and run in an emulator.

    Returns:
        The programs, as they are made.
    """
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no emulator of ARM: {tool} is not installed")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", COMPILER)
    compiler.find_compiler.cache_clear()
    compiler.describe_target.cache_clear()
    monkeypatch.setattr(compiler, "_processor_flag", lambda: "-march=armv8.2-a")
    held: list[Tensor] = []
    made: list[EmulatedLibrary] = []

    def note_address(tensor: Tensor | None) -> int | None:
        if tensor is not None:
            held.append(tensor)
        return None if tensor is None else tensor.data_ptr()

    for module in (library, traced):
        monkeypatch.setattr(module, "address_of", note_address)

    def load(text: str, flags: tuple[str, ...] = ()) -> tuple[EmulatedLibrary, float]:
        program = folder / f"program{len(made)}"
        source = program.with_suffix(".cpp")
        source.write_text(text + MAIN)
        usual = [flag for flag in compiler._FLAGS if flag not in ("-shared", "-fPIC")]
        march = compiler.describe_machine()[1]
        subprocess.run(
            [COMPILER, *usual, *flags, march, "-static", str(source), "-o", str(program)],
            check=True,
            timeout=300,
        )
        count = text.partition("constexpr int INPUTS = ")[2].partition(";")[0]
        program.with_suffix(".inputs").write_text(count)
        made.append(EmulatedLibrary(program, held))
        return made[-1], 0.0

    monkeypatch.setattr(compiler, "load", load)
    return made
