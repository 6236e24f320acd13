"""JSON that every program reads."""

from __future__ import annotations

import json
import math

from andon.host.strict_json import strict_json


def test_a_number_that_is_not_finite_is_null_wherever_it_stands() -> None:
    value = {"loss": math.nan, "rows": [(1.5, math.inf), {"deep": -math.inf}], "text": "NaN"}

    assert json.loads(strict_json(value)) == {
        "loss": None,
        "rows": [[1.5, None], {"deep": None}],
        "text": "NaN",
    }


def test_what_is_finite_is_written_as_it_is_on_one_line() -> None:
    assert strict_json({"a": [1, 0.5, None, True, "x\ny"]}) == (
        '{"a": [1, 0.5, null, true, "x\\ny"]}'
    )
