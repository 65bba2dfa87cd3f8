"""What the files with columns of their own come to, as tables for the README."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean, median

Row = Mapping[str, str]

NONE = "–"


def section(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the README says of a file, device by device; nothing of one that it knows not."""
    for needs, title, table in _KINDS:
        if rows and needs <= rows[0].keys():
            for device in dict.fromkeys(row["device"] for row in rows):
                mine = [row for row in rows if row["device"] == device]
                found = list(table(mine))
                if found:
                    about = f"{device}, {mine[0]['date']}; `benchmarks/results/{name}`"
                    yield f"**{title}** ({about})"
                    yield from found


def clock(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of how far the clock is from the hardware's own."""
    lines = [
        f"| {row['workload']} | {row['note']} |"
        for row in rows
        if row["op"] == "summary" and "no pairs" not in row["note"]
    ]
    if lines:
        yield "\n".join(["| against the hardware | found |", "| --- | --- |", *lines])


def search(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each kernel: how soon each sampler came near the best of all."""
    ends = [row for row in rows if row["share_of_best"]]
    for kernel, workload in dict.fromkeys((row["kernel"], row["workload"]) for row in ends):
        lines = [
            f"| {kernel} {workload} | searches | of the best | trials to 98 % | seconds |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        mine = [row for row in ends if (row["kernel"], row["workload"]) == (kernel, workload)]
        for sampler in dict.fromkeys(row["sampler"] for row in mine):
            runs = [row for row in mine if row["sampler"] == sampler]
            figures = [
                str(len(runs)),
                f"{median(float(row['share_of_best']) for row in runs):.3f}",
                _reached(runs, "trials_to_98", "g"),
                _reached(runs, "seconds_to_98", ".1f"),
            ]
            lines.append(f"| {sampler} | {' | '.join(figures)} |")
        yield "\n".join(lines)


def _reached(runs: Sequence[Row], name: str, form: str) -> str:
    found = median(float(row[name] or math.inf) for row in runs)
    return f"{found:{form}}" if math.isfinite(found) else "not reached"


def runs(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of what runs did for each kernel."""
    lines = [
        "| | workloads | trials | a second | default / winner | rival / winner |",
        "| --- |" + 5 * " ---: |",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        figures = [
            str(len(mine)),
            str(sum(int(row["trials"]) for row in mine)),
            f"{median(float(row['trials_per_s']) for row in mine):.1f}",
            *(_mean(mine, name) for name in ("gain", "rival_ratio")),
        ]
        lines.append(f"| {kernel} | {' | '.join(figures)} |")
    yield "\n".join(lines)
    yield "Trials a second in the search of a workload, median; ratios of times, geometric means."


def _mean(rows: Sequence[Row], name: str) -> str:
    found = [float(row[name]) for row in rows if row[name]]
    return f"{geometric_mean(found):.2f}" if found else NONE


def ablations(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table for each winner: the time over the winner's with one choice changed."""
    for kernel, workload in dict.fromkeys((row["kernel"], row["workload"]) for row in rows):
        mine = [row for row in rows if (row["kernel"], row["workload"]) == (kernel, workload)]
        changed = [row for row in mine if row["value"]]
        lines = [
            f"| {kernel} {workload} | winner | time over the winner's with another value |",
            "| --- | --- | --- |",
        ]
        for parameter in dict.fromkeys(row["parameter"] for row in changed):
            values = [row for row in changed if row["parameter"] == parameter]
            shown = ", ".join(f"{_changed(row)}: {_worth(row)}" for row in values)
            lines.append(f"| {parameter} | {values[0]['winner_value']} | {shown} |")
        if changed:
            yield "\n".join(lines)


def _changed(row: Row) -> str:
    return f"{row['value']} (with {row['also']})" if row["also"] else row["value"]


def _worth(row: Row) -> str:
    if row["ratio"]:
        return f"{float(row['ratio']):.3f}"
    return {"": "same code", "constraints": "not allowed"}.get(row["stage"], row["stage"])


def selection(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of what the choices of runs with different seeds lose."""
    ends = [row for row in rows if row["op"] == "summary" and row["runs"]]
    lines = [f"| {_selected(row, rows)} |" for row in ends]
    if lines:
        columns = ("runs", "each", "winners", "within 1 %", "lost, mean", "most")
        yield "\n".join(
            [
                f"| | {' | '.join((*columns, 'by the search', 'by the choice'))} |",
                f"| --- |{' ---: |' * (len(columns) + 2)}",
                *lines,
            ]
        )
        yield (
            "Runs differ in their seed alone; what one's winner loses is how much longer it takes "
            "than the best of all runs' winners, when all are timed together for long. By the "
            "search, the most of any run: the best of what it had timed, over that; by the "
            "choice: its winner over the best of what it had timed."
        )


def _selected(end: Row, rows: Sequence[Row]) -> str:
    """Return the cells of one workload: how long runs were, and what they lost."""
    place = (end["kernel"], end["workload"])
    runs = [row for row in rows if (row["kernel"], row["workload"]) == place and row["trials"]]
    each = [median(float(row[name]) for row in runs) for name in ("trials", "seconds")]
    lost = ("mean_percent", "regret_percent", "search_percent", "choice_percent")
    cells = [
        " ".join(place),
        end["runs"],
        f"{each[0]:.0f} trials, {each[1]:.0f} s",
        *(end["winners"], end["within"]),
        *(f"{float(end[name]):.1f} %" for name in lost),
    ]
    return " | ".join(cells)


def gradients(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the last line of each run."""
    yield from (row["note"] for row in rows if not row["case"] and row["note"])


def seeds(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of the evaluations that searches need, with each file of seeds and without."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lines = [
        f"| seeds of another card | first try | {' | '.join(kernels)} | mean |",
        f"| --- | {'---: | ' * (len(kernels) + 2)}".rstrip(),
    ]
    for name in dict.fromkeys(row["format"] for row in rows):
        mine = [row for row in rows if row["format"] == name]
        groups = [[row for row in mine if row["kernel"] == kernel] for kernel in kernels]
        means = [
            [fmean(float(row[column]) for row in group) for column in ("mean_to_95", "mean_to_98")]
            for group in groups
        ]
        means.append([fmean(column) for column in zip(*means, strict=True)])
        first = fmean(float(row["first_share"]) for row in mine)
        holds = f": {mine[0]['holds']}" if mine[0]["holds"] else ""
        cells = [f"{first:.2f}", *(f"{near:.0f} / {nearer:.0f}" for near, nearer in means)]
        lines.append(f"| {name}{holds} | {' | '.join(cells)} |")
    yield "\n".join(lines)
    yield (
        "Evaluations to 95 % / 98 % of the fastest configuration's speed on one card, and the "
        "share of it that the first try has; the best four of a file about another card are tried "
        f"first. Means of {rows[0]['searches']} searches for each pair of cards, 100 where one "
        "did not get there. Kernel Tuner and Triton's autotuner were given recorded times; Helion "
        "saved what it had not searched for."
    )


_Table = Callable[[Sequence[Row]], Iterator[str]]

_KINDS: tuple[tuple[set[str], str, _Table], ...] = (
    ({"cupti_us"}, "The clock beside the hardware's own", clock),
    ({"trials_to_98"}, "Searching on the device", search),
    ({"trials_per_s"}, "What a run did", runs),
    ({"winner_value"}, "What each choice of a winner is worth", ablations),
    ({"seeds_of"}, "What seeds save", seeds),
    ({"choice_percent"}, "What a run's choice loses", selection),
    ({"tuner_dq"}, "Gradients of attention against float64", gradients),
)
