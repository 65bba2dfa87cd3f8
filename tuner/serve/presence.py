"""Which kinds of device are here, asked of all at once: what takes long is to load torch."""

from __future__ import annotations

from collections.abc import Sequence

from tuner import codec
from tuner.catalog import device_class
from tuner.records import DeviceInfo, TunerError
from tuner.serve.blame import fault_of


def presence(kinds: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return for each kind of device what is here, as JSON under `info`, or why there is none.

    Args:
        kinds: Names of device plug-ins that want the same environment.
    """
    found: dict[str, dict[str, object]] = {}
    for kind in kinds:
        try:
            found[kind] = {"info": codec.to_json(_usable(kind))}
        except TunerError as error:
            found[kind] = {"absent": str(error)}
        except Exception as error:  # such as a driver's; the next kind may still be here
            found[kind] = {"absent": fault_of(error, None)}
    return found


def _usable(kind: str) -> DeviceInfo:
    device = device_class(kind)()
    info = device.info()
    if launch := device.empty_call():
        launch()
        device.synchronize()
    return info
