"""A newcomer: a worker that joins a line from the test's own process, without a model."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from andon.protocol.run_settings import RunPlan
from andon_trainer import JoinRefused
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Joining
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.path import Inbox
from andon_trainer.model.layout import plan_model
from integration.scripts.train import Model

__all__ = ["refusal_of"]


def refusal_of(spec: dict[str, Any], slot: int, environment: dict[str, str]) -> JoinRefused:
    """The error of a worker with this environment; its model and data do fit the line."""
    config = LineConfig.read(environment)
    connection = Connection(config, Inbox())
    joining = Joining(
        run_id=config.run_id,
        incarnation=connection.incarnation,
        layout=plan_model([Model()]).layout,
        plan=RunPlan(
            global_batch=spec["batch"], dataset_size=spec["samples"], total_steps=spec["steps"]
        ),
        node_id=socket.gethostname(),
        launch_slot=slot,
        device=("cpu", "", 0, 1),
        token=config.token,
        capabilities=config.capabilities,
    )
    with pytest.raises(JoinRefused) as caught:
        connection.connect(joining)
    connection.close()
    return caught.value
