"""Which rendered files a buffer launches: frozen winners, or the defaults where there are none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from ..dispatch import Dispatch
from ..signature import Signature
from ..triton_module import import_file
from .errors import MisuseError

DISPATCH, COMBINE = "moe_dispatch", "moe_combine"

WITHOUT_WEIGHTS = 2
"""Index of the kernels that combine after a dispatch without weights."""

_DEFAULTS = Path(__file__).parent / "defaults"
_PACKAGE = Path(__file__).parents[2]  # the frozen package, which has folders of kernels


@dataclass(frozen=True, slots=True)
class Shape:
    """What all ranks of a buffer agree about.

    Attributes:
        ranks: Number of ranks.
        experts: Experts of all ranks together.
        max_tokens: The most tokens of a rank in a round.
        hidden: Channels of a row.
        topk: Experts that a token names.
    """

    ranks: int
    experts: int
    max_tokens: int
    hidden: int
    topk: int

    def __post_init__(self) -> None:
        """Raise ValueError unless the kernels serve the shape."""
        for name in ("ranks", "experts", "max_tokens", "hidden", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")
        if self.experts % self.ranks:
            raise ValueError(
                f"the number of experts must be a multiple of the {self.ranks} ranks, but got "
                f"{self.experts}"
            )
        if self.hidden % 128:
            raise ValueError(f"hidden must be a multiple of 128, but got {self.hidden}")

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """The most rows of an expert."""
        return self.ranks * self.max_tokens


@dataclass(frozen=True, slots=True)
class Kernels:
    """Imported files of the kernels that a buffer launches.

    Attributes:
        dispatch: By whether rows travel as fp8.
        combine: By whether the rows are in the view already; then what serves dispatches without
            weights, which `reduce` cannot do without.
        digest: What all ranks must have in common.
        buffering: How all of them use the buffers: ``"double"`` or ``"acknowledged"``.
    """

    dispatch: tuple[Any, Any]
    combine: tuple[Any, Any, Any]
    digest: str
    buffering: str

    @classmethod
    def load(cls, dispatch: tuple[Path, Path], combine: tuple[Path, Path]) -> Kernels:
        """Import rendered files.

        Raises:
            MisuseError: They do not all use the buffers in the same way.
        """
        paths = (*dispatch, *combine)
        texts = {path: path.read_bytes() for path in paths}
        modules = {path: _import(path, text) for path, text in texts.items()}
        buffering = {path.name: str(modules[path].BUFFERING) for path in paths}
        if len(set(buffering.values())) > 1:
            said = ", ".join(f"{name} is {value}" for name, value in buffering.items())
            raise MisuseError(f"the kernels of a buffer must share one BUFFERING, but {said}")
        first, second = modules[combine[0]], modules[combine[1]]
        copying = [module for module in (first, second) if module.COPY != "reduce"]
        digest = hashlib.sha256(b"".join(texts[path] for path in paths)).hexdigest()[:16]
        return cls(
            (modules[dispatch[0]], modules[dispatch[1]]),
            (first, second, copying[0] if copying else _copying()),
            digest,
            modules[paths[0]].BUFFERING,
        )

    @property
    def is_double(self) -> bool:
        """Whether rounds use two buffers by turns."""
        return self.buffering == "double"


def _copying() -> Any:
    """Return the kernels that combine without having had weights, with two buffers."""
    path = _DEFAULTS / "copying_combine.py"
    return _import(path, path.read_bytes())


def default_kernels() -> Kernels:
    """Return the kernels that work everywhere."""
    dispatch, combine = (_DEFAULTS / f"{name}.py" for name in ("dispatch", "combine"))
    return Kernels.load((dispatch, dispatch), (combine, combine))


def require_device(device: torch.device) -> None:
    """Raise MisuseError where kernels are to run on a CPU, but not in Triton's interpreter."""
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise MisuseError(
            "on a CPU the kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before "
            "Python starts, or use a process group with NCCL"
        )


def kernels_for(shape: Shape, device: torch.device) -> Kernels:
    """Return the frozen kernels of this package, and defaults where none is or fits the others.

    Args:
        shape: What they are to serve.
        device: Where they run.
    """
    common = {"RANKS": shape.ranks, "TOKENS": shape.max_tokens}
    common |= {"TOPK": shape.topk, "EXPERTS": shape.experts}
    rows = {DISPATCH: {"GROUPS": shape.hidden // 128, "CHANNELS": 128}}
    rows[COMBINE] = {"HIDDEN": shape.hidden}
    paths = [
        _frozen(kernel, common | rows[kernel], {flag: value}, device)
        for kernel, flag in ((DISPATCH, "fp8"), (COMBINE, "zero_copy"))
        for value in (False, True)
    ]
    defaults = [_DEFAULTS / f"{name}.py" for name in ("dispatch", "combine") for _ in range(2)]
    found = [path or default for path, default in zip(paths, defaults, strict=True)]
    try:
        return Kernels.load((found[0], found[1]), (found[2], found[3]))
    except MisuseError:  # they use the buffers in different ways: those that do as the defaults
        buffering = default_kernels().buffering
        found = [
            path if buffering == _import(path, path.read_bytes()).BUFFERING else default
            for path, default in zip(found, defaults, strict=True)
        ]
        return Kernels.load((found[0], found[1]), (found[2], found[3]))


def _frozen(
    kernel: str, extents: Mapping[str, int], flags: Mapping[str, bool], device: torch.device
) -> Path | None:
    """Return the file that was tuned for a workload or the nearest one, if there is any."""
    folder = _PACKAGE / kernel
    if not (folder / "kernel.json").is_file():
        return None
    data = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
    dispatch = Dispatch(_PACKAGE.name, folder, Signature.from_json(data["signature"]))
    try:
        choice = dispatch.choose(extents, dtype="bfloat16", flags=flags, device=device)
    except NotImplementedError:
        return None
    return folder / choice.arch / choice.file


def _import(path: Path, text: bytes) -> Any:
    name = f"{__name__}.{path.stem}_{hashlib.sha256(text).hexdigest()[:16]}"
    return import_file(path, name)
