"""Mutants of the cores of calls between ranks: each is a rule that is taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_effects import Calls
from andon_trainer.core.peer_flow import Flow
from andon_trainer.core.send_calls import SendCalls
from search.mutants import wrap

__all__ = ["PEER_MUTANTS", "PeerMutant"]


@dataclass(frozen=True, slots=True)
class PeerMutant:
    """A missing rule, the world in which that shows, and a part of what the search says."""

    name: str
    world: str
    sign: str
    apply: Callable[[pytest.MonkeyPatch], None]


PEER_MUTANTS: list[PeerMutant] = []


def _mutant(world: str, sign: str, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    def add(wrong: Callable[..., Any]) -> None:
        title = wrong.__name__.strip("_").replace("_", " ")
        PEER_MUTANTS.append(
            PeerMutant(title, world, sign, lambda patch: wrap(patch, owner, name, wrong))
        )

    return add


@_mutant("a sum in stages and pieces", "which has not begun", Flow, "eager_bytes")
def _everything_is_eager(_: Any, flow: Flow, stage: int, size: int) -> int:
    return size if stage == 0 else 0


@_mutant("types differ", "though calls differ", GroupCalls, "_meet")
def _a_begin_is_not_compared(
    right: Any, core: GroupCalls, call: Any, flow: Any, peer: int, begin: Any
) -> Any:
    gets = flow.plan.gets_bytes(peer)
    return right(core, call, flow, peer, replace(begin, call=call.work.call, gives_bytes=gets))


@_mutant("broadcasts run ahead", "ahead of this rank", GroupCalls, "_tell")
def _begins_are_not_counted(
    right: Any, core: GroupCalls, call: Any, flow: Any, peers: frozenset[int]
) -> Any:
    effects = right(core, call, flow, peers)
    for peer in peers:
        core._ahead[peer] = 0
    return effects


@_mutant("sends run ahead", "has not received", SendCalls, "_send_held")
def _sends_do_not_wait_for_answers(right: Any, core: SendCalls, peer: int) -> Any:
    kept = dict(core._unanswered.get(peer, {}))
    core._unanswered[peer] = {}
    effects = right(core, peer)
    core._unanswered[peer] = {**kept, **core._unanswered[peer]}
    return effects


@_mutant("sends of two ranks, received from any", "", SendCalls, "_receive")
def _what_came_is_matched_again(right: Any, core: SendCalls, call: Any) -> Any:
    came = list(core._came)
    effects = right(core, call)
    core._came[:] = came
    return effects


@_mutant("one rank's call needs nobody", "", GroupCalls, "_skipped")
def _a_skipped_call_is_not_noticed(*_: Any) -> Any:
    return []


@_mutant("broadcasts run ahead", "are told", GroupCalls, "_after")
def _a_call_that_ended_early_is_forgotten(right: Any, core: GroupCalls, call: Any) -> Any:
    effects = right(core, call)
    core._past.clear()
    return effects


@_mutant("roots differ, and nobody takes anything", "", GroupCalls, "_take")
def _a_late_begin_is_not_compared(right: Any, core: GroupCalls, peer: int, begin: Any) -> Any:
    past = core._past.get(begin.sequence)
    if past is not None and peer in past.gets:
        begin = replace(begin, call=past.call, gives_bytes=past.gets[peer])
    return right(core, peer, begin)


@_mutant("a small sum in place", "and should have", Flow, "advance")
def _a_result_is_made_before_the_input_has_left(right: Any, flow: Flow) -> Any:
    for making in flow._makes:
        making.after_gives = False
    return right(flow)


@_mutant("a sum in stages and pieces", "", Flow, "_some_of")
def _a_make_is_given_out_twice(right: Any, flow: Flow, making: Any) -> Any:
    some = right(flow, making)
    making.busy = False
    return some


@_mutant("one rank leaves, and is needed", "nobody found", GroupCalls, "_miss_the_gone")
def _who_left_is_not_missed(_: Any, core: GroupCalls) -> Any:
    return []


def _ended_twice(patch: pytest.MonkeyPatch) -> None:
    """Both rules: an ended call does nothing more, and a SEND's answer finds no ended call."""

    def goes_on(right: Any, core: Calls, call: Any) -> Any:
        call.ended = False
        return right(core, call)

    wrap(patch, Calls, "_go_on", goes_on)
    wrap(patch, SendCalls, "_after", lambda *_: [])


PEER_MUTANTS.append(
    PeerMutant("an answer ends a call again", "sends run ahead", "ended twice", _ended_twice)
)
