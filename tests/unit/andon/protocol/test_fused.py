"""The compiled passes refuse what does not fit, and equal NumPy's to the bit."""

from __future__ import annotations

import mmap
import operator
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import andon
from andon.protocol.encoding import (
    Encoding,
    EncodingOverflow,
    decode,
    decode_part,
    encodable,
    encode,
)
from andon.protocol.encoding import fused as built
from andon.protocol.grains import Node, children, fold

NO_COMPILER = "no C compiler was there when Andon was installed: apt-get install gcc"
UNHURRIED = settings(deadline=None)  # A busy machine is no defect.
SOURCE = Path(andon.__file__).parent / "protocol/_fused.c"


@pytest.fixture(scope="module", params=["as installed", "portable"])
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module, and what it is on a processor that it has no instructions for."""
    if request.param == "as installed":
        if built is None:
            pytest.skip(NO_COMPILER)
        return built
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip(NO_COMPILER)
    module = tmp_path_factory.mktemp("portable") / "_fused.so"
    flags = ["-O3", "-ffp-contract=off", "-shared", "-fPIC", "-DANDON_PORTABLE", f"-I{headers}"]
    subprocess.run([compiler, *flags, SOURCE, "-o", module], check=True)
    loader = ExtensionFileLoader("_fused", str(module))
    spec = spec_from_loader("_fused", loader)
    assert spec is not None
    portable = module_from_spec(spec)
    loader.exec_module(portable)
    return portable


_FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@UNHURRIED
@given(
    st.integers(1, 70).flatmap(
        lambda size: st.lists(arrays(np.float32, size, elements=_FLOATS), min_size=1, max_size=5)
    ),
    st.data(),
)
def test_any_numbers_give_the_bits_that_numpy_gives(
    fused: ModuleType,
    vectors: list[np.ndarray[tuple[int], np.dtype[np.float32]]],
    data: st.DataObject,
) -> None:
    shares = [data.draw(st.floats(0, 1, width=32)) for _ in vectors]
    out = np.empty_like(vectors[0])

    finite = fused.weighted_mean(
        out.data, tuple(vector.data for vector in vectors), tuple(shares), data.draw(st.booleans())
    )

    with np.errstate(all="ignore"):
        expected = np.float32(shares[0]) * vectors[0]
        for share, vector in zip(shares[1:], vectors[1:], strict=True):
            expected = expected + np.float32(share) * vector
    # Any NaN equals any other: a mean with one is never sent.
    np.testing.assert_array_equal(out, expected)
    assert np.array_equal(np.signbit(out[out == 0]), np.signbit(expected[out == 0]))
    assert finite == np.isfinite(expected).all()


@UNHURRIED
@given(
    st.integers(0, 70).flatmap(
        lambda size: st.lists(arrays(np.float32, size, elements=_FLOATS), min_size=1, max_size=5)
    ),
    st.sampled_from([1.0, 3.0]),
)
def test_sums_are_those_of_numpy_and_the_first_that_is_not_finite_is_found(
    fused: ModuleType,
    vectors: list[np.ndarray[tuple[int], np.dtype[np.float32]]],
    divisor: float,
) -> None:
    out, copied = np.empty_like(vectors[0]), np.empty_like(vectors[0])

    bad = fused.sum(out.data, tuple(vector.data for vector in vectors), divisor)
    bad_input = fused.checked_copy(copied.data, vectors[0].data)

    with np.errstate(all="ignore"):
        expected = vectors[0].copy()
        for vector in vectors[1:]:
            expected = expected + vector
        expected = expected / np.float32(divisor)
    np.testing.assert_array_equal(out, expected)
    assert copied.tobytes() == vectors[0].tobytes()
    for found, values in ((bad, expected), (bad_input, vectors[0])):
        wrong = np.flatnonzero(~np.isfinite(values))
        assert found == (wrong[0] if wrong.size else -1)
    assert fused.checked_copy(None, vectors[0].data) == bad_input


@st.composite
def partitions(draw: st.DrawFn) -> list[tuple[Node, int]]:
    """Nodes that partition a root, and how many sums can be done once each of them is there."""

    def below(node: Node) -> list[tuple[Node, int]]:
        both = children(node)
        if both is None or draw(st.integers(0, 3)) == 0:
            return [(node, 0)]
        *others, (last, sums) = (part for child in both for part in below(child))
        return [*others, (last, sums + 1)]

    return below(Node(0, draw(st.sampled_from([1, 2, 3, 5, 8, 13, 33]))))


EDGES = np.array([0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000], np.uint32)
"""Zeros, subnormals, the greatest float32, an infinity."""


@UNHURRIED
@given(
    partitions(),
    st.sampled_from([1, 7, 16, 511, 512, 1040]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.0, 0.2]),
    st.sampled_from([1.0, 3.0, 0.25, 0.0]),
    st.booleans(),
)
def test_a_mean_along_any_tree_has_the_bits_that_numpy_gives(
    fused: ModuleType,
    parts: list[tuple[Node, int]],
    size: int,
    seed: int,
    wild: float,
    divisor: float,
    past_caches: bool,
) -> None:
    random = np.random.default_rng(seed)
    vectors = {}
    for node, _ in parts:
        numbers = random.standard_normal(size, np.float32) * np.float32(
            2.0 ** random.integers(-149, 8)
        )
        edges = random.choice(EDGES[: None if wild else 5], size).view(np.float32)
        vectors[node] = np.where(random.random(size) < 0.3, edges, numbers)
    room = np.full(size + 32, 7, np.float32)
    out = room[16 - room.ctypes.data % 64 // 4 :][:size]
    before = room.ctypes.data % 64

    finite = fused.tree_mean(
        out.data,
        tuple(vectors[node].data for node, _ in parts),
        bytes(sums for _, sums in parts),
        divisor,
        past_caches,
    )

    with np.errstate(all="ignore"):
        root = fold(vectors, Node(0, parts[-1][0].stop), operator.add)
        expected = root / np.float32(divisor) if divisor else root * np.float32(0) + np.float32(0)
    assert finite == np.isfinite(expected).all()
    if finite:
        assert out.tobytes() == expected.tobytes()
    untouched = np.delete(room, np.arange(size) + (16 - before // 4))
    assert (untouched == 7).all()


@UNHURRIED
@given(
    st.integers(1, 9),
    st.sampled_from([1, 31, 32, 33, 200]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_a_trimmed_mean_has_the_bits_that_numpy_gives(
    fused: ModuleType, count: int, size: int, seed: int, wild: bool
) -> None:
    random, cut = np.random.default_rng(seed), (count - 1) // 3
    edges = random.choice(EDGES[: None if wild else 5], (count, size + 3)).view(np.float32)
    numbers = random.standard_normal((count, size + 3), np.float32)
    values = np.where(random.random(numbers.shape) < 0.5, edges, numbers)
    shares, out = random.random(count) + 1e-9, np.full(size + 2, 7, np.float32)

    finite = fused.trimmed_mean(out[1:-1], values, tuple(shares.tolist()), cut)

    given = values[:, :size].astype(np.float64)
    assert finite == np.isfinite(given).all()
    assert (out[0], out[-1]) == (7, 7)
    if not finite:
        return
    kept = np.sort(np.argsort(given, axis=0, kind="stable")[cut : count - cut], axis=0)
    total, weight = np.full(size, -0.0), np.zeros(size)
    for ranks in kept:
        total += shares[ranks] * np.take_along_axis(given, ranks[None], axis=0)[0]
        weight += shares[ranks]
    assert out[1:-1].tobytes() == (total / weight).astype(np.float32).tobytes()


@pytest.mark.parametrize(("size", "rows", "cut"), [(5, 8, 0), (2, 7, 0), (2, 8, 1), (2, 8, -1)])
def test_a_trimmed_mean_of_rows_that_do_not_match_is_refused(
    fused: ModuleType, size: int, rows: int, cut: int
) -> None:
    with pytest.raises(ValueError, match="nothing would be kept"):
        fused.trimmed_mean(np.zeros(size, "f4"), np.zeros(rows, "f4"), (0.25,) * 2, cut)


@pytest.mark.parametrize("sums", [b"", b"\0\0", b"\0\2", b"\1\0", b"\0\1\0"])
def test_sums_that_are_no_tree_are_refused(fused: ModuleType, sums: bytes) -> None:
    four = np.zeros(4, np.float32)

    with pytest.raises(ValueError, match="don't join all vectors"):
        fused.tree_mean(four.data, (four.data,) * 2, sums, 1.0, False)
    with pytest.raises(ValueError, match="or are too deep"):
        fused.tree_mean(four.data, (four.data,) * 65, bytes(64) + b"\x40", 1.0, False)


@pytest.mark.skipif(sys.platform != "linux", reason="waits by Linux' futex")
def test_words_and_files_that_can_not_be_are_refused(fused: ModuleType) -> None:
    file, values = mmap.mmap(-1, 3 * 4096), np.zeros(4, np.float32)

    def wait(*, files: object = (file, file), me: int = 0, at: int = 64) -> None:
        fused.wait_word(files, me, None, at, 0)

    wait()
    for wrong in ({"files": ()}, {"files": (file,) * 65}, {"me": 2}, {"me": -1}):
        with pytest.raises(ValueError, match="not the files"):
            wait(**wrong)
    for files in ((file, mmap.mmap(-1, 4096)), (memoryview(file)[1:],), (mmap.mmap(-1, 4096),)):
        with pytest.raises(ValueError, match="have one length"):
            wait(files=files)
    for at in (-64, 65, 4096):
        with pytest.raises(ValueError, match="no such word"):
            wait(at=at)
        with pytest.raises(ValueError, match="no such word"):
            fused.set_word(memoryview(file)[:4096], at, 1)
    with pytest.raises(OverflowError):
        fused.set_word(file, 64, -1)
    for out, call_bytes in ((values[:3], 8), (values, 2**62), (values, -1)):
        args = (out.data, values.data, 1.0, None)
        with pytest.raises(ValueError, match="of one length"):
            fused.all_reduce((file, file), 0, None, 0, 1024, call_bytes, *args)


def test_arguments_of_wrong_sizes_are_refused(fused: ModuleType) -> None:
    four, two = np.zeros(4, np.float32), np.zeros(2, np.float32)

    for vectors, shares, why in (
        ((), (), "there must be vectors"),
        ((four.data,), (0.5, 0.5), "one share for each"),
        ((four.data, two.data), (0.5, 0.5), "of one length"),
        ((memoryview(b"x" * 16), memoryview(b"x" * 15)), (0.5, 0.5), "of one length"),
    ):
        with pytest.raises(ValueError, match=why):
            fused.weighted_mean(np.zeros(4, np.float32).data, vectors, shares, False)
    with pytest.raises(ValueError, match="of one length"):
        fused.weighted_mean(bytearray(3), (memoryview(b"abc"),), (1.0,), False)
    with pytest.raises(TypeError):
        fused.weighted_mean(four.data, (four.data,), ("a half",), False)
    with pytest.raises(BufferError):
        fused.weighted_mean(b"read only, sixteen"[:16], (four.data,), (1.0,), False)


def check_rounding(
    fits: bool,
    out: np.ndarray[tuple[int], np.dtype[np.uint16]],
    values: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> None:
    """What the module made of float32 `values` must be what NumPy makes of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("andon.protocol.encoding.fused", None)
        try:
            expected = encode(values, Encoding.BFLOAT16)
        except EncodingOverflow:
            assert not fits
            return
    assert fits == bool(np.isfinite(values).all())
    if fits:
        assert out.tobytes() == bytes(expected)


