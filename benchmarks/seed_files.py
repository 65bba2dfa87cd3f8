"""Results of a recorded space in the files of several tools, written by those tools.

Kernel Tuner searches the table in its simulation mode; Triton's autotuner gets the table's times
in the place of its benchmark's, which needs a GPU; Helion saves a configuration that it has not
searched for; the tuner searches the table and exports.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from tuner.package.export import trials_csv, winners_json
from tuner.records import (
    DeviceInfo,
    Interval,
    Measurement,
    Rejection,
    Source,
    Trial,
    Winner,
    Workload,
)
from tuner.search.replay import SAMPLERS
from tuner.search.tables import Table

EVALUATIONS = 100
"""Candidates that a search evaluates before it writes its file."""

_LISTED = 32
"""Configurations that an autotuner's user lists."""

Writer = Callable[[Table, int, Path], Path]
"""Writes a file about a table, with a seed for what is random, into a folder of the table."""


def workload(table: Table) -> Workload:
    """Return the workload that a table stands for: its name begins with the kernel's."""
    return Workload(table.space.partition("_")[0], (), "float32")


def _valid(table: Table) -> dict[int, float]:
    return {key: time_ms for key, time_ms in table.times.items() if time_ms is not None}


def _values(table: Table, key: int) -> dict[str, object]:
    """Return a candidate's parameters in the order of the table's columns."""
    chosen = dict(table.feasible.candidate(key).parameters)
    return {name: chosen[name] for name, _ in table.feasible.templates[0].spec.parameters}


def kernel_tuner_cache(table: Table, seed: int, folder: Path) -> Path:
    """Write Kernel Tuner's cache of the whole table, as an exhaustive run leaves it."""
    del seed
    from kernel_tuner import util
    from kernel_tuner.interface import Options
    from kernel_tuner.runners.simulation import SimulationDevice

    path = folder / "cache.json"
    choices = {name: list(values) for name, values in table.feasible.templates[0].spec.parameters}
    kernel = Options(kernel_name=workload(table).kernel, problem_size=1)
    tuning = Options(tune_params=choices, objective=["time"], simulation_mode=False)
    device = SimulationDevice(1 << 30, {"device_name": table.space}, True)
    util.process_cache(str(path), kernel, tuning, Options(get_device_info=lambda: device))
    known: dict[str, object] = {}
    spent = {f"{name}_time": 0 for name in ("compile", "verification", "benchmark")}
    for key, time_ms in table.times.items():
        values = _values(table, key)
        outcome = {"time": time_ms, **spent}
        if time_ms is None:
            outcome |= {
                "time": util.RuntimeFailedConfig(),
                "__error__": util.RuntimeFailedConfig(),
            }
        util.store_cache(",".join(map(str, values.values())), values | outcome, str(path), known)
    util.close_cache(str(path))
    return path


def kernel_tuner_t4(table: Table, seed: int, folder: Path) -> Path:
    """Let Kernel Tuner's genetic algorithm search the table and write T4 results."""
    import kernel_tuner
    from kernel_tuner.file_utils import store_output_file

    cache = folder / "cache.json"
    if not cache.exists():
        kernel_tuner_cache(table, seed, folder)
    random.seed(seed)
    np.random.seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        results, _ = kernel_tuner.interface.tune_cache(
            str(cache), strategy="genetic_algorithm", strategy_options={"max_fevals": EVALUATIONS}
        )
    path = folder / f"t4_{seed}.json"
    store_output_file(str(path), results, dict(table.feasible.templates[0].spec.parameters))
    return path


class _Unlaunched:
    """A kernel whose launches do nothing: the autotuner times it by a table."""

    def __init__(self, fn: JITFunction) -> None:
        self.fn = fn

    def run(self, *arguments: object, **options: object) -> None:
        """Do nothing."""


class _Driver:
    """Says which card there is, and knows nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def _with_driver(stand_in: _Driver) -> Iterator[None]:
    before = driver._active  # reset_active() looks for a card
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


@triton.jit
def recorded_kernel(extent):
    pass


def triton_autotune(table: Table, seed: int, folder: Path) -> Path:
    """Let Triton's autotuner time a list of random configurations and keep what it found."""
    keys = np.random.default_rng(seed).choice(list(table.times), _LISTED, replace=False).tolist()
    configs = [triton.Config(_values(table, key)) for key in keys]
    autotuner = Autotuner(
        *(_Unlaunched(recorded_kernel), ["extent"], configs, ["extent"], None, None),
        do_bench=_answering(table, keys),
        cache_results=True,
    )
    with _with_driver(_Driver()), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / f"triton_{seed}")
        autotuner.run(1)
        (path,) = Path(triton.knobs.cache.dir).glob("*/*.autotune.json")
    return path


