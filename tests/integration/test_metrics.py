"""Metrics: a real run's endpoints say what is so, and Prometheus and Alertmanager see what happens.

They start while the line is halted, so they never saw that halt begin. The rules and configurations
are those of docker/, in a hurry (`integration.watchers`), and so are the dashboard's queries.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from andon_grafana.queries import PanelQuery, panel_queries
from integration.metrics_story import (
    BACK,
    BAD,
    HELD_UP_S,
    LOST,
    PAUSED,
    STEPS,
    Stage,
    Story,
    tell,
)
from integration.watchers import DOCS, MISSING, Vector, Watchers, hurried_rules

pytestmark = pytest.mark.integration

OF_THE_SERVICE = {
    "andon_line_state": {"state"},
    "andon_build_info": {"version"},
    "andon_allreduce_seconds_bucket": {"le"},
    "andon_jidoka_halts_total": {"reason"},
    "andon_step_loss": set(),
    "andon_step": set(),
    "andon_steps_committed_total": set(),
    "andon_step_seconds_bucket": {"le"},
    "andon_samples_committed_total": set(),
    "andon_workers": {"state"},
    "andon_worker_wait_seconds_sum": {"worker"},
    "andon_heartbeat_age_seconds": {"worker"},
    "andon_exchange_bytes_total": {"direction", "path"},
    "andon_step_attempts_total": {"cause"},
    "andon_recovery_seconds_bucket": {"le"},
    "andon_join_pause_seconds_bucket": {"le"},
    "andon_inflight_bytes": set(),
}
OF_A_WORKER = {
    "andon_build_info": {"version"},
    "andon_worker_step": set(),
    "andon_samples_total": set(),
    "andon_exchange_bytes_total": {"direction", "path"},
    "andon_exchange_hidden_ratio": set(),
    "andon_exchange_seconds_bucket": {"le"},
    "andon_exchange_wait_seconds_bucket": {"le"},
    "andon_compute_seconds_bucket": {"le"},
    "andon_data_wait_seconds_bucket": {"le"},
    "andon_commit_wait_seconds_bucket": {"le"},
    "andon_worker_step_seconds_bucket": {"le"},
}


MOMENTS = ("halted", "resumed", "lost", "back", "complete")
FIRING: dict[str, dict[str, list[dict[str, str]]]] = {
    "LineHalted": {"halted": [{"reason": "non_finite_loss"}]},
    "LossNotFinite": {"halted": [{"reason": "non_finite_loss"}]},
    "WorkersBelowExpected": {"lost": [{}]},
    "WorkerSilent": {"lost": [{"worker": "1"}]},
    "OperatorHaltForgotten": {},
    "CheckpointStale": {},
    "SharedMemoryLost": {},
}
"""Labels besides the run, by alert and moment; nothing where there is none. The other alerts depend
on how busy the machine is."""


@pytest.fixture(scope="module")
def watched_story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    with nullcontext() if MISSING else Watchers(folder / "watchers") as watchers:
        story = Story(watchers=watchers)
        story.stages = tell(folder, story.watch)
        if watchers is not None:
            watchers.await_found('up{worker=""} == 0')
        yield story


@pytest.fixture
def story(watched_story: Story) -> dict[str, Stage]:
    return watched_story.stages


@pytest.fixture
def watchers(watched_story: Story) -> Watchers:
    if watched_story.watchers is None:
        pytest.skip(f"no {' and no '.join(MISSING)}: apt-get install {' '.join(MISSING)}")
    return watched_story.watchers


def without_run(found: Vector) -> list[dict[str, str]]:
    return [{k: v for k, v in labels.items() if k != "run"} for labels, _value in found]


def queries(story: Story, **names: str) -> list[PanelQuery]:
    """The dashboard's queries, with intervals as short as the run."""
    return panel_queries(story.run, **{"window": "10s", "span": "1m", **names})


# What the endpoints say


def test_every_metric_of_the_service_is_there_with_its_labels(story: dict[str, Stage]) -> None:
    scrape = story["paused"].service

    for name, labels in OF_THE_SERVICE.items():
        found = scrape.labels_of(name)
        assert found, name
        assert all(each.keys() == labels for each in found), name


def test_every_metric_of_a_worker_is_there_with_its_labels(story: dict[str, Stage]) -> None:
    assert story["paused"].workers.keys() == {"0", "1"}
    for scrape in story["paused"].workers.values():
        for name, labels in OF_A_WORKER.items():
            found = scrape.labels_of(name)
            assert found, name
            assert all(each.keys() == labels for each in found), name


