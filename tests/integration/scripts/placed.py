"""Computes a product and its gradients where memory is off by some floats, under `same_bits`.

Usage: placed.py SPEC.json OUT.json. It writes how many different results there were.
`computes_first`: something is multiplied before the Line is made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from andon_trainer import Line

SHAPES = ((8, 33, 65), (4, 64, 32), (3, 7, 5))
OFFSETS = (0, 1, 2, 3, 9)


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, so many floats behind an address of 64 bytes."""
    room = torch.empty(values.numel() + 64)
    start = (-room.data_ptr() % 64) // 4 + offset
    there = room[start : start + values.numel()].view(values.shape)
    return there.copy_(values)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("computes_first"):
        torch.ones(3, 3) @ torch.ones(3, 3)
    torch.manual_seed(0)
    found = set()
    with Line(same_bits=True):
        shapes = [(torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)) for m, k, n in SHAPES]
        for offset in OFFSETS:
            results = b""
            for given in shapes:
                x, weight, change = (placed(each, offset) for each in given)
                parts = F.linear(x, weight), change @ weight, change.t() @ x
                results += b"".join(each.numpy().tobytes() for each in parts)
            found.add(results)
    Path(sys.argv[2]).write_text(json.dumps({"different": len(found)}))


if __name__ == "__main__":
    main()
