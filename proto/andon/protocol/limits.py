"""Limits of the wire: every client may use all of them, and every server refuses more."""

from __future__ import annotations

__all__ = [
    "BATCH_LIMIT",
    "CHUNK_ELEMENTS",
    "COUNT_LIMIT",
    "MAX_COMPONENTS",
    "MAX_CONNECTIONS",
    "MAX_DIMENSIONS",
    "MAX_ELEMENTS",
    "MAX_FIELDS",
    "MAX_GIVEN_BYTES",
    "MAX_GRAINS",
    "MAX_HASHED_SAMPLES",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_BYTES",
    "MAX_NODES_APART",
    "MAX_NUMBERS",
    "MAX_OWED_RANGES",
    "MAX_PACING_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_SCALARS",
    "MAX_SCALAR_NAMES",
    "MAX_SCALAR_NAME_BYTES",
    "MAX_TEXT_BYTES",
    "MAX_WORKERS",
    "PREFIX_BYTES",
    "PROTOCOL_VERSION",
    "STATE_PIECE_BYTES",
    "LimitExceeded",
    "clipped",
    "on_one_line",
    "require_at_most",
]

PROTOCOL_VERSION = 1
"""Major version of the protocol, sent in Join."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""gRPC's own default limit in every language: no message is ever longer."""

MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - 64 * 2**10
"""The longest payload of a chunk. The rest of a message is left for its other fields."""

CHUNK_ELEMENTS = 2**19
"""Elements in a chunk unless the line says otherwise: 2 MiB of float32."""

STATE_PIECE_BYTES = 2**20
"""Length of one piece of a state transfer."""

MAX_ELEMENTS = 2**48
"""Elements in a model. Sums of element counts stay far below 64 bits."""

MAX_COMPONENTS = 2**16
"""Components in a layout."""

MAX_CONNECTIONS = 16
"""Connections of a TCP lane in one direction."""

MAX_GRAINS = 2**15
"""Grains in a batch, of which one report may have to attest all, with 40 bytes each."""

MAX_HASHED_SAMPLES = 2**15
"""Positions in a batch whose samples are hashed one by one; of a larger one, grain by grain."""

MAX_DIMENSIONS = 64
"""Dimensions of one component, or of one element that evidence names."""

MAX_NAME_BYTES = 1000
"""Bytes of the name of a block or a component."""

MAX_FIELDS = 1024
"""Fields in one message of the data plane. It bounds the work that a hostile message makes."""

MAX_NUMBERS = 2**16
"""Numbers in one packed field of the data plane: blocks of a layout."""

MAX_NODES_APART = 1024
"""Nodes of which one report has two results, with the first element that differs."""

MAX_OWED_RANGES = 4096
"""Ranges of owed positions in one cursor."""

MAX_TEXT_BYTES = 1000
"""Bytes of a text for people; a longer one is clipped. Keeps a status with details below 8 KiB."""

PREFIX_BYTES = 8
"""Bytes of each component's prefix of the weights' digest."""

MAX_PACING_BYTES = 2**18
"""In what a coordinator keeps of its workers' speed: 256 bytes for each of the most workers."""

MAX_SCALARS = 256
"""Scalars that one Heartbeat may carry."""

MAX_SCALAR_NAMES = 64
"""Names of scalars in a run. Each is a series for as long as the run lasts."""

MAX_SCALAR_NAME_BYTES = 64
"""Bytes of the name of a scalar."""

MAX_WORKERS = 1024
"""The most workers that a line may be configured for."""

MAX_GIVEN_BYTES = 3 * 2**10
"""Bytes that a worker gives to a scalar all-reduce: an answer has those of MAX_WORKERS."""

COUNT_LIMIT = 2**53
"""Counts from peers that are kept are below it: steps, epochs, positions, samples, halts.

Every language and JSON hold such a number exactly. The sum of one number from each of MAX_WORKERS
workers is below 2**63, where SQLite's integers end.
"""

BATCH_LIMIT = 2**32
"""A step has fewer samples than this. After two billion steps their sum is still below 2**63."""


_ELLIPSIS = "…"


class LimitExceeded(ValueError):
    """A peer sent more of something than the protocol allows: which limit, and how much."""


def require_at_most(count: int, most: int, what: str) -> None:
    """Refuses a count above its limit; `what` names the things counted, in the plural.

    Raises:
        LimitExceeded: `count` is above `most`.
    """
    if count > most:
        raise LimitExceeded(f"{count} {what} are more than {most}, which is the limit")


def on_one_line(text: str) -> str:
    """What somebody else wrote, without what would end a line or move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)


def clipped(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """`text` cut to at most `max_bytes` bytes of UTF-8, with an ellipsis where it was cut.

    A character that UTF-8 can't hold (half a surrogate pair) becomes a question mark, so that the
    message of any exception can be sent.
    """
    data = text.encode(errors="replace")
    if len(data) > max_bytes:
        kept = max_bytes - len(_ELLIPSIS.encode())
        # "ignore" drops the bytes of a character that the cut went through.
        return data[:kept].decode(errors="ignore") + _ELLIPSIS
    return data.decode()
