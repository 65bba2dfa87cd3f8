"""Every structural branch of the Triton and Gluon templates: interpreted, and compiled for GPUs.

Children do the work, since triton reads its environment when it is imported: one interprets each
variant of `VARIANTS` on small odd shapes, others compile each template's default and seeds for
cards that need not be present, and of `VARIANTS` those with a choice that these do not take.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tuner.catalog import Catalog
from tuner.records import Candidate
from tuner.render import Renderer
from tuner.space.kernel import load_space

# The first test of each child waits for all of its work.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parent.parent
CATALOG = Catalog()
TARGETS = ("cuda:90", "cuda:80", "hip:gfx942")
MODES = ("interpret", TARGETS[0], " ".join(TARGETS[1:]))
REST = "the rest"
"""Work for the first target: what the quick tests leave out."""

# Small tiles reach the loops' ends and the masks on shapes that an interpreter can bear.
TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "NUM_WARPS": 4, "NUM_STAGES": 2}
ROWS = {"ROWS": 2, "RESIDENT": 64, "BLOCK_N": 32, "NUM_WARPS": 4, "NUM_STAGES": 2}
KEYS = {"KV_BLOCK_M": 16, "KV_BLOCK_N": 32, "KV_WARPS": 4, "KV_STAGES": 2}
QUERIES = {"Q_BLOCK_M": 32, "Q_BLOCK_N": 16, "Q_WARPS": 4, "Q_STAGES": 2}
EXCHANGE = {"SCAN_TOKENS": 32, "SEND_WARPS": 4, "RECEIVE_TILE": 256, "RECEIVE_WARPS": 4}
WGMMA = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 3, "GROUP_M": 4, "SWIZZLE": 128}


def product(base: dict, **choices: tuple) -> list[dict]:
    """Return variants of `base`: the n-th has each choice's n-th value, or else its last."""
    count = max(len(values) for values in choices.values())
    return [
        {**base, **{key: values[min(n, len(values) - 1)] for key, values in choices.items()}}
        for n in range(count)
    ]


