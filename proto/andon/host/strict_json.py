"""Strict JSON: what a program prints for other programs, in any language, to read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["strict_json"]


def strict_json(value: Any) -> str:
    """A value as one line of JSON; a number that is not finite becomes null.

    Python would write NaN and Infinity, which are no JSON: `jq` and browsers refuse the whole text.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return value
