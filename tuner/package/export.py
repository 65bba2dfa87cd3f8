"""Winners and trials in formats that other tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.package.files import replace, require_file, require_folder
from tuner.records import Measurement, Trial, UsageError, Value, Winner, Workload, format_value

FORMATS = ("json", "csv", "vllm", "t4", "optuna")
"""The formats: winners (json, vllm) or all trials (csv, t4, optuna)."""

SCHEMA_VERSION = 1
T4_VERSION = "1.0.0"

_VLLM_NAMES = {
    "BLOCK_M": "BLOCK_SIZE_M",
    "BLOCK_N": "BLOCK_SIZE_N",
    "BLOCK_K": "BLOCK_SIZE_K",
    "GROUP_M": "GROUP_SIZE_M",
    "NUM_WARPS": "num_warps",
    "NUM_STAGES": "num_stages",
}


def write(
    form: str, output: Path, *, winners: Sequence[Winner], trials: Sequence[Trial]
) -> list[Path]:
    """Write winners or trials in one of `FORMATS` and return the files written.

    Args:
        form: The format.
        output: The file; a folder for vllm, and for t4 unless its name ends in ``.json``.
        winners: What json and vllm hold.
        trials: What csv and t4 hold.

    Raises:
        UsageError: The format is unknown, or there is nothing to write in it.
    """
    _require_known(form)
    if not (trials if form in ("csv", "t4", "optuna") else winners):
        raise UsageError(f"--format {form}: there is nothing to export; run `tune` first")
    if form == "optuna":
        from tuner.package.journal import write_journal  # optuna takes a second to import

        write_journal(output, trials)
        return [output]
    match form:
        case "json":
            files = {output: winners_json(winners)}
        case "csv":
            files = {output: trials_csv(trials)}
        case "vllm":
            files = {output / name: text for name, text in vllm_files(winners).items()}
        case _:
            files = _t4_files(trials, output)
    for path, text in files.items():
        replace(path, text)
    return list(files)


def require_output(form: str, output: str) -> None:
    """Raise UsageError unless a format can be written to what the user named.

    Args:
        form: The format.
        output: A file or a folder, which one may say by a slash at its end.
    """
    _require_known(form)
    path = Path(output)
    if form == "vllm" or (form == "t4" and not _is_json(path)):
        require_folder(f"--format {form}: --output", path)
    elif output.endswith("/"):
        raise UsageError(f"--format {form}: --output {output}: names a folder; name a file")
    else:
        require_file(f"--format {form}: --output", path)


def _require_known(form: str) -> None:
    if form not in FORMATS:
        raise UsageError(f"--format {form}: must be one of {', '.join(FORMATS)}")


def winners_json(winners: Sequence[Winner]) -> str:
    """Return all that is known of the winners, their sources included."""
    return _dumps(
        {"schema_version": SCHEMA_VERSION, "winners": [codec.to_json(item) for item in winners]}
    )


def trials_csv(trials: Sequence[Trial]) -> str:
    """Return one row per trial, each parameter in a column of its name.

    A measured trial's stage is ``correct``; times are in milliseconds.
    """
    import pandas as pd  # here: it takes most of a second to import

    frame = pd.DataFrame([_row(trial) for trial in trials])
    for name in frame.columns:
        if name in ("samples", "shared_bytes", "registers", "spills"):
            frame[name] = frame[name].astype("Int64")
    return str(frame.to_csv(index=False, lineterminator="\n"))


def vllm_files(winners: Sequence[Winner]) -> dict[str, str]:
    """Return files in the layout of vLLM's and SGLang's tuned configurations.

    One file per N, K, device, dtype and flags; in it, one entry per M, its parameters under the
    names that those projects use, and the version of Triton where there is one.

    Raises:
        UsageError: No winner's kernel has the dims M, N and K, or none was searched.
    """
    fitting = [
        winner for winner in winners if {"M", "N", "K"} <= dict(winner.workload.dims).keys()
    ]
    if not fitting:
        kernels = ", ".join(sorted({winner.workload.kernel for winner in winners}))
        raise UsageError(f"--format vllm: needs a kernel with the dims M, N and K, not {kernels}")
    fitting = [
        winner for winner in fitting if winner.searched
    ]  # as M, too, is served by the nearest
    if not fitting:
        raise UsageError("--format vllm: no workload was searched; run `tune` with more --budget")
    several = len({winner.workload.kernel for winner in fitting}) > 1
    files: dict[str, dict[str, Any]] = {}
    for winner in sorted(fitting, key=lambda winner: dict(winner.workload.dims)["M"]):
        folder = f"{winner.workload.kernel}/" if several else ""
        entries = files.setdefault(folder + _vllm_name(winner), {})
        versions = dict(winner.device.versions)
        if "triton" in versions and winner.source.language != "cpp":
            entries["triton_version"] = versions["triton"]
        entries[str(dict(winner.workload.dims)["M"])] = {
            _VLLM_NAMES.get(name, name): value for name, value in winner.candidate.parameters
        }
    return {name: _dumps(entries) for name, entries in sorted(files.items())}


def t4_json(trials: Sequence[Trial]) -> str:
    """Return the trials of one workload as Kernel Tuner's T4 results, version 1.0.0.

    Times are in milliseconds, as Kernel Tuner writes them.
    """
    return _dumps({"schema_version": T4_VERSION, "results": [_t4_result(item) for item in trials]})


def _row(trial: Trial) -> dict[str, Value | None]:
    row: dict[str, Value | None] = {
        "number": trial.number,
        "kernel": trial.workload.kernel,
        "workload": str(trial.workload),
        "template": trial.candidate.template,
        **dict(trial.candidate.parameters),
    }
    if isinstance(trial.outcome, Measurement):
        measured = codec.to_json(trial.outcome)
        row |= {"stage": "correct", **measured.pop("resources"), **measured}
    else:
        row |= {"stage": trial.outcome.stage, "reason": trial.outcome.reason}
    return row | {"seconds": trial.seconds, "source_sha256": trial.source_sha256}


def _vllm_name(winner: Winner) -> str:
    workload = winner.workload
    device = "_".join(winner.device.name.replace("/", " ").split())
    names: dict[str, Value] = {name: extent for name, extent in workload.dims if name != "M"}
    names |= {"device_name": device, "dtype": workload.dtype, **dict(workload.flags)}
    return ",".join(f"{name}={format_value(value)}" for name, value in names.items()) + ".json"


def _t4_files(trials: Sequence[Trial], output: Path) -> dict[Path, str]:
    groups: dict[Workload, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.workload, []).append(trial)
    if _is_json(output):
        if len(groups) > 1:
            raise UsageError(
                f"--format t4: --output {output}: is one file, but the trials are of "
                f"{len(groups)} workloads with a file each: name a folder, such as "
                f"{output.with_suffix('')}"
            )
        return {output: t4_json(trials)}
    return {
        output / f"{workload.kernel},{workload}.json": t4_json(group)
        for workload, group in groups.items()
    }


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _t4_result(trial: Trial) -> dict[str, Any]:
    configuration = {"template": trial.candidate.template, **dict(trial.candidate.parameters)}
    result: dict[str, Any] = {"configuration": configuration, "objectives": ["time"]}
    match trial.outcome:
        case Measurement() as measured:
            times: Mapping[str, Any] = {
                "compilation_time": measured.compile_s * 1e3,
                "runtimes": [measured.median_ms],
            }
            values = {
                "time": (measured.median_ms, "ms"),
                "time_low": (measured.low_ms, "ms"),
                "time_high": (measured.high_ms, "ms"),
                "shared": (measured.resources.shared_bytes, "bytes"),
                "registers": (measured.resources.registers, ""),
                "spills": (measured.resources.spills, ""),
            }
            measurements = [
                {"name": name, "value": value, "unit": unit}
                for name, (value, unit) in values.items()
                if value is not None
            ]
            result |= {"times": times, "invalidity": "correct", "correctness": 1}
            return result | {"measurements": measurements}
        case rejection:
            result |= {"times": {}, "invalidity": rejection.stage, "correctness": 0}
            return result | {"measurements": []}


def _dumps(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
