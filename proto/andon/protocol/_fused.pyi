from collections.abc import Callable

from typing_extensions import Buffer

def weighted_mean(
    out: Buffer, vectors: tuple[Buffer, ...], shares: tuple[float, ...], past_caches: bool, /
) -> bool: ...
def tree_mean(
    out: Buffer,
    vectors: tuple[Buffer, ...],
    sums: bytes,
    divisor: float,
    past_caches: bool,
    /,
) -> bool: ...
def trimmed_mean(out: Buffer, values: Buffer, shares: tuple[float, ...], cut: int, /) -> bool: ...
def bfloat16_mean(
    out: Buffer, vectors: tuple[Buffer, ...], shares: tuple[float, ...], /
) -> bool: ...
def to_bfloat16(out: Buffer, values: Buffer, /) -> bool: ...
def to_int8(out: Buffer, values: Buffer, residual: Buffer | None, /) -> bool: ...
def to_int4(out: Buffer, values: Buffer, residual: Buffer | None, /) -> bool: ...
def to_int2(out: Buffer, values: Buffer, residual: Buffer | None, /) -> bool: ...
def from_int8(out: Buffer, payload: Buffer, count: int, start: int, /) -> None: ...
def from_int4(out: Buffer, payload: Buffer, count: int, start: int, /) -> None: ...
def from_int2(out: Buffer, payload: Buffer, count: int, start: int, /) -> None: ...
def int8_mean(
    out: Buffer,
    vectors: tuple[Buffer, ...],
    shares: tuple[float, ...],
    count: int,
    wide: bool,
    /,
) -> bool: ...
def int4_mean(
    out: Buffer,
    vectors: tuple[Buffer, ...],
    shares: tuple[float, ...],
    count: int,
    wide: bool,
    /,
) -> bool: ...
def int2_mean(
    out: Buffer,
    vectors: tuple[Buffer, ...],
    shares: tuple[float, ...],
    count: int,
    wide: bool,
    /,
) -> bool: ...

# On Linux only: docs/protocol-sessions.md, section 30.
def all_reduce(
    files: tuple[Buffer, ...],
    me: int,
    still: Callable[[int], object],
    part: int,
    call_at: int,
    call_bytes: int,
    out: Buffer,
    values: Buffer,
    divisor: float,
    found: Callable[[int, int], object] | None,
    /,
) -> tuple[int, int]: ...
def wait_word(
    files: tuple[Buffer, ...], me: int, still: Callable[[int], object], at: int, value: int, /
) -> None: ...
def set_word(file: Buffer, at: int, value: int | None, /) -> None: ...
def copy(out: Buffer, values: Buffer, /) -> None: ...
def checked_copy(out: Buffer | None, values: Buffer, /) -> int: ...
def sum(out: Buffer, vectors: tuple[Buffer, ...], divisor: float, /) -> int: ...