@pytest.mark.parametrize("name", ["paused", "halted", "resumed", "lost", "back", "complete"])
def test_the_service_agrees_with_the_journal_to_the_unit(
    story: dict[str, Stage], name: str
) -> None:
    stage = story[name]

    steps = {
        **{"paused": PAUSED - 1, "halted": BAD - 1, "resumed": LOST - 1, "lost": LOST - 1},
        **{"back": BACK - 1, "complete": STEPS},
    }
    assert stage.steps == steps[name]
    assert stage.service.value("andon_steps_committed_total") == stage.steps
    assert stage.service.value("andon_step") == stage.steps
    assert stage.service.value("andon_step_seconds_count") == stage.steps
    assert stage.service.value("andon_samples_committed_total") == stage.samples
    assert stage.service.value("andon_step_loss") == stage.losses[-1]
    halts = {reason.label: float(stage.halts.count(reason)) for reason in stage.halts}
    assert stage.service.shown("andon_jidoka_halts_total", "reason") == halts


@pytest.mark.parametrize("name", ["paused", "halted"])
def test_the_workers_agree_with_the_journal_to_the_unit(story: dict[str, Stage], name: str) -> None:
    stage = story[name]

    for scrape in stage.workers.values():
        assert scrape.value("andon_worker_step") == stage.steps
        for timed in ("exchange", "exchange_wait", "compute", "data_wait", "commit_wait"):
            assert scrape.value(f"andon_{timed}_seconds_count") == stage.steps, timed
        assert scrape.value("andon_worker_step_seconds_count") == stage.steps
        assert 0 <= scrape.value("andon_exchange_hidden_ratio") <= 1
    given = [scrape.value("andon_samples_total") for scrape in stage.workers.values()]
    assert sum(given) == stage.samples


def test_parts_of_a_step_are_no_longer_than_the_step(story: dict[str, Stage]) -> None:
    for scrape in story["halted"].workers.values():
        whole = scrape.value("andon_worker_step_seconds_sum")
        parts = ("compute", "data_wait", "exchange_wait", "commit_wait")
        assert 0 < sum(scrape.value(f"andon_{part}_seconds_sum") for part in parts) <= whole


def test_bytes_are_those_that_the_workers_sent_and_received(story: dict[str, Stage]) -> None:
    for stage in (story["paused"], story["halted"]):
        for direction in ("up", "down"):
            everywhere = [
                {"direction": direction, "path": path} for path in ("tcp", "wire", "shared-memory")
            ]
            seen = sum(
                stage.service.value("andon_exchange_bytes_total", **labels) for labels in everywhere
            )
            told = [
                sum(each.value("andon_exchange_bytes_total", **labels) for labels in everywhere)
                for each in stage.workers.values()
            ]
            assert all(each > 0 for each in told)
            assert sum(told) < seen  # the service also relayed state, and holds the next round


def test_what_the_reducer_holds_is_shown_and_let_go(story: dict[str, Stage]) -> None:
    held = [stage.service.value("andon_inflight_bytes") for stage in story.values()]

    assert held[0] > 0
    assert held[-1] == 0


def test_the_state_is_one_of_all(story: dict[str, Stage]) -> None:
    shown = {
        name: stage.service.shown("andon_line_state", "state") for name, stage in story.items()
    }

    assert shown == {
        "paused": {"running": 1},
        "halted": {"halted": 1},
        "resumed": {"running": 1},
        "lost": {"forming": 1},
        "back": {"running": 1},
        "complete": {"complete": 1},
    }


def test_workers_are_counted_and_their_heartbeats_aged_while_they_live(
    story: dict[str, Stage],
) -> None:
    def seen(name: str) -> tuple[dict[str, float], set[str]]:
        scrape = story[name].service
        ages = scrape.labels_of("andon_heartbeat_age_seconds")
        return scrape.shown("andon_workers", "state"), {each["worker"] for each in ages}

    assert seen("paused") == ({"live": 2, "participating": 2}, {"0", "1"})
    assert seen("lost") == ({"live": 1}, {"0"})
    assert seen("back") == ({"live": 2, "participating": 2}, {"0", "1"})
    assert seen("complete") == ({}, set())


def test_the_worker_that_the_others_wait_for_is_reported(story: dict[str, Stage]) -> None:
    before, after = story["paused"].service, story["halted"].service

    def waited(worker: str) -> float:
        name = "andon_worker_wait_seconds_sum"
        return after.value(name, worker=worker) - before.value(name, worker=worker)

    assert waited("0") >= HELD_UP_S
    assert 0 <= waited("1") < waited("0")
    for worker in ("0", "1"):
        assert after.value("andon_worker_wait_seconds_count", worker=worker) == BAD - 1


