"""The drawing of the tree over a batch's grains, docs/assets/grains.svg.

`python docs/tree_drawing.py docs/assets/grains.svg` writes it. Shares and sums are those that the
protocol's own functions give, so the drawing shows what a line does: three workers, and then two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from andon.protocol.grains import Grains, Node, children, cover
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split

__all__ = ["drawing"]

GRAINS = Grains(PositionRange(0, 24), 3)
LOST = 1

_TITLE = (
    "A batch of eight grains, and one tree over them. Three workers sum the parts of the tree that "
    "lie in their shares. When worker 1 is lost the other two keep their sums and compute its "
    "grains, and every sum of the tree is that of before"
)
_WORKERS = {0: "blue", 1: "amber", 2: "green"}
_WIDTH, _HEIGHT = 860, 372
_PANEL, _LEFT = 420, 28
_STEP, _FLOOR, _TOP = 48, 262, 86
_HIGH = 26
_STYLE = """
    text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #14181f; }
    .small { font-size: 12px; fill: #586070; }
    .strong { font-weight: 600; }
    .mid { text-anchor: middle; }
    .card { fill: #ffffff; stroke: #e2e5ea; }
    .box { fill: #f0f2f5; stroke: #9aa2ae; stroke-dasharray: 4 3; }
    .blue { fill: #e9f1fc; stroke: #3b7ddd; }
    .green { fill: #e7f6ec; stroke: #16a34a; }
    .amber { fill: #fdf3dd; stroke: #e08e00; }
    .sent { stroke-width: 3; }
    .edge { fill: none; stroke: #9aa2ae; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e8eaef; }
      .small { fill: #98a1b0; }
      .card { fill: #13161c; stroke: #262b35; }
      .box { fill: #1a1e26; stroke: #5e6776; }
      .blue { fill: #121f35; stroke: #5b9bff; }
      .green { fill: #10241a; stroke: #3ecf74; }
      .amber { fill: #2a2010; stroke: #f5a524; }
      .edge { stroke: #5e6776; }
    }
  """


@dataclass(frozen=True, slots=True)
class Panel:
    """One tree, its shares, and where it begins."""

    left: int
    heading: str
    shares: dict[int, Ranges]
    """The grains of each worker."""

    def sent(self) -> dict[Node, int]:
        """The sums that workers send, and whose they are."""
        return {
            node: worker
            for worker, share in self.shares.items()
            for node in cover(share, GRAINS.count)
        }

    def lines(self) -> Iterator[str]:
        """Everything that is drawn."""
        yield f'<text class="strong" x="{self.left}" y="34">{self.heading}</text>'
        nodes = list(_nodes(GRAINS.root))
        for node in nodes:
            for child in children(node) or ():
                (x, y), (to_x, to_y) = self._place(node), self._place(child)
                yield f'<path class="edge" d="M{x} {y}L{to_x} {to_y}"/>'
        sent = self.sent()
        for node in nodes:
            owner = next((at for over, at in sent.items() if _within(node, over)), None)
            yield from self._drawn(node, owner, is_sent=node in sent)
        for grain in range(GRAINS.count):
            x, _ = self._place(Node(grain, grain + 1))
            worker = next(
                at
                for at, share in self.shares.items()
                if any(part.start <= grain < part.stop for part in share)
            )
            yield f'<text class="small mid" x="{x}" y="{_FLOOR + 32}">w{worker}</text>'

    def _place(self, node: Node) -> tuple[float, float]:
        middle = (node.first + node.stop - 1) / 2
        depth = (len(node) - 1).bit_length()
        levels = (GRAINS.count - 1).bit_length()
        x = self.left + _STEP / 2 + middle * _STEP
        return round(x, 1), round(_FLOOR - depth * (_FLOOR - _TOP) / levels, 1)

    def _drawn(self, node: Node, owner: int | None, *, is_sent: bool) -> Iterator[str]:
        x, y = self._place(node)
        wide = 34 if len(node) == 1 else 52
        kind = "box" if owner is None else _WORKERS[owner]
        yield (
            f'<rect class="{kind}{" sent" if is_sent else ""}" x="{x - wide / 2:g}" '
            f'y="{y - _HIGH / 2:g}" width="{wide}" height="{_HIGH}" rx="5"/>'
        )
        name = str(node.first) if len(node) == 1 else f"{node.first}–{node.stop - 1}"
        yield f'<text class="mid" x="{x:g}" y="{y + 5:g}">{name}</text>'


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node) or ():
        yield from _nodes(child)


def _within(node: Node, over: Node) -> bool:
    return over.first <= node.first and node.stop <= over.stop


def _legend() -> Iterator[str]:
    y = _HEIGHT - 42
    samples: Sequence[tuple[int, str, str]] = (
        (28, "blue", "summed by a worker"),
        (238, "blue sent", "summed, and sent by it"),
        (470, "box", "added by the reducer"),
    )
    for x, kind, text in samples:
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="34" height="18" rx="4"/>'
        yield f'<text class="small" x="{x + 44}" y="{y + 14}">{text}</text>'
    yield f'<text class="small" x="690" y="{y + 14}">w0 to w2: workers</text>'


def drawing() -> str:
    """The SVG."""
    first = GRAINS.deal([()] * len(_WORKERS), Split())
    kept = {worker: share for worker, share in enumerate(first) if worker != LOST}
    again = GRAINS.deal(list(kept.values()), Split())
    panels = (
        Panel(_LEFT, "Three workers", dict(enumerate(first))),
        Panel(_LEFT + _PANEL, "Worker 1 is lost", dict(zip(kept, again, strict=True))),
    )
    parts = [
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="12"/>',
        *(line for panel in panels for line in panel.lines()),
        *_legend(),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-labelledby="title">\n'
        f'  <title id="title">{_TITLE}</title>\n  <style>{_STYLE}</style>\n'
        + "".join(f"  {each}\n" for each in parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(), "utf-8")
