"""Rules: recorded series, and alerts whose texts name job, rank and node."""

from dataclasses import dataclass
from enum import StrEnum

from monitoring.windows import duration

RUNBOOK = "https://github.com/finetune-operator/finetune-operator/blob/main/docs/runbook.md"

JOB = "namespace, finetunejob"
"""Labels that identify the job of a series."""
RANK = f"{JOB}, node, rank"
"""Labels that identify the rank of a series."""

THE_JOB = "job {{ $labels.namespace }}/{{ $labels.finetunejob }}"
JOB_AT_FIRST = f"J{THE_JOB[1:]}"
THE_RANK = f"Rank {{{{ $labels.rank }}}} on node {{{{ $labels.node }}}} of {THE_JOB}"


class Severity(StrEnum):
    """Whom an alert should reach."""

    CRITICAL = "critical"
    """Someone must act now, because GPUs are idle or will be."""
    WARNING = "warning"
    """Someone must act today, because GPU time is wasted."""


@dataclass(frozen=True)
class Worst:
    """The rank with the highest value of a series, for the text of an alert on a job.

    It is queried when the text is written. An alert by rank would fire for each affected rank, and
    an alert on the highest rank would start again whenever another rank is the highest.

    Attributes:
        series: Name of the series.
        matchers: Matchers for labels other than the job's.
        words: Start of the sentence, before "rank 3 on node x".
    """

    series: str
    matchers: str
    words: str

    @property
    def sentence(self) -> str:
        """Prometheus template; templates of Azure cannot query."""
        matchers = self.matchers.replace('"', '\\"')
        query = f"topk(1, {self.series}{{{matchers}namespace=%q,finetunejob=%q}})"
        return (
            f'{{{{ range query (printf "{query}" $labels.namespace $labels.finetunejob) }}}}'
            f"{self.words} rank {{{{ .Labels.rank }}}} on node {{{{ .Labels.node }}}}.{{{{ end }}}}"
        )


@dataclass(frozen=True)
class Rule:
    """A recording rule: the name of its series, and their expression."""

    record: str
    expr: str

    def to_prometheus(self) -> dict[str, object]:
        """Return the entry for a rule file."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        hold: Seconds for which the condition must be true.
        summary: One line, with the labels job, rank and node that the series has.
        description: Meaning of the alert, with its value.
        worst: The rank that an alert on a job names.
    """

    name: str
    expr: str
    hold: float
    severity: Severity
    summary: str
    description: str
    worst: Worst | None = None

    @property
    def runbook_url(self) -> str:
        """Section of docs/runbook.md about the alert."""
        return f"{RUNBOOK}#{self.name.lower()}"

    def to_prometheus(self) -> dict[str, object]:
        """Return the entry for a rule file."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": duration(self.hold) if self.hold else "0s",
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary,
                "description": self.description + (f" {self.worst.sentence}" if self.worst else ""),
                "runbook_url": self.runbook_url,
            },
        }


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated one after the other."""

    name: str
    rules: tuple[Rule | Alert, ...]
