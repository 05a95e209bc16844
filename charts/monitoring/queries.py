"""Check that a query uses only metrics of the catalogue, with their labels and label values.

The labels of every intermediate result are computed, so that the use of a label that an aggregation
has removed is an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import promql_parser as promql

from finetune_trainer.config.metrics import Metric, MetricType
from monitoring.rule import Rule

OF_EACH_SCRAPE = frozenset({"namespace", "pod", "instance", "job"})
"""Labels that every series has."""
OF_TRAINING_PODS = OF_EACH_SCRAPE | {"finetunejob", "node"}
"""Labels of series that the chart's PodMonitor scrapes."""

_OF_HISTOGRAM = ("_bucket", "_sum", "_count")
_SELECTIONS = ("topk", "bottomk")
_SETS = ("and", "unless")

Labels = frozenset[str]


class QueryError(ValueError):
    """A query uses an unknown metric, label or label value."""


@dataclass(frozen=True)
class Series:
    """A metric with its labels.

    Attributes:
        values: Values of a label, if all are known.
    """

    labels: Labels
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def series_of(metrics: Iterable[Metric], added: Labels) -> dict[str, Series]:
    """Return the series that Prometheus stores for these metrics, by name; a scrape adds labels."""
    found = {}
    for one in metrics:
        values = {label.name: label.values for label in one.labels if label.values}
        labels = added | set(one.label_names)
        if one.type is MetricType.HISTOGRAM:
            for suffix in _OF_HISTOGRAM:
                le = {"le"} if suffix == "_bucket" else set()
                found[one.name + suffix] = Series(labels | le, values)
        else:
            found[one.name] = Series(labels, values)
    return found


class Queries:
    """Checks queries against the known series."""

    def __init__(self, series: Mapping[str, Series]) -> None:
        self._series = dict(series)

    def learn(self, rule: Rule) -> None:
        """Check a recording rule, and add its series to the known ones.

        Raises:
            QueryError: it queries an unknown series.
        """
        labels = self.labels_of(rule.expr)
        values: dict[str, tuple[str, ...]] = {}
        for name in self.names_in(rule.expr):
            values |= self._series[name].values
        known = {label: found for label, found in values.items() if label in labels}
        self._series[rule.record] = Series(labels, known)

    def names_in(self, query: str) -> set[str]:
        """Return the names of all series in a query."""
        found = set()

        def visit(expr: promql.Expr) -> bool:
            if isinstance(expr, promql.VectorSelector):
                found.add(expr.name or "")
            elif isinstance(expr, promql.MatrixSelector):
                found.add(expr.vector_selector.name or "")
            return True

        promql.walk(promql.parse(query), visit)
        return found

    def labels_of(self, query: str) -> Labels:
        """Return the labels of a query's result.

        Raises:
            QueryError: a metric, a label or the value of a label is not known.
            ValueError: the text is not a query.
        """
        return self._labels(promql.parse(query))

    def _labels(self, expr: promql.Expr) -> Labels:
        match expr:
            case promql.NumberLiteral() | promql.StringLiteral():
                return frozenset()
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self._labels(expr.expr)
            case promql.MatrixSelector():
                return self._selected(expr.vector_selector)
            case promql.VectorSelector():
                return self._selected(expr)
            case promql.AggregateExpr():
                return self._aggregated(expr)
            case promql.BinaryExpr():
                return self._joined(expr)
            case promql.Call():
                return self._called(expr)
            case _:
                raise QueryError(f"{expr.prettify()}: this check does not know such a term")

    def _selected(self, expr: promql.VectorSelector) -> Labels:
        series = self._series.get(expr.name or "")
        if series is None:
            raise QueryError(f"{expr.name} is not in the catalogue")
        for matcher in expr.matchers.matchers:
            _require(series.labels, [matcher.name], expr)
            known = series.values.get(matcher.name)
            if known is None or "$" in matcher.value:  # a variable of a dashboard
                continue
            is_regex = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
            asked = matcher.value.split("|") if is_regex else [matcher.value]
            if unknown := {value for value in asked if value} - set(known):
                raise QueryError(
                    f"{expr.name} has no {matcher.name} {sorted(unknown)}, only {sorted(known)}"
                )
        return series.labels

    def _aggregated(self, expr: promql.AggregateExpr) -> Labels:
        inner = self._labels(expr.expr)
        named = frozenset(expr.modifier.labels if expr.modifier else ())
        _require(inner, named, expr.expr)
        if str(expr.op) in _SELECTIONS:
            return inner
        if expr.modifier and expr.modifier.type == promql.AggModifierType.Without:
            return inner - named
        return named

    def _joined(self, expr: promql.BinaryExpr) -> Labels:
        left, right = self._labels(expr.lhs), self._labels(expr.rhs)
        matching = expr.modifier.matching if expr.modifier else None
        named = frozenset(matching.labels if matching else ())
        if matching and matching.type == promql.LabelModifierType.Include:
            _require(left, named, expr.lhs)
            _require(right, named, expr.rhs)
        if str(expr.op) in _SETS:
            return left
        if str(expr.op) == "or":
            return left & right
        if not left or not right:  # a number
            return left | right
        taken = frozenset((expr.modifier.group_labels if expr.modifier else None) or ())
        match expr.modifier.card if expr.modifier else None:
            case promql.VectorMatchCardinality.ManyToOne:
                _require(right, taken, expr.rhs)
                return left | taken
            case promql.VectorMatchCardinality.OneToMany:
                _require(left, taken, expr.lhs)
                return right | taken
        if matching is None:
            return left
        is_on = matching.type == promql.LabelModifierType.Include
        return named if is_on else left - named

    def _called(self, expr: promql.Call) -> Labels:
        name, arguments = expr.func.name, expr.args
        if name in ("time", "scalar", "vector"):
            return frozenset()
        if name == "label_replace":
            source, made = _text(arguments[3]), _text(arguments[1])
            labels = self._labels(arguments[0])
            _require(labels, [source], arguments[0])
            return labels | {made}
        if name == "histogram_quantile":
            labels = self._labels(arguments[1])
            _require(labels, ["le"], arguments[1])
            return labels - {"le"}
        return frozenset[str]().union(*(self._labels(one) for one in arguments))


def _require(there: Labels, asked: Iterable[str], expr: promql.Expr) -> None:
    if missing := set(asked) - there:
        raise QueryError(f"{expr.prettify()} has no label {sorted(missing)}, only {sorted(there)}")


def _text(expr: promql.Expr) -> str:
    assert isinstance(expr, promql.StringLiteral)
    return expr.val
