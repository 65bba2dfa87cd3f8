"""The kernels of a buffer with single choices changed."""

from __future__ import annotations

from pathlib import Path

from tuner.catalog import Catalog
from tuner.package.reading import package_winners
from tuner.records import Candidate, Value
from tuner.render import Renderer
from tuner.runtime.moe import Kernels
from tuner.space.kernel import load_space


def variant(
    folder: Path,
    kernels: Kernels | None = None,
    package: Path | None = None,
    settings: dict[str, dict[str, Value]] | None = None,
    **changes: Value,
) -> Kernels:
    """Return rendered kernels.

    Args:
        folder: Where their files go.
        kernels: Those to change; None stands for the defaults.
        package: Where kernels that are winners were frozen.
        settings: Parameters of ``moe_dispatch`` and ``moe_combine`` that differ from theirs.
        changes: Parameters that differ in both, where both have them.
    """
    frozen = package_winners(package) if kernels and package else []
    chosen = {winner.source.text: dict(winner.candidate.parameters) for winner in frozen}
    catalog, paths = Catalog(), []
    for kernel in ("moe_dispatch", "moe_combine"):
        default = dict(load_space(catalog.space_path(kernel)).templates[0].default.parameters)
        for flag in (False, True):
            pair = getattr(kernels, kernel.removeprefix("moe_"), None)
            text = Path(pair[flag].__file__).read_text() if pair else ""
            values = chosen.get(text, default) | (settings or {}).get(kernel, {})
            values |= {name: value for name, value in changes.items() if name in default}
            if values["BUFFERING"] == "acknowledged" and values["SIGNAL"] == "count":
                values["SIGNAL"] = "add"  # the others do not go together
            candidate = Candidate.of("triton", values)
            source = Renderer(catalog.template_folders).render(kernel, "triton", candidate)
            paths.append(folder / f"{kernel}_{source.sha256[:16]}.py")
            paths[-1].write_text(source.text)
    return Kernels.load((paths[0], paths[1]), (paths[2], paths[3]))
