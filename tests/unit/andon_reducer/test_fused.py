"""The compiled mean refuses what does not fit, and equals NumPy's to the bit."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import andon_reducer.core
from andon_reducer.core.mean import is_fused

NO_COMPILER = "no C compiler was there when Andon was installed: apt-get install gcc"
SOURCE = Path(andon_reducer.core.__file__).with_name("_fused.c")


@pytest.fixture(scope="module", params=["as installed", "portable"])
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module, and what it is on a processor that it has no instructions for."""
    if request.param == "as installed":
        if not is_fused():
            pytest.skip(NO_COMPILER)
        from andon_reducer.core import _fused

        return _fused
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
    # Which NaN it is, is nobody's business: a mean with one is never told.
    np.testing.assert_array_equal(out, expected)
    assert np.array_equal(np.signbit(out[out == 0]), np.signbit(expected[out == 0]))
    assert finite == np.isfinite(expected).all()


def test_what_does_not_fit_is_refused(fused: ModuleType) -> None:
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
