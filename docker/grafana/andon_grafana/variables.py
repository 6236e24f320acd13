"""What is selected at the top of a dashboard."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from andon_grafana.panels import SOURCE

__all__ = ["Variable", "docs", "run", "runs", "source", "worker", "workers"]

Variable = dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.TextBoxVariable

_DOCS = ""
"""Where Andon's sources or documentation can be read, up to and with the slash before `docs/`: then
the page that a panel names is a link. Empty: it is a path in the sources."""

_RUNS = "label_values(andon_line_state, run)"
_WORKERS = 'label_values(andon_heartbeat_age_seconds{run="$run"}, worker)'


def source() -> dashboard.DatasourceVariable:
    """Which Prometheus; the one that docker/grafana/provisioning names, unless somebody chooses."""
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Prometheus")
        .type("prometheus")
        .current(models.VariableOption(text="Prometheus", value="prometheus"))
    )


def run() -> dashboard.QueryVariable:
    """Which run: the label that the service's discovery gives to all processes of the run."""
    return _asked("run", "Run", _RUNS).sort(models.VariableSort.ALPHABETICAL_DESC)


def runs() -> dashboard.QueryVariable:
    """Which runs; all of them unless somebody chooses."""
    return _or_all(_asked("runs", "Runs", _RUNS)).sort(models.VariableSort.ALPHABETICAL_DESC)


def worker() -> dashboard.QueryVariable:
    """Which worker: one."""
    return _asked("worker", "Worker", _WORKERS).sort(models.VariableSort.NUMERICAL_ASC)


def workers() -> dashboard.QueryVariable:
    """Which workers; all of them unless somebody chooses."""
    return _or_all(_asked("worker", "Workers", _WORKERS)).sort(models.VariableSort.NUMERICAL_ASC)


def _asked(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _or_all(variable: dashboard.QueryVariable) -> dashboard.QueryVariable:
    return (
        variable.multi(multi=True)
        .include_all(include_all=True)
        # Not .*: that would take series without the label, too, such as the service's own.
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def docs() -> dashboard.TextBoxVariable:
    """What stands before the pages that the panels name."""
    return (
        dashboard.TextBoxVariable("docs")
        .hide(models.VariableHide.HIDE_VARIABLE)
        .default_value(_DOCS)
        .current(models.VariableOption(text=_DOCS, value=_DOCS))
    )
