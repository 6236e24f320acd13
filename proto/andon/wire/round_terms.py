"""The terms of a round as `ShardAssignment`, and back with every rule checked.

A term that is a number, a truth value or a text has the same name in the message, and needs nothing
here. The others are in `_CONVERTED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from andon.protocol.records import PositionRange
from andon.protocol.rounds import TOLD_TO_ALL, RankTerms, RoundTerms
from andon.protocol.shards import Ranges, Split
from andon.v1.coordinator_pb2 import ShardAssignment
from andon.v1.record_pb2 import PositionRange as RangeMessage
from andon.wire.conversion import (
    key_from_proto,
    key_to_proto,
    optional_key_from_proto,
    range_from_proto,
    range_to_proto,
    reading,
    shares_from_proto,
    shares_to_proto,
    sums_from_proto,
    sums_to_proto,
)

__all__ = ["own_terms_to_proto", "terms_from_proto", "terms_to_proto"]

_Terms = TypeVar("_Terms", bound=RankTerms)


def terms_to_proto(terms: RoundTerms) -> ShardAssignment:
    """What every member of a round is told of it."""
    return ShardAssignment(**_fields_of(terms, _TOLD_TO_ALL), world_size=terms.world_size)


def own_terms_to_proto(terms: RankTerms) -> ShardAssignment:
    """One rank's part; merged with `terms_to_proto` it is the whole."""
    return ShardAssignment(**_fields_of(terms, _OWN))


def terms_from_proto(message: ShardAssignment, kind: type[_Terms], **own: Any) -> _Terms:
    """A round's terms and one rank's part, as a `kind` with the fields `own` beside them.

    Raises:
        WireError: a key or a range is invalid, the numbers of ranks differ, the grains to verify
            don't rise, sums have gaps, or a factor is not a positive finite number.
    """
    with reading(message):
        terms = kind(**{name: read(message) for name, read in _READERS}, **own)
        if message.world_size != terms.world_size:
            raise ValueError(
                f"a world_size of {message.world_size} for a roster of {terms.world_size}"
            )
        terms.split.targets_of(terms.world_size)
        for name in ("learning_rate_scale", "change_scale"):
            if not 0 < getattr(terms, name) < math.inf:
                raise ValueError(f"a {name} of {getattr(terms, name)}")
        return terms


def _fields_of(terms: RoundTerms, part: _Part) -> dict[str, Any]:
    """The message's fields; a term that is as usual needs none."""
    found: dict[str, Any] = {}
    for (name, usual, write), value in zip(part.terms, part.of(terms), strict=True):
        if value is usual:
            continue
        if write is None:
            found[name] = value
        else:
            found |= write(value)
    return found


class _Part(NamedTuple):
    """Terms that travel in one message."""

    terms: tuple[tuple[str, Any, Callable[[Any], dict[str, Any]] | None], ...]
    """The name of each, the value that no field says as well, and how it is written."""
    of: Callable[[RoundTerms], tuple[Any, ...]]
    """Their values."""


class _Conversion(NamedTuple):
    """How one term is read from the message, and the message's fields that it is written as."""

    read: Callable[[ShardAssignment], Any]
    write: Callable[[Any], dict[str, Any]]


def _ranges_from(messages: Iterable[RangeMessage]) -> Ranges:
    return tuple(map(range_from_proto, messages))


def _rising(grains: tuple[int, ...]) -> tuple[int, ...]:
    if any(one >= other for one, other in pairwise(grains)):
        raise ValueError(f"verifies must rise, and is {list(grains[:8])}")
    return grains


def _ranges_to(ranges: Iterable[PositionRange]) -> list[RangeMessage]:
    return list(map(range_to_proto, ranges))


_CONVERTED = {
    "key": _Conversion(lambda m: key_from_proto(m.key), lambda v: {"key": key_to_proto(v)}),
    "parent": _Conversion(
        lambda m: optional_key_from_proto(m.parent), lambda v: {"parent": key_to_proto(v)}
    ),
    "roster": _Conversion(lambda m: tuple(m.roster), lambda v: {"roster": v}),
    "batch": _Conversion(
        lambda m: range_from_proto(m.batch), lambda v: {"batch": range_to_proto(v)}
    ),
    "ahead_batch": _Conversion(
        lambda m: range_from_proto(m.ahead_batch) if m.HasField("ahead_batch") else None,
        lambda v: {} if v is None else {"ahead_batch": range_to_proto(v)},
    ),
    "fragment": _Conversion(
        lambda m: m.fragment if m.HasField("fragment") else None,
        lambda v: {} if v is None else {"fragment": v},
    ),
    "positions": _Conversion(
        lambda m: _ranges_from(m.positions), lambda v: {"positions": _ranges_to(v)}
    ),
    "verifies": _Conversion(lambda m: _rising(tuple(m.verifies)), lambda v: {"verifies": v}),
    "sums": _Conversion(lambda m: sums_from_proto(m.sums), lambda v: {"sums": sums_to_proto(v)}),
    "ahead": _Conversion(lambda m: _ranges_from(m.ahead), lambda v: {"ahead": _ranges_to(v)}),
    "reducers": _Conversion(
        lambda m: shares_from_proto(m.reducers), lambda v: {"reducers": shares_to_proto(v)}
    ),
    "split": _Conversion(
        lambda m: Split(tuple(m.targets), m.interleaved),
        lambda v: {"targets": v.targets, "interleaved": v.interleaved},
    ),
    # 1 and 0 mean the same: the usual step's message stays short.
    "learning_rate_scale": _Conversion(
        lambda m: m.learning_rate_scale or 1.0,
        lambda v: {} if v == 1.0 else {"learning_rate_scale": v},
    ),
    "change_scale": _Conversion(
        lambda m: m.change_scale or 1.0, lambda v: {} if v == 1.0 else {"change_scale": v}
    ),
    # A coordinator of an earlier version does not say it: then rank 0 writes.
    "writes_checkpoint": _Conversion(
        lambda m: m.writes_checkpoint if m.HasField("writes_checkpoint") else m.rank == 0,
        lambda v: {"writes_checkpoint": v},
    ),
}

_READERS: tuple[tuple[str, Callable[[ShardAssignment], Any]], ...] = tuple(
    (each.name, _CONVERTED[each.name].read if each.name in _CONVERTED else attrgetter(each.name))
    for each in fields(RankTerms)
)

_SAID_IN_ANY_CASE = object()


def _part(names: tuple[str, ...]) -> _Part:
    usual = {each.name: each.default for each in fields(RankTerms)}
    # A message without it is of a coordinator that does not know it, and then rank 0 writes.
    usual["writes_checkpoint"] = _SAID_IN_ANY_CASE
    write = {name: conversion.write for name, conversion in _CONVERTED.items()}
    return _Part(tuple((name, usual[name], write.get(name)) for name in names), attrgetter(*names))


_TOLD_TO_ALL = _part(TOLD_TO_ALL)
_OWN = _part(tuple(each.name for each in fields(RankTerms) if each.name not in TOLD_TO_ALL))
