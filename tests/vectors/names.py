"""The keys and secrets that all samples share."""

from __future__ import annotations

from andon.v1 import record_pb2

__all__ = ["BLOCK_ELEMENTS", "KEY", "PARENT", "TERM", "TOKEN"]

TERM = 0x65A1B2C3_00000007
KEY = record_pb2.Key(term=TERM, round=9)
PARENT = record_pb2.Key(term=TERM, round=8)
TOKEN = bytes(range(32))
BLOCK_ELEMENTS = (20, 5, 16, 402)
"""Elements of the sample's blocks, in the layout's order."""
