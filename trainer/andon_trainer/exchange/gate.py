"""The worker's end of the value gate: what must not be sent (F-DP-003)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from andon.protocol.encoding import Encoding, EncodingOverflow, encodable, encode
from andon.protocol.halts import describe_value
from andon_trainer.exchange.path import Floats

__all__ = ["Defect", "defect_of"]


@dataclass(frozen=True, slots=True)
class Defect:
    """The first element of a vector that must not be sent; `kind` is a name of FaultKind."""

    kind: str
    element: int
    value: str


def defect_of(flat: Floats, encoding: Encoding) -> Defect | None:
    """The first value of `flat`, shape (n,), that must not be sent; None if there is none.

    A cheap look, tile by tile in the processor's cache, and an exact one if it trips. Nothing is
    encoded for it.
    """
    if encodable(flat, encoding):
        return None
    wrong = np.flatnonzero(~np.isfinite(flat))
    if wrong.size:
        element = int(wrong[0])
        return Defect("NON_FINITE_GRADIENT", element, describe_value(float(flat[element])))
    try:
        encode(flat, encoding)
    except EncodingOverflow as overflow:
        return Defect("ENCODING_OVERFLOW", overflow.element, describe_value(overflow.value))
    return None
