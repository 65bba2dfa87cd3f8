"""What goes wrong between ranks."""

from __future__ import annotations

PHASES = {1: "send", 2: "receive"}
"""The phases as the kernels number them: a send waits for acknowledgements, if for anything."""


class ExchangeError(RuntimeError):
    """The base of the errors of an exchange between ranks."""


class MisuseError(ExchangeError):
    """A call that the protocol forbids; the message says what to do instead."""


class PeerTimeout(ExchangeError):
    """A peer's signal did not come in time; the buffer is of no use until all ranks reset it.

    Args:
        rank: The first peer that was waited for in vain.
        phase: ``"send"`` or ``"receive"``.
        round: The round, or one shortly after it: devices report late.
    """

    def __init__(self, rank: int, phase: str, round: int) -> None:
        super().__init__(rank, phase, round)
        self.rank, self.phase, self.round = rank, phase, round

    def __str__(self) -> str:
        """Return who, when and what to do."""
        return (
            f"no signal from rank {self.rank} in the {self.phase} phase of round {self.round}: it "
            "is late, dead or in another round; call reset() on every rank, after mask() of a "
            "rank that is gone"
        )
