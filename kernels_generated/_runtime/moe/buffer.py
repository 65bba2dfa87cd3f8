"""Low-latency dispatch and combine of tokens over the ranks of one host, by DeepEP's names.

Every call is a round: all ranks make the same calls in the same order, each with as many tokens
as it has. Rounds use two buffers by turns. Every rank signals every rank in every round, also
when it has nothing to send, so that the signals of a round free the buffer of the one before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import Checks
from .errors import MisuseError
from .heap import Heap, heap_of
from .kernels import (
    WITHOUT_WEIGHTS,
    Kernels,
    Shape,
    default_kernels,
    kernels_for,
    require_device,
)
from .layouts import Layouts
from .results import Arrived, Combined, Dispatched, Handle, Packed, empty_arrived
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
        self.rank, self.device = heap.rank, heap.device
        self._checks = Checks(self.shape, heap.device, debug=debug)
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
        self._views = self._rounds.addresses(self._layouts.view)
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
        topk_weights: Tensor | None = None,
        *,
        fp8: bool = False,
        hook: bool = False,
        stats: Tensor | None = None,
    ) -> Dispatched:
        """Send each token's row to the ranks of its experts, and pack what the peers sent.

        Args:
            x: [tokens, hidden] bfloat16.
            topk_idx: [tokens, topk] int32 or int64 experts; -1 names none.
            topk_weights: [tokens, topk] float32 of the combine, on all ranks or none. With them
                ranks may add up a token's rows before they send the sum back: fewer bytes.
            fp8: Send e4m3 with a scale for 128 channels.
            hook: Leave the receive phase to the hook that is returned.
            stats: [local] int32, to which the counts of rows are added.

        Raises:
            MisuseError: A hook was not called, or an earlier wait was in vain and not reset.
            PeerTimeout: A peer did not come; on GPUs a later call or `check` tells.
            ValueError: A shape, an element type or, in debug mode, an id is not allowed.
        """
        self._checks.tokens(x)
        self._checks.choices(topk_idx, topk_weights, x.shape[0])
        if stats is not None:
            self._checks.tensor("stats", stats, (self.shape.local,), torch.int32)
        weighted, kernel = topk_weights is not None, self.kernels.dispatch[fp8]
        constants = {**self._layouts.dispatch[fp8], "WEIGHTED": weighted}
        packed = Packed.empty(self.shape, self.device, fp8=fp8)
        rows, scales, source, ranges, counts = packed
        slots = torch.empty(topk_idx.shape, dtype=torch.int32, device=self.device)
        weights, arrived = slots, (counts, counts, counts)  # stand for what is not looked at
        if topk_weights is not None:
            weights, arrived = topk_weights, empty_arrived(self.shape, self.device)
        place = self._rounds.begin("dispatch", (fp8, weighted))
        kernel.send(place, x, (topk_idx, weights, slots), arrived[0], constants)

        def receive() -> None:
            taken = rows.view(torch.uint8) if fp8 else rows
            added = (self._nothing, torch.empty_like(counts)) if stats is None else (stats, stats)
            others = (source, ranges, *added, counts, *arrived)
            kernel.receive(place, taken, scales, *others, **constants)

        handle = self.handle(slots, source, ranges, arrived if weighted else None)
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

    def handle(
        self, slots: Tensor, source: Tensor, layout_range: Tensor, arrived: Arrived | None = None
    ) -> Handle:
        """Return the handle of a dispatch from its parts, such as those that were kept of one."""
        tokens = slots.shape[0]
        return Handle(self, self.shape.topk, tokens, slots, source, layout_range, arrived)

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
            topk_weights: [tokens, topk] float32, those of the dispatch if it had some.
            handle: The dispatch's.
            zero_copy: x is the view of `get_next_combine_buffer`.
            out: [tokens, hidden] bfloat16 to write to.
            hook: Leave the receive phase to the hook that is returned.

        Raises:
            MisuseError: The handle or the view is not this round's, or as for `dispatch`.
            PeerTimeout: A peer did not come; on GPUs a later call or `check` tells.
            ValueError: A shape, an element type or, in debug mode, an id is not allowed.
        """
        self._check_handle(handle)
        shape, which = self.shape, int(zero_copy)
        if self.kernels.combine[which].COPY == "reduce" and handle.arrived is None:
            which = WITHOUT_WEIGHTS
        kernel = self.kernels.combine[which]
        self._checks.tensor("x", x, (shape.local, shape.rows, shape.hidden), torch.bfloat16)
        self._checks.choices(topk_idx, topk_weights, handle.tokens)
        if out is None:
            out = x.new_empty((handle.tokens, shape.hidden))
        self._checks.tensor("out", out, (handle.tokens, shape.hidden), torch.bfloat16)
        if zero_copy and x.data_ptr() != self._view(self._rounds.next_buffer()).data_ptr():
            raise MisuseError(
                "combine: with zero_copy, x must be the view that get_next_combine_buffer returns "
                "after the last round; a view of an earlier round lies in the other buffer"
            )
        views = self._views[self._rounds.index]
        place = self._rounds.begin("combine", which)
        constants = self._layouts.combine[which]
        rows = None if zero_copy and kernel.COPY == "pull" else x
        sent = (rows, handle.source, handle.layout_range, views, handle.arrived)
        kernel.send(place, *sent, **constants)

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
        shape, begin = self.shape, self._layouts.view
        rows = memory[begin : begin + self._layouts.view_size].view(torch.bfloat16)
        return rows.view(shape.local, shape.rows, shape.hidden)

    def _check_handle(self, handle: Handle) -> None:
        if handle.buffer is not self:
            raise MisuseError("the handle comes from another buffer's dispatch")