VARIANTS: dict[tuple[str, str], list[dict]] = {
    ("matmul", "triton"): product(TILES, GROUP_M=(1, 4)),
    ("matmul", "triton_tma"): product(
        {**TILES, "GROUP_M": 4}, PROGRAMS_PER_UNIT=(0, 1, 2), EPILOGUE_SPLIT=(1, 2)
    ),
    ("matmul", "triton_split_k"): product(
        TILES,
        BLOCK_M=(1, 1, 16, 16, 16),
        BLOCK_N=(64, 64, 32),
        BLOCK_K=(64, 32, 16),
        SPLIT_K=(1, 2, 4, 4, 1),
        REDUCTION=(
            *("second_kernel", "last_program", "second_kernel"),
            *("last_program", "second_kernel"),
        ),
        SWAP=(False, False, False, True, True),
    ),
    ("matmul", "gluon_sm90"): product(
        WGMMA,
        SCHEDULE=("pipelined", "pipelined", "warp_specialized", "warp_specialized"),
        CONSUMERS=(1, 1, 1, 2),
        NUM_WARPS=(4, 8),
        BLOCK_M=(64, 128),
        IN_FLIGHT=(1, 0, 1, 0),
        SWIZZLE=(128, 64),
        GROUP_M=(4, 1, 4),
    ),
    ("softmax", "triton"): product(
        ROWS,
        ROWS=(2, 1, 4),
        ONLINE=("lane", "block", "block"),
        BACKWARD=(True, False),
        PROGRAMS_PER_UNIT=(2, 0, 1),
        STREAMING=(True, False),
    ),
    ("softmax", "triton_split"): product(
        {"SPLIT": 4, "BLOCK_N": 32, "NUM_WARPS": 4, "NUM_STAGES": 2},
        ONLINE=("lane", "block"),
        STREAMING=(True, False),
    ),
    ("softmax_backward", "triton"): product(
        ROWS,
        ROWS=(2, 1),
        BACKWARD=(True, False),
        PROGRAMS_PER_UNIT=(2, 0),
        STREAMING=(True, False),
    ),
    ("rms_norm", "triton"): product(
        ROWS,
        ROWS=(2, 1),
        BACKWARD=(True, False),
        PROGRAMS_PER_UNIT=(2, 0),
        STREAMING=(True, False),
    ),
    ("softmax", "triton_parts"): product({"PART": 64, "NUM_WARPS": 2}, STREAMING=(True, False)),
    ("rms_norm", "triton_parts"): product({"PART": 64, "NUM_WARPS": 2}, STREAMING=(True, False)),
    ("rms_norm_backward", "triton"): product(
        {"RESIDENT": 64, "NUM_WARPS": 4, "NUM_STAGES": 2},
        ROWS=(2, 1),
        PROGRAMS_PER_UNIT=(2, 1),
        STREAMING=(True, False),
    ),
    ("rms_norm_backward", "triton_columns"): product(
        {"CHUNK_N": 64, "BLOCK_M": 4, "BLOCK_N": 32, "NUM_WARPS": 4, "NUM_STAGES": 2},
        ROWS=(2, 1),
        SPLIT_M=(4, 1),
    ),
    ("attention_forward", "triton"): product(
        {"BLOCK_M": 16, "BLOCK_N": 16, "NUM_WARPS": 4, "NUM_STAGES": 2},
        LOADS=("pointers", "descriptors", "device_descriptors", "device_descriptors"),
        MASKING=("split", "always", "split", "always"),
        ORDER=("heads", "tiles"),
        WARP_SPECIALIZE=(False, False, False, True),
    ),
    ("attention_backward", "triton"): product(
        {**KEYS, **QUERIES},
        LOADS=("pointers", "descriptors"),
        MASKING=("split", "always"),
        ORDER=("heads", "tiles"),
    ),
    ("attention_backward", "triton_add"): product(
        KEYS,
        LOADS=("pointers", "descriptors"),
        MASKING=("always", "split"),
        ORDER=("heads", "tiles"),
    ),
    **{
        (kernel, "triton"): product(
            {"BLOCK_M": 16, "BLOCK_N": 16, "NUM_WARPS": 4, "NUM_STAGES": 2},
            MASKING=("split", "always"),
            ORDER=("heads", "tiles"),
        )
        for kernel in ("attention_window_forward", "attention_varlen_forward")
    },
    **{
        (kernel, "triton"): product(
            {**KEYS, **QUERIES}, MASKING=("split", "always"), ORDER=("heads", "tiles")
        )
        for kernel in ("attention_window_backward", "attention_varlen_backward")
    },
    ("moe_dispatch", "triton"): product(
        {**EXCHANGE, "SEND_PROGRAMS": 2},
        BUFFERING=("double", "acknowledged", "double", "acknowledged", "double"),
        COPIES=("expert", "rank", "rank", "expert"),
        MESSAGE=("apart", "interleaved"),
        SLOTS=("scan", "walk", "scan", "walk"),
        CONVERSION=("integer", "integer", "integer", "integer", "native"),
        SIGNAL=("add", "exchange", "count", "exchange", "count"),
        AWAIT=("programs", "kernel", "programs", "kernel"),
        STORE=("plain", "streaming"),
        RECEIVE_SPLIT=(1, 2),
    ),
    ("moe_combine", "triton"): product(
        {"SEND_SPLIT": 2, "SEND_TILE": 256, "SEND_WARPS": 4, "RECEIVE_PROGRAMS": 2}
        | {"RECEIVE_TILE": 256, "RECEIVE_WARPS": 4},
        BUFFERING=("double", "acknowledged", "double", "acknowledged", "double", "double"),
        COPY=("push", "pull", "pull", "push", "reduce", "reduce"),
        SIGNAL=("add", "exchange", "count", "exchange", "count", "add"),
        AWAIT=("programs", "kernel", "programs", "kernel", "programs", "kernel"),
        STORE=("plain", "streaming"),
        UNROLL=(True, False, True, False, True, False),
    ),
}

