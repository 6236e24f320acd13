"""Servers that each break one rule, and the checks that must find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BROKEN", "FOLDER", "BrokenServer"]

FOLDER = Path(__file__).parent / "broken"


@dataclass(frozen=True, slots=True)
class BrokenServer:
    """A server in `broken/`: the checks that it fails, and related checks that it must pass."""

    name: str
    caught_by: tuple[str, ...]
    sign: str
    """A part of the first failed check's message."""
    passes: tuple[str, ...] = ()
    workers: int = 2

    @property
    def restarts(self) -> bool:
        """Whether the defect shows only after the server is killed."""
        return any(name.startswith("journal.") for name in self.caught_by)


BROKEN = (
    BrokenServer(
        "sums_backwards",
        ("average.order",),
        "0x",
        ("average.weights", "average.everyone", "average.facts", "average.abstain"),
        workers=3,
    ),
    BrokenServer(
        "means_unweighted", ("average.weights",), "0x", ("average.alone", "average.facts")
    ),
    BrokenServer(
        "keeps_all_digits",
        ("average.int8",),
        "as byte 0 of block 0",
        ("average.int4", "average.int8_answer"),
    ),
    BrokenServer("answers_one_rank", ("average.everyone",), "the average of block 0"),
    BrokenServer(
        "lets_nan_through",
        ("fault.nan", "fault.infinity"),
        "an average of the same chunk",
        ("fault.weight",),
    ),
    BrokenServer(
        "silent_about_stale", ("reduce.stale",), "expected stale_round", ("reduce.aborted",)
    ),
    BrokenServer(
        "trusts_any_token",
        ("session.token",),
        "came round_opened",
        ("session.opened", "session.open_first"),
    ),
    BrokenServer(
        "believes_any_proof",
        ("lane.proof",),
        "the end of a connection with a proof with another token",
        ("lane.offer", "lane.once", "lane.average"),
    ),
    BrokenServer("commits_early", ("commit.all_ready",), "no record of the void round"),
    BrokenServer(
        "commits_the_halted",
        ("halt.no_commit",),
        "no record of the void round",
        ("halt.cord", "halt.status"),
    ),
    BrokenServer("uses_keys_again", ("void.new_key",), "expected a key above"),
    BrokenServer("forgets_a_member", ("commit.everyone",), "at worker 1"),
    BrokenServer(
        "names_a_wrong_parent",
        ("assign.parent",),
        "the parent at worker 0",
        ("assign.roster", "commit.record"),
    ),
    BrokenServer(
        "assigns_twice",
        ("assign.shares",),
        "the positions of worker",
        ("assign.parent", "assign.roster"),
    ),
    BrokenServer(
        "deals_in_runs",
        ("assign.shares", "void.shares"),
        "the positions of worker",
        ("assign.parent", "void.stream_end"),
        workers=3,
    ),
    BrokenServer(
        "forgets_the_targets",
        ("assign.shares",),
        "the positions of worker",
        ("average.weights", "average.order", "average.facts", "average.abstain", "assign.parent"),
        workers=3,
    ),
    BrokenServer(
        "refuses_by_another_code",
        ("refuse.layout",),
        "came INVALID_ARGUMENT",
        ("refuse.plan", "refuse.slot"),
    ),
    BrokenServer(
        "journals_late", ("journal.record",), "JOIN_STATUS_RECORD_FOLLOWS; came JOIN_STATUS_IN_SYNC"
    ),
    BrokenServer(
        "averages_losses_plainly", ("commit.loss",), "the loss", ("commit.record",), workers=2
    ),
    BrokenServer(
        "takes_one_standing_request_for_all",
        ("assign.standing",),
        "no assignment while a member does not stand",
        ("assign.asked", "commit.record"),
    ),
    BrokenServer("forgets_overflows", ("commit.overflow",), "the overflow at", ("commit.record",)),
    BrokenServer("takes_any_answer", ("halt.wrong_id",), "came OK", ("halt.cord", "halt.retry")),
    BrokenServer(
        "keeps_older_streams",
        ("join.replaces",),
        "the end of worker 1",
        ("join.fresh", "rejoin.in_sync"),
    ),
    BrokenServer(
        "counts_steps",
        ("rejoin.equal_step",),
        "came JOIN_STATUS_IN_SYNC",
        ("rejoin.behind", "rejoin.in_sync"),
    ),
    BrokenServer(
        "believes_the_weights", ("halt.divergence",), "StepCommitted at worker", ("halt.loss",)
    ),
    BrokenServer("believes_any_rank", ("halt.blame",), "the worker", ("halt.loss",)),
    BrokenServer(
        "believes_the_totals",
        ("commit.total_weight", "commit.world_size"),
        "nothing was added",
        ("commit.loss",),
    ),
    BrokenServer(
        "bootstraps_early",
        ("bootstrap.waits", "join.fresh"),
        "INITIAL",
        ("bootstrap.record", "bootstrap.transfer"),
    ),
    BrokenServer(
        "trains_during_transfers", ("bootstrap.no_round", "transfer.no_round"), "no ShardAssignment"
    ),
    BrokenServer(
        "shrinks_the_roster",
        ("void.stream_end", "void.rejoin"),
        "no record of the void round",
        ("void.new_key",),
    ),
    BrokenServer(
        "ignores_greater_terms", ("reduce.term",), "a round of a term above", ("reduce.stale",)
    ),
    BrokenServer(
        "counts_old_readies", ("void.old_ready",), "no record of the void round", ("void.new_key",)
    ),
)