def test_attempts_are_counted_by_what_they_followed(story: dict[str, Stage]) -> None:
    attempts = story["complete"].service.shown("andon_step_attempts_total", "cause")

    assert attempts == {"first": STEPS, "halt": 1, "stream_lost": 1}


def test_pause_for_a_newcomer_is_timed(story: dict[str, Stage]) -> None:
    counts = [stage.service.value("andon_join_pause_seconds_count") for stage in story.values()]

    # Worker 1 receives rank 0's weights before step 1, and the line's after it was lost.
    assert counts == [1, 1, 1, 1, 2, 2]
    assert story["back"].service.value("andon_join_pause_seconds_sum") > 0


def test_recovery_from_a_loss_is_timed(story: dict[str, Stage]) -> None:
    counts = [stage.service.value("andon_recovery_seconds_count") for stage in story.values()]

    assert counts == [0, 0, 0, 0, 1, 1]
    assert story["back"].service.value("andon_recovery_seconds_sum") > 0


def test_every_committed_exchange_is_timed_once_its_round_is_freed(
    story: dict[str, Stage],
) -> None:
    counts = [
        story[name].service.value("andon_allreduce_seconds_count")
        for name in ("paused", "back", "complete")
    ]

    assert counts == [PAUSED - 1, BACK - 1, STEPS]


def test_workers_are_named_by_slots_that_are_bounded(story: dict[str, Stage]) -> None:
    named = {
        sample.labels["worker"]
        for stage in story.values()
        for scrape in (stage.service, *stage.workers.values())
        for family in scrape.families
        for sample in family.samples
        if "worker" in sample.labels
    }

    assert named == {"0", "1"}


def test_discovery_lists_the_service_and_every_live_worker(story: dict[str, Stage]) -> None:
    (service, first, second) = story["paused"].groups

    run = service["labels"]["run"]
    assert service["labels"] == {"run": run}
    assert first["labels"] == {"run": run, "worker": "0"}
    assert second["labels"] == {"run": run, "worker": "1"}
    targets = [target for group in story["paused"].groups for target in group["targets"]]
    assert len(set(targets)) == 3
    assert all(target.startswith("127.0.0.1:") for target in targets)


def test_discovery_drops_who_is_lost_and_who_left(story: dict[str, Stage]) -> None:
    assert story["lost"].groups == story["paused"].groups[:2]
    assert story["back"].groups[:2] == story["paused"].groups[:2]
    assert story["back"].groups[2]["labels"]["worker"] == "1"
    assert story["back"].groups[2] != story["paused"].groups[2]
    assert story["complete"].groups == story["paused"].groups[:1]


# Alerts


@pytest.mark.prometheus
def test_every_rule_is_evaluated_without_an_error(watchers: Watchers) -> None:
    rules = watchers.rules()

    assert {rule.name for rule in rules} == {
        rule.get("alert") or rule["record"]
        for group in hurried_rules()["groups"]
        for rule in group["rules"]
    }
    assert [(rule.health, rule.error) for rule in rules] == [("ok", "")] * len(rules)


@pytest.mark.prometheus
@pytest.mark.parametrize("name", FIRING)
def test_an_alert_returns_what_happened_and_nothing_at_other_times(
    watched_story: Story, watchers: Watchers, name: str
) -> None:
    (rule,) = [rule for rule in watchers.rules() if rule.name == name]

    found = {
        moment: watchers.query(rule.expression, watched_story.moments[moment]) for moment in MOMENTS
    }

    assert {m: without_run(v) for m, v in found.items() if v} == FIRING[name]
    runs = {labels["run"] for vector in found.values() for labels, _value in vector}
    assert runs <= {watched_story.run}


@pytest.mark.prometheus
def test_a_service_that_ended_with_its_run_is_still_asked_and_not_missed(
    watchers: Watchers,
) -> None:
    (rule,) = [rule for rule in watchers.rules() if rule.name == "ServiceDown"]

    assert [value for _, value in watchers.query('up{worker=""}')] == [0]
    assert watchers.query(rule.expression) == []