@UNHURRIED
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_any_float32_is_rounded_to_the_bfloat16_that_numpy_gives(
    fused: ModuleType, patterns: list[int]
) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    out = np.empty(values.size, np.uint16)

    fits = fused.to_bfloat16(out.data, values.data)

    check_rounding(fits, out, values)


@UNHURRIED
@given(
    st.integers(1, 3000).flatmap(
        lambda size: st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(
            lambda seeds: [
                np.random.default_rng(seed).integers(0, 2**16, size, np.uint16) for seed in seeds
            ]
        )
    ),
    st.booleans(),
)
def test_a_mean_of_bfloat16_has_the_bits_that_numpy_gives(
    fused: ModuleType, vectors: list[np.ndarray[tuple[int], np.dtype[np.uint16]]], tame: bool
) -> None:
    if tame:  # numbers below 2, so that most means are finite
        vectors = [vector & np.uint16(0xBFFF) for vector in vectors]
    shares = tuple(float(np.float32((rank + 1) / 7)) for rank in range(len(vectors)))
    out = np.empty_like(vectors[0])

    finite = fused.bfloat16_mean(out.data, tuple(each.data for each in vectors), shares)

    with np.errstate(all="ignore"):
        wide = [(each.astype(np.uint32) << np.uint32(16)).view(np.float32) for each in vectors]
        acc = np.float32(shares[0]) * wide[0]
        for share, vector in zip(shares[1:], wide[1:], strict=True):
            acc = acc + np.float32(share) * vector
    check_rounding(finite, out, acc)


