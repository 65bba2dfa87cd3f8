"""The `tune` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tuner import __version__
from tuner.catalog import Catalog
from tuner.cli import measuring, results
from tuner.cli.options import (
    SEED,
    TIMEOUT,
    cluster_option,
    device_option,
    kernels_option,
    max_slowdown_option,
    max_variants_option,
    output_option,
    process_environment,
    seed_from_option,
    store_option,
)
from tuner.records import TunerError
from tuner.render import Renderer
from tuner.space.kernel import load_space


class DefaultGroup(click.Group):
    """A group whose first argument may be left out when it is ``run``."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Put ``run`` in front of arguments that name no command."""
        if not arguments or (
            arguments[0] not in self.commands and arguments[0] not in ("--help", "--version")
        ):
            arguments = ["run", *arguments]
        return super().parse_args(context, arguments)


@click.group(cls=DefaultGroup)
@click.version_option(__version__)
def tune() -> None:
    """Make kernels fast on a device that has no profiler, only a clock."""


@tune.command()
@click.argument("kernels", nargs=-1)
@device_option
@click.option("--workload", "workloads", multiple=True, help="Such as M=512,N=512,K=512.")
@click.option(
    "--workloads", "sets", multiple=True, help="Name of a workload set, or a captured FILE."
)
@click.option(
    "--goal",
    type=click.Choice(["equal", "weighted"]),
    default="equal",
    show_default=True,
    help="Share the budget equally, or by what the captured program spends.",
)
@click.option("--budget", default="120s", show_default=True, help="90, 90s, 5m, 1h or 200trials.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Candidates that compile at a time.")
@click.option(
    "--timeout",
    type=TIMEOUT,
    default=60.0,
    show_default=True,
    help="Seconds that one candidate may take.",
)
@seed_from_option
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Devices that exchange: the slowest one's time counts.",
)
@cluster_option
@max_variants_option
@max_slowdown_option
@output_option
@store_option
@click.option("--fresh", is_flag=True, help="Set earlier trials aside and start anew.")
@kernels_option
@click.option("--json", "as_json", is_flag=True, help="Print the winners as JSON.")
def run(**options: Any) -> None:
    """Tune kernels and freeze the winners into a package.

    Several cards work at a time: --device cuda:0,cuda:1 or cuda:all, or those of a --cluster.
    """
    from tuner.cli.job import RunOptions

    asked = RunOptions(**options)
    if asked.cluster is None:
        from tuner.cli.tuning import tune_kernels as work
    else:
        from tuner.cli.cluster import tune_on_cluster as work
    sys.exit(work(asked, process_environment()))


@tune.command("list")
@kernels_option
def list_kernels(folders: Sequence[Path]) -> None:
    """List the kernels with their templates."""
    catalog = Catalog(folders)
    for name in catalog.kernels:
        spec = load_space(catalog.space_path(name))
        templates = ", ".join(
            f"{template.name} ({'/'.join(template.devices)})" for template in spec.templates
        )
        click.echo(f"{name}: {spec.summary}\n  {templates}")


@tune.command()
@click.argument("kernel")
@device_option
@kernels_option
def show(kernel: str, device: str, folders: Sequence[Path]) -> None:
    """Show a kernel's parameters, constraints, workloads and the size of its space."""
    from tuner.cli.commands import show_kernel

    show_kernel(kernel, device, Catalog(folders), process_environment())


@tune.command()
def devices() -> None:
    """List the kinds of devices, and which of them are here."""
    from tuner.cli.commands import list_devices

    list_devices(process_environment())


@tune.command()
@click.argument("kernel")
@click.option("--template", help="Which implementation; the first one if left out.")
@click.option("--set", "settings", multiple=True, help="NAME=VALUE of a parameter.")
@kernels_option
def render(
    kernel: str, template: str | None, settings: Sequence[str], folders: Sequence[Path]
) -> None:
    """Print the source of one candidate: the default with what --set changes."""
    from tuner.cli.verify import choose_candidate

    catalog = Catalog(folders)
    spec = load_space(catalog.space_path(kernel))
    chosen = spec.template(template) if template else spec.templates[0]
    candidate = choose_candidate(spec, chosen, settings)
    source = Renderer(catalog.template_folders).render(kernel, chosen.language, candidate)
    click.echo(source.text, nl=False)


@tune.command()
@click.argument("kernel")
@click.option("--target", required=True, help="cuda:90, cuda:80, hip:gfx942, ...")
@click.option("--workload", "workloads", multiple=True, help="What to specialise for.")
@click.option("--sample", type=click.IntRange(1), default=16, show_default=True)
@click.option("--all", "everything", is_flag=True, help="Every feasible candidate.")
@click.option("--jobs", type=click.IntRange(1), help="Candidates that compile at a time.")
@store_option
@kernels_option
def build(**options: Any) -> None:
    """Compile candidates for a card that need not be here, and print what they need."""
    from tuner.cli.build import BuildOptions, build_kernel

    sys.exit(build_kernel(BuildOptions(**options), process_environment()))


@tune.command()
@click.argument("kernel")
@device_option
@click.option("--template", help="Which implementation; all that the device runs if left out.")
@click.option("--set", "settings", multiple=True, help="NAME=VALUE of a parameter.")
@click.option("--sample", type=click.IntRange(1), help="Only so many cases, drawn at random.")
@click.option(
    "--timeout",
    type=TIMEOUT,
    default=60.0,
    show_default=True,
    help="Seconds that a case may take.",
)
@click.option("--jobs", type=click.IntRange(1), help="Cases that run at a time.")
@store_option
@kernels_option
def verify(**options: Any) -> None:
    """Check a kernel against its reference on every case of its correctness suite."""
    from tuner.cli.verify import VerifyOptions, verify_kernel

    sys.exit(verify_kernel(VerifyOptions(**options), process_environment()))


for command in (*measuring.COMMANDS, *results.COMMANDS):
    tune.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what the user or the file system gets wrong prints a line: status 2."""
    run: Callable[..., Any] = tune.main
    try:
        run(arguments, prog_name="tune", standalone_mode=True)
    except TunerError as error:
        click.echo(f"tune: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:  # not about a file: the tuner's own fault
            raise
        name = error.filename2 or error.filename
        click.echo(f"tune: {name}: cannot be read or written: {error.strerror}", err=True)
        sys.exit(2)
