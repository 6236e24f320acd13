"""The example of a webhook for Alertmanager reads notifications, and prints nothing but lines."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest

from unit.project.documents import ROOT


@pytest.fixture(scope="module")
def receiver() -> ModuleType:
    path = ROOT / "docker/alertmanager/receiver.py"
    spec = importlib.util.spec_from_file_location("alertmanager_receiver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up there.
    spec.loader.exec_module(module)
    return module


def notification(
    status: str = "firing", *, since: str = "14:03", **annotations: str
) -> dict[str, Any]:
    labels = {"alertname": "LineHalted", "severity": "critical", "run": "7f3a"}
    alert = {"status": status, "labels": labels, "annotations": annotations}
    return {"alerts": [{**alert, "fingerprint": "c0de", "startsAt": since}]}


def lines(receiver: ModuleType, said: object) -> list[str]:
    return [str(alert) for alert in receiver.Alert.all_of(json.dumps(said).encode())]


def test_an_alert_is_one_line_with_what_to_do(receiver: ModuleType) -> None:
    said = notification(summary="It stopped", description="Look.", runbook_url="docs/x.md")

    assert lines(receiver, said) == ["FIRING critical LineHalted: It stopped. Look. docs/x.md"]


def test_a_resolved_alert_says_only_which(receiver: ModuleType) -> None:
    said = notification("resolved", summary="It stopped", description="Look.")

    assert lines(receiver, said) == ["RESOLVED LineHalted: It stopped"]


def test_an_alert_without_texts_is_its_name(receiver: ModuleType) -> None:
    assert lines(receiver, notification()) == ["FIRING critical LineHalted:"]


def test_nothing_in_an_alert_breaks_the_line_or_colours_the_terminal(receiver: ModuleType) -> None:
    said = notification(summary="one\ntwo\x1b[31m")

    assert lines(receiver, said) == ["FIRING critical LineHalted: one two [31m."]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"alerts": 3}', b'{"alerts": [{}]}'])
def test_what_alertmanager_does_not_send_is_refused(receiver: ModuleType, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"notification|Expecting"):
        receiver.Alert.all_of(body)


def alert(receiver: ModuleType, *status: str, since: str = "14:03") -> Any:
    (alert,) = receiver.Alert.all_of(json.dumps(notification(*status, since=since)).encode())
    return alert


def test_an_alert_that_was_told_is_told_again_only_as_a_reminder(receiver: ModuleType) -> None:
    memory, firing = receiver.Memory(), alert(receiver)
    memory.told(firing, 100.0)

    assert memory.news([firing], 160.0) == []
    assert memory.news([firing], 100.0 + receiver.AGAIN_S) == [firing]


def test_an_alert_that_is_resolved_or_fires_anew_is_news(receiver: ModuleType) -> None:
    memory = receiver.Memory()
    memory.told(alert(receiver), 100.0)
    changed = [alert(receiver, "resolved"), alert(receiver, since="15:20")]

    assert memory.news(changed, 101.0) == changed
