"""What lies in the page beside its text: the chart library and the charts' data."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache

import vl_convert
from markupsafe import Markup

_VEGA = "window.vegaEmbed = vegaEmbed;"


@cache
def library() -> str:
    """Return the chart library, compressed: a browser unpacks it without a network."""
    script = vl_convert.javascript_bundle(_VEGA)
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def embedded(value: object) -> Markup:
    """Return JSON that nothing in it can end the script element of."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))
