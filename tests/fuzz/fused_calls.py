"""Random valid and invalid calls of the compiled functions; `test_fused_sanitized` runs it.

Usage: fused_calls.py MODULE.so CALLS SEED. Exits with 0 if each call returns a bool or raises the
module's own error.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

_ERRORS = (ValueError, TypeError, BufferError, OverflowError)


def load(path: str) -> ModuleType:
    """Imports the module from a file."""
    loader = ExtensionFileLoader("_fused", path)
    spec = spec_from_loader("_fused", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class Buffers:
    """Buffers of exact size, at any alignment; some of them overlap."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._shared = self._memory(512)

    def one(self, size: int) -> object:
        """A buffer of about `size` bytes, or an object that is not a buffer."""
        kind = self._chance.randrange(12)
        if kind == 0:
            return self._chance.choice([None, 3, "text", bytes(size)])
        if kind == 1:
            return memoryview(bytearray(2 * size + 2))[::2][:size]
        if kind <= 4:
            at = self._chance.randrange(0, 512 - size + 1) if size <= 512 else 0
            return self._shared[at : at + size]
        wrong = self._chance.choice([0, 0, 0, 0, 1, 4, -1])
        at = self._chance.randrange(4)
        return self._memory(max(0, size + wrong) + at)[at:]

    def _memory(self, size: int) -> memoryview:
        # ctypes allocates exactly this many bytes, so a sanitizer sees an access beyond them.
        memory = memoryview((ctypes.c_ubyte * size)()).cast("B")
        memory[:] = self._chance.randbytes(size)
        return memory


def call(module: ModuleType, chance: random.Random) -> None:
    """Calls one of the functions once."""
    buffers, size = (
        Buffers(chance),
        chance.choice([0, 2, 4, 64, 68, 128, 260, 4 * 37, 5, 7, 4 * 128, 4 * 291]),
    )
    count = chance.choice([0, 1, 1, 2, 3, 5])
    vectors: object = tuple(buffers.one(size) for _ in range(count))
    shares: object = tuple(
        chance.choice([0.5, 0.0, -1.0, 1e300, float("nan"), float("inf")])
        for _ in range(chance.choice([count, count, count, count + 1]))
    )
    if chance.random() < 0.02:
        vectors, shares = list(vectors), "abc"  # type: ignore[call-overload]  # a wrong argument
    elements = size // 4
    bits = chance.choice([8, 4, 2])
    payload = 4 * -(-elements // {8: 128, 4: 32, 2: 64}[bits]) + -(-elements * bits // 8)
    match chance.randrange(8):
        case 0:
            module.weighted_mean(buffers.one(size), vectors, shares, chance.random() < 0.5)
        case 1:
            module.bfloat16_mean(buffers.one(size), vectors, shares)
        case 2:
            module.to_bfloat16(buffers.one(size // 2), buffers.one(size))
        case 3:
            encode = getattr(module, f"to_int{bits}")
            residual = buffers.one(size) if chance.random() < 0.5 else None
            encode(buffers.one(payload), buffers.one(size), residual)
        case 4:
            decode = getattr(module, f"from_int{bits}")
            start = chance.choice([0, 0, 0, 32, 128, 256, -128, 2**62])
            some = max(0, elements - start) if chance.random() < 0.9 else elements
            most = chance.choice([elements, elements, elements, elements + 1, -1, 2**61, 2**63 - 1])
            decode(buffers.one(4 * min(some, 100)), buffers.one(payload), most, start)
        case 5:
            neighbours(module, chance, buffers, size)
        case 6:
            other_means(module, chance, buffers, (size, vectors, shares))
        case _:
            mean = getattr(module, f"int{bits}_mean")
            if isinstance(vectors, tuple):
                vectors = tuple(buffers.one(payload) for _ in range(count))
            wide = chance.random() < 0.5
            most = chance.choice([elements, elements, elements, elements + 1, -1, 2**61])
            mean(buffers.one(size if wide else payload), vectors, shares, most, wide)


def other_means(
    module: ModuleType, chance: random.Random, buffers: Buffers, given: tuple[int, object, object]
) -> None:
    """Calls the mean along a tree, or the trimmed one; `given`: bytes of a vector, all, shares."""
    size, vectors, shares = given
    count = len(shares) if isinstance(shares, tuple) else 1
    if chance.random() < 0.5:
        sums = bytes(chance.choice([0, 0, 1, 1, 2, 255]) for _ in range(count))
        module.tree_mean(buffers.one(size), vectors, sums, 2.0, chance.random() < 0.5)
        return
    cut = chance.choice([0, 0, 1, 1, 2, 3, -1, 2**62])
    values = buffers.one(count * chance.choice([size, size, size, size + 4]))
    module.trimmed_mean(buffers.one(size), values, shares, cut)


def neighbours(module: ModuleType, chance: random.Random, buffers: Buffers, size: int) -> None:
    """Calls one of the functions of neighbours, who have given and taken anything."""
    one, other = buffers.one(size), buffers.one(size)
    match chance.randrange(4):
        case 0:
            module.copy(one, other)
        case 1:
            module.checked_copy(chance.choice([None, one]), other)
        case 2:
            module.sum(one, (other,) * chance.choice([0, 1, 2, 5]), 2.0)
        case _:
            length = chance.choice([4096 + 2 * 4096] * 6 + [4096, 4100, 1])
            files = tuple(mmap.mmap(-1, length) for _ in range(chance.choice([0, 1, 2, 2, 3, 4])))
            for file in files:
                if length >= 4096:
                    file[128:132] = struct.pack("<I", chance.choice([0, 1, 2, 3, 100, 2**32 - 1]))
                    file[192:196] = struct.pack("<I", chance.choice([0, 0, 1, 2, 100, 2**32 - 1]))
                    file[256] = 1  # Nobody waits for long: the session is over.
            at = chance.choice([1024, 1024, 2048, 4096, -1, 2**62])
            args = (one, other, 1.0, chance.choice([None, lambda *_: None]))
            module.all_reduce(files, chance.choice([0, 0, 1, 4]), over, 0, at, 16, *args)


def over(_: int) -> None:
    """Ends a call that waits."""
    raise ValueError


def main() -> None:
    """Makes the calls."""
    module, calls, chance = load(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    refused = 0
    for _ in range(calls):
        try:
            call(module, chance)
        except _ERRORS:
            refused += 1
    assert 0 < refused < calls, "both kinds of calls were made"


if __name__ == "__main__":
    main()
