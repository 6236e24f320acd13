"""Where the time of a session's ranks went, by their trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from andon.host.trace import Track
from andon_cli.drawing.texts import aligned, duration

__all__ = ["RankTime", "rank_lines"]

_HEADINGS = (
    "rank",
    "steps",
    "calls",
    "time",
    "backward",
    "in calls",
    "waits",
    "waited longest for",
)
_WAIT = "wait for "


@dataclass(slots=True)
class RankTime:
    """Where the time of one rank went."""

    rank: str
    steps: int = 0
    """Backward passes that exchanged something."""
    calls: int = 0
    seconds: float = 0.0
    """From the beginning of its first call to the end of what came last."""
    backward: float = 0.0
    """The share of backward passes, each from its first call to its end; from 0 to 1."""
    in_calls: float = 0.0
    """The share in which at least one call was open."""
    waits: float = 0.0
    """The share in which its script did nothing but wait for calls."""
    waited_for_ms: dict[str, float] = field(default_factory=dict)
    """For how long its calls waited for each rank."""
    longest_wait_ms: float = 0.0
    """The longest time that one call waited for one rank."""
    longest_wait: str = ""
    """For which rank, in which call; empty if it never waited long enough to be seen."""

    @classmethod
    def of(cls, rank: str, spans: Sequence[dict[str, Any]]) -> RankTime:
        """The time of a rank by its spans."""
        time = cls(rank)
        calls = [each for each in spans if each["tid"] >= Track.CALLS]
        passes = [each for each in spans if _is(each, "backward")]
        waits = [
            each for each in spans if each["tid"] == Track.SCRIPT and each["name"].startswith(_WAIT)
        ]
        time.steps, time.calls = len(passes), len(calls)
        shown = [*calls, *passes, *waits]
        if shown:
            time.seconds = (max(map(_end, shown)) - min(each["ts"] for each in shown)) / 1e6
        whole = time.seconds or 1.0
        time.backward = _covered_s(passes) / whole
        time.in_calls = _covered_s(calls) / whole
        time.waits = _covered_s(waits) / whole
        time._look_for_waits(calls)
        return time

    def _look_for_waits(self, calls: Iterable[dict[str, Any]]) -> None:
        sums: Counter[str] = Counter()
        for each in calls:
            args = each.get("args", {})
            found = args.get("waited_for_ms", {})
            for rank, waited_ms in found.items() if isinstance(found, dict) else ():
                if not isinstance(waited_ms, int | float):
                    continue
                sums[rank] += waited_ms  # type: ignore[assignment]  # a counter of fractions
                if waited_ms > self.longest_wait_ms:
                    self.longest_wait_ms = waited_ms
                    step = f", step {args['step']}" if "step" in args else ""
                    self.longest_wait = f"rank {rank}, {each['name']}{step}"
        self.waited_for_ms = dict(sums)

    def fields(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def rank_lines(times: Sequence[RankTime]) -> list[str]:
    """The table of ranks."""
    return aligned([_HEADINGS, *map(_row, times)])


def _row(time: RankTime) -> tuple[str, ...]:
    shares = (time.backward, time.in_calls, time.waits)
    wait_ms = time.longest_wait_ms
    wait = f"{wait_ms:.0f} ms" if wait_ms < 1000 else duration(wait_ms / 1000)
    return (
        time.rank,
        str(time.steps),
        str(time.calls),
        duration(time.seconds),
        *(f"{100 * share:.0f} %" for share in shares),
        f"{wait} ({time.longest_wait})" if time.longest_wait else "-",
    )


def _is(span: dict[str, Any], name: str) -> bool:
    return bool(span["tid"] == Track.SCRIPT and span["name"] == name)


def _end(span: dict[str, Any]) -> int:
    end: int = span["ts"] + span["dur"]
    return end


def _covered_s(spans: Iterable[dict[str, Any]]) -> float:
    """For how long at least one of the spans went on, in seconds."""
    covered = upto = 0
    for each in sorted(spans, key=lambda span: span["ts"]):
        covered += max(0, _end(each) - max(upto, each["ts"]))
        upto = max(upto, _end(each))
    return covered / 1e6
