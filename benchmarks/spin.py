"""Kernels whose true times are known: one takes as long as its number of rounds says."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.devices.cpu import Cpu
from tuner.runtime.cpp import compile_source
from tuner.timing.clock import Clock

SOURCE = """\
#include <cstdint>

// A chain of multiplications that no compiler shortens: each waits for the one before.
extern "C" void spin(int64_t rounds) {
  uint64_t x = 1;
  for (int64_t i = 0; i < rounds; ++i) {
    x = x * 6364136223846793005u + 1;
    asm volatile("" : "+r"(x));
  }
}
"""

Spin = Callable[[int], Callable[[], None]]


def build(folder: Path) -> Spin:
    """Return what makes the call of a number of rounds, compiled into a folder."""
    path = folder / "spin.cpp"
    path.write_text(SOURCE)
    entry = ctypes.CDLL(str(compile_source(path, cache=folder))).spin
    entry.argtypes, entry.restype = [ctypes.c_int64], None

    def call_of(rounds: int) -> Callable[[], None]:
        return lambda: entry(rounds)

    return call_of


def cpu_clock() -> Clock:
    """Return a calibrated clock of the CPU."""
    clock = Clock(Cpu())
    clock.calibrate(None)
    return clock


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy, in bursts, as other people's work does."""
    code = (
        "import random, time\n"
        "while True:\n"
        "    until = time.perf_counter() + random.uniform(0.0, 0.02)\n"
        "    while time.perf_counter() < until: pass\n"
        "    time.sleep(random.uniform(0.0, 0.02))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()
