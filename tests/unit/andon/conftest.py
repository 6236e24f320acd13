"""The fixture that tests of encodings and of means share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from andon.protocol.encoding import fused


@pytest.fixture(params=["fused", "numpy"], scope="module")
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for both ways to encode and to average: the C part, and NumPy."""
    if request.param == "fused" and fused is None:
        pytest.skip("no C compiler was there when Andon was installed: apt-get install gcc")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr("andon.protocol.encoding.fused", None)
            patch.setattr("andon_reducer.core.mean.fused", None)
        yield
