"""The most floating-point operations a second that one core of this machine can do: what a share of peak is of.

A small native program runs chains of fused multiply-adds that do not wait for each other, in the
widest registers of the processor, in float32, without touching memory. PyTorch's product of two
large matrices is no such measure: on some processors it reaches less than half.
"""

import ctypes
import time
from typing import Any

from coterie._util.origin import describe_machine
from coterie.engine.native.compiler import load

# two units that take four or five cycles need eight or ten at once; AVX2 has 16 registers for them
CHAINS = 12
PROGRAM = """
#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef float vec __attribute__((vector_size(WIDTH)));

extern "C" int lanes() { return WIDTH / sizeof(float); }

// Return the sum of all chains after `steps` times x = x * factor + term; each starts with another value.
extern "C" float chains(long steps, float factor, float term) {
  const vec zero = {}, f = zero + factor, t = zero + term;
  vec a = t, b = 2 * t, c = 3 * t, d = 4 * t, e = 5 * t, g = 6 * t;
  vec h = 7 * t, i = 8 * t, j = 9 * t, k = 10 * t, l = 11 * t, m = 12 * t;
  for (long step = 0; step < steps; step++) {
    a = a * f + t; b = b * f + t; c = c * f + t; d = d * f + t; e = e * f + t; g = g * f + t;
    h = h * f + t; i = i * f + t; j = j * f + t; k = k * f + t; l = l * f + t; m = m * f + t;
  }
  const vec all = a + b + c + d + e + g + h + i + j + k + l + m;
  float sum = 0;
  for (int lane = 0; lane < lanes(); lane++) sum += all[lane];
  return sum;
}
"""


class Peak:
    """Measures the peak of the core that runs it.

    Raises:
        CompilerError: when there is no C++ compiler.
    """

    def __init__(self) -> None:
        self._program, _ = load(PROGRAM)
        self._program.chains.restype = ctypes.c_float
        self._program.chains.argtypes = (ctypes.c_long, ctypes.c_float, ctypes.c_float)
        self.lanes: int = self._program.lanes()

    def chains(self, steps: int, factor: float, term: float) -> float:
        """Return the sum of the chains after some steps of x = x * factor + term."""
        return self._program.chains(steps, factor, term)

    def flops(self, seconds: float = 0.02, repeats: int = 5) -> float:
        """Return the floating-point operations a second, an addition and a multiplication counted as two.

        Args:
            seconds: of one timing, about.
            repeats: how many timings; the fastest counts, since nothing makes a processor faster
                than it is.
        """
        steps, each = 1000, 0.0
        while each < seconds:
            steps *= 2
            each = self._seconds(steps)
        fastest = min(each, *(self._seconds(steps) for _ in range(repeats)))
        return 2.0 * CHAINS * self.lanes * steps / fastest

    def _seconds(self, steps: int) -> float:
        started = time.perf_counter()
        self.chains(steps, 0.999, 0.001)
        return time.perf_counter() - started


def machine_with_peak() -> dict[str, Any]:
    """Return what `origin.describe_machine` says, and this core's peak in GFLOP/s, float32."""
    return describe_machine() | {"fma_gflops": round(Peak().flops() / 1e9, 1)}
