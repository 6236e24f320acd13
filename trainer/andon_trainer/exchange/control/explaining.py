"""Explaining: what this worker says when it is asked why it is late.

Theory of operation. The question comes on the thread that reads the control stream, which must not
wait, so a thread is begun for the answer. It takes the stacks at once, looks at the counters of the
process and of its host twice, a sixth of a second apart, and answers.

That thread needs the interpreter's lock. If a call keeps it, the answer comes late, and tells what
`lock_watch` has seen meanwhile.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from andon import protocol
from andon.protocol.slowness import (
    LOADING,
    MAX_STACKS,
    Explanation,
    ProcessFacts,
    SlowPhase,
    ThreadStack,
)
from andon_trainer.core.stacks import CodePlaces, phase_of, stack_of, waits_for_loading
from andon_trainer.exchange.control.gpu_clock import GpuClock, read_gpu
from andon_trainer.exchange.control.host_looks import (
    host_facts,
    lacks_something,
    look_at_host,
    look_at_others,
    who_has_it,
)
from andon_trainer.exchange.control.lock_watch import LockWatch
from andon_trainer.exchange.control.process_looks import (
    child_processes,
    facts_between,
    look,
    waits_for_disk,
)
from andon_trainer.exchange.control.thread_calls import thread_calls
from andon_trainer.exchange.control.written_stacks import stacks_of

__all__ = ["Explainer"]

log = logging.getLogger(__name__)

_APART_S = 0.16
_LOOKS = 8
"""So often between the two looks it is asked whether the script's thread waits for a disk."""
_MOST_LOADING = 32
"""So many loading processes are asked where they are."""
_REMEMBERED_S = 2.0


class Explainer:
    """Answers for one worker. Made by the script's thread."""

    def __init__(self, gpu: Callable[[], GpuClock | None] = read_gpu) -> None:
        """Answers nobody yet; `gpu` reads the clock of the process's GPU."""
        self._script = threading.get_ident()
        self._native = threading.get_native_id()
        self._gpu = gpu
        self._busy = threading.Lock()
        self._newest: tuple[int, Callable[[Explanation], None]] = (0, lambda _: None)
        """The last question's number, and what takes its answer."""
        self._places = _places()
        self.watch = LockWatch(self._script)

    def asked(
        self, number: int, detail: Callable[[], str], send: Callable[[Explanation], None]
    ) -> None:
        """Answers soon, from another thread; if it is still at an earlier answer, by that one.

        After a call that kept the interpreter's lock several questions come at once, and whoever
        asked waits for the last one.

        Args:
            number: of the question.
            detail: the script's own words for what it does.
            send: takes the answer.
        """
        self._newest = number, send
        if not self._busy.acquire(blocking=False):
            return

        def answer() -> None:
            try:
                said = self.explain(number, detail())
                newest, to_whom = self._newest
                to_whom(replace(said, number=newest))
            except Exception:  # An answer for people is worth no run.
                log.warning("this worker can't say why it is late", exc_info=True)
            finally:
                self._busy.release()

        threading.Thread(target=answer, name="andon-explain", daemon=True).start()

    def explain(self, number: int, detail: str) -> Explanation:
        """What this worker does now. Takes a sixth of a second."""
        phase, stacks = self._taken()
        children = child_processes()
        loading = children if phase is SlowPhase.DATA else ()
        host, first = look_at_host(), look(self._native)
        looks = [self._waits_for_disk(loading) for _ in range(_LOOKS)]
        known = [each for each in looks if each is not None]
        disk = sum(known) / len(known) if known else None
        facts = facts_between(first, look(self._native), disk)
        facts = host_facts(facts, host, look_at_host())
        if lacks_something(facts):
            own = {os.getpid(), *children}
            others = look_at_others(own)
            time.sleep(_APART_S / 2)
            facts = who_has_it(facts, others, look_at_others(own))
        if phase is SlowPhase.EXCHANGE:
            # It may have been there for a moment only.
            phase, stacks = self._taken()
        held, now = self.watch.last, time.monotonic()
        if held is not None and now - held.ended_at < _REMEMBERED_S:
            self.watch.last = None
            phase = phase_of(held.frames, self._places)
            stacks = (stack_of("the script", held.frames, self._places), *stacks[1:])
            facts = replace(facts, held_s=held.seconds)
        return Explanation(number, phase, detail, stacks, self._with_gpu(facts))

    def _waits_for_disk(self, loading: Sequence[int]) -> float | None:
        time.sleep(_APART_S / _LOOKS)
        return waits_for_disk(self._native, loading)

    def _taken(self) -> tuple[SlowPhase, tuple[ThreadStack, ...]]:
        """The phase, and the stacks: the script's first, then others in code of the user.

        Where the script waits for loading processes, they are the others, before any thread.
        """
        threads = thread_calls()
        names = {each.ident: each.name for each in threading.enumerate()}
        script = threads.pop(self._script, ())
        calls = [(names.get(ident, "a thread"), found) for ident, found in threads.items()]
        if waits_for_loading(script, self._places):
            written = stacks_of(child_processes()[:_MOST_LOADING])
            calls = [*((f"{LOADING} {pid}", found) for pid, found in written.items()), *calls]
        others = [stack_of(name, found, self._places) for name, found in calls]
        own = [each for each in others if any(line.own for line in each.lines)]
        stacks = (stack_of("the script", script, self._places), *own)
        return phase_of(script, self._places), stacks[:MAX_STACKS]

    def _with_gpu(self, facts: ProcessFacts) -> ProcessFacts:
        clock = self._gpu()
        if clock is None:
            return facts
        return replace(
            facts, gpu_mhz=clock.mhz, gpu_most_mhz=clock.most_mhz, gpu_throttled=clock.throttled
        )


def _places() -> CodePlaces:
    library = {sysconfig.get_path(each) for each in ("stdlib", "platstdlib")}
    trainer = Path(__file__).parents[2]
    # In a source tree they lie beside the user's code; installed, among the packages.
    ours = trainer, trainer.parent / "andon_torch", Path(protocol.__path__[0]).parent
    return CodePlaces(tuple(sorted(filter(None, library))), tuple(map(str, ours)))
