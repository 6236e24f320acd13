"""A minimal HTTP/2 client that follows the protocol's rules only where a test asks for it.

It has only what an attacker needs: it writes frames (RFC 9113), with headers as literals without an
index (RFC 7541, 6.2.2). It discards or counts what the peer sends.
"""

from __future__ import annotations

import select
import socket
import struct
import time

__all__ = [
    "DATA",
    "HALF_CLOSE",
    "PREFACE",
    "Connection",
    "frame",
    "grpc_message",
    "headers",
    "window",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
HALF_CLOSE, END_HEADERS, ACK = 0x1, 0x4, 0x1
_CANCEL = 8
_INITIAL_WINDOW = 4


def frame(
    kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None
) -> bytes:
    """A frame; `length` replaces the true length in its header."""
    said = len(body) if length is None else length
    return struct.pack(">I", said)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def window(size: int) -> bytes:
    """Settings that let the peer send so many bytes on each stream before it must wait."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, size))


def headers(method: str, **more: str) -> bytes:
    """The header block of a gRPC call."""
    pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more.items(),
    ]
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in pairs)


def grpc_message(data: bytes, length: int | None = None) -> bytes:
    """A gRPC message as DATA carries it; `length` replaces the true length in its prefix."""
    said = len(data) if length is None else length
    return struct.pack(">BI", 0, said) + data


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, written = len(data) - 127, bytearray([127])
    while rest > 127:
        written.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*written, rest]) + data


class Connection:
    """One connection; streams are 1, 3, 5, ..."""

    def __init__(self, address: str, *, polite: bool = True, timeout_s: float = 10.0) -> None:
        """Connects; if `polite`, sends the preface and settings."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._readable = select.poll()  # select.select does not support descriptors above 1023
        self._readable.register(self.socket, select.POLLIN)
        self._last = -1
        self._unread = b""
        self.closed = False
        self._room = self._first_room = 65_535
        self._rooms: dict[int, int] = {}
        self._ended: set[int] = set()
        if polite:
            self.send(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> bool:
        """Sends all of it; False if the peer closed the connection, or reads no more."""
        try:
            self.socket.sendall(data)
        except OSError:
            self.closed = True
        return not self.closed

    def open(self, method: str, **more: str) -> int:
        """Starts a call; returns its stream."""
        self._last += 2
        self.send(frame(HEADERS, END_HEADERS, self._last, headers(method, **more)))
        return self._last

    def say(self, stream: int, data: bytes) -> bool:
        """Sends DATA as it is."""
        return self.send(frame(DATA, 0, stream, data))

    def feed(self, stream: int, data: bytes) -> int:
        """Sends as much DATA as the peer's window allows now; returns the number of bytes."""
        sent = 0
        while sent < len(data) and not self.closed:
            room = min(2**14, self._room, self._rooms.setdefault(stream, self._first_room))
            piece = data[sent : sent + room]
            if not piece:
                break
            self.say(stream, piece)
            self._room -= len(piece)
            self._rooms[stream] -= len(piece)
            sent += len(piece)
        return sent

    def _widen(self, stream: int, more: int) -> None:
        if stream:
            self._rooms[stream] = self._rooms.get(stream, self._first_room) + more
        else:
            self._room += more

    def _settle(self, body: bytes) -> None:
        for number, value in struct.iter_unpack(">HI", body):
            if number == _INITIAL_WINDOW:
                for stream in self._rooms:
                    self._rooms[stream] += value - self._first_room
                self._first_room = value

    def reset(self, stream: int) -> bool:
        """Cancels a call."""
        return self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))

    def answer(self) -> int:
        """Reads frames, and acknowledges settings and pings; returns the number of frames."""
        frames = 0
        self._fill()
        while len(self._unread) >= 9:
            length = int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < 9 + length:
                break
            kind, flags = self._unread[3], self._unread[4]
            stream = int.from_bytes(self._unread[5:9], "big")
            body, self._unread = self._unread[9 : 9 + length], self._unread[9 + length :]
            frames += 1
            if kind == HEADERS and flags & HALF_CLOSE:
                self._ended.add(stream)
            if kind == WINDOW_UPDATE:
                self._widen(stream, int.from_bytes(body, "big"))
            elif kind == SETTINGS and not flags & ACK:
                self._settle(body)
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.send(frame(kind, ACK, 0, body if kind == PING else b""))
        return frames

    def ended(self, stream: int) -> bool:
        """Whether the peer has ended a call, with a status; `answer` must have read that."""
        return stream in self._ended

    def _fill(self) -> None:
        while not self.closed and self._readable.poll(0):
            try:
                data = self.socket.recv(2**16)
            except OSError:
                data = b""
            self.closed = not data
            self._unread += data

    def await_end(self, within_s: float) -> bool:
        """Whether the peer closes the connection within the time, while we answer nothing."""
        self._fill()
        until = time.monotonic() + within_s
        while not self.closed and time.monotonic() < until:
            self._fill()
            self._unread = b""
            time.sleep(0.02)
        return self.closed

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()
