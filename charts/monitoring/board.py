"""Dashboards: a description of their panels, and the JSON for Grafana.

Panels fill rows of 24 columns from the left. A panel's only data source is the variable
`datasource`, so that a dashboard works in any Grafana.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from grafana_foundation_sdk.builders import (
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
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    GridPos,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Panel as PanelModel
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from finetune_trainer.config.metrics import Needs

COLUMNS = 24
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "finetune"


class Kind(StrEnum):
    """How a panel shows its series."""

    LINES = "timeseries"
    STACK = "stacked timeseries"
    NUMBER = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"
    STATES = "state-timeline"


@dataclass(frozen=True)
class Query:
    """A query, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        description: What it shows, and how to interpret it.
        unit: Name of the unit in Grafana.
        width: Width in columns, of 24.
        needs: What the panel needs in order to show data.
        columns: Names of a table's columns, one for each query.
        is_empty_when_well: Whether it shows data only if there is a problem.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    height: int = 8
    needs: Needs = Needs.NOTHING
    columns: tuple[str, ...] = ()
    is_empty_when_well: bool = False

    @property
    def text(self) -> str:
        """Description for Grafana, including the needs and whether the panel may be empty."""
        needs = "" if self.needs is Needs.NOTHING else f" Needs {self.needs}."
        return self.description + needs + (" Empty while all is well." * self.is_empty_when_well)


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A variable with which a user selects values of a label."""

    name: str
    query: str
    is_many: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Attributes:
        name: Name of its file, and end of its uid, which links use.
    """

    name: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in their order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def to_json(self) -> str:
        """Return the JSON for Grafana."""
        made = (
            dashboard.Dashboard(self.title)
            .uid(f"finetune-{self.name}")
            .description(self.description)
            .tags([_TAG])
            .refresh("30s")
            .time("now-3h", "now")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
            .link(_other_boards())
        )
        for variable in self.variables:
            made = made.with_variable(_variable(variable))
        ids, top = count(1), 0
        for row in self.rows:
            place = GridPos(h=1, w=COLUMNS, x=0, y=top)
            made = made.with_row(dashboard.Row(row.title).id(next(ids)).grid_pos(place))
            places, top = _places(row, top + 1)
            for panel, place in zip(row.panels, places, strict=True):
                made = made.with_panel(_Placed(panel, next(ids), place))
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
    """Return the position of each panel of a row, and where the next row begins."""
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
        made.targets = [
            _target(panel, query, ref).build()
            for ref, query in zip("ABCDEFGH", panel.queries, strict=False)
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
            newest = common.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().unit(panel.unit).reduce_options(newest)
        case Kind.HEATMAP:
            colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
            axis = heatmap.YAxisConfig().unit(panel.unit)
            made = heatmap.Panel().unit(panel.unit).calculate(False)
            return made.color(colors.steps(64)).y_axis(axis)
        case Kind.STATES:
            return statetimeline.Panel().unit(panel.unit).merge_values(True)
        case Kind.TABLE:
            return _table(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    all_series = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    made = timeseries.Panel().unit(panel.unit).min(0).tooltip(all_series)
    return made.legend(legend.placement(LegendPlacement.BOTTOM))


def _table(panel: Panel) -> table.Panel:
    """Return a table; each row has the values of all queries for the same labels."""
    names = {
        f"Value #{ref}": column for ref, column in zip("ABCDEFGH", panel.columns, strict=False)
    }
    renamed = {"excludeByName": {"Time": True}, "renameByName": names}
    return (
        table.Panel()
        .unit(panel.unit)
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(DataTransformerConfig(id_val="organize", options=renamed))
    )


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(ref).expr(query.expr)
    if panel.kind is Kind.TABLE:
        return made.instant().format(PromQueryFormat.TABLE)
    if panel.kind is Kind.HEATMAP:
        return made.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return made.legend_format(query.legend)
