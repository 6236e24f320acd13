"""Keys: the line's term and its rounds, none of which is ever used twice (rules 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable

from andon.protocol.records import Key, latest_plausible_term, make_term

__all__ = ["Keys"]


class Keys:
    """Hands out keys of one durable term after the other."""

    def __init__(self, term: int, random_bits: Callable[[], int]) -> None:
        """Starts in `term`, which is durable; `random_bits` draws 32 bits for each later one."""
        self.term = term
        self.saved = True
        self._round = 0
        self._random_bits = random_bits

    def draw(self) -> Key:
        """A key that was never used."""
        assert self.saved, "a term is made durable before its first key is used"
        self._round += 1
        return Key(self.term, self._round)

    def rise_above(self, greatest: int, wall: float) -> int:
        """Takes a term above `greatest`; no key is drawn until `saved` is set again.

        `greatest` is one that `may_be`: whatever is above it is still a term.
        """
        self.term = make_term(max(greatest, self.term), wall, self._random_bits())
        self.saved = False
        self._round = 0
        return self.term

    def may_be(self, term: int, wall: float) -> bool:
        """Whether a term that a peer shows is any coordinator's, and not made up."""
        return term <= max(self.term, latest_plausible_term(self.term, wall))

    def knows(self, key: Key) -> bool:
        """Whether a key is none that another coordinator drew after ours.

        One of our own term beyond our last round is one, too: nothing that we draw is above it.
        """
        return key <= Key(self.term, self._round)
