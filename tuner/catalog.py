"""Finds kernels, devices and builders by file name, in the package and in the user's folders."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import tuner.builders
import tuner.devices
from tuner.plugins import Builder, Device
from tuner.records import UsageError

_PACKAGE = Path(__file__).parent
_DATA = _PACKAGE / "_data"
_SHIPPED = _DATA if _DATA.exists() else _PACKAGE.parent


class Catalog:
    """Where the files of every kernel lie.

    Args:
        folders: The user's own folders, each with `templates/`, `search_spaces/` and `problems/`
            like the project's; they come before the project's own.

    Raises:
        UsageError: A folder does not exist.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"--kernels {folder}: no such folder")
        self._templates = [*(folder / "templates" for folder in folders), _SHIPPED / "templates"]
        self._spaces = [*(folder / "search_spaces" for folder in folders)]
        self._spaces.append(_SHIPPED / "search_spaces")
        self._problems = [*(folder / "problems" for folder in folders), _PACKAGE / "problems"]

    @property
    def template_folders(self) -> tuple[Path, ...]:
        """Folders to look for templates in, the first match winning."""
        return tuple(self._templates)

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of all kernels, sorted."""
        return tuple(
            sorted({path.stem for folder in self._spaces for path in folder.glob("*.yaml")})
        )

    def space_path(self, kernel: str) -> Path:
        """Return the search space's file of a kernel."""
        if kernel not in self.kernels:
            raise UsageError(
                f"unknown kernel {kernel!r}; known: {', '.join(self.kernels)}; "
                "`tune --help` lists the commands"
            )
        return self._find(self._spaces, f"{kernel}.yaml", kernel)

    def problem_path(self, kernel: str) -> Path:
        """Return the problem module's file of a kernel."""
        return self._find(self._problems, f"{kernel}.py", kernel)

    def template_path(self, kernel: str, template: str, language: str) -> Path:
        """Return a template's file."""
        suffix = "cpp" if language == "cpp" else "py"
        return self._find(self._templates, f"{kernel}/{template}.{suffix}.j2", kernel)

    def _find(self, folders: Sequence[Path], name: str, kernel: str) -> Path:
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        places = ", ".join(str(folder / name) for folder in folders)
        raise UsageError(f"kernel {kernel!r} is incomplete: there is no {places}")


def device_kinds() -> tuple[str, ...]:
    """Return the names of all device plug-ins."""
    return tuple(sorted(_module_names(tuner.devices)))


def device_class(kind: str) -> type[Device]:
    """Return the device plug-in of a name.

    Raises:
        UsageError: There is no module of this name, or it defines no `Device`.
    """
    if kind not in device_kinds():
        raise UsageError(f"unknown device {kind!r}; known: {', '.join(device_kinds())}")
    found: type[Device] = _only_subclass(importlib.import_module(f"tuner.devices.{kind}"), Device)
    return found


def split_device(name: str) -> tuple[str, int]:
    """Return kind and index of a device's name such as ``"cuda:1"``.

    Raises:
        UsageError: The index is not a number.
    """
    kind, _, index = name.partition(":")
    if index and not index.isdecimal():
        raise UsageError(f"--device {name}: {index!r} is not an index; write {kind}:0")
    return kind, int(index or 0)


def builder_for(language: str) -> Builder:
    """Return the builder of a language.

    Raises:
        UsageError: No module in `tuner/builders/` builds it.
    """
    known: list[str] = []
    for name in sorted(_module_names(tuner.builders)):
        kind: type[Builder] = _only_subclass(
            importlib.import_module(f"tuner.builders.{name}"), Builder
        )
        if language in kind.languages:
            return kind()
        known += kind.languages
    raise UsageError(f"unknown language {language!r}; known: {', '.join(known)}")


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, under a name that no other module has."""
    name = f"tuner_file_{path.stem}_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module_names(package: ModuleType) -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_")]


def _only_subclass(module: ModuleType, base: type) -> Any:
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise UsageError(f"{module.__file__} must define one {base.__name__}, found {len(found)}")
    return found[0]
