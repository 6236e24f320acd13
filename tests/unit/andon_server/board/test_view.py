"""The board's JSON of a line: what its page reads."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor
from andon.protocol.run_settings import MeanKind
from andon_coordinator.core import events
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.spikes import SpikeAction
from andon_server.board.view import halt_view, state_view
from andon_server.halt_words import help_page
from unit.andon_server.board.boards import line_core, line_of, nan_halt

ROOT = Path(__file__).parents[4]


def test_a_line_is_shown_with_its_workers_and_what_it_waits_for() -> None:
    view = state_view(line_of(2), pace_s=None, now_unix_s=1000.0)

    assert json.loads(json.dumps(view)) == view
    assert (view["run_id"], view["state"], view["live"]) == ("7f3a", "FORMING", 2)
    assert view["waiting_for"] == "3 workers, 2 of them here"
    assert (view["loss"], view["accuracy"], view["step_seconds"], view["halt"]) == (None,) * 4
    first, second = view["workers"]
    assert (first["worker"], second["worker"]) == (0, 1)
    assert (second["host"], second["device"], second["live"]) == ("host-1", "cpu", True)
    assert (second["busy_cores"], second["memory_bytes"]) == (None, None)
    assert second["hardware"] == {
        "kind": "cpu", "name": "AMD EPYC", "memory_bytes": 2**30, "cores": 2,
    }  # fmt: skip


def test_numbers_of_a_step_are_those_of_the_snapshot() -> None:
    line = replace(
        line_of(), state=LineState.RUNNING, step=7, cursor=Cursor(1, 4), samples=8, correct=6,
        samples_per_second=4.0, loss=1.25, total_steps=10,
    )  # fmt: skip

    view = state_view(line, pace_s=2.5, now_unix_s=1000.0)

    assert (view["step"], view["epoch"], view["loss"], view["accuracy"]) == (7, 1, 1.25, 0.75)
    assert (view["step_seconds"], view["eta_s"]) == (2.0, 7.5)


def test_a_worker_shows_what_its_last_heartbeat_said_that_its_process_uses() -> None:
    core = line_core(1)
    use = events.ProcessUse(busy_cores=1.5, memory_bytes=2**31)

    core.receive(events.HeartbeatArrived(1, 1, use=use), 1.0, wall=1.0)

    (worker,) = state_view(core.status(1.0), pace_s=None, now_unix_s=0.0)["workers"]
    assert (worker["busy_cores"], worker["memory_bytes"]) == (1.5, 2**31)


def test_a_complete_line_has_no_time_to_go() -> None:
    line = replace(line_of(), state=LineState.COMPLETE, step=10, total_steps=10)

    assert state_view(line, pace_s=2.5, now_unix_s=1000.0)["eta_s"] is None


def test_the_worker_that_waits_least_while_others_wait_holds_them_up() -> None:
    line = line_of(3)
    waits = (0.5, 0.1, 0.4)
    workers = [
        replace(each, waiting_ratio=ratio, rank=each.worker, samples_per_second=4.0)
        for each, ratio in zip(line.workers, waits, strict=True)
    ]

    view = state_view(replace(line, workers=tuple(workers)), pace_s=None, now_unix_s=0.0)

    assert [each["holds_up"] for each in view["workers"]] == [False, True, False]


def test_fragments_trimmed_means_and_budgets_for_spikes_are_shown_where_there_are_any() -> None:
    plain = state_view(line_of(), pace_s=None, now_unix_s=0.0)
    line = replace(
        line_of(), fragments=4, fragment=2, mix=0.5,
        spikes_left={SpikeAction.LIMIT: 50, SpikeAction.SKIP: 19}, mean=MeanKind.TRIMMED, trimmed=1,
    )  # fmt: skip

    view = state_view(line, pace_s=None, now_unix_s=0.0)

    assert (plain["fragments"], plain["spikes"], plain["trimmed"]) == (None, None, None)
    assert view["trimmed"] == {"left_out": 1}
    assert view["fragments"] == {"count": 4, "exchanged": 2, "mix": 0.5}
    assert view["spikes"] == {"steps": 1000, "left": {"limit": 50, "skip": 19}}


def test_checkpoints_are_shown_once_somebody_can_write_them() -> None:
    known = RunCheckpoints(writer=1, host="beta", place="runs/x", every=10, step=20)

    view = state_view(replace(line_of(), checkpoints=known), pace_s=None, now_unix_s=0.0)

    assert view["checkpoints"] == {
        "writer": 1, "host": "beta", "folder": "runs/x", "step": 20, "every": 10, "overdue": 0,
    }  # fmt: skip


def test_a_halt_has_its_evidence_the_terminals_sentence_and_three_answers() -> None:
    view = halt_view(nan_halt())

    assert view["id"] == str(2**60 + 1), "a browser's numbers are exact up to 2^53 only"
    assert view["reason"] == "non_finite_gradient"
    assert (view["worker"], view["parameter"], view["element"]) == (1, "blocks.3.weight", [17, 4])
    assert view["sentence"] == (
        "HALTED at step 3 (epoch 0, positions 8 to 11): worker 1 sent nan in "
        "blocks.3.weight[17, 4] (block 3). No weight moved."
    )
    assert [(each["answer"], each["worker"], each["label"]) for each in view["answers"]] == [
        ("retry", None, "Try again"),
        ("skip", None, "Skip the samples"),
        ("drop", 1, "Drop worker 1"),
    ]
    assert [each["command"] for each in view["answers"]] == [
        "andon resume", "andon resume --skip", "andon resume --drop 1",
    ]  # fmt: skip


def test_a_halt_names_its_page_of_the_documentation_and_links_it_if_the_place_is_known() -> None:
    spike = HaltEvidence(id=1, reason=HaltReason.LOSS_SPIKE, step=3)

    unknown, known = halt_view(nan_halt()), halt_view(spike, "https://git.example.com/andon/")

    assert (unknown["help"], unknown["help_url"]) == ("docs/guide/halts.md", "")
    assert known["help_url"] == "https://git.example.com/andon/docs/halts.md#spikes"


@pytest.mark.parametrize("reason", HaltReason)
def test_the_page_of_each_halt_and_its_heading_exist(reason: HaltReason) -> None:
    page, _, anchor = help_page(HaltEvidence(id=1, reason=reason, step=3)).partition("#")

    text = (ROOT / page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert not anchor or anchor in [each.lower().replace(" ", "-") for each in headings]


def test_a_claim_of_one_worker_about_another_offers_to_drop_either() -> None:
    claim = HaltEvidence(
        id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=0, reported_by=1
    )

    view = halt_view(claim)

    assert (view["worker"], view["reported_by"]) == (0, 1)
    assert [(each["worker"], each["effect"]) for each in view["answers"][2:]] == [
        (0, "go on without worker 0, as worker 1 says"),
        (1, "go on without worker 1, which said so"),
    ]


@pytest.mark.parametrize("reporter", [None, 1])
def test_a_halt_whose_worker_nobody_knows_leaves_the_choice_to_the_person(
    reporter: int | None,
) -> None:
    view = halt_view(HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3, reported_by=reporter))

    drop = view["answers"][-1]
    assert (drop["answer"], drop["worker"], drop["label"]) == ("drop", None, "Drop a worker")
    assert drop["effect"] == "go on without a worker"
    assert view["reported_by"] == reporter


def test_of_wrong_arithmetic_the_samples_are_innocent_so_none_are_skipped() -> None:
    halt = HaltEvidence(id=1, reason=HaltReason.WRONG_ARITHMETIC, step=3, worker=2)

    answers = halt_view(halt)["answers"]

    assert [each["command"] for each in answers] == ["andon resume", "andon resume --drop 2"]
    assert answers[0]["effect"] == "compute the step again, and compare all results again"
