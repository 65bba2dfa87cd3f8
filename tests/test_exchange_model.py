"""The protocol of the exchange, by exhaustive search: it is safe, and every known bug is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exchange_model import Add, Memory, Mutation, Phase, Read, Wait, Write, counted, faults, phases

EVERYWHERE = [("double", False), ("double", True), ("acknowledged", False)]


def fault(ranks, rounds, *, buffering, pull, mutation: Mutation | None = None) -> str | None:
    """Return what goes wrong in some interleaving; `pull` is a list for rounds that differ."""
    memory = Memory(ranks, 2 if buffering == "double" else 1)
    pulls = [pull] * rounds if isinstance(pull, bool) else pull
    programs: list[Phase] = []
    for rank in range(ranks):
        program: Phase = []
        for number in range(1, rounds + 1):
            send, receive = phases(
                memory, rank, number, buffering=buffering, pull=pulls[number - 1]
            )
            if mutation:
                send, receive = mutation(rank, number, send, receive)
            program += send + receive
        programs.append(program)
    return next(faults(programs, memory), None)


def is_zeroing(step) -> bool:
    return isinstance(step, Write) and step.value == 0


@pytest.mark.parametrize(("buffering", "pull"), EVERYWHERE)
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 5), (2, 5), (3, 3)])
def test_the_protocol_is_safe(ranks, rounds, buffering, pull):
    assert fault(ranks, rounds, buffering=buffering, pull=pull) is None


@pytest.mark.parametrize("buffering", ["double", "acknowledged"])
def test_dispatch_and_zero_copy_combine_may_alternate(buffering):
    assert fault(2, 4, buffering=buffering, pull=[False, True, False, True]) is None


def test_one_acknowledged_buffer_gives_no_second_view_without_a_dispatch_between():
    found = fault(2, 2, buffering="acknowledged", pull=[True, True])
    assert found is not None
    assert "reads round 2" in found


def count_signals(rank, number, send, receive):
    return counted(send, receive)


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 5), (2, 5), (3, 2)])
def test_signals_that_every_program_counts_up_are_safe(ranks, rounds, pull):
    options = {"buffering": "double", "pull": pull, "mutation": count_signals}
    assert fault(ranks, rounds, **options) is None


def count_and_lower_last(rank, number, send, receive):
    send, receive = counted(send, receive)
    return sorted(send, key=is_zeroing), receive


def count_but_await_one_program(rank, number, send, receive):
    send, receive = counted(send, receive)
    ups = [step for step in send if isinstance(step, Add)]
    first, others = ups[: len(ups) // 2], [step for step in send if step not in ups]
    waits = [Wait(step.cell) if isinstance(step, Wait) else step for step in receive]
    return [*first, *others, *first], waits


def zero_after_signals(rank, number, send, receive):
    zeroing = [step for step in send if is_zeroing(step)]
    return [step for step in send if not is_zeroing(step)] + zeroing, receive


def never_zero(rank, number, send, receive):
    return [step for step in send if not is_zeroing(step)], receive


def signal_before_data(rank, number, send, receive):
    signals = send[-2:]
    return send[:1] + signals + send[1:-2], receive


def no_signal_from_an_empty_rank(rank, number, send, receive):
    return (send[:-1] if (rank, number) == (0, 2) else send), receive


def one_buffer(rank, number, send, receive):
    memory = Memory(2, 2)
    other = {
        cell: other
        for peer in range(2)
        for owner in range(2)
        for kind in (memory.signal, memory.data)
        for cell, other in [(kind(1, owner, peer), kind(0, owner, peer))]
    }

    def moved(step):
        if isinstance(step, Write):
            return replace(step, cells=tuple(other.get(cell, cell) for cell in step.cells))
        return replace(step, cell=other.get(step.cell, step.cell))

    return [moved(step) for step in send if not is_zeroing(step)], [*map(moved, receive)]


def acknowledge_before_reading(rank, number, send, receive):
    return send, receive[:2] + receive[4:] + receive[2:4]


def never_await_acknowledgements(rank, number, send, receive):
    return [step for step in send if not isinstance(step, Wait)], receive


def keep_the_signals(rank, number, send, receive):
    return send, [step for step in receive if not is_zeroing(step)]


def lower_signals_after_acknowledging(rank, number, send, receive):
    zeroing = [step for step in receive if is_zeroing(step)]
    return send, [step for step in receive if not is_zeroing(step)] + zeroing


def read_the_other_buffer(rank, number, send, receive):
    shift = 4 if number % 2 == 0 else -4
    return send, [
        replace(step, cell=step.cell - shift) if isinstance(step, Read) else step
        for step in receive
    ]


@pytest.mark.parametrize(
    ("buffering", "mutation", "symptom"),
    [
        ("double", zero_after_signals, "nobody can go on"),
        ("double", never_zero, "reads round"),
        ("double", signal_before_data, "reads round"),
        ("double", no_signal_from_an_empty_rank, "nobody can go on"),
        ("double", one_buffer, "reads round"),
        ("double", read_the_other_buffer, "reads round"),
        ("double", count_and_lower_last, "nobody can go on"),
        ("double", count_but_await_one_program, "reads round"),
        ("acknowledged", acknowledge_before_reading, "reads round"),
        ("acknowledged", never_await_acknowledgements, "reads round"),
        ("acknowledged", keep_the_signals, "reads round"),
        ("acknowledged", lower_signals_after_acknowledging, "nobody can go on"),
    ],
)
def test_a_broken_protocol_is_found_out(buffering, mutation, symptom):
    found = fault(2, 4, buffering=buffering, pull=False, mutation=mutation)
    assert found is not None
    assert symptom in found


def test_sending_before_receiving_is_found_out():
    memory = Memory(2, 2)
    programs = []
    for rank in range(2):
        (send, receive), (next_send, next_receive) = (
            phases(memory, rank, number, buffering="double", pull=False) for number in (1, 2)
        )
        programs.append(send + next_send + receive + next_receive)
    assert "nobody can go on" in next(faults(programs, memory))