VARIANTS["attention_backward", "gluon_sm90"] = product(
    {"Q_STAGES": 2, "DO_STAGES": 2, "DQ_SWIZZLE": 128, "WORKER_REGISTERS": 24},
    SCHEDULE=(*["cooperative"] * 4, "independent"),
    BLOCK_M=(64, 128, 64),
    BLOCK_N=(64, 128),
    DQ_MODE=("linear_writer", "writer", "reduce", "atomic", "reduce", "atomic"),
    ARRIVALS=("grouped", "grouped", "single"),
    PRODUCTS=("dk_first", "dq_first", "dk_first", "dq_first", "dq_first", "dk_first"),
    DS_ORDER=("keys", "queries"),
    DS_STAGES=(1, 2, 1),
    DQ_STAGES=(2, 1),
    DQ_SPLIT=(1, 1, 1, 1, 2, 1),
    P_ROUNDED=(True, False),
    STATS=("tma", "loads", "tma"),
    MASKING=("split", "always", "split", "always"),
    ORDER=("heads", "tiles"),
    PERSISTENT=(True, False, True, False, True, False),
    PROGRAMS=(2, 1),
)
VARIANTS["attention_backward", "gluon_sm90"] += product(
    {
        **{"SCHEDULE": "paired", "BLOCK_M": 128, "BLOCK_N": 128},
        **{"Q_STAGES": 2, "DO_STAGES": 2, "DQ_STAGES": 1, "DS_STAGES": 2, "DQ_SPLIT": 1},
        **{"PRODUCTS": "dq_first", "DQ_SWIZZLE": 128, "PROGRAMS": 1, "WORKER_REGISTERS": 24},
    },
    ARRIVALS=("single", "grouped", "grouped"),
    DQ_MODE=("linear_writer", "linear_finisher", "linear_writer"),
    DS_ORDER=("queries", "keys", "queries"),
    P_ROUNDED=(True, False),
    STATS=("loads", "tma_late", "tma"),
    MASKING=("always", "split", "skip"),
    ORDER=("heads", "groups", "tiles"),
    PERSISTENT=(False, True, True),
)
VARIANTS["attention_backward", "gluon_sm90"] += product(
    {
        **{"BLOCK_N": 128, "Q_STAGES": 3, "DO_STAGES": 2, "DQ_STAGES": 1, "DQ_SPLIT": 1},
        **{"DQ_MODE": "linear_atomic", "DS_ORDER": "queries", "P_ROUNDED": False},
        **{"ORDER": "groups", "DQ_SWIZZLE": 128, "PROGRAMS": 1, "WORKER_REGISTERS": 24},
    },
    SCHEDULE=("cooperative", "cooperative", "independent", "independent", "paired"),
    BLOCK_M=(64, 128, 64, 64, 128),
    DS_STAGES=(1, 1, 1, 1, 2),
    ARRIVALS=("grouped", "grouped", "single"),
    PRODUCTS=("dq_first", "dk_first", "dk_first", "dq_first"),
    STATS=("tma", "tma", "tma", "tma", "tma_late"),
    MASKING=("split", "always", "always", "split", "skip"),
    PERSISTENT=(False, True, False, False, True),
)
VARIANTS["attention_forward", "gluon_sm90"] = product(
    {"BLOCK_N": 64, "KV_STAGES": 2, "PRODUCER_REGISTERS": 24},
    CONSUMERS=(1, 2, 3),
    Q_STAGES=(2, 1, 1),
    EPILOGUE=("overlapped", "apart", "apart"),
    PINGPONG=(False, True, False),
    MASKING=("split", "always"),
    ORDER=("heads", "groups", "tiles"),
    PERSISTENT=(True, True, False),
    TILES=("static", "dynamic", "dynamic"),
    PROGRAMS=(2, 1),
)
VARIANTS["attention_forward", "gluon_sm90_narrow"] = product(
    {"BLOCK_N": 128, "KV_STAGES": 3, "PRODUCER_REGISTERS": 24},
    CONSUMERS=(3, 2, 1),
    Q_STAGES=(2, 1, 1),
    EPILOGUE=("overlapped", "apart", "apart"),
    PINGPONG=(False, True, False),
    MASKING=("split", "always"),
    ORDER=("heads", "groups", "tiles"),
    PERSISTENT=(True, True, False),
    TILES=("static", "dynamic", "dynamic"),
    PROGRAMS=(1, 1, 2),
)
VARIANTS["attention_forward", "gluon_sm90_wide"] = product(
    {"BLOCK_N": 32, "KV_STAGES": 2, "PRODUCER_REGISTERS": 24, "PROGRAMS": 1},
    CONSUMERS=(2, 2, 1),
    Q_STAGES=(1, 1, 2),
    EPILOGUE=("apart", "apart", "overlapped"),
    PINGPONG=(True, False, False),
    MASKING=("split", "always"),
    ORDER=("heads", "groups", "tiles"),
    PERSISTENT=(True, False, True),
    TILES=("dynamic", "dynamic", "static"),
)

