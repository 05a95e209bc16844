"""What a rule is: a recorded series, or an alert that names job, rank and node in words."""

from dataclasses import dataclass
from enum import StrEnum

from monitoring.windows import duration

RUNBOOK = "https://github.com/finetune-operator/finetune-operator/blob/main/docs/runbook.md"

JOB = "namespace, finetunejob"
"""Labels that say of which job a series is."""
RANK = f"{JOB}, node, rank"
"""Labels that say of which rank."""

THE_JOB = "job {{ $labels.namespace }}/{{ $labels.finetunejob }}"
JOB_AT_FIRST = f"J{THE_JOB[1:]}"
THE_RANK = f"Rank {{{{ $labels.rank }}}} on node {{{{ $labels.node }}}} of {THE_JOB}"


class Severity(StrEnum):
    """Whom an alert should reach."""

    CRITICAL = "critical"
    """Somebody now: GPUs stand still, or will."""
    WARNING = "warning"
    """Somebody today: GPUs are wasted."""


@dataclass(frozen=True)
class Worst:
    """The rank with the highest of some series, for the text of an alert on a whole job.

    Asked when the text is written. An alert by rank would name as many as are affected, and one on
    the highest would begin anew whenever another rank is.

    Attributes:
        series: their name.
        matchers: for labels other than the job's.
        words: what the sentence says before "rank 3 on node x".
    """

    series: str
    matchers: str
    words: str

    @property
    def sentence(self) -> str:
        """A template of Prometheus; Azure's know no queries."""
        matchers = self.matchers.replace('"', '\\"')
        query = f"topk(1, {self.series}{{{matchers}namespace=%q,finetunejob=%q}})"
        return (
            f'{{{{ range query (printf "{query}" $labels.namespace $labels.finetunejob) }}}}'
            f"{self.words} rank {{{{ .Labels.rank }}}} on node {{{{ .Labels.node }}}}.{{{{ end }}}}"
        )


@dataclass(frozen=True)
class Rule:
    """A recording rule: the name of its series, and what they are."""

    record: str
    expr: str

    def to_prometheus(self) -> dict[str, object]:
        """Return it as a rule file has it."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        hold: Seconds for which the condition must be true.
        summary: One line, with job, rank and node where the series has them.
        description: What that means, and what its value is.
        worst: Of an alert on a whole job: which of its ranks it names.
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
        """Where docs/runbook.md says what to do."""
        return f"{RUNBOOK}#{self.name.lower()}"

    def to_prometheus(self) -> dict[str, object]:
        """Return it as a rule file has it."""
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
