"""``python -m PACKAGE verify`` checks every frozen variant on this machine."""

import sys

from . import _package
from ._runtime.selftest import main

sys.exit(main(_package))