ROW_SHAPES = [{"M": 1, "N": 1}, {"M": 5, "N": 64}, {"M": 9, "N": 203}]
ATTENTION_SHAPES = [
    {"B": 1, "H": 1, "S": 1, "D": 1, "KV": 1, "T": 1},
    {"B": 1, "H": 2, "S": 37, "D": 16, "KV": 1, "T": 53},
    {"B": 1, "H": 1, "S": 40, "D": 24, "KV": 1, "T": 19},
    {"B": 1, "H": 1, "S": 3, "D": 8, "KV": 1, "T": 0},
]
VARLEN_SHAPES = [
    {"N": 1, "H": 1, "D": 1, "M": 1, "KV": 1, "C": 2},
    {"N": 53, "H": 2, "D": 16, "M": 53, "KV": 1, "C": 4},
    {"N": 61, "H": 1, "D": 24, "M": 40, "KV": 1, "C": 12},
    {"N": 3, "H": 1, "D": 8, "M": 0, "KV": 1, "C": 3},
]
EXCHANGE_SHAPE = {"RANKS": 2, "TOKENS": 3, "TOPK": 3, "EXPERTS": 4}
SHAPES = {
    "matmul": [
        {"M": 1, "K": 1, "N": 1},
        {"M": 3, "K": 0, "N": 5},
        {"M": 19, "K": 41, "N": 53},
        {"M": 24, "K": 72, "N": 56},
    ],
    "attention_forward": ATTENTION_SHAPES,
    "attention_backward": ATTENTION_SHAPES,
    "attention_window_forward": ATTENTION_SHAPES,
    "attention_window_backward": ATTENTION_SHAPES,
    "attention_varlen_forward": VARLEN_SHAPES,
    "attention_varlen_backward": VARLEN_SHAPES,
    "moe_dispatch": [{**EXCHANGE_SHAPE, "GROUPS": 3, "CHANNELS": 128}],
    "moe_combine": [{**EXCHANGE_SHAPE, "HIDDEN": 384}],
}
# Not all 32 choices, but each of each; all but the first on the last two shapes and one dtype.
FLAGS = {
    "matmul": [
        {},
        {"bias": True, "activation": "gelu", "transposed_b": True},
        {"bias": True, "activation": "silu"},
        {"activation": "relu", "transposed_b": True, "allow_tf32": True},
    ],
}
DTYPES = {
    **dict.fromkeys((kernel for kernel in SHAPES if kernel.startswith("att")), ("float16",)),
    **{"moe_dispatch": ("bfloat16",), "moe_combine": ("bfloat16",)},
}

# Warp specialisation needs tiles that four warps fill twice over.
COMPILED = {
    ("attention_forward", "triton"): {"BLOCK_M": 128, "BLOCK_N": 64},
    ("attention_backward", "triton"): {"KV_BLOCK_N": 64, "Q_BLOCK_M": 64},
    ("attention_backward", "triton_add"): {"KV_BLOCK_N": 64},
}
COMPILED |= {
    (f"attention_{kind}_backward", "triton"): {"KV_BLOCK_N": 64, "Q_BLOCK_M": 64}
    for kind in ("window", "varlen")
}
COMPILED_WORKLOADS = {
    "matmul": "M=1024,N=1024,K=1024",
    "attention_forward": "B=1,H=4,KV=2,S=1024,D=128,causal=true",
    "attention_backward": "B=1,H=4,KV=2,S=1024,D=128,causal=true",
    **dict.fromkeys(
        ("attention_window_forward", "attention_window_backward"),
        "B=1,H=4,KV=2,S=1024,D=128,causal=true,window_left=255",
    ),
    **dict.fromkeys(
        ("attention_varlen_forward", "attention_varlen_backward"),
        "N=2048,H=4,KV=2,D=128,C=9,causal=true",
    ),
    "moe_dispatch": "RANKS=2,TOKENS=128,GROUPS=56,TOPK=8,EXPERTS=256,fp8=true",
    "moe_combine": "RANKS=2,TOKENS=128,HIDDEN=7168,TOPK=8,EXPERTS=256",
}
MORE_FLAGS = {"matmul": ",bias=true,activation=gelu,transposed_b=true"}


