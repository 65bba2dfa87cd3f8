"""Every C++ template: each value of each parameter once, on odd shapes and unaligned tensors."""

from __future__ import annotations

import pytest
from cover import LIMITS, cover, templates

from tuner.catalog import Catalog
from tuner.render import Renderer
from tuner.runtime.cases import edge_cases
from tuner.runtime.check import Case, Example, load_problem
from tuner.runtime.variant import load_variant

CASES = [
    pytest.param(spec, template, candidate, id=f"{spec.kernel}-{number}")
    for spec, template in templates("cpp")
    for number, candidate in enumerate(cover(template, LIMITS))
]
_examples: dict[str, list[Example]] = {}


def examples_of(spec) -> list[Example]:
    """Return the questions that every variant of a kernel must answer, made once."""
    if spec.kernel not in _examples:
        problem = load_problem(Catalog().problem_path(spec.kernel))
        assert len(problem.EDGE_SHAPES) >= 3
        _examples[spec.kernel] = [
            Example(spec.signature, problem, Case(shape, flags, "float32", misaligned=odd))
            for _, shape, choices in edge_cases(spec.signature, problem)
            for flags in choices
            for odd in (False, True)
        ]
    return _examples[spec.kernel]


@pytest.mark.parametrize(("spec", "template", "candidate"), CASES)
def test_a_variant_is_right_on_odd_shapes(spec, template, candidate, tmp_path_factory):
    check(spec, candidate, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("spec", "template"),
    [pytest.param(spec, template, id=spec.kernel) for spec, template in templates("cpp")],
)
def test_every_pair_of_values_is_right_on_odd_shapes(spec, template, tmp_path):
    for candidate in cover(template, LIMITS, size=2):
        check(spec, candidate, tmp_path)


def check(spec, candidate, folder) -> None:
    catalog = Catalog()
    source = Renderer(catalog.template_folders).render(spec.kernel, "cpp", candidate)
    path = folder / f"{source.sha256}.cpp"
    path.write_text(source.text)
    variant = load_variant(spec.signature, "cpp", path=path, cache=folder)
    for example in examples_of(spec):
        assert example.check(variant) is None
