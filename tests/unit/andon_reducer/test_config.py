"""Settings of a reducer: what can't work is refused, by name."""

from __future__ import annotations

from typing import Any, cast

import pytest

from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon_reducer.config import ReducerConfig


@pytest.mark.parametrize(
    "name",
    [
        "window_bytes",
        "listener_bytes",
        "threads",
        "max_payload_bytes",
        "chunk_elements",
        "opening_s",
        "state_s",
    ],
)
def test_a_setting_of_zero_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ReducerConfig(**cast(dict[str, Any], {name: 0}))


def test_a_payload_limit_beyond_the_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="max_payload_bytes"):
        ReducerConfig(max_payload_bytes=MAX_PAYLOAD_BYTES + 1)
