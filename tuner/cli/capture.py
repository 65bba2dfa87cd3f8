"""`tune capture`: what a Python program spends on operations that kernels of ours do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tuner.catalog import Catalog
from tuner.package.files import PARTIAL, require_file
from tuner.records import UsageError
from tuner.space.schema import read_captured_file

_ROOT = Path(__file__).parent.parent.parent
_MOST_LINES = 10
_RECORDER_NEEDS: tuple[str, ...] = ("torch", "yaml", "pydantic", "numpy")
_MISSING = (
    "import importlib.util, sys; sys.path.insert(0, '')\n"
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)
"""Prints which of the modules that its arguments name are not there."""


def capture_program(
    program: Sequence[str],
    output: Path,
    *,
    folders: Sequence[Path],
    environment: Mapping[str, str],
) -> int:
    """Run a program, write what was recorded and print the most expensive of it.

    Args:
        program: ``python``, then what Python's own command line would have.
        output: The file that is written.
        folders: The user's own folders of kernels.
        environment: The program's environment.

    Returns:
        The program's exit status; 1 if it did nothing that a kernel of ours does.
    """
    Catalog(folders)  # says what is wrong with them
    if not re.fullmatch(r"python[\d.]*", Path(program[0]).name) or len(program) < 2:
        raise UsageError(
            f"tune capture: runs `python FILE`, `python -m MODULE` or `python -c CODE`, but got "
            f'{program[0]!r}; elsewhere write `with tuner.capture("captured.yaml"):`'
        )
    require_file("--output", output)
    _require_runnable(program, environment)
    output.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    names = [str(folder.absolute()) for folder in folders]
    partial = output.with_name(f".{output.name}{PARTIAL}")
    partial.unlink(missing_ok=True)
    command = [
        program[0],
        "-m",
        "tuner.recording.recorder",
        str(partial),
        *names,
        "--",
        *program[1:],
    ]
    status = _run(command, {**environment, "PYTHONPATH": path})
    if not partial.exists():
        why = f"the program ended with status {status}" if status else "it did nothing of ours"
        click.echo(f"tune: nothing was captured: {why}", err=True)
        return status or 1
    partial.replace(output)
    _print(output)
    return status


def _require_runnable(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise UsageError unless the program and what records it are there."""
    if shutil.which(program[0], path=environment.get("PATH")) is None:
        raise UsageError(f"tune capture: there is no program {program[0]!r}")
    if not program[1].startswith("-") and not Path(program[1]).exists():
        raise UsageError(f"tune capture: there is no file {program[1]!r}")
    wanted = _RECORDER_NEEDS
    if program[1] == "-m" and len(program) > 2:
        wanted = (*wanted, program[2].partition(".")[0])
    asked = subprocess.run(
        [program[0], "-c", _MISSING, *wanted],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if missing := asked.stdout.split():
        raise UsageError(
            f"tune capture: {program[0]} has no module {', '.join(missing)}: install it there, or "
            "name another python"
        )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return a program's exit status; an interrupt is the program's, whose record is written."""
    process = subprocess.Popen(command, env=dict(environment))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _print(output: Path) -> None:
    entries = read_captured_file(output).workloads
    total_s = sum(entry.seconds for entry in entries)
    click.echo(f"{output}: {len(entries)} workloads, {total_s:.3g} s in all")
    for entry in entries[:_MOST_LINES]:
        share = entry.seconds / total_s if total_s else 0.0
        click.echo(f"  {share:.0%} {entry.kernel} {entry.workload}: {entry.calls} calls")
    click.echo(f"tune for it: tune --workloads {output} --goal weighted")