@pytest.mark.prometheus
def test_the_receiver_printed_what_happened_in_its_order(
    watched_story: Story, watchers: Watchers
) -> None:
    run, told = watched_story.run, watchers.told()
    places = [
        next(at for at, line in enumerate(told) if line.startswith(beginning))
        for beginning in (
            f"FIRING critical LineHalted: Run {run} has halted: non finite loss.",
            f"RESOLVED LineHalted: Run {run} has halted: non finite loss",
            f"FIRING warning WorkersBelowExpected: Run {run} has fewer workers than expected: 1.",
            f"RESOLVED WorkersBelowExpected: Run {run} has fewer workers than expected",
        )
    ]

    assert places == sorted(places)
    assert any(f"WorkerSilent: Worker 1 of run {run} is silent." in line for line in told)


@pytest.mark.prometheus
def test_an_alert_leads_to_its_page_where_the_documentation_is_published(
    watchers: Watchers,
) -> None:
    (halted,) = {line for line in watchers.told() if line.startswith("FIRING critical LineHalted")}

    assert halted.endswith(f" {DOCS}docs/runbooks/LineHalted.md")
    assert "after step 4: non finite loss" in halted


@pytest.mark.prometheus
def test_alerts_are_passed_on_to_a_topic_with_their_urgency(
    watched_story: Story, watchers: Watchers
) -> None:
    title = f"Run {watched_story.run} has halted: non finite loss"

    assert ("urgent", title) in watchers.topic
    assert ("default", title) in watchers.topic
    assert ("default", f"Worker 1 of run {watched_story.run} is silent") in watchers.topic


# The dashboard


@pytest.mark.prometheus
def test_every_panel_returns_what_it_shows(watched_story: Story, watchers: Watchers) -> None:
    began, ended = watched_story.moments["halted"], watched_story.moments["complete"]

    empty = [
        (query.row, query.panel, query.expr)
        for query in queries(watched_story)
        # A query with an error raises, whether or not it may be empty.
        if not watchers.span(query.expr, began, ended) and not query.may_be_empty
    ]

    assert empty == []


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("panel", "moment", "shown"),
    [
        ("Halted now, because of", "halted", [({"reason": "non_finite_loss"}, 1)]),
        ("Halted now, because of", "resumed", []),
        ("Halts since the run began", "complete", [({"reason": "non_finite_loss"}, 1)]),
        ("Answers since the run began", "complete", [({"answer": "retry"}, 1)]),
        ("Missing", "lost", [({}, 1)]),
        ("Missing", "back", [({}, 0)]),
        ("Step", "lost", [({}, 6)]),
        ("Step", "complete", [({}, 9)]),
    ],
)
def test_a_panel_shows_what_happened(
    watched_story: Story, watchers: Watchers, panel: str, moment: str, shown: Vector
) -> None:
    at = watched_story.moments[moment]

    found = [
        each
        for query in queries(watched_story)
        if query.panel == panel
        for each in watchers.query(query.expr, at)
    ]

    assert found == shown


@pytest.mark.prometheus
@pytest.mark.parametrize("name", ["andon_step_seconds", "andon_allreduce_seconds"])
def test_an_exemplar_names_the_step_that_took_so_long(
    watched_story: Story, watchers: Watchers, name: str
) -> None:
    began, ended = watched_story.moments["halted"], watched_story.moments["complete"]

    found = watchers.exemplars(f"{name}_bucket", began, ended + 1)

    assert found
    assert {int(each["step"]) for each in found} <= set(range(1, STEPS + 1))


@pytest.mark.prometheus
def test_the_dashboard_lists_the_alerts_that_fire(watched_story: Story, watchers: Watchers) -> None:
    (query,) = [each for each in queries(watched_story) if each.panel == "Alerts that fire"]

    found = watchers.query(query.expr, watched_story.moments["halted"])

    assert {"LineHalted", "LossNotFinite"} <= {labels["alertname"] for labels, _ in found}


# What Prometheus reads


@pytest.mark.prometheus
@pytest.mark.usefixtures("watchers")
def test_promtool_finds_nothing_to_object_to(story: dict[str, Stage]) -> None:
    stage = story["back"]

    for scrape in (stage.service, *stage.workers.values()):
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=scrape.text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.prometheus
def test_every_process_was_scraped_under_the_names_that_its_service_gave(
    watched_story: Story, watchers: Watchers
) -> None:
    # At any time of the story so far: on a busy machine a single scrape may time out.
    found = watchers.query("max_over_time(up[1h])", watched_story.moments["resumed"])

    assert all(value == 1 for _, value in found)
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", each["instance"]) for each, _ in found)
    assert sorted(each.get("worker", "") for each, _ in found) == ["", "0", "1"]
    assert {each["run"] for each, _ in found} == {watched_story.run}
