"""Panels as data, and how Grafana's builders draw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as sources

from andon_grafana.links import from_row, from_series

__all__ = [
    "BLUE",
    "CLEAR",
    "GREEN",
    "GREY",
    "ORANGE",
    "RED",
    "SOURCE",
    "YELLOW",
    "Amounts",
    "Column",
    "Curve",
    "Drawn",
    "Facts",
    "Lanes",
    "Number",
    "Panel",
    "Query",
    "Row",
    "Table",
    "draw",
]

GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"
GREY, CLEAR = "text", "transparent"

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The source that the variable `datasource` selects."""

Drawn = stat.Panel | timeseries.Panel | bargauge.Panel | statetimeline.Panel | table.Panel
_Any = TypeVar(
    "_Any", stat.Panel, timeseries.Panel, bargauge.Panel, statetimeline.Panel, table.Panel
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ""
    """Grafana's pattern: `worker {{worker}}`. Empty for a panel with one nameless value."""
    exemplars: bool = False
    """Asks for the histogram's exemplars, too: they name the step that was slow."""
    color: str = ""
    """For all its series; empty: Grafana chooses."""
    unit: str = ""
    """Where it is not the panel's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What all panels have."""

    title: str
    tells: str
    """What it shows, and what to do about it: plain English, Markdown."""
    see: str
    """The page of the documentation that says more, from the root, perhaps with an anchor."""
    queries: tuple[Query, ...]
    unit: str = "none"
    """Grafana's name of the unit."""
    width: int = 8
    """Of 24 columns."""
    empty: str = ""
    """What is shown where Prometheus has nothing; empty: Grafana's `No data`."""
    may_be_empty: str = ""
    """Why a run that works may have nothing here; empty: it always has something."""

    @property
    def description(self) -> str:
        """What Grafana shows behind the panel's (i).

        Grafana fills in the variable `docs`, and makes a link of what is then an address.
        """
        return f"{self.tells}\n\nMore: ${{docs}}{self.see}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Panel):
    """The latest values, as large text."""

    decimals: int | None = None
    names: bool = False
    """Shows the legends above the values, even if there is only one."""
    base: str = CLEAR
    """The colour below all thresholds, and where there is nothing."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """The colour from a value on."""
    states: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Text and colour in place of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Panel):
    """Values over time."""

    stacked: bool = False
    limits: tuple[float, float] | None = None
    """The ends of the axis."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """Dashed lines: where an alert looks up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts(Panel):
    """The latest values as bars, side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes(Panel):
    """States over time, a lane for each series."""

    states: Mapping[int, tuple[str, str]]
    """Text and colour of each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Panel):
    """A table of the labels of the latest series."""

    hidden: tuple[str, ...] = ("Time", "Value")
    """Columns that say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Query):
    """One column of a table; its legend is the column's name."""

    decimals: int | None = None
    states: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Text and colour in place of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """A table of the latest values: a row for each value of one label, a column for each query."""

    key: str
    """The label."""
    queries: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A question, and the panels that answer it."""

    title: str
    panels: tuple[tuple[int, tuple[Panel, ...]], ...]
    """The height of each line of panels, and its panels; the widths of a line add up to 24."""
    collapsed: bool = False
    """Asks nothing until somebody opens it."""


def draw(panel: Panel, number: int, height: int) -> Drawn:
    """Grafana's builder of a panel, which has this number and height."""
    match panel:
        case Number():
            drawn: Drawn = _number(panel)
        case Curve():
            drawn = _curve(panel)
        case Amounts():
            drawn = _amounts(panel)
        case Lanes():
            drawn = _lanes(panel)
        case Facts():
            drawn = _facts(panel)
        case Table():
            drawn = _table(panel)
        case _:
            raise TypeError(f"{type(panel).__name__} has no drawing")
    return drawn.id(number).height(height)


def _number(panel: Number) -> stat.Panel:
    colored = panel.thresholds or panel.states or any(each.color for each in panel.queries)
    text = looks.BigValueTextMode.VALUE_AND_NAME if panel.names else looks.BigValueTextMode.AUTO
    drawn = (
        _framed(stat.Panel(), panel, instant=True)
        .text_mode(text)
        .graph_mode(looks.BigValueGraphMode.NONE)
        .color_mode(
            looks.BigValueColorMode.BACKGROUND_SOLID if colored else looks.BigValueColorMode.NONE
        )
        .reduce_options(_last())
        .thresholds(_thresholds(panel.base, panel.thresholds))
        .mappings(_mappings(panel.states))
    )
    return drawn if panel.decimals is None else drawn.decimals(panel.decimals)


