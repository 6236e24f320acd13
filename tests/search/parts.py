"""Parts: the values that a state is made of, stored once each, and when two states are equal.

Theory of operation. A part is a core or a message. It is flattened into plain values and *marks*:
keys, terms, numbers of streams, processes, transfers and weights. Marks mean something only
relative to each other, so a state is told from another by its plain values and by its marks
renamed: keys and terms by their order, all others by where they occur first. Fields that are
only for people are left out. A field that is not named here is plain, which is always safe: at
worst two states that behave alike count as different.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.events import JoinRequest, Ready
from andon_coordinator.core.members import Members
from andon_coordinator.core.round import AttemptCounts
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.core.transfers import StateTransfers
from search.copying import names_of
from search.numbers import Incarnation, Serial, Stream, Weights
from search.weights import contribution_in

__all__ = ["Mark", "Parts", "renamed"]

Mark = tuple[int, int, int]
"""Kind and value; a key has two."""
Flatten = Callable[[Any, list[object], list[Mark]], None]

_KEY, _TERM, _STREAM, _PROCESS, _TRANSFER, _WEIGHTS, _SERIAL = range(7)


_NUMBERS = {Stream: _STREAM, Incarnation: _PROCESS, Weights: _WEIGHTS, Serial: _SERIAL}
_PLAIN = frozenset({int, str, bool, float, type(None), bytes})
_CONSTANT = (Layout, RunPlan, LineSettings)

# Numbers with a meaning of their own, by class and field.
_MARKED = {
    ("JoinRequest", "greatest_term"): _TERM,
    ("Worker", "greatest_term"): _TERM,
    ("Journal", "term"): _TERM,
    ("Accepted", "term"): _TERM,
    ("SaveTerm", "term"): _TERM,
    ("StateTransfer", "id"): _TRANSFER,
    ("TransferAsked", "transfer_id"): _TRANSFER,
    ("StateReported", "transfer_id"): _TRANSFER,
}

# Only for people, or the same in every state.
_IGNORED = {
    ("Conversation", "doubts"),  # It only says what is computed anew.
    ("LineMember", "home"),  # What follows from other fields:
    ("LineMember", "process"),
    ("LineMember", "answers"),  # The clock stands still, so nobody is ever late.
    ("CoreState", "rounds"),
    ("CoreState", "slowness"),
    ("CoreState", "late_answers_s"),
    ("Pace", "took_s"),
    ("Pace", "_begun_at"),
    ("Pace", "_positions"),
    ("Pace", "_rates"),
    ("StepRound", "quorum_at"),  # There is no grace.
    ("CoreState", "lag_s"),
    ("StepRound", "rank_of"),
    ("ScalarAllReduces", "_furthest"),
    ("ScalarAllReduces", "_reached"),
    ("CoreState", "detectors"),  # They are off.
    ("CoreState", "verified"),
    ("CoreState", "unverified"),
    ("PendingRecord", "proved"),
    ("SaveRecord", "proved"),
    ("SaveVerdict", "evidence"),
    ("Given", "components"),
    ("CoreState", "effects"),
    ("CoreState", "departed"),  # Nobody leaves a searched line.
    ("CoreState", "forming_since"),  # Every wait of a searched line is without a limit.
    ("Member", "activity"),
    ("Member", "detail"),
    ("Member", "voided_attempt"),
    ("Member", "last_step"),
    ("StepRound", "attempt"),
    ("StepRound", "opened_at"),
    ("Assigned", "attempt"),
    ("Voided", "message"),
    ("ControlLost", "message"),
    ("ExchangeFailed", "message"),
    ("Fault", "message"),
    ("HaltEvidence", "message"),
    ("SaveRecord", "note"),
    ("Rounds", "_ids"),
    ("Run", "ids"),
    ("Run", "_outgoing"),
    ("IncompleteChunk", "exchange"),  # Flattened with its round.
    ("IncompleteChunk", "first"),  # Its first contribution.
}


class Parts:
    """Parts by number: equal parts have one number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.plain: list[int] = []
        self.marks: list[tuple[Mark, ...]] = []
        self._numbers: dict[tuple[object, tuple[Mark, ...]], int] = {}
        self._plains: dict[object, int] = {}

    def number(self, part: Any) -> int:
        """The part's number; it must not be changed any more."""
        plain: list[object] = []
        marks: list[Mark] = []
        _flatten(part, plain, marks)
        flat = tuple(plain), tuple(marks)
        number = self._numbers.get(flat)
        if number is None:
            number = self._numbers[flat] = len(self.objects)
            self.objects.append(part)
            self.plain.append(self._plains.setdefault(flat[0], len(self._plains)))
            self.marks.append(flat[1])
        return number


