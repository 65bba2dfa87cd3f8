"""A model of the exchange between ranks: every interleaving of what they write, await and read.

A round of a rank is a send phase and a receive phase. Memory is a row of cells; a rank's program
is a list of steps on them. A search over all interleavings finds lost signals (nobody can go on)
and overwritten data (a read meets the version of another round).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Buffering = Literal["double", "acknowledged"]


@dataclass(frozen=True, slots=True)
class Write:
    """Give cells a value at once."""

    cells: tuple[int, ...]
    value: int


@dataclass(frozen=True, slots=True)
class Add:
    """Add one to a cell."""

    cell: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when a cell is at least so large."""

    cell: int
    least: int = 1


@dataclass(frozen=True, slots=True)
class Read:
    """Find the version of a round in a cell; a larger or smaller one is an error."""

    cell: int
    version: int


Step = Write | Add | Wait | Read
Phase = list[Step]
Mutation = Callable[[int, int, Phase, Phase], tuple[Phase, Phase]]
"""Changes the send and receive phase of (rank, round): a bug to be found."""


class Memory:
    """Numbers of the cells: signals, data and views exist per buffer, acknowledgements once.

    Args:
        ranks: Number of ranks.
        buffers: Number of buffers that rounds alternate between.
    """

    def __init__(self, ranks: int, buffers: int) -> None:
        self.ranks, self.buffers = ranks, buffers
        self._table = ranks * ranks
        self.size = (2 * buffers + 1) * self._table + buffers * ranks

    def signal(self, buffer: int, owner: int, source: int) -> int:
        """Return the signal that `source` raises in `owner`'s memory."""
        return buffer * self._table + owner * self.ranks + source

    def data(self, buffer: int, owner: int, source: int) -> int:
        """Return what `source` pushes into `owner`'s memory."""
        return self.signal(self.buffers + buffer, owner, source)

    def acknowledgement(self, owner: int, source: int) -> int:
        """Return what `source` raises in `owner`'s memory when it has read all."""
        return self.signal(2 * self.buffers, owner, source)

    def view(self, buffer: int, owner: int) -> int:
        """Return what peers pull from `owner`'s memory."""
        return (2 * self.buffers + 1) * self._table + buffer * self.ranks + owner


def phases(
    memory: Memory, rank: int, number: int, *, buffering: Buffering, pull: bool
) -> tuple[Phase, Phase]:
    """Return the steps of a rank in the send and in the receive phase of a round.

    Args:
        memory: The cells.
        rank: The rank.
        number: The round, which is also the version of its data.
        buffering: How a buffer becomes free again.
        pull: Whether the receivers fetch the data from a view of the sender's memory.
    """
    everyone = range(memory.ranks)
    double = buffering == "double"
    buffer = number % 2 if double else 0
    send: Phase = [Write((memory.view(buffer, rank),), number)] if pull else []
    if double:
        send.append(Write(tuple(memory.signal(1 - buffer, rank, peer) for peer in everyone), 0))
    else:
        acknowledgements = [memory.acknowledgement(rank, peer) for peer in everyone]
        send += [Wait(cell) for cell in acknowledgements]
        send.append(Write(tuple(acknowledgements), 0))
    if not pull:
        send += [Write((memory.data(buffer, peer, rank),), number) for peer in everyone]
    send += [Write((memory.signal(buffer, peer, rank),), 1) for peer in everyone]
    receive: Phase = [Wait(memory.signal(buffer, rank, peer)) for peer in everyone]
    receive += [
        Read(memory.view(buffer, peer) if pull else memory.data(buffer, rank, peer), number)
        for peer in everyone
    ]
    if not double:
        receive.append(Write(tuple(memory.signal(0, rank, peer) for peer in everyone), 0))
        receive += [Write((memory.acknowledgement(peer, rank),), 1) for peer in everyone]
    return send, receive


def counted(send: Phase, receive: Phase) -> tuple[Phase, Phase]:
    """Return a round of two programs that each count a signal up when they are done.

    One sends all data; the other lowers the next signals, and may come first or last.
    """
    ranks = sum(isinstance(step, Wait) for step in receive)
    lowering = [step for step in send if isinstance(step, Write) and step.value == 0]
    data = [step for step in send[:-ranks] if step not in lowering]
    up = [Add(cell) for step in send[-ranks:] if isinstance(step, Write) for cell in step.cells]
    waits = [replace(step, least=2) if isinstance(step, Wait) else step for step in receive]
    return [*data, *up, *lowering, *up], waits


def changed(cells: tuple[int, ...], step: Write | Add) -> tuple[int, ...]:
    """Return the cells after a step."""
    after = list(cells)
    if isinstance(step, Add):
        after[step.cell] += 1
    else:
        for cell in step.cells:
            after[cell] = step.value
    return tuple(after)


def faults(programs: list[Phase], memory: Memory) -> Iterator[str]:
    """Yield what goes wrong in some interleaving of the programs; nothing if none does.

    Args:
        programs: The steps of each rank.
        memory: The cells; acknowledgements begin raised, everything else at zero.
    """
    everyone = range(memory.ranks)
    raised = {memory.acknowledgement(owner, source) for owner in everyone for source in everyone}
    start = (0,) * memory.ranks, tuple(int(cell in raised) for cell in range(memory.size))
    seen, pending = {start}, [start]
    while pending:
        positions, cells = pending.pop()
        moves = 0
        for rank, position in enumerate(positions):
            if position == len(programs[rank]):
                continue
            step, after = programs[rank][position], cells
            match step:
                case Wait(cell, least) if cells[cell] < least:
                    continue
                case Read(cell, version) if cells[cell] != version:
                    yield f"rank {rank} wants round {version} and reads round {cells[cell]}"
                    return
                case Write() | Add():
                    after = changed(cells, step)
            moves += 1
            state = (*positions[:rank], position + 1, *positions[rank + 1 :]), after
            if state not in seen:
                seen.add(state)
                pending.append(state)
        if not moves and any(len(programs[rank]) > positions[rank] for rank in everyone):
            yield f"nobody can go on from {positions}"
            return
