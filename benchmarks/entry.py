"""How a script starts: what the user got wrong is said in a line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from tuner.records import TunerError


def start(main: Callable[[], int]) -> NoReturn:
    """Run a script's main function and exit with its status."""
    try:
        sys.exit(main())
    except TunerError as error:
        sys.exit(f"error: {error}")