def _answering(table: Table, keys: list[int]) -> Callable[..., list[float]]:
    """Return a benchmark that gives the times of some candidates one after the other."""
    times = iter([table.times[key] for key in keys])

    def bench(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        call()
        time_ms = next(times)
        if time_ms is None:
            raise OutOfResources(1, 0, "a resource that the table does not name")
        return [time_ms] * len(quantiles)

    return bench


def helion_config(table: Table, seed: int, folder: Path) -> Path:
    """Write the table's fastest configuration as Helion saves one, each parameter a tunable."""
    del seed
    import helion

    valid = _valid(table)
    path = folder / "helion.json"
    chosen = _values(table, min(valid, key=valid.__getitem__))
    helion.Config(pid_type="flat", num_warps=4, num_stages=1, **chosen).save(path)
    return path


def _trials(table: Table, seed: int) -> Iterator[Trial]:
    """Yield the trials of the tuner's own search of the table."""
    strategy = SAMPLERS["tuner"](table, seed)
    for number in range(min(EVALUATIONS, len(table.times))):
        key = strategy.ask()
        time_ms = table.times[key]
        strategy.tell(key, time_ms)
        outcome: Measurement | Rejection = Rejection("runtime", "recorded as a failure")
        if time_ms is not None:
            outcome = Measurement(time_ms, time_ms, time_ms, 1, "warm", 0.0)
        yield Trial(
            *(number, workload(table), table.feasible.candidate(key), "0" * 64, outcome, 0.0)
        )


def tuner_trials(table: Table, seed: int, folder: Path) -> Path:
    """Export the trials of the tuner's own search of the table."""
    path = folder / f"trials_{seed}.csv"
    path.write_text(trials_csv(list(_trials(table, seed))), encoding="utf-8")
    return path


def tuner_winners(table: Table, seed: int, folder: Path) -> Path:
    """Export the winner of the tuner's own search of the table."""
    timed = {
        trial: trial.outcome.median_ms
        for trial in _trials(table, seed)
        if isinstance(trial.outcome, Measurement)
    }
    best = min(timed, key=timed.__getitem__)
    path = folder / f"winners_{seed}.json"
    path.write_text(winners_json([_winner(best, best.outcome)]), encoding="utf-8")
    return path


def _winner(trial: Trial, time: Measurement) -> Winner:
    """Return a trial as a winner that raced against nobody."""
    source = Source(trial.workload.kernel, "cpp", "")
    return Winner(
        *(trial.workload, trial.candidate, trial.candidate, source, source, time, time),
        *(Interval(1.0, 1.0, 1.0), None, None, None, ()),
        *(DeviceInfo("cuda", "recorded", "recorded", (), (), ()), "recorded", 0, "2026-11-30"),
    )


@dataclass(frozen=True, slots=True)
class Format:
    """A file format with who writes it.

    Attributes:
        name: What the results call it.
        package: The package that writes it.
        holds: What the file holds.
        write: Writes it.
        random: Whether what is written depends on the seed.
    """

    name: str
    package: str
    holds: str
    write: Writer
    random: bool = True


FORMATS = (
    Format("Kernel Tuner cache", "kernel_tuner", "all", kernel_tuner_cache, random=False),
    Format(
        *("Kernel Tuner T4", "kernel_tuner"),
        *(f"its genetic algorithm's {EVALUATIONS} evaluations", kernel_tuner_t4),
    ),
    Format("Triton *.autotune.json", "triton", f"{_LISTED} at random", triton_autotune),
    Format("Helion configuration", "helion", "the fastest of all", helion_config, random=False),
    Format("tuner trials.csv", "tuner", f"our search's {EVALUATIONS} evaluations", tuner_trials),
    Format(
        *("tuner winners.json", "tuner", f"the best of our search's {EVALUATIONS} evaluations"),
        tuner_winners,
    ),
)
