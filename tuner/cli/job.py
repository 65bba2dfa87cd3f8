"""What a run was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tuner.budget import Budget
from tuner.catalog import Catalog
from tuner.cli.display import make_console
from tuner.cli.probe import cards_folder
from tuner.package.files import require_folder
from tuner.package.freeze import check_output
from tuner.plan import Request, check_request
from tuner.render import Renderer
from tuner.seeds import Seed, read_seeds


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `tune run`, as the command line gives them."""

    kernels: tuple[str, ...]
    device: str
    workloads: tuple[str, ...]
    sets: tuple[str, ...]
    goal: str
    budget: str
    seed: int
    jobs: int | None
    timeout: float
    seed_from: tuple[Path, ...]
    output: Path
    store: Path
    fresh: bool
    folders: tuple[Path, ...]
    as_json: bool
    ranks: int
    cluster: str | None
    max_variants: int | None
    max_slowdown: float | None


@dataclass(frozen=True, slots=True)
class Job:
    """What a run was asked for, and what it needs on whatever card.

    Attributes:
        options: The command line.
        console: Where to print.
        catalog: Where the kernels are.
        request: What to tune for.
        budget: How long to search.
        seeds: What others found, by file.
        renderer: Renders the candidates.
        cards: Folder of the cards that say what devices can do.
    """

    options: RunOptions
    console: Console
    catalog: Catalog
    request: Request
    budget: Budget
    seeds: Mapping[Path, Sequence[Seed]]
    renderer: Renderer
    cards: Path


def job_of(options: RunOptions, environment: Mapping[str, str]) -> Job:
    """Return what a run needs whatever it runs on; what is wrong with it is said here."""
    console = make_console(stderr=options.as_json)
    catalog = Catalog(options.folders)
    budget = Budget.parse(options.budget)
    require_folder("--output", options.output)  # not after an hour
    check_output(options.output)
    seeds = {path: read_seeds(path) for path in options.seed_from}
    request = _request(options)
    check_request(catalog, request)
    renderer = Renderer(catalog.template_folders)
    cards = cards_folder(options.store, environment)
    return Job(options, console, catalog, request, budget, seeds, renderer, cards)


def _request(options: RunOptions) -> Request:
    """Return what to tune for; what is or looks like a file among the sets is a captured one."""
    files = [name for name in options.sets if _is_file(name)]
    sets = tuple(name for name in options.sets if name not in files)
    captured = tuple(map(Path, files))
    return Request(options.kernels, options.workloads, sets, captured, options.goal, options.ranks)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file()
