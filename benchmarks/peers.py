"""What a frozen kernel is compared with: torch's operation, compiled or by backend, and a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm

from tuner.serve.bench import Bench, Call

Operation = Callable[[], object]

COPY = "copy"
FLASH_4 = "FlashAttention-4"

_EXPRESSIONS: Mapping[str, Callable[..., object]] = {
    "matmul": lambda a, b: a @ b,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "softmax_backward": lambda y, dy: y * (dy - (y * dy).sum(dim=-1, keepdim=True)),
    "rms_norm": lambda x, weight, eps: rms_norm(x, weight.shape, weight, eps),
}
"""What `torch.compile` is given: the rivals of the problems write to memory of their own."""

_BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def peers(
    bench: Bench, kernel: str, device: str, *, copied_bytes: float, compile_mode: str
) -> dict[str, Callable[[], list[Call]]]:
    """Return what makes each peer's calls, one for each set of buffers, by the peer's label.

    Args:
        bench: The workload's buffers.
        kernel: Name of the kernel.
        device: Torch's type of the device.
        copied_bytes: What a copy should read and write together; 0 for no copy.
        compile_mode: Mode of `torch.compile`.
    """
    makers: dict[str, Callable[[], Sequence[Operation]]] = {}
    makers[bench.problem.RIVAL] = bench.rival_calls
    if device != "cpu":
        if kernel in _EXPRESSIONS:
            makers["torch.compile"] = partial(_compiled, bench, kernel, compile_mode)
        if kernel == "rms_norm_backward":
            makers["torch.compile"] = partial(_compiled_rms_norm_backward, bench, compile_mode)
        if kernel.startswith("attention"):
            makers |= {name: partial(_with, item, bench) for name, item in _BACKENDS.items()}
            if _importable("flash_attn.cute"):
                makers[FLASH_4] = partial(_flash_4, bench, backward=kernel.endswith("backward"))
    if copied_bytes:
        makers[COPY] = partial(_copies, bench, device, int(copied_bytes) // 2)
    return {label: partial(_prepared, maker, device) for label, maker in makers.items()}


def _prepared(maker: Callable[[], Sequence[Operation]], device: str) -> list[Call]:
    """Return a peer's calls after a first round, in which libraries compile and allocate."""
    with _capturing_stream(device):
        calls = [_keeping(call) for call in maker()]
        for call in calls:
            call()
    return calls


def _keeping(call: Operation) -> Call:
    """Return a call that holds its result until the next: results rotate as our outputs do."""
    kept: list[object] = []

    def keep() -> None:
        kept[:] = [call()]

    return keep


@contextmanager
def _capturing_stream(device: str) -> Iterator[None]:
    """Run what is prepared on the stream that graphs are captured on.

    Autograd runs a backward pass on the stream of its forward pass, whichever is current, and a
    capture fails when work goes to another stream.
    """
    if device != "cuda":
        yield
        return
    torch.cuda.graph(torch.cuda.CUDAGraph())  # the first one makes the stream
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        yield
    torch.cuda.synchronize()


def _compile(expression: Callable[..., object], mode: str) -> Callable[..., Any]:
    torch._dynamo.reset()  # else another workload's shapes would be compiled as dynamic ones
    return torch.compile(expression, dynamic=False, mode=mode)


def _compiled(bench: Bench, kernel: str, mode: str) -> list[Operation]:
    compiled = _compile(_EXPRESSIONS[kernel], mode)
    return [partial(compiled, **arguments) for arguments in bench.arguments()]


def _compiled_rms_norm_backward(bench: Bench, mode: str) -> list[Operation]:
    """Return the compiled backward pass of a compiled forward pass."""
    forward = _compile(_EXPRESSIONS["rms_norm"], mode)
    calls: list[Operation] = []
    # A backward pass that reuses the memory of what was saved can run only once.
    with torch._functorch.config.patch(donated_buffer=False):
        for arguments in bench.arguments():
            sources = [arguments[name].detach().requires_grad_() for name in ("x", "weight")]
            y = forward(*sources, 1e-6)
            calls.append(
                partial(torch.autograd.grad, y, sources, arguments["dy"], retain_graph=True)
            )
        for call in calls:
            call()
    return calls


def _with(backend: SDPBackend, bench: Bench) -> list[Operation]:
    """Return the rival's calls with one backend of torch's attention, or raise its refusal."""
    with sdpa_kernel(backend):
        calls = bench.rival_calls()

    def within(call: Operation) -> object:
        with sdpa_kernel(backend):
            return call()

    return [partial(within, call) for call in calls]


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it lies in
        return False


def _flash_4(bench: Bench, *, backward: bool) -> list[Operation]:
    """Return calls of FlashAttention-4's kernels, whose tensors are [batch, seq, heads, head_dim].

    Its mask is aligned at the lower right, as ours is.
    """
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    calls: list[Operation] = []
    for arguments in bench.arguments():
        q, k, v = (
            arguments[name].transpose(1, 2).contiguous().requires_grad_(backward) for name in "qkv"
        )
        options = {"causal": arguments["causal"], "softmax_scale": arguments["scale"]}
        if not backward:
            calls.append(partial(attend, q, k, v, **options))
            continue
        result = attend(q, k, v, **options)
        o = result[0] if isinstance(result, tuple) else result
        do = arguments["do"].transpose(1, 2).contiguous()
        calls.append(partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True))
    return calls


def _copies(bench: Bench, device: str, size: int) -> list[Operation]:
    """Return copies of so many bytes, between as many pairs of buffers as the bench has sets."""
    calls: list[Operation] = []
    for _ in bench.sets:
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        calls.append(partial(target.copy_, source))
    return calls
