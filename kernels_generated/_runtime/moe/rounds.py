"""Whose turn it is: the buffers of each round, and the order of calls that the protocol needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import PHASES, MisuseError, PeerTimeout
from .heap import Heap

SIGNAL_BYTES = 4096
"""Of a rank's signals of a round: one word per rank, at addresses that depend on nothing."""

POLLS_PER_SECOND = {"cuda": 1_000_000, "cpu": 5_000}
"""About how often a program looks at a signal: on a GPU, and in Triton's interpreter."""

FIRST_TIMEOUT_S = 300.0
"""After which the first waits on a GPU are given up: peers may still be compiling."""

_FIRST = 2  # rounds of a kind: in the second, a peer may compile how the first one ends
_SIGNALS, _ACKNOWLEDGEMENTS, _AREAS = 0, 2, 3
_RANK_BITS = 16
_MOST_POLLS = 2**31 - 1

Hook = Callable[[], None]


class Place(NamedTuple):
    """Where a rank stands in a round: the first arguments of every kernel.

    Attributes:
        signals: [ranks] int64, addresses of each rank's signals of this round; as in the other
            tables, 0 stands for a rank that is left out.
        next_signals: [ranks] int64, those of the next round.
        acknowledgements: [ranks] int64, addresses of each rank's acknowledgements.
        buffers: [ranks] int64, addresses of each rank's buffer of this round.
        done: [2] int32, programs that are done with a phase.
        status: [1] int32, phase and rank of the first wait that was in vain.
        report: [1] int32, the same in memory that the host reads without waiting.
        rank: This rank.
        max_polls: After how many polls a wait is given up.
    """

    signals: Tensor
    next_signals: Tensor
    acknowledgements: Tensor
    buffers: Tensor
    done: Tensor
    status: Tensor
    report: Tensor
    rank: int
    max_polls: int


