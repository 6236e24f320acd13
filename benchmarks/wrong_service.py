"""The service of `wrong_arithmetic.py`: `andon serve`, whose reducer adds wrong when it is told to.

    ANDON_WRONG_FILE=FILE python benchmarks/wrong_service.py serve ...

As soon as the file is there, one bit of the next mean is flipped, and the file removed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
from wrong_plan import flip

from andon_cli.app import main
from andon_reducer.core.tree import Floats, TreeSum

__all__: list[str] = []


def _put_in(file: Path) -> None:
    """Puts the chance to be wrong behind both ways of making a mean."""
    whole, tile = TreeSum.mean_in_one_pass, TreeSum.mean_into
    draw = random.Random(0)

    def spoil(numbers: Floats) -> None:
        if file.exists():
            flip(numbers, draw, exponent=draw.random() < 0.5)
            file.unlink()

    def mean_in_one_pass(self: TreeSum, out: memoryview, *, past_caches: bool) -> bool:
        done = whole(self, out, past_caches=past_caches)
        if done:
            spoil(np.frombuffer(out, np.float32))
        return done

    def mean_into(self: TreeSum, start: int, out: Floats) -> None:
        tile(self, start, out)
        spoil(out)

    TreeSum.mean_in_one_pass, TreeSum.mean_into = mean_in_one_pass, mean_into  # type: ignore[method-assign]  # that is the point


if __name__ == "__main__":
    _put_in(Path(os.environ["ANDON_WRONG_FILE"]))
    main()