def renamed(marks: list[Mark]) -> tuple[int, ...]:
    """Marks as small numbers; equal for two states that differ only in their numbering."""
    names: dict[Mark, int] = {}
    counts = [0] * 7
    ordered: set[tuple[int, int]] = set()
    for mark in dict.fromkeys(marks):
        kind = mark[0]
        if kind > _TERM:
            names[mark] = counts[kind] if kind != _SERIAL else 0
            counts[kind] += 1
        else:
            ordered.add((mark[1], mark[2]))
    term = term_number = round_number = 0
    for at in sorted(ordered):
        if at[0] != term:
            term, term_number, round_number = at[0], term_number + 1, 0
        if at[1]:
            round_number += 1
        names[_KEY, at[0], at[1]] = name = term_number * 1000 + round_number
        names[_TERM, at[0], at[1]] = name
    return tuple(map(names.__getitem__, marks))


def _flatten(value: Any, plain: list[object], marks: list[Mark]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        plain.append(value)
    elif kind is Key:
        plain.append(Key)
        marks.append((_KEY, value.term, value.round))
    elif kind is tuple or kind is list or kind is deque:
        plain.append(len(value))
        for each in value:
            if type(each) in _PLAIN:
                plain.append(each)
            else:
                _flatten(each, plain, marks)
    else:
        flatten = _FLATTEN.get(kind)
        if flatten is None:
            flatten = _FLATTEN[kind] = _way_of(value)
        flatten(value, plain, marks)


def _flatten_number(value: Any, plain: list[object], marks: list[Mark]) -> None:
    plain.append(type(value))
    marks.append((_NUMBERS[type(value)], int(value), 0))


def _flatten_dict(value: dict[Any, Any], plain: list[object], marks: list[Mark]) -> None:
    plain.append(len(value))
    for name, each in sorted(value.items(), key=itemgetter(0)):
        _flatten(name, plain, marks)
        _flatten(each, plain, marks)


def _flatten_set(value: set[Any] | frozenset[Any], plain: list[object], marks: list[Mark]) -> None:
    plain.append(len(value))
    for each in sorted(value):
        _flatten(each, plain, marks)


def _way_of(value: object) -> Flatten:
    """How all objects of a class are flattened."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return lambda each, plain, _: plain.append(each)
    if isinstance(value, _CONSTANT) or callable(value):
        constant: object = kind if isinstance(value, _CONSTANT) else "callable"
        return lambda _, plain, __: plain.append(constant)
    if not is_dataclass(value) and names_of(value) is not names_of(value):
        return _flatten_object  # Each has attributes of its own.
    fields_of = _told(kind, _names(value))
    return lambda each, plain, marks: _flatten_fields(each, fields_of, plain, marks)


def _flatten_object(value: Any, plain: list[object], marks: list[Mark]) -> None:
    _flatten_fields(value, _told(type(value), _names(value)), plain, marks)


def _flatten_fields(
    value: Any, told: Sequence[tuple[str, int | None]], plain: list[object], marks: list[Mark]
) -> None:
    plain.append(type(value))
    for field, marked in told:
        each = getattr(value, field)
        if marked is not None:
            marks.append((marked, each, 0))
        elif type(each) in _PLAIN:  # Most are: a call for each would take longer than the rest.
            plain.append(each)
        else:
            _flatten(each, plain, marks)


def _told(kind: type, names: Sequence[str]) -> tuple[tuple[str, int | None], ...]:
    """The fields of a class that count, each with the kind of mark that it is, if it is one."""
    name = kind.__name__
    counted = [field for field in names if (name, field) not in _IGNORED]
    return tuple((field, _MARKED.get((name, field))) for field in counted)


def _names(value: object) -> tuple[str, ...]:
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return names_of(value)


def _flatten_keys(value: Keys, plain: list[object], marks: list[Mark]) -> None:
    plain.append(value.saved)
    marks.append((_TERM, value.term, 0))
    marks.append((_KEY, value.term, value._round))


def _flatten_members(value: Members, plain: list[object], marks: list[Mark]) -> None:
    # Its indices follow from these.
    _flatten({each.worker: each for each in value}, plain, marks)


def _flatten_transfers(value: StateTransfers, plain: list[object], marks: list[Mark]) -> None:
    _flatten(list(value._active.values()), plain, marks)
    for slot, each in sorted(value.setbacks.items()):
        # From the second failure on a step must come between two tries. Of a pause, only whether
        # there is one matters.
        plain.append((slot, min(each.failures, 2), each.not_before > 0, each.step))
    marks.append((_SERIAL, value._begun, 0))


def _flatten_tries(value: AttemptCounts, plain: list[object], marks: list[Mark]) -> None:
    # From the second void on, the back-off has its greatest length in a search.
    plain.append((min(value.voided, 2), value.not_before > 0, value.last_loss_at > -math.inf))
    plain.append(tuple(sorted(value.assigned.items())))
    plain.append((value.tried, value.ahead_batch, tuple(sorted(value.ahead.items()))))
    plain.append((value.fragment, value.left_over, value.batch))
    for window in (value.window, value.ahead_window):
        # Without local steps they are all alike.
        plain.append((window.size, window.unit) if window is not None and window.unit else None)
    plain.append(value.verified)
    _flatten(value.inquest, plain, marks)
    marks.append((_SERIAL, value.attempt, 0))


def _flatten_result(value: StepResult, plain: list[object], marks: list[Mark]) -> None:
    plain.append((value.stop_reason, value.batch.start, value.batch.stop))


def _flatten_ready(value: Ready, plain: list[object], marks: list[Mark]) -> None:
    plain.append((value.weight, value.total_weight, value.world_size, value.samples))
    plain.append(tuple((each.node, each.weight) for each in value.node_losses))
    plain.append(tuple((each.node, each.digest) for each in value.attested))
    check = value.mean_check
    plain.append(None if check is None else (check.expected, check.came, check.relayed))
    _flatten(value.key, plain, marks)


def _flatten_request(value: JoinRequest, plain: list[object], marks: list[Mark]) -> None:
    for part in (value.incarnation, value.launch_slot, value.head, value.cursor, value.step):
        _flatten(part, plain, marks)
    plain.append(value.spare)
    _flatten(value.held_key, plain, marks)
    _flatten(value.halt, plain, marks)
    marks.append((_TERM, value.greatest_term, 0))


def _flatten_payload(value: memoryview, plain: list[object], marks: list[Mark]) -> None:
    _flatten(contribution_in(value), plain, marks)


_FLATTEN: dict[type, Flatten] = {
    **dict.fromkeys(_NUMBERS, _flatten_number),
    dict: _flatten_dict,
    set: _flatten_set,
    frozenset: _flatten_set,
    Keys: _flatten_keys,
    Members: _flatten_members,
    StateTransfers: _flatten_transfers,
    StepResult: _flatten_result,
    Ready: _flatten_ready,
    AttemptCounts: _flatten_tries,
    JoinRequest: _flatten_request,
    memoryview: _flatten_payload,
}
