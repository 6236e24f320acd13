"""The worker's end of the value gate: what must not be sent (F-DP-003)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from andon.encoding import Encoding, EncodingOverflow, encode
from andon.halts import describe_value
from andon_trainer.exchange.path import Floats

__all__ = ["Defect", "defect_of"]


@dataclass(frozen=True, slots=True)
class Defect:
    """The first element of a vector that must not be sent; `kind` is a name of FaultKind."""

    kind: str
    element: int
    value: str


def defect_of(flat: Floats, encoding: Encoding) -> Defect | None:
    """A cheap look (a sum is finite only if its terms are), and an exact one if it trips."""
    with np.errstate(all="ignore"):
        finite = bool(np.isfinite(np.add.reduce(flat)))
    if not finite:
        wrong = np.flatnonzero(~np.isfinite(flat))
        if wrong.size:
            element = int(wrong[0])
            return Defect("NON_FINITE_GRADIENT", element, describe_value(float(flat[element])))
    if encoding is not Encoding.FLOAT32:
        try:
            encode(flat, encoding)
        except EncodingOverflow as overflow:
            return Defect("ENCODING_OVERFLOW", overflow.element, describe_value(overflow.value))
    return None