def _curve(panel: Curve) -> timeseries.Panel:
    drawn = (
        _framed(timeseries.Panel(), panel, instant=False)
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(looks.TooltipDisplayMode.MULTI)
            .sort(looks.SortOrder.DESCENDING)
        )
        .line_width(1)
        .fill_opacity(30 if panel.stacked else 5)
        .show_points(looks.VisibilityMode.AUTO)
        # A hole is a time in which nothing was scraped or nothing ran; a line would hide it.
        .span_nulls(span_nulls=False)
    )
    if panel.stacked:
        drawn = drawn.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        dashed = common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED)
        drawn = drawn.thresholds(_thresholds(CLEAR, panel.thresholds)).thresholds_style(dashed)
    if panel.limits is not None:
        drawn = drawn.min(panel.limits[0]).max(panel.limits[1])
    return drawn


def _amounts(panel: Amounts) -> bargauge.Panel:
    return (
        _framed(bargauge.Panel(), panel, instant=True)
        .orientation(looks.VizOrientation.HORIZONTAL)
        .display_mode(looks.BarGaugeDisplayMode.BASIC)
        .value_mode(looks.BarGaugeValueMode.TEXT)
        .show_unfilled(show_unfilled=False)
        .reduce_options(_last())
        .thresholds(_thresholds(BLUE))
        .min(0)
        # An increase is extrapolated to the ends of its window: 1 event may come out as 1.03.
        .decimals(0)
    )


def _lanes(panel: Lanes) -> statetimeline.Panel:
    return (
        _framed(statetimeline.Panel(), panel, instant=False)
        .mappings(_mappings(panel.states))
        .merge_values(merge_values=True)
        .line_width(0)
        .fill_opacity(70)
        .row_height(0.8)
        .show_value(looks.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(show_legend=False)
        )
    )


def _facts(panel: Facts) -> table.Panel:
    drawn = (
        _framed(table.Panel(), panel, instant=True)
        .show_header(show_header=True)
        .align(looks.FieldTextAlignment.AUTO)
    )
    for name in panel.hidden:
        drawn = drawn.override_by_name(
            name, [models.DynamicConfigValue(id_val="custom.hidden", value=True)]
        )
    return drawn


def _table(panel: Table) -> table.Panel:
    drawn = (
        _framed(table.Panel(), panel, instant=True)
        .show_header(show_header=True)
        .align(looks.FieldTextAlignment.AUTO)
        .data_links(from_row(panel.key))
        # A frame for each query; together, they are a row for each value of the label.
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True},
                    "renameByName": {
                        f"Value #{letter}": each.legend
                        for letter, each in zip(ascii_uppercase, panel.queries, strict=False)
                    },
                },
            )
        )
    )
    for each in panel.queries:
        if own := _own_of_column(each):
            drawn = drawn.override_by_name(each.legend, own)
    return drawn


def _own_of_column(column: Column) -> list[models.DynamicConfigValue]:
    """What a column has in place of its table's."""
    found: list[tuple[str, Any]] = []
    if column.unit:
        found.append(("unit", column.unit))
    if column.decimals is not None:
        found.append(("decimals", column.decimals))
    if column.states:
        found.append(("mappings", [each.to_json() for each in _mappings(column.states)]))
        found.append(("custom.cellOptions", {"type": "color-background", "mode": "basic"}))
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in found]


def _framed(drawn: _Any, panel: Panel, *, instant: bool) -> _Any:
    """Sets what all panels have."""
    drawn = (
        drawn.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(panel.width)
    )
    if panel.empty:
        drawn = drawn.no_value(panel.empty)
    if links := from_series(tuple(each.legend for each in panel.queries)):
        drawn = drawn.data_links(links)
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        target = (
            prometheus.Dataquery()
            .ref_id(letter)
            .datasource(SOURCE)
            .expr(query.expr)
            .legend_format(query.legend)
            .exemplar(query.exemplars)
        )
        target = target.instant() if instant else target.range()
        if isinstance(panel, Facts | Table):
            target = target.format(sources.PromQueryFormat.TABLE)
        drawn = drawn.with_target(target)
        if not isinstance(query, Column) and (own := _own(query)):
            drawn = drawn.override_by_query(letter, own)
    return drawn


def _own(query: Query) -> list[models.DynamicConfigValue]:
    """What a query has in place of its panel's."""
    found = []
    if query.color:
        color = {"mode": "fixed", "fixedColor": query.color}
        found.append(models.DynamicConfigValue(id_val="color", value=color))
    if query.unit:
        found.append(models.DynamicConfigValue(id_val="unit", value=query.unit))
    return found


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False)


def _thresholds(base: str, steps: tuple[tuple[float, str], ...] = ()) -> dashboard.ThresholdsConfig:
    found = [models.Threshold(value=None, color=base)]
    found += [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def _mappings(states: Mapping[int, tuple[str, str]]) -> list[models.ValueMapping]:
    if not states:
        return []
    results = {
        str(value): models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(states.items())
    }
    return [models.ValueMap(options=results)]