def templates() -> list:
    """Return every Triton and Gluon template of the catalog with its kernel's spec."""
    specs = [load_space(CATALOG.space_path(kernel)) for kernel in CATALOG.kernels]
    return [
        (spec, template)
        for spec in specs
        for template in spec.templates
        if template.language in ("triton", "gluon")
    ]


TEMPLATES = templates()
EVERY_TEMPLATE = [
    pytest.param(spec, template, id=f"{spec.kernel}-{template.name}")
    for spec, template in TEMPLATES
]
NAMES = {(spec.kernel, template.name) for spec, template in TEMPLATES}


def interpreted() -> list[tuple[str, str, int]]:
    return [
        (kernel, template, number)
        for (kernel, template), variants in VARIANTS.items()
        for number, parameters in enumerate(variants)
        # the interpreter's conversions to fp8 lose carries
        if not template.startswith("gluon") and parameters.get("CONVERSION") != "native"
    ]


def first_choices(target: str) -> list[tuple[str, str, int]]:
    """Return the numbers of each template's default and, for the first target, its seeds."""
    limits = {**dict(target_device(target).limits), "itemsize": 2}
    return [
        (spec.kernel, template.name, number)
        for spec, template in TEMPLATES
        if target.split(":")[0] in template.devices
        for number, candidate in enumerate((template.default, *template.seeds))
        if (number == 0 or target == TARGETS[0]) and not [*template.broken(candidate, limits)]
    ]


def structural(template) -> set[tuple[str, object]]:
    """Return the choices of a template that change its text, not only sizes in it."""
    return {
        (name, value)
        for name, values in template.parameters
        for value in values
        if isinstance(value, bool | str) or value == 0
    }


def compiled_variants(template, variants: list[dict], *, rest: bool = False) -> list[int]:
    """Return the numbers of variants with structural choices of which no first choice has one.

    Args:
        template: Their template.
        variants: Values of the parameters.
        rest: Whether to return all others instead.
    """
    left = structural(template)
    for candidate in (template.default, *template.seeds):
        left -= set(candidate.parameters)
    chosen = []
    while wanted := [len(left & set(values.items())) for values in variants]:
        if not max(wanted):
            break
        chosen.append(wanted.index(max(wanted)))
        left -= set(variants[chosen[-1]].items())
    return [number for number in range(len(variants)) if (number in chosen) is not rest]


