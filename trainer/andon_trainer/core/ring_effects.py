"""Effects of the ring's core: what a rank is to do, and how it says that something is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.messages import RingChunk, RingHeader
from andon.protocol.records import Key
from andon_trainer.core.events import AveragesComplete, ExchangeFailed

__all__ = ["Effect", "Faulty", "Forward", "Send", "Violation"]


class Violation(Exception):
    """The rank before this one sent what can't be."""


class Faulty(Exception):
    """The round can't be finished, and this rank sends nothing more of it."""

    def __init__(self, failed: ExchangeFailed) -> None:
        """`failed` is what the coordinator is to hear."""
        super().__init__(failed.message)
        self.failed = failed

    @classmethod
    def protocol(cls, key: Key, message: str) -> Faulty:
        """Workers don't fit together."""
        return cls(ExchangeFailed(key=key, kind="PROTOCOL", message=message))

    @classmethod
    def corrupt(cls, chunk: RingChunk, sender: int, receiver: int, *, bytes_: bool) -> Faulty:
        """A chunk of rank `sender` does not match its checksum; of `bytes_` it names no block."""
        text = (
            f"the {chunk.stage.name.lower().replace('_', ' ')} at element {chunk.offset} of block "
            f"{chunk.block} does not match its CRC-32C: the network, or the memory of a machine, "
            f"changed it on its way from rank {sender} to rank {receiver}"
        )
        return cls(
            ExchangeFailed(
                key=chunk.key,
                kind="CORRUPT_CHUNK",
                message=text,
                rank=sender,
                block=None if bytes_ else chunk.block,
                element=chunk.offset,
            )
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the next rank."""

    message: RingHeader | RingChunk


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the bytes that came, unchanged, to the next rank."""

    data: bytes


Effect = Send | Forward | AveragesComplete | ExchangeFailed
