"""Rendered code is reviewed like code: the default and the seeds of every template, in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.catalog import Catalog
from tuner.render import Renderer
from tuner.space.kernel import load_space

GOLDEN = Path(__file__).parent / "golden"
DEFAULTS = Path(__file__).parent.parent / "tuner" / "runtime" / "moe" / "defaults"


def renders() -> list:
    """Return a test parameter for every file: its name and its text."""
    return list(_renders())


def _renders():
    catalog = Catalog()
    renderer = Renderer(catalog.template_folders)
    for kernel in catalog.kernels:
        for template in load_space(catalog.space_path(kernel)).templates:
            named = {"default": template.default}
            named |= {f"seed{number}": seed for number, seed in enumerate(template.seeds)}
            suffix = "cpp" if template.language == "cpp" else "py"
            for name, candidate in named.items():
                source = renderer.render(kernel, template.language, candidate)
                yield pytest.param(
                    f"{kernel}-{template.name}-{name}.{suffix}",
                    source.text,
                    id=f"{kernel}-{template.name}-{name}",
                )


@pytest.mark.parametrize(("name", "text"), renders())
def test_rendered_code_is_the_reviewed_code(name, text, request):
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.exists(), f"run `make golden` and review {path.name}"
    assert text == path.read_text()


@pytest.mark.parametrize(("name", "text"), renders())
def test_rendered_code_is_clean(name, text):
    lines = text.splitlines()
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert all(line == line.rstrip() for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert "\n\n\n\n" not in text
    assert not any(mark in text for mark in ("{{", "{%", "{#", "Undefined"))


def test_no_golden_file_is_left_over():
    expected = {f"{param.values[0]}.txt" for param in renders()}
    assert {path.name for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("dispatch", "moe_dispatch-triton-default"),
        ("combine", "moe_combine-triton-default"),
        ("copying_combine", "moe_combine-triton-seed0"),
    ],
)
def test_packages_carry_the_default_kernels_of_an_exchange(name, render, request):
    texts = {param.values[0]: param.values[1] for param in renders()}
    text, path = texts[f"{render}.py"], DEFAULTS / f"{name}.py"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), "run `make golden`, then freeze"
