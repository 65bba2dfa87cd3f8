"""Low-latency dispatch and combine of tokens over the ranks of one host, by DeepEP's names.

Every call is a round: all ranks make the same calls in the same order, each with as many tokens
as it has. Rounds use two buffers by turns. Every rank signals every rank in every round, also
when it has nothing to send, so that the signals of a round free the buffer of the one before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import MisuseError
from .heap import Heap, heap_of
from .kernels import Kernels, Shape, default_kernels, kernels_for, require_device
from .layouts import Layouts, check_ids, check_tensor
from .results import Combined, Dispatched, Handle, Packed
from .rounds import FIRST_TIMEOUT_S, Rounds


class LowLatencyBuffer:
    """Memory through which the ranks of one host exchange tokens' rows.

    Args:
        group: A process group, or a rank of a `LocalGroup`.
        max_tokens: The most tokens of a rank in a round, equal on all ranks.
        hidden: Channels of a row, a multiple of 128.
        num_experts: Experts of all ranks together, a multiple of the number of ranks.
        topk: Experts that each token names.
        timeout_s: Seconds, roughly, after which a wait for a peer is given up.
        first_timeout_s: The same in the first two rounds of a kind; None stands for 300 on GPUs,
            where peers may still be compiling, and for `timeout_s` elsewhere.
        debug: Check the ids of experts, which waits for the device.
        kernels: What to launch; None stands for this package's frozen or default kernels.

    Raises:
        ValueError: The kernels do not serve the shape.
        MisuseError: The ranks disagree about it, or nothing here runs the kernels.
    """

    def __init__(  # noqa: PLR0913 - the first four are DeepEP's
        self,
        group: dist.ProcessGroup | Heap,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        *,
        topk: int = 8,
        timeout_s: float = 10.0,
        first_timeout_s: float | None = None,
        debug: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        heap = heap_of(group)
        require_device(heap.device)
        self.shape = Shape(heap.ranks, num_experts, max_tokens, hidden, topk)
        self.kernels = kernels or kernels_for(self.shape, heap.device)
        self.rank, self.device, self._debug = heap.rank, heap.device, debug
        heap.agree(f"{self.shape}, kernels {self.kernels.digest}")
        self._layouts = Layouts(self.shape, self.kernels)
        if first_timeout_s is None:
            first_timeout_s = FIRST_TIMEOUT_S if heap.device.type == "cuda" else timeout_s
        self._rounds = Rounds(
            heap,
            self._layouts.size,
            double=self.kernels.is_double,
            timeouts_s=(first_timeout_s, timeout_s),
        )
        self._views = tuple(self._rounds.addresses(begin) for begin in self._layouts.views)
        self._nothing = torch.zeros(self.shape.local, dtype=torch.int32, device=self.device)

    @staticmethod
    def size_hint(
        max_tokens: int, hidden: int, num_ranks: int, num_experts: int, topk: int = 8
    ) -> int:
        """Return the bytes that a buffer with the default kernels takes of each rank."""
        kernels = default_kernels()
        layouts = Layouts(Shape(num_ranks, num_experts, max_tokens, hidden, topk), kernels)
        return Rounds.bytes_for(layouts.size, double=kernels.is_double)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        *,
        fp8: bool = False,
        hook: bool = False,
        stats: Tensor | None = None,
    ) -> Dispatched:
        """Send each token's row to the ranks of its experts, and pack what the peers sent.

        Args:
            x: [tokens, hidden] bfloat16.
            topk_idx: [tokens, topk] int32 or int64 experts; -1 names none.
            fp8: Send e4m3 with a scale for 128 channels.
            hook: Leave the receive phase to the hook that is returned.
            stats: [local] int32, to which the counts of rows are added.

        Raises:
            MisuseError: A hook was not called, or an earlier wait was in vain and not reset.
            PeerTimeout: A peer did not come; on GPUs a later call or `check` tells.
            ValueError: A shape, an element type or, in debug mode, an id is not allowed.
        """
        tokens = x.shape[0]
        self._check_tokens(tokens)
        self._check("x", x, (tokens, self.shape.hidden), torch.bfloat16)
        self._check_choices(topk_idx, tokens)
        if stats is not None:
            self._check("stats", stats, (self.shape.local,), torch.int32)
        kernel, constants = self.kernels.dispatch[fp8], self._layouts.dispatch[fp8]
        packed = Packed.empty(self.shape, self.device, fp8=fp8)
        rows, scales, source, ranges, counts = packed
        slots = torch.empty(topk_idx.shape, dtype=torch.int32, device=self.device)
        place = self._rounds.begin("dispatch", fp8)
        kernel.send(place, x, topk_idx, slots, constants)

        def receive() -> None:
            taken = rows.view(torch.uint8) if fp8 else rows
            added = (self._nothing, torch.empty_like(counts)) if stats is None else (stats, stats)
            others = (source, ranges, *added, counts)
            kernel.receive(place, taken, scales, *others, **constants)

        handle = self.handle(slots, source, ranges)
        finish = self._rounds.end(receive, hook=hook)
        return Dispatched(rows, scales if fp8 else None, counts, handle, finish)

    def get_next_combine_buffer(self, handle: Handle) -> Tensor:
        """Return the view that experts may write what the next combine sends into.

        Returns:
            [local, rows, hidden] bfloat16 in the packed order of the dispatch; it serves the
            next round only, with ``zero_copy=True``.

        Raises:
            MisuseError: The handle is another buffer's, or peers may still read the view.
        """
        self._check_handle(handle)
        return self._view(self._rounds.next_buffer())

    def handle(self, slots: Tensor, source: Tensor, layout_range: Tensor) -> Handle:
        """Return the handle of a dispatch from its parts, such as those that were kept of one."""
        return Handle(self, self.shape.topk, slots.shape[0], slots, source, layout_range)

    def combine(  # noqa: PLR0913 - the first six are DeepEP's
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        *,
        zero_copy: bool = False,
        out: Tensor | None = None,
        hook: bool = False,
    ) -> Combined:
        """Add up the rows that experts made of each token, with its weights.

        Args:
            x: [local, rows, hidden] bfloat16 in the packed order of the dispatch.
            topk_idx: [tokens, topk], as in the dispatch.
            topk_weights: [tokens, topk] float32.
            handle: The dispatch's.
            zero_copy: x is the view of `get_next_combine_buffer`.
            out: [tokens, hidden] bfloat16 to write to.
            hook: Leave the receive phase to the hook that is returned.

        Raises:
            MisuseError: The handle or the view is not this round's, or as for `dispatch`.
            PeerTimeout: A peer did not come; on GPUs a later call or `check` tells.
            ValueError: A shape, an element type or, in debug mode, an id is not allowed.
        """
        shape, kernel = self.shape, self.kernels.combine[zero_copy]
        self._check_handle(handle)
        self._check("x", x, (shape.local, shape.rows, shape.hidden), torch.bfloat16)
        self._check_choices(topk_idx, handle.tokens)
        self._check("topk_weights", topk_weights, tuple(topk_idx.shape), torch.float32)
        if out is None:
            out = x.new_empty((handle.tokens, shape.hidden))
        self._check("out", out, (handle.tokens, shape.hidden), torch.bfloat16)
        if zero_copy and x.data_ptr() != self._view(self._rounds.next_buffer()).data_ptr():
            raise MisuseError(
                "combine: with zero_copy, x must be the view that get_next_combine_buffer returns "
                "after the last round; a view of an earlier round lies in the other buffer"
            )
        views = self._views[zero_copy][self._rounds.index]
        place = self._rounds.begin("combine", zero_copy)
        constants = self._layouts.combine[zero_copy]
        rows = None if zero_copy and kernel.COPY == "pull" else x
        kernel.send(place, rows, handle.source, handle.layout_range, views, **constants)

        def receive() -> None:
            kernel.receive(place, out, topk_idx, topk_weights, handle.slots, views, **constants)

        return Combined(out, self._rounds.end(receive, hook=hook))

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if a peer did not come."""
        self._rounds.check()

    def reset(self) -> None:
        """Start anew after a PeerTimeout; every rank must call it."""
        self._rounds.reset()

    def mask(self, rank: int, masked: bool = True) -> None:
        """Leave a rank out, or take it in again: nothing is sent to it or awaited from it.

        Args:
            rank: The rank; every other rank must leave it out in the same round.
            masked: Whether it is left out.

        Raises:
            ValueError: There is no such rank, or it is this one.
        """
        if not 0 <= rank < self.shape.ranks or rank == self.rank:
            raise ValueError(
                f"mask: rank must be one of the {self.shape.ranks} ranks other than {self.rank}, "
                f"but got {rank}"
            )
        self._rounds.leave_out(rank, masked)

    def _view(self, memory: Tensor) -> Tensor:
        """Return the part of a buffer that a combine with zero copy sends from."""
        shape, begin = self.shape, self._layouts.views[True]
        size = 2 * shape.local * shape.rows * shape.hidden
        rows = memory[begin : begin + size].view(torch.bfloat16)
        return rows.view(shape.local, shape.rows, shape.hidden)

    def _check(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
    ) -> None:
        check_tensor(name, tensor, shape, dtypes=dtypes, device=self.device)

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self.shape.max_tokens:
            raise ValueError(
                f"x: must have at most {self.shape.max_tokens} tokens, but got {tokens}"
            )

    def _check_choices(self, topk_idx: Tensor, tokens: int) -> None:
        wanted = (tokens, self.shape.topk)
        self._check("topk_idx", topk_idx, wanted, torch.int64, torch.int32)
        if self._debug:
            check_ids(topk_idx, self.shape.experts)

    def _check_handle(self, handle: Handle) -> None:
        if handle.buffer is not self:
            raise MisuseError("the handle comes from another buffer's dispatch")
