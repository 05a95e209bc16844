"""What the page shows of a job, as its object and the operator's memory have it."""

from collections.abc import Iterator
from dataclasses import dataclass

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.kube.resources import Object
from finetune_operator.metrics import catalogue
from finetune_trainer.config.metrics import Metric

Series = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class JobNow:
    """One job at the moment of a scrape.

    Attributes:
        made: Its object, as it was seen last.
    """

    made: Object

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `catalogue.OF_JOB`."""
        metadata = self.made["metadata"]
        return metadata.get("namespace", ""), metadata["name"]

    def series(self, metric: Metric) -> Series:
        """Yield its series of a metric: the values of the labels after the job's, and the value."""
        if metric is catalogue.JOB_INFO:
            yield _info(self.made), 1.0
        elif metric is catalogue.JOB_PHASE:
            now = self._status.get("phase", JobPhase.PENDING)
            for phase in JobPhase:
                yield (phase.value,), float(phase == now)

    @property
    def _status(self) -> Object:
        status: Object = self.made.get("status") or {}
        return status


def _info(made: Object) -> tuple[str, ...]:
    """Return the values of the info's labels; empty ones where the spec does not say."""
    spec, plan = made["spec"], (made.get("status") or {}).get("plan") or {}
    topology = spec.get("topology") or {}
    gpus = topology.get("nodes", 1) * topology.get("gpusPerNode", 0)
    return (
        str((spec.get("backend") or {}).get("type", "")),
        str(plan.get("strategy", "")),
        str((spec.get("model") or {}).get("source", "")),
        str(gpus),
        str((spec.get("queue") or {}).get("name", "")),
    )
