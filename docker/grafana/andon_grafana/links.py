"""Where a click leads: to another dashboard, with what is selected here."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models

__all__ = ["LINE", "NETWORK", "OVERVIEW", "WORKER", "from_row", "from_series", "to_board"]

OVERVIEW, LINE, WORKER, NETWORK = "andon-overview", "andon-line", "andon-worker", "andon-network"
"""The uids of the dashboards, which their addresses have."""

_TIME = "${__url_time_range}"


def to_board(title: str, uid: str, variables: tuple[str, ...]) -> dashboard.DashboardLink:
    """A link at the top of a dashboard, which carries these variables and the time.

    Grafana writes a variable as it stands in an address: `var-run=7f3a`.
    """
    carried = "&".join(f"${{{name}:queryparam}}" for name in variables)
    return (
        dashboard.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .icon("dashboard")
        .url(f"/d/{uid}?{carried}")
        .keep_time(keep_time=True)
    )


def from_series(legends: tuple[str, ...]) -> list[Builder[models.DashboardLink]]:
    """Links from a series to the dashboard of what its legend names: a worker, or a run."""
    for label, title, uid, others in (
        ("worker", "This worker", WORKER, ("datasource", "run", "docs")),
        ("run", "This run", LINE, ("datasource", "docs")),
    ):
        if any(f"{{{{{label}}}}}" in legend for legend in legends):
            return [_to_named(title, uid, label, f"${{__field.labels.{label}}}", others)]
    return []


def from_row(label: str) -> list[Builder[models.DashboardLink]]:
    """A link from a row of a table to the run that the row is of."""
    value = f"${{__data.fields.{label}}}"
    return [_to_named("This run", LINE, label, value, ("datasource", "docs"))]


def _to_named(
    title: str, uid: str, name: str, value: str, others: tuple[str, ...]
) -> dashboard.DashboardLink:
    carried = "&".join(f"${{{other}:queryparam}}" for other in others)
    return (
        dashboard.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{uid}?var-{name}={value}&{carried}&{_TIME}")
    )
