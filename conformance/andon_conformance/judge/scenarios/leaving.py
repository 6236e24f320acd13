"""Leaving: the run is complete, and the client leaves."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check
from andon_conformance.judge.transcript import EXITED

__all__ = ["LEAVING"]


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start()
    await line.bootstrap()
    await line.steps()
    before, current = await line.averaged()
    since = line.transcript.now
    line.commit(current, stop_reason="steps")
    with verdicts.deciding("leave.complete"):
        event = await line.transcript.wait("Leave", line.on_train("leave"), since)
    leave: pb.Leave = event.message
    right = leave.reason == pb.LEAVE_REASON_COMPLETE
    verdicts.judge("leave.complete", right, pb.LeaveReason.Name(leave.reason))
    verdicts.judge("leave.step", leave.final_step == 2, f"final step {leave.final_step}")
    head, sha256 = conversion.optional_key_from_proto(leave.digest.head), leave.digest.sha256
    right = head == line.head and len(sha256) == 32 and sha256 != before.digest.sha256
    verdicts.judge("leave.digest", right, f"digest {sha256.hex()[:12] or 'none'} of {head}")
    asked = line.transcript.find(line.on_train("request_work"), since)
    verdicts.judge("leave.no-work", not asked, f"{len(asked)} RequestWork came after the last step")
    line.train.end()
    with verdicts.deciding("leave.exit"):
        ended = await line.transcript.wait("the end", lambda event: event.kind == EXITED, since)
    verdicts.judge("leave.exit", ended.message == 0, f"exit code {ended.message}")


LEAVING = Scenario(
    name="leave",
    summary="two steps, and the second is the last",
    checks=(
        Check("leave.complete", "leaves as COMPLETE after the step with a stop_reason",
              "section 3"),
        Check("leave.step", "reports its final step", "section 3"),
        Check("leave.digest", "reports the digest of its final weights, with their head",
              "section 3"),
        Check("leave.no-work", "asks for no work after the last step", "section 3"),
        Check("leave.exit", "ends with exit code 0", "section 14"),
    ),
    play=_play,
)  # fmt: skip
