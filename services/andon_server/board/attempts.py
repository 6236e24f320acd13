"""Attempts: how many wrong tokens somebody may show, and how much of that is logged."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from andon.host.peers import peer_of

__all__ = ["MOST_WRONG", "Attempts"]

MOST_WRONG = 10
"""Wrong tokens from one address in a minute; then it has to wait for the next minute."""

_MINUTE_S = 60.0
_ADDRESSES = 1024
"""How many are remembered; a further one pushes the oldest out."""
_LINES = 30
"""Lines of the log in a minute, whoever is refused."""


@dataclass(slots=True)
class _Minute:
    """What was counted since a moment."""

    began: float
    count: int = 0


class Attempts:
    """Counts wrong tokens by address. One thread at a time."""

    def __init__(self) -> None:
        """Nobody has shown any."""
        self._wrong: OrderedDict[str, _Minute] = OrderedDict()
        self._logged = _Minute(-_MINUTE_S)

    def wait_s(self, address: str, now: float) -> float:
        """How long an address must not show a token; 0: it may."""
        minute = self._wrong.get(peer_of(address))
        if minute is None or minute.count < MOST_WRONG:
            return 0.0
        return max(0.0, minute.began + _MINUTE_S - now)

    def note(self, address: str, now: float) -> bool:
        """Counts a wrong token. Returns whether to log it: the first and the last one."""
        key = peer_of(address)
        minute = self._wrong.get(key)
        if minute is None or now >= minute.began + _MINUTE_S:
            self._wrong.pop(key, None)
            minute = self._wrong[key] = _Minute(now)
            while len(self._wrong) > _ADDRESSES:
                self._wrong.popitem(last=False)
        minute.count += 1
        if now >= self._logged.began + _MINUTE_S:
            self._logged = _Minute(now)
        if minute.count not in (1, MOST_WRONG) or self._logged.count >= _LINES:
            return False
        self._logged.count += 1
        return True
