"""Others' results as first candidates: what they chose, in the names of our parameters."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.package.freeze import RUNTIME
from tuner.package.reading import package_winners
from tuner.records import Candidate, UsageError, Winner, Workload, format_value
from tuner.search.tables import read_tables
from tuner.space.feasible import FeasibleSet
from tuner.space.template import TemplateSpec

FORMATS = (
    "a configuration of vLLM or SGLang, a *.autotune.json of Triton, a configuration or cache "
    "entry of Helion, a cache or T4 results of Kernel Tuner, a trials.jsonl, winners.json or CSV "
    "export of ours, or a folder: of a package or store of ours, or of such files"
)
MOST = 4
"""Configurations that a workload takes over of a file: the nearest workloads', then the fastest.
More are like these, and cost what the search finds on its own (`benchmarks/seeds.py`)."""

_HELION_BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
_SAME = re.compile(r"(BLOCK|GROUP)_?SIZE_")


@dataclass(frozen=True, slots=True)
class Seed:
    """A configuration that someone found good.

    Attributes:
        parameters: Its values under the names of whoever found it.
        template: Our template, where it is one of ours.
        kernel: Our kernel, where it is one of ours.
        dims: What is known of the workload's extents.
        time_ms: The time, where it is known.
    """

    parameters: tuple[tuple[str, Any], ...]
    template: str | None = None
    kernel: str | None = None
    dims: tuple[tuple[str, int], ...] = ()
    time_ms: float = math.inf


@dataclass(slots=True)
class Fit:
    """What a workload takes over, and how often something was left out for a reason."""

    candidates: list[Candidate] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_seeds(path: Path) -> list[Seed]:
    """Return the configurations of a file or folder, in one of the `FORMATS`.

    Of a folder of files, those of none of the formats are left out.

    Raises:
        UsageError: It cannot be read or is none of them.
    """
    if (path / RUNTIME).is_dir():
        return [_of_winner(winner) for winner in package_winners(path)]
    if path.is_dir():
        return _of_folder(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix != ".gz":
            raise UsageError(f"--seed-from {path}: cannot be read: {error}") from error
        text = ""
    try:
        data = json.loads(text)
        seeds = _of_json(data, path) if isinstance(data, dict) else []
    except (KeyError, TypeError, ValueError):
        seeds = []  # a table's reader says what is wrong, if it is none either
    seeds = seeds or _of_tables(path)
    if not seeds:
        raise UsageError(f"--seed-from {path}: holds no configuration; it may be {FORMATS}")
    return seeds


def _of_folder(path: Path) -> list[Seed]:
    seeds: list[Seed] = []
    for file in sorted({*path.glob("*/trials.jsonl"), *filter(Path.is_file, path.iterdir())}):
        with suppress(UsageError):
            seeds += read_seeds(file)
    if not seeds:
        raise UsageError(f"--seed-from {path}: no file in it holds a configuration")
    return seeds


def fit(workload: Workload, feasible: FeasibleSet, seeds: Sequence[Seed]) -> Fit:
    """Return the candidates that a workload takes over: nothing is rounded to what it allows.

    What a configuration does not say has the template's default value.

    Args:
        workload: The workload.
        feasible: What may be tried for it.
        seeds: A file's configurations, of any kernels.
    """
    found, taken = Fit(), 0
    extents, kernel = dict(workload.dims), workload.kernel
    mine = [seed for seed in seeds if seed.kernel in (None, kernel)]
    for seed in sorted(mine, key=lambda seed: (_distance(seed, extents), seed.time_ms)):
        given = candidates_of(kernel, feasible, seed, found.left_out)
        before = len(found.candidates)
        found.candidates += [item for item in given if item not in found.candidates]
        taken += len(found.candidates) > before
        if taken == MOST:
            break
    return found


def candidates_of(
    kernel: str, feasible: FeasibleSet, seed: Seed, left_out: Counter[str]
) -> Iterator[Candidate]:
    """Yield a configuration as a candidate of each template that knows most of its names.

    Args:
        kernel: The kernel's name.
        feasible: What may be tried.
        seed: The configuration.
        left_out: Counts why it is none.
    """
    given = {_canonical(name): (name, value) for name, value in seed.parameters}
    parts = [part for part in feasible.templates if seed.template in (None, part.spec.name)]
    known = {part.spec.name: given.keys() & _names(part.spec).keys() for part in parts}
    most = max(map(len, known.values()), default=0)
    if not most:
        what = f"template {seed.template}" if seed.template else ", ".join(dict(seed.parameters))
        left_out[f"{what}: unknown to {kernel} on this device"] += 1
        return
    for part in parts:
        if len(known[part.spec.name]) < most:
            continue
        for name in given.keys() - known[part.spec.name]:
            left_out[f"{part.spec.name}: unknown parameter {given[name][0]}"] += 1
        values = {key: value for key, (_, value) in given.items() if key in _names(part.spec)}
        candidate = _candidate(part.spec, values, left_out)
        if candidate is None:
            continue
        if candidate in feasible:
            yield candidate
        for constraint in part.spec.broken(candidate, part.limits):
            left_out[f"{part.spec.name}: breaks {constraint}"] += 1


def _candidate(
    spec: TemplateSpec, values: Mapping[str, Any], left_out: Counter[str]
) -> Candidate | None:
    """Return the candidate with these values, None if one of them is none of the choices."""
    names, chosen, choices = _names(spec), dict(spec.default.parameters), dict(spec.parameters)
    for key, value in values.items():
        name = names[key]
        same = [item for item in choices[name] if item == value]  # 1 stands for true, too
        if not same:
            allowed = ", ".join(map(format_value, choices[name]))
            left_out[f"{spec.name}: {name}={format_value(value)} is not one of {allowed}"] += 1
            return None
        chosen[name] = same[0]
    return Candidate.of(spec.name, chosen)


def _names(spec: TemplateSpec) -> dict[str, str]:
    return {_canonical(name): name for name, _ in spec.parameters}


def _canonical(name: str) -> str:
    """Return a parameter's name in the one of the spellings that they share."""
    return _SAME.sub(r"\1_", name.upper())