STRIPPED = [Encoding.INT8_BLOCK, Encoding.INT4_BLOCK, Encoding.INT2_BLOCK]


def of_bits(fused: ModuleType, name: str, encoding: Encoding) -> Any:
    """One of the passes for strips."""
    return getattr(fused, name.format(encoding.label))


@st.composite
def wild(draw: st.DrawFn) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Numbers of any bits, or tame ones with zeros of both signs among them."""
    size, seed = draw(st.integers(0, 700)), draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    if draw(st.booleans()):
        return random.integers(0, 2**32, size, np.uint32).view(np.float32)
    tame = random.standard_normal(size) * 2.0 ** draw(st.integers(-130, 118))
    tame[random.random(size) < 0.2] = -0.0
    return tame.astype(np.float32)


@pytest.mark.parametrize("encoding", STRIPPED)
@UNHURRIED
@given(values=wild(), keeps=st.booleans())
def test_any_float32_is_encoded_in_strips_as_numpy_does(
    fused: ModuleType,
    encoding: Encoding,
    values: np.ndarray[tuple[int], np.dtype[np.float32]],
    keeps: bool,
) -> None:
    out = np.empty(encoding.payload_bytes(values.size), np.uint8)
    residual = np.empty_like(values)

    fits = of_bits(fused, "to_{}", encoding)(
        out.data, values.data, residual.data if keeps else None
    )

    lost = np.empty_like(values)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr("andon.protocol.encoding.fused", None)
        assert fits == encodable(values, encoding)
        if fits:
            assert out.tobytes() == bytes(encode(values, encoding, lost))
    if fits and keeps:
        assert residual.tobytes() == lost.tobytes()


@pytest.mark.parametrize("encoding", STRIPPED)
@UNHURRIED
@given(count=st.integers(0, 700), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_payload_of_strips_is_decoded_as_numpy_does(
    fused: ModuleType, encoding: Encoding, count: int, seed: int, data: st.DataObject
) -> None:
    size = encoding.payload_bytes(count)
    payload = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    start = 128 * data.draw(st.integers(0, count // 128))
    out = np.empty(data.draw(st.integers(0, count - start)), np.float32)

    of_bits(fused, "from_{}", encoding)(out.data, payload.data, count, start)

    expected = np.empty_like(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("andon.protocol.encoding.fused", None)
        decode_part(payload.data, encoding, count, start, expected)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("encoding", STRIPPED)
@UNHURRIED
@given(
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    size=st.integers(0, 700),
    power=st.integers(-125, 126),
    spoiled=st.booleans(),
    wide=st.booleans(),
)
def test_a_mean_of_strips_has_the_bits_that_numpy_gives(
    fused: ModuleType,
    encoding: Encoding,
    numbers: list[int],
    size: int,
    power: int,
    spoiled: bool,
    wide: bool,
) -> None:
    payloads = []
    for seed in numbers:
        random = np.random.default_rng(seed)
        payload = random.integers(0, 256, encoding.payload_bytes(size), np.uint8)
        assert encoding.strips is not None
        scales = payload[: encoding.strips.scale_bytes(size)]
        if not spoiled:
            scales.view("<f4")[:] = (1 + random.random(scales.size // 4)) * 2.0**power
        payloads.append(payload)
    shares = tuple(float(np.float32((rank + 1) / 7)) for rank in range(len(numbers)))
    out = np.empty(4 * size if wide else encoding.payload_bytes(size), np.uint8)

    good = of_bits(fused, "{}_mean", encoding)(
        out.data, tuple(each.data for each in payloads), shares, size, wide
    )

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr("andon.protocol.encoding.fused", None)
        parts = [decode(each.data, encoding, size) for each in payloads]
        mean = np.float32(shares[0]) * parts[0]
        for share, part in zip(shares[1:], parts[1:], strict=True):
            mean = mean + np.float32(share) * part
        assert good == (np.isfinite(mean).all() if wide else encodable(mean, encoding))
        if good:
            expected = mean.tobytes() if wide else bytes(encode(mean, encoding))
            assert out.tobytes() == expected


def test_strips_that_do_not_fit_are_refused(fused: ModuleType) -> None:
    four = np.zeros(4, np.float32)

    with pytest.raises(ValueError, match="out has 9 bytes, and must have 8"):
        fused.to_int8(bytearray(9), four.data, None)
    with pytest.raises(ValueError, match="residual has 12 bytes, and must have 16"):
        fused.to_int4(bytearray(6), four.data, bytearray(12))
    with pytest.raises(ValueError, match="whole float32"):
        fused.to_int8(bytearray(9), b"x" * 17, None)
    with pytest.raises(ValueError, match="payload has 9 bytes, and must have 8"):
        fused.from_int8(four.data, bytes(9), 4, 0)
    for count, start in ((3, 0), (4, 1), (4, 128), (4, -128), (-1, 0), (2**62, 0)):
        with pytest.raises(ValueError, match="elements that the payload has"):
            fused.from_int8(four.data, bytes(8), count, start)
    with pytest.raises(ValueError, match="a vector is not as long"):
        fused.int8_mean(bytearray(8), (bytes(9),), (1.0,), 4, False)
    with pytest.raises(ValueError, match="out is not as long"):
        fused.int8_mean(bytearray(8), (bytes(8),), (1.0,), 4, True)
    with pytest.raises(ValueError, match="so many elements"):
        fused.int4_mean(bytearray(8), (bytes(8),), (1.0,), 2**62, False)
    with pytest.raises(BufferError):
        fused.to_int8(bytes(8), four.data, None)


def test_bfloat16_that_does_not_fit_is_refused(fused: ModuleType) -> None:
    four = np.zeros(4, np.float32)

    for out, values in ((bytearray(6), four.data), (bytearray(8), b"x" * 17)):
        with pytest.raises(ValueError, match="half as long"):
            fused.to_bfloat16(out, values)
    with pytest.raises(ValueError, match="of one length"):
        fused.bfloat16_mean(bytearray(6), (b"x" * 8,), (1.0,))
    with pytest.raises(BufferError):
        fused.to_bfloat16(bytes(8), four.data)


def test_a_module_built_by_a_newer_python_works_in_an_older_one() -> None:
    # Headers of Python 3.13 leave out what makes "#" work in a format before it.
    source = "".join(path.read_text() for path in SOURCE.parent.glob("*.[ch]"))
    formats = re.findall(r'Py(?:Arg_Parse|_Build)\w+\([^"]*"(.+?)"', source)

    assert len(formats) > 10
    assert not [each for each in formats if "#" in each]
