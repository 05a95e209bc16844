"""Compute what each rank does, from two pages of each node of a job. Pure functions.

A page without a metric, such as the page of an older trainer, leaves the columns that need it
empty.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_operator.cli.top_rows import RankRow, SuspectRow
from finetune_trainer.config import gpu_metrics, metrics

_WAITING = ("data_wait", "comm_exposed")

Labels = Mapping[str, str]


@dataclass(frozen=True)
class NodePage:
    """The page of one node at one moment.

    Attributes:
        node: Name of the node.
        samples: Samples by the name of the metric.
    """

    node: str
    samples: Mapping[str, Sequence[tuple[Labels, float]]]

    def of(self, name: str) -> Iterator[tuple[int, Labels, float]]:
        """Yield the samples of a per-rank metric, with the rank."""
        for labels, value in self.samples.get(name, ()):
            if labels.get("rank", "").isdecimal():
                yield int(labels["rank"]), labels, value

    def value(self, name: str, rank: int) -> float | None:
        """Return the value of a metric whose only label is the rank."""
        return next((value for one, _, value in self.of(name) if one == rank), None)


def read_page(node: str, text: str) -> NodePage:
    """Parse a page.

    Raises:
        ValueError: the text is not in the Prometheus text format.
    """
    # Imported here: the import takes 50 ms, and a list of jobs does not need it.
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return NodePage(node, samples)


def ranks_of(
    before: Sequence[NodePage],
    now: Sequence[NodePage],
    nodes: Sequence[str],
    ranks_per_node: int,
    suspects: Sequence[SuspectRow] = (),
) -> tuple[RankRow, ...]:
    """Return a row for each rank of the nodes, also if the page of its node was not read."""
    earlier = {rank: seconds for page in before for rank, seconds in _phases(page).items()}
    scores = {rank: value for page in now for rank, _, value in page.of(metrics.SCORE.name)}
    scores |= {one.rank: one.score for one in suspects if one.score is not None}
    causes = {one.rank: one.cause for one in suspects}
    rows = {}
    for number, node in enumerate(nodes):
        for rank in range(number * ranks_per_node, (number + 1) * ranks_per_node):
            rows[rank] = {"node": node}
    for page in now:
        phases = _phases(page)
        for rank, _, age in page.of(metrics.LAST_SEEN_AGE.name):
            known = {"node": page.node, "age_seconds": age, **_state(page, rank)}
            rows[rank] = known | _shares(earlier.get(rank, {}), phases.get(rank, {}))
    return tuple(
        RankRow(rank=rank, score=scores.get(rank), cause=causes.get(rank), **known)
        for rank, known in sorted(rows.items())
    )


def _phases(page: NodePage) -> dict[int, dict[str, float]]:
    """Return the seconds of each rank so far, by phase."""
    found: dict[int, dict[str, float]] = {}
    for rank, labels, seconds in page.of(metrics.PHASE_SECONDS.name):
        found.setdefault(rank, {})[labels.get("phase", "")] = seconds
    return found


def _shares(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, Any]:
    """Return how a rank spent the time between two pages; empty if no time has passed."""
    spent = {one: max(0.0, now[one] - before[one]) for one in now if one in before}
    if (whole := sum(spent.values())) <= 0:
        return {}
    ratios = {phase: seconds / whole for phase, seconds in spent.items()}
    return {
        "phase": max(ratios, key=lambda phase: ratios[phase]),
        "phase_ratios": ratios,
        "waiting_ratio": sum(ratios.get(phase, 0.0) for phase in _WAITING),
    }


def _state(page: NodePage, rank: int) -> dict[str, Any]:
    """Return the present state of a rank from its page."""
    step, gpu = page.value(metrics.GLOBAL_STEP.name, rank), _gpu(page, rank)
    used = page.samples.get(gpu_metrics.UTILIZATION.name, ())
    return {
        "step": int(step) if step is not None and math.isfinite(step) else None,
        "step_seconds": page.value(metrics.STEP_DURATION_EWMA.name, rank),
        "memory_bytes": {
            labels.get("kind", ""): value
            for one, labels, value in page.of(metrics.MEMORY.name)
            if one == rank
        },
        "gpu": gpu,
        "gpu_utilization_ratio": next(
            (value for labels, value in used if gpu and labels.get("gpu") == gpu), None
        ),
    }


def _gpu(page: NodePage, rank: int) -> str | None:
    """Return the UUID of a rank's GPU, in the form of NVML."""
    infos = (labels for one, labels, _ in page.of(metrics.INFO.name) if one == rank)
    return next(infos, {}).get("gpu_uuid") or None
