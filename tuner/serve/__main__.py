"""The child's loop, started by `tuner.children.child` as a process of its own."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path

from tuner.catalog import device_class, split_device
from tuner.records import TunerError
from tuner.runtime.cases import InputError
from tuner.serve.blame import fault_of
from tuner.serve.server import Message, Server
from tuner.serve.tether import die_with_parent

_COMPILE_NICENESS = 10


def main(arguments: list[str]) -> None:
    """Serve until the parent closes its pipe.

    Args:
        arguments: Role, device, file descriptors of requests and replies, the parent's process
            id, the cache folder, the compiler and the number of ranks.
    """
    gc.disable()  # what importing torch makes is kept: to look for garbage in it takes long
    role, name, requests, replies, parent, cache, compiler, ranks = arguments
    die_with_parent(role, int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, index = split_device(name)
    device = device_class(kind)(index)
    if role == "measure":
        device.confine()
        if int(ranks) > 1:
            from tuner.serve.ranks.team import TeamDevice  # loads torch

            device = TeamDevice(device, int(ranks))
    else:
        os.nice(_COMPILE_NICENESS)  # a measurement must never wait for a compiler
    out = os.fdopen(int(replies), "w", buffering=1)

    def send(reply: Message) -> None:
        out.write(json.dumps(reply) + "\n")

    server = Server(
        device,
        cache=Path(cache),
        compiler=compiler or None,
        announce=lambda phase: send({"phase": phase}),
    )
    with os.fdopen(int(requests)) as lines:
        for line in lines:
            send(reply_to(server, json.loads(line)))
            if not gc.isenabled():
                gc.freeze()
                gc.enable()


def reply_to(server: Server, message: Message) -> Message:
    """Return what the server answers, or why the run cannot go on."""
    try:
        return server.answer(message)
    except (TunerError, InputError) as error:
        return {"failure": str(error)}
    except Exception as error:
        return {"failure": fault_of(error, message.get("problem"))}


if __name__ == "__main__":
    main(sys.argv[1:])