def _distance(seed: Seed, extents: Mapping[str, int]) -> float:
    """Return how far the known extents of a configuration's workload are from ours, in logs."""
    logs = (abs(math.log(size / extents[dim])) for dim, size in seed.dims if dim in extents)
    return sum(logs) if seed.dims else math.inf


def _of_json(data: Mapping[str, Any], path: Path) -> list[Seed]:
    """Return the configurations of a JSON file that is no table, none if it is unknown."""
    if "configs_timings" in data:
        seeds = [_of_triton(config, timing) for config, timing in data["configs_timings"]]
        return [seed for seed in seeds if math.isfinite(seed.time_ms)]  # the others failed
    if "winners" in data:
        return [_of_winner(codec.from_json(Winner, item)) for item in data["winners"]]
    if "config" in data and "key" in data:  # Helion's cache holds its configuration as text
        return [_of_helion(json.loads(data["config"]))]
    if "block_sizes" in data or "pid_type" in data:
        return [_of_helion(data)]
    return [_of_vllm(int(key), item, path) for key, item in data.items() if key.isdecimal()]


def _of_triton(config: Mapping[str, Any], timing: Any) -> Seed:
    options = {name: value for name, value in config.items() if name != "kwargs"}
    median_ms = timing[0] if isinstance(timing, list) else timing
    return _seed({**config["kwargs"], **options}, time_ms=float(median_ms))


def _of_helion(config: Mapping[str, Any]) -> Seed:
    values = dict(config)
    blocks = values.get("block_sizes", [])
    if len(blocks) == len(_HELION_BLOCKS):  # of a product of matrices, in the order of its loops
        values |= dict(zip(_HELION_BLOCKS, values.pop("block_sizes"), strict=True))
    if values.get("l2_groupings"):
        values["GROUP_M"] = values.pop("l2_groupings")[0]
    return _seed(values)


def _of_vllm(m: int, config: Mapping[str, Any], path: Path) -> Seed:
    """Return one entry of a file that is named after N and K and has an entry per M."""
    named = re.findall(r"(?:^|,)([NK])=(\d+)", path.name)
    dims = {"M": m, **{name: int(extent) for name, extent in named}}
    return _seed(config, dims=tuple(dims.items()))


def _of_winner(winner: Winner) -> Seed:
    chosen, workload = winner.candidate, winner.workload
    return Seed(chosen.parameters, chosen.template, workload.kernel, workload.dims)


def _of_tables(path: Path) -> list[Seed]:
    seeds = []
    for table in read_tables(path):
        kernel, _, workload = table.space.rpartition(":")
        pairs = (pair.partition("=")[::2] for pair in workload.split(",") if kernel)
        dims = tuple((name, int(extent)) for name, extent in pairs if extent.isdecimal())
        for key, time_ms in table.times.items():
            if time_ms is not None:
                chosen = table.feasible.candidate(key)
                template = None if chosen.template == "table" else chosen.template
                seeds.append(Seed(chosen.parameters, template, kernel or None, dims, time_ms))
    return seeds


def _seed(values: Mapping[str, Any], **known: Any) -> Seed:
    """Return a configuration without what it leaves open."""
    return Seed(
        tuple((name, value) for name, value in values.items() if value is not None), **known
    )
