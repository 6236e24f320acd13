"""The fixture that tests of encodings and of means share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from andon.protocol.encoding import fused

_USES_C = (
    "andon.protocol.encoding",
    "andon_reducer.core.mean",
    "andon_reducer.core.tree",
    "andon_reducer.core.trimmed",
)


@pytest.fixture(params=["fused", "numpy"], scope="module")
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for both ways to encode and to average: the C part, and NumPy."""
    if request.param == "fused" and fused is None:
        pytest.skip("no C compiler was there when Andon was installed: apt-get install gcc")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            for module in _USES_C:
                patch.setattr(f"{module}.fused", None)
        yield