class Rounds:
    """The rounds of one buffer on one rank.

    Args:
        heap: The way to all ranks' memory.
        size: Bytes of a buffer.
        double: Whether rounds use two buffers by turns.
        timeouts_s: After how many seconds, roughly, a wait is given up: in the first two rounds
            of a kind, and later.
    """

    def __init__(
        self, heap: Heap, size: int, *, double: bool, timeouts_s: tuple[float, float]
    ) -> None:
        polls = [timeout_s * POLLS_PER_SECOND[heap.device.type] for timeout_s in timeouts_s]
        if not min(polls) >= 1:
            raise ValueError(f"timeout_s must be a positive time, but got {min(timeouts_s)}")
        self._heap, self._size, self._buffers = heap, size, 2 if double else 1
        self._allocation = heap.allocate(self.bytes_for(size, double=double))
        self._max_polls = [int(min(number, _MOST_POLLS)) for number in polls]
        self._played: Counter[str] = Counter()
        device = heap.device
        self._done = torch.zeros(2, dtype=torch.int32, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        # a GPU writes into the host's memory, but only if a wait was in vain: no copy per round
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True) if on_gpu else self._status
        self._addresses = self._address_tables()
        self._tables = self._addresses.clone()
        self._number, self._captured, self._pending, self._operation = 0, 0, False, ""
        self.reset()

    @staticmethod
    def bytes_for(size: int, *, double: bool) -> int:
        """Return the bytes of a rank's memory, given those of a buffer."""
        return _AREAS * SIGNAL_BYTES + (2 if double else 1) * size

    @property
    def index(self) -> int:
        """Index of the next round's buffer."""
        return self._number % self._buffers

    def addresses(self, begin: int) -> Tensor:
        """Return [buffers, ranks] int64, addresses of what begins some bytes into each buffer."""
        return self._addresses[_AREAS:] + begin

    def leave_out(self, rank: int, masked: bool) -> None:
        """Send nothing to a rank and await nothing from it, or do so again."""
        self._tables[:, rank] = 0 if masked else self._addresses[:, rank]

    def begin(self, operation: str, kind: object = None) -> Place:
        """Enter a round and return the rank's place in it.

        Args:
            operation: What the round is for, ``"dispatch"`` or ``"combine"``.
            kind: What else decides about the kernels that it launches.

        Raises:
            MisuseError: The round before was not received.
            PeerTimeout: A wait was in vain, as far as the host knows.
        """
        self._raise_if_late()
        if self._pending:
            raise MisuseError(
                f"{operation}: round {self._number - 1} was sent but not received: call its hook "
                "first, for sending wipes out signals that it waits for"
            )
        self._count_captured()
        index, tables = self.index, self._tables
        self._played[f"{operation} {kind}"] += 1
        is_first = self._played[f"{operation} {kind}"] <= _FIRST
        self._number += 1
        self._operation = operation
        self._pending = True
        return Place(
            signals=tables[_SIGNALS + index],
            next_signals=tables[_SIGNALS + 1 - index],
            acknowledgements=tables[_ACKNOWLEDGEMENTS],
            buffers=tables[_AREAS + index],
            done=self._done,
            status=self._status,
            report=self._seen,
            rank=self._heap.rank,
            max_polls=self._max_polls[0 if is_first else 1],
        )

    def end(self, receive: Hook, *, hook: bool) -> Hook | None:
        """Launch the receive phase, or return the hook that does."""
        number = self._number

        def finish() -> None:
            if not self._pending or number != self._number:
                raise MisuseError(f"the hook of round {number - 1} was called already, or reset")
            self._pending = False
            receive()
            if self._seen is self._status:
                self._raise_if_late()

        if hook:
            return finish
        finish()
        return None

    def next_buffer(self) -> Tensor:
        """Return this rank's bytes of the next round's buffer.

        Raises:
            MisuseError: Peers may still read them.
        """
        if self._pending:
            raise MisuseError(
                f"round {self._number - 1} was not received: call its hook first, for peers may "
                "still read the view"
            )
        if self._buffers == 1 and self._operation == "combine":
            raise MisuseError(
                "these kernels use one buffer, which peers may still read after a combine: take "
                "the view after a dispatch"
            )
        begin = _AREAS * SIGNAL_BYTES + self.index * self._size
        return self._allocation.memory[begin : begin + self._size]

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if a wait was in vain."""
        if self._heap.device.type == "cuda":
            torch.cuda.synchronize(self._heap.device)
        self._raise_if_late()

    def reset(self) -> None:
        """Start anew with round 0; all ranks call it, and none returns before all have.

        They meet before, so that no signal of theirs comes after this rank's were lowered.
        """
        self._heap.barrier()
        self._clear()
        self._heap.barrier()

    def _clear(self) -> None:
        words = self._allocation.memory[: _AREAS * SIGNAL_BYTES].view(torch.int32)
        words.zero_()
        words[_ACKNOWLEDGEMENTS * SIGNAL_BYTES // 4 :] = 1  # nothing was read that is not free
        self._done.zero_()
        self._status.zero_()
        self._seen.zero_()
        self._number, self._captured, self._pending, self._operation = 0, 0, False, ""

    def _address_tables(self) -> Tensor:
        """Return a row of addresses for each area and buffer, each row aligned."""
        sizes = [SIGNAL_BYTES] * _AREAS + [self._size] * self._buffers
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        odd = len(self._allocation.addresses) % 2
        rows = [
            [address + offset for address in self._allocation.addresses] + [0] * odd
            for offset in offsets
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self._heap.device)

    def _raise_if_late(self) -> None:
        status = int(self._seen)
        if status:
            peer = status % 2**_RANK_BITS - 1
            raise PeerTimeout(peer, PHASES[status >> _RANK_BITS], self._number - 1)

    def _count_captured(self) -> None:
        """Refuse a graph of an odd number of rounds: replays would use the wrong buffer."""
        if self._heap.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured += 1
        elif self._captured % 2 and self._buffers == 2:
            raise MisuseError(
                f"a graph captured {self._captured} rounds: capture an even number, so that every "
                "replay begins with the same buffer"
            )
        else:
            self._captured = 0
