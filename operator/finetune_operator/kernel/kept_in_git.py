"""Warns about a job with a TTL that a GitOps tool would create again from Git after its deletion.

The reconciler calls it once for each job, with the first attempt. Only an Event depends on it.
"""

from collections.abc import Mapping
from typing import Any

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.kernel.events import EventType, JobEvent

_TRACES = {
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "argocd.argoproj.io/instance": "Argo CD",
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
}
"""Labels and annotations by which a tool tracks its objects, with the tool's name."""


def tool_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the GitOps tool that applied an object; None if none did."""
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return next((tool for trace, tool in _TRACES.items() if trace in marks), None)


def recreation(metadata: Mapping[str, Any], job: FineTuneJob) -> JobEvent | None:
    """Return the warning about a job with a TTL that a GitOps tool would create again."""
    seconds, tool = job.spec.ttl_seconds_after_finished, tool_of(metadata)
    if seconds is None or tool is None:
        return None
    text = (
        f"spec.ttlSecondsAfterFinished {seconds} deletes the job that long after its end, and "
        f"{tool} then creates it again from Git: it trains again, or is refused on folders that "
        "it has written; remove the field, and remove the finished job from Git instead"
    )
    return JobEvent(EventType.WARNING, "WillBeRecreated", text)
