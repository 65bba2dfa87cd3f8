"""How the command line names a cluster and what is wanted of it."""

from __future__ import annotations

import logging
import socket

import ray

from tuner.catalog import device_class
from tuner.records import UsageError

GPUS = ("cuda", "hip", "xpu")
"""Kinds of device that Ray counts as its resource GPU."""

_CONNECT_S = 5.0
_LOCAL = ("localhost", "127.0.0.1", "::1")


def kinds_of(device: str) -> tuple[str, ...]:
    """Return the kinds of device that a --device asks of a cluster.

    Raises:
        UsageError: It names a card, an unknown kind, or one whose times mean nothing.
    """
    kinds = tuple(dict.fromkeys(part.strip() for part in device.split(",")))
    if kinds == ("auto",):
        return kinds
    for kind in kinds:
        if ":" in kind:
            plain = kind.partition(":")[0]
            raise UsageError(
                f"--device {kind}: Ray hands out the cards of a cluster; write {plain}"
            )
        if not device_class(kind).timed:
            raise UsageError(
                f"--device {kind}: it never times, so nothing can be tuned on it; "
                "`tune verify` runs there"
            )
    return kinds


def connect(address: str) -> None:
    """Connect this process to a cluster.

    Args:
        address: ``"auto"`` or ``HOST:PORT``.

    Raises:
        UsageError: It is spelled otherwise, or nothing answers there.
    """
    host, _, port = address.rpartition(":")
    if address != "auto" and not port.isdecimal():
        raise UsageError(f"--cluster {address}: write auto or HOST:PORT, such as 10.0.0.1:6379")
    if "//" in address:
        raise UsageError(f"--cluster {address}: run tune on a node of the cluster, with auto")
    try:
        if (
            address != "auto" and host not in _LOCAL
        ):  # which Ray takes for this host by its address
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # What happens to nodes is told in our words; Ray would write it among --json's output.
        ray._private.worker._worker_logs_enabled = False
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--cluster {address}: no Ray cluster answers: {str(error).partition('. ')[0]}; "
            "begin one with `ray start --head` and run tune on one of its nodes"
        ) from error
