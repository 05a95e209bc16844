"""Dashboards: a description of their rows, panels, limits and links.

`grafana.py` writes the JSON, `draw.py` draws pictures.
"""

from dataclasses import dataclass
from enum import StrEnum

from finetune_trainer.config.metrics import Needs


class Kind(StrEnum):
    """How a panel shows its series."""

    LINES = "timeseries"
    STACK = "stacked timeseries"
    NUMBER = "stat"
    TABLE = "table"
    BARS = "bargauge"
    HEATMAP = "heatmap"
    STATES = "state-timeline"


@dataclass(frozen=True)
class Query:
    """A query, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Limit:
    """Value beyond which a panel has the colour of an alert.

    Attributes:
        alert: Name of the alert with this limit; its severity is the colour.
        is_minimum: Whether values below it are bad, instead of values from it on.
    """

    value: float
    alert: str
    is_minimum: bool = False


@dataclass(frozen=True)
class Link:
    """Link from a series, or from a row of a table, to another dashboard.

    Attributes:
        board: Name of the dashboard.
        labels: Labels of the series; the variables of the dashboard have the same names. A table
            shows the link in the column of the last label.
    """

    title: str
    board: str
    labels: tuple[str, ...]


TO_JOB = Link("Show this job", "job", ("namespace", "finetunejob"))
TO_NODE = Link("Show this node", "node", ("node",))


@dataclass(frozen=True)
class Column:
    """Column of a table, with the values of one query.

    Attributes:
        name: Heading; empty for a query of which only the labels are shown.
        unit: Name of the unit in Grafana.
    """

    name: str
    unit: str = "none"
    limit: Limit | None = None


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        description: What it shows, and how to interpret it.
        unit: Name of the unit in Grafana.
        width: Width in columns, of 24.
        needs: What the panel needs in order to show data.
        columns: A table's columns, one for each query.
        links: Dashboards about a series of the panel.
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
    columns: tuple[Column, ...] = ()
    limit: Limit | None = None
    links: tuple[Link, ...] = ()
    is_empty_when_well: bool = False

    @property
    def text(self) -> str:
        """Description for Grafana, with needs, limits and whether the panel may be empty."""
        needs = "" if self.needs is Needs.NOTHING else f" Needs {self.needs}."
        limits = "".join(f" {_limit(one)}" for one in self.limits)
        empty = " Empty while all is well." * self.is_empty_when_well
        return self.description + limits + needs + empty

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits of the panel and its columns."""
        found = (self.limit, *(one.limit for one in self.columns))
        return tuple(one for one in found if one is not None)


def _limit(limit: Limit) -> str:
    side = "Coloured below" if limit.is_minimum else "Coloured from"
    return f"{side} {limit.value:g}, as the alert {limit.alert}."


@dataclass(frozen=True)
class Row:
    """Panels under a heading.

    Attributes:
        is_collapsed: Whether a user opens the row to see its panels.
    """

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False


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
