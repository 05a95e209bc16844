"""Write a dashboard as the JSON of Grafana.

Panels fill rows of 24 columns from the left. A panel's only data source is the variable
`datasource`, so that a dashboard works in any Grafana.
"""

from dataclasses import dataclass
from itertools import count
from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TableColorTextCellOptions,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import DashboardLink as LinkModel
from grafana_foundation_sdk.models.dashboard import Panel as PanelModel
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from monitoring.board import Board, Column, Kind, Limit, Link, Panel, Query, Row, Variable
from monitoring.groups import alerts_of
from monitoring.rule import Severity
from monitoring.windows import Windows

COLUMNS = 24
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "finetune"
_COLORS = {Severity.WARNING: "orange", Severity.CRITICAL: "red"}
_BY_SERIES = dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC)
_NEWEST = common.ReduceDataOptions().calcs(["lastNotNull"])


def uid_of(board: str) -> str:
    """Return the uid of a dashboard, by its name."""
    return f"finetune-{board}"


def dashboard_json(board: Board) -> str:
    """Return the JSON of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(uid_of(board.name))
        .description(board.description)
        .tags([_TAG])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .link(_other_boards())
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    ids, top = count(1), 0
    for row in board.rows:
        place = GridPos(h=1, w=COLUMNS, x=0, y=top)
        heading = dashboard.Row(row.title).id(next(ids)).grid_pos(place)
        places, below = _places(row, top + 1)
        panels = [
            _Placed(panel, next(ids), place)
            for panel, place in zip(row.panels, places, strict=True)
        ]
        if row.is_collapsed:  # its panels are inside, and the next row follows at once
            for one in panels:
                heading = heading.with_panel(one)
            made, top = made.with_row(heading), top + 1
        else:
            made, top = made.with_row(heading), below
            for one in panels:
                made = made.with_panel(one)
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _other_boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Fine-tuning").type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(variable.name)
        .datasource(_SOURCE)
        .query(variable.query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    return made.multi(True).include_all(True).all_value(".*") if variable.is_many else made


def _places(row: Row, top: int) -> tuple[list[GridPos], int]:
    """Return the position of each panel of a row, and the first line below the row."""
    places: list[GridPos] = []
    left, height = 0, 0
    for panel in row.panels:
        if left + panel.width > COLUMNS:
            left, top, height = 0, top + height, 0
        places.append(GridPos(h=panel.height, w=panel.width, x=left, y=top))
        left, height = left + panel.width, max(height, panel.height)
    return places, top + height


@dataclass(frozen=True)
class _Placed(Builder[PanelModel]):
    """Builds a panel with the library."""

    panel: Panel
    id: int
    place: GridPos

    def build(self) -> PanelModel:
        """Return the library's panel."""
        panel = self.panel
        made = _builder(panel).build()
        made.id_val, made.grid_pos = self.id, self.place
        made.title, made.description = panel.title, panel.text
        made.datasource = _SOURCE
        # Grafana's default is red from 80 on.
        made.field_config.defaults.thresholds = _thresholds(panel.limit).build()
        if panel.links and panel.kind is not Kind.TABLE:
            made.field_config.defaults.links = [
                _link(one, "__field.labels").build() for one in panel.links
            ]
        made.targets = [
            _target(panel, query, ref).build()
            for ref, query in zip(ascii_uppercase, panel.queries, strict=False)
        ]
        return made


def _builder(panel: Panel) -> Builder[PanelModel]:
    match panel.kind:
        case Kind.LINES:
            return _lines(panel).fill_opacity(8)
        case Kind.STACK:
            stacking = common.StackingConfig().mode(StackingMode.NORMAL).group("A")
            return _lines(panel).fill_opacity(60).stacking(stacking)
        case Kind.NUMBER:
            return stat.Panel().unit(panel.unit).reduce_options(_NEWEST)
        case Kind.BARS:
            made = bargauge.Panel().unit(panel.unit).min(0).color_scheme(_BY_SERIES)
            return made.orientation(VizOrientation.HORIZONTAL).reduce_options(_NEWEST)
        case Kind.HEATMAP:
            return _heatmap(panel)
        case Kind.STATES:
            return (
                statetimeline.Panel().merge_values(True).color_scheme(_BY_SERIES).unit(panel.unit)
            )
        case Kind.TABLE:
            return _table(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    all_series = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    made = timeseries.Panel().unit(panel.unit).min(0).tooltip(all_series)
    if panel.limit is not None:
        dashed = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        made = made.thresholds_style(dashed)
    return made.legend(legend.placement(LegendPlacement.BOTTOM))


def _heatmap(panel: Panel) -> heatmap.Panel:
    colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    axis = heatmap.YAxisConfig().unit(panel.unit)
    made = heatmap.Panel().unit(panel.unit).calculate(False)
    return made.color(colors.steps(64)).y_axis(axis)


def _table(panel: Panel) -> table.Panel:
    """Return a table; each row has the values of all queries for the same labels.

    Columns of labels keep their names, because links refer to these names.
    """
    columns = list(zip(ascii_uppercase, panel.columns, strict=False))
    hidden = {f"Value #{ref}": True for ref, one in columns if not one.name}
    names = {f"Value #{ref}": one.name for ref, one in columns if one.name}
    options = {"excludeByName": {"Time": True, **hidden}, "renameByName": names}
    made = (
        table.Panel()
        .unit(panel.unit)
        .show_header(True)
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(DataTransformerConfig(id_val="organize", options=options))
    )
    for _, column in columns:
        if column.name:
            made = made.override_by_name(column.name, _properties(column))
    for link in panel.links:
        links = DynamicConfigValue("links", [_link(link, "__data.fields").build()])
        made = made.override_by_name(link.labels[-1], [links])
    return made


def _properties(column: Column) -> list[DynamicConfigValue]:
    found = [DynamicConfigValue("unit", column.unit)]
    if column.limit is not None:
        found.append(DynamicConfigValue("thresholds", _thresholds(column.limit).build()))
        found.append(DynamicConfigValue("custom.cellOptions", TableColorTextCellOptions()))
    return found


def _thresholds(limit: Limit | None) -> dashboard.ThresholdsConfig:
    made = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    if limit is None:
        return made.steps([Threshold(color="text")])
    severities = {one.name: one.severity for one in alerts_of(Windows())}
    colors = ["green", _COLORS[severities[limit.alert]]]
    below, above = reversed(colors) if limit.is_minimum else colors
    return made.steps([Threshold(color=below), Threshold(limit.value, above)])


def _link(link: Link, labels: str) -> Builder[LinkModel]:
    """Return a link; `labels` is Grafana's variable with the labels of the selected series."""
    chosen = [f"var-{one}=${{{labels}.{one}}}" for one in link.labels]
    query = "&".join(["${datasource:queryparam}", *chosen, "${__url_time_range}"])
    made = dashboard.DashboardLink(link.title).type(DashboardLinkType.LINK)
    return made.url(f"/d/{uid_of(link.board)}?{query}")


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(ref).expr(query.expr)
    if panel.kind is Kind.TABLE:
        return made.instant().format(PromQueryFormat.TABLE)
    if panel.kind is Kind.BARS:
        return made.instant().legend_format(query.legend)
    if panel.kind is Kind.HEATMAP:
        return made.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return made.legend_format(query.legend)