class Children:
    """Starts a child for each mode at once and hands out what they reported."""

    def __init__(self, folder: Path, modes: tuple[str, ...] = MODES) -> None:
        self._reports: dict[str, dict] = {}
        self._running = {}
        for mode in modes:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder)}
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment |= {"TRITON_INTERPRET": "1"} if mode == "interpret" else {}
            self._running[mode] = subprocess.Popen(
                [sys.executable, __file__, mode],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def report(self, work: str) -> dict:
        """Return what the interpreter, or the compiler for a target, had to say."""
        if work not in self._reports:
            mode = next(mode for mode in self._running if work in mode)
            out, errors = self._running[mode].communicate()
            assert self._running[mode].returncode == 0, errors[-3000:]
            self._reports |= json.loads(out.splitlines()[-1])
        return self._reports[work]


@pytest.fixture(scope="session")
def children(tmp_path_factory):
    return Children(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize(("kernel", "template", "number"), interpreted())
def test_a_variant_is_right_in_the_interpreter(children, kernel, template, number):
    assert children.report("interpret")[f"{kernel}/{template}/{number}"] is None


@pytest.mark.parametrize("target", TARGETS)
def test_variants_and_first_choices_compile(children, target):
    results = children.report(target)
    failures = {name: result for name, result in results.items() if isinstance(result, str)}
    assert not failures


@pytest.mark.slow
def test_all_other_variants_and_flags_compile(tmp_path):
    results = Children(tmp_path, (REST,)).report(REST)
    assert results
    assert {name: found for name, found in results.items() if isinstance(found, str)} == {}


def test_products_are_rounded_to_tf32_where_that_is_allowed_alone(children):
    report = children.report("cuda:90")
    assert (report["rounds"], report["rounds if allowed"]) == (0, 1)


@pytest.mark.parametrize(("spec", "template"), EVERY_TEMPLATE)
def test_the_variants_take_every_structural_choice(spec, template):
    variants = VARIANTS[spec.kernel, template.name]
    for name, values in template.parameters:
        taken = {variant[name] for variant in variants}
        if isinstance(values[0], bool | str):
            assert taken >= set(values), name
        elif 0 in values:
            assert 0 in taken and taken != {0}, name


@pytest.mark.parametrize(("spec", "template"), EVERY_TEMPLATE)
def test_what_is_compiled_takes_every_structural_choice(spec, template):
    variants = VARIANTS[spec.kernel, template.name]
    taken = {
        item
        for number in compiled_variants(template, variants)
        for item in variants[number].items()
    }
    for candidate in (template.default, *template.seeds):
        taken |= set(candidate.parameters)
    assert taken >= structural(template)


@pytest.mark.parametrize(("spec", "template"), EVERY_TEMPLATE)
def test_the_shared_memory_that_constraints_count_is_what_the_compiler_takes(
    children, spec, template
):
    if not spec.kernel.startswith(("matmul", "attention")):
        pytest.skip("the kernels over rows only bound what is loaded ahead")
    report = children.report("cuda:90")
    for number, candidate in enumerate((template.default, *template.seeds)):
        taken = report[f"{spec.kernel}/{template.name}/first{number}"]
        limits = {**dict(target_device("cuda:90").limits), "itemsize": 2}
        assert [*template.broken(candidate, {**limits, "shared_bytes": taken - 1})]
        ample = {**limits, "shared_bytes": int(1.25 * taken) + 4096}
        assert not [*template.broken(candidate, ample)]


@pytest.mark.parametrize(("spec", "template"), EVERY_TEMPLATE)
def test_rendered_files_have_no_leftovers(spec, template, tmp_path):
    candidates = [Candidate.of(template.name, v) for v in VARIANTS[spec.kernel, template.name]]
    for number, candidate in enumerate((template.default, *template.seeds, *candidates)):
        source = Renderer(CATALOG.template_folders).render(
            spec.kernel, template.language, candidate
        )
        (tmp_path / f"variant{number}.py").write_text(source.text)
    rules = ["--isolated", "--line-length", "99", "--select", "E,W,F,I,UP", "--no-cache"]
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(("spec", "template"), EVERY_TEMPLATE)
def test_host_functions_spell_their_arithmetic_out(spec, template):
    if spec.kernel.startswith("moe"):
        pytest.skip("an exchange waits for other ranks")
    for parameters in VARIANTS[spec.kernel, template.name]:
        candidate = Candidate.of(template.name, parameters)
        text = (
            Renderer(CATALOG.template_folders)
            .render(spec.kernel, template.language, candidate)
            .text
        )
        # each call of these takes microseconds, as much as a launch
        assert not re.findall(r"triton\.(?:cdiv|next_power_of_2)\(.*", text)


def target_device(target: str):
    from tuner.devices.cuda import Cuda
    from tuner.devices.hip import Hip

    kind, arch = target.split(":")
    return {"cuda": Cuda, "hip": Hip}[kind].target(arch)


def write(kernel: str, template: str, parameters: dict, folder: Path) -> Path:
    language = "gluon" if template.startswith("gluon") else "triton"
    renderer = Renderer(CATALOG.template_folders)
    source = renderer.render(kernel, language, Candidate.of(template, parameters))
    path = folder / f"{kernel}_{template}_{source.sha256[:16]}.py"
    path.write_text(source.text)
    return path


def interpret(folder: Path) -> dict[str, str | None]:
    """Return what is wrong with each variant, or None, in a process that interprets kernels."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_descriptor_reduce = add_through_descriptor
    report = {}
    for kernel, template, number in interpreted():
        path = write(kernel, template, VARIANTS[kernel, template][number], folder)
        try:
            report[f"{kernel}/{template}/{number}"] = fault(kernel, path)
        except Exception as error:
            report[f"{kernel}/{template}/{number}"] = f"{type(error).__name__}: {error}"
    return report


def add_through_descriptor(builder, kind, descriptor, value, indices):
    """Do what the interpreter lacks: add a block to memory through a tensor descriptor."""
    from triton._C.libtriton import ir

    pointers, mask = descriptor.materialize_pointers(indices)
    relaxed, device = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
    return builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, relaxed, device)


_examples: dict[str, list] = {}


def fault(kernel: str, path: Path) -> str | None:
    """Return the first thing that is wrong with a variant."""
    from tuner.runtime.cases import flag_choices
    from tuner.runtime.check import Case, Example, load_problem
    from tuner.runtime.variant import load_variant

    signature = load_space(CATALOG.space_path(kernel)).signature
    if kernel not in _examples:
        problem = load_problem(CATALOG.problem_path(kernel))
        dtypes = DTYPES.get(kernel, ("float32", "float16"))
        shapes = SHAPES.get(kernel, ROW_SHAPES)
        _examples[kernel] = [
            Example(signature, problem, Case(shape, flags, dtype, misaligned=misaligned))
            for dtype in dtypes
            for shape in shapes
            for flags in some_flags(kernel, dtype == dtypes[0] and shape in shapes[-2:])
            or flag_choices(signature)
            for misaligned in ((False, True) if shape is shapes[-1] else (False,))
        ]
    variant = load_variant(signature, "triton", path=path)
    return next(filter(None, (example.check(variant) for example in _examples[kernel])), None)


def some_flags(kernel: str, every: bool) -> list[dict]:
    flags = FLAGS.get(kernel, [])
    return flags if every else flags[:1]


def compile_all(target: str, folder: Path) -> dict[str, int | str]:
    """Return the shared bytes of each first choice and of some variants, or what is wrong."""
    rest, report = target == REST, {}
    specs = {(spec.kernel, template.name): (spec, template) for spec, template in TEMPLATES}
    target = TARGETS[0] if rest else target
    for kernel, name, number in first_choices(target):
        spec, template = specs[kernel, name]
        parameters = dict((template.default, *template.seeds)[number].parameters)
        path = write(kernel, name, parameters, folder)
        if not rest:
            report[f"{kernel}/{name}/first{number}"] = compiled(spec, path, target)
        more = MORE_FLAGS.get(kernel)
        if more and (number > 0) is rest:
            report[f"{kernel}/{name}/first{number}{more}"] = compiled(spec, path, target, more)
    if target == TARGETS[0]:
        for (kernel, name), variants in VARIANTS.items():
            spec, template = specs[kernel, name]
            for number in compiled_variants(template, variants, rest=rest):
                parameters = {**variants[number], **COMPILED.get((kernel, name), {})}
                path = write(kernel, name, parameters, folder)
                report[f"{kernel}/{name}/{number}"] = compiled(spec, path, target)
        report["rounds"] = rounds(target, folder, "")
        report["rounds if allowed"] = rounds(target, folder, ",allow_tf32=true")
    return report


def compiled(spec, path: Path, target: str, more: str = "") -> int | str:
    from tuner.plugins import RejectedBuild

    try:
        return resources(spec, path, target, more).shared_bytes
    except RejectedBuild as error:
        return str(error)


def resources(spec, path: Path, target: str, more: str = ""):
    from tuner.builders.triton import TritonBuilder

    return TritonBuilder().compile(task_of(spec, path, target, f",dtype=bfloat16{more}"))


def rounds(target: str, folder: Path, more: str) -> int:
    """Return whether a matmul of float32 has instructions that round it to TF32."""
    from tuner.builders import triton

    spec = load_space(CATALOG.space_path("matmul"))
    path = write("matmul", "triton", dict(spec.template("triton").default.parameters), folder)
    task = task_of(spec, path, target, f",dtype=float32{more}")
    with triton._targeting(task.device), triton._compiling_only() as kernels:
        triton._call_on_meta_tensors(triton.TritonVariant(task.signature, path), task)
    return int(any("tf32" in kernel.asm["ptx"] for kernel in kernels))


def task_of(spec, path: Path, target: str, more: str):
    from tuner.plugins import BuildTask

    workload = COMPILED_WORKLOADS.get(spec.kernel, "M=64,N=20000")
    for name, width in (("_narrow_", 64), ("_wide_", 256)):
        if name in path.name:
            workload = workload.replace("D=128", f"D={width}")
    return BuildTask(
        path=path,
        signature=spec.signature,
        workload=spec.workload(f"{workload}{more}"),
        device=target_device(target),
        cache=path.parent,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = {
            work: interpret(folder) if work == "interpret" else compile_all(work, folder)
            for work in ([REST] if sys.argv[1] == REST else sys.argv[1].split())
        }
        print(json.dumps(report))
