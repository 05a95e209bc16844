"""The facts of a pod that the operator reads and caches. Pure.

`watched` caches them instead of whole pods, and `judge` turns them into a verdict. Texts that many
pods share are interned, because a cluster may have thousands of pods.
"""

from dataclasses import dataclass
from enum import StrEnum
from sys import intern
from typing import NamedTuple

from finetune_operator.backends.kubernetes.child_names import CONTAINER, INDEX_LABEL, owner_of
from finetune_operator.kube.labels import (
    FENCED_ANNOTATION,
    GRACE_ANNOTATION,
    JOB_LABEL,
    JOB_UID_LABEL,
)
from finetune_operator.kube.resources import Object


class Role(StrEnum):
    """Role of a container."""

    TRAINER = "Trainer"
    INIT = "Init"  # must end before the trainer starts
    SIDECAR = "Sidecar"  # runs beside the trainer


class ConditionFacts(NamedTuple):
    """A condition of a pod; all fields are empty if the condition is absent."""

    status: str = ""
    reason: str = ""
    message: str = ""
    since: str = ""


class ContainerFacts(NamedTuple):
    """State of a container.

    Attributes:
        state: `waiting`, `running`, `terminated`, or empty.
        started: When it started; empty if it never ran.
        exit_code: Its exit code; 0 unless it is terminated.
    """

    name: str
    role: Role
    state: str = ""
    reason: str = ""
    message: str = ""
    started: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod; texts are empty if the pod has none.

    Attributes:
        job_uid: Uid of the FineTuneJob, by the pod's label.
        index: Number of its node in the gang.
        owner_uid: Uid of its batch Job.
        deleted: Its deletionTimestamp.
        deletion_seconds: Grace period of its deletion.
        grace_seconds: Its own grace period, from an annotation.
        is_fenced: Whether the next attempt may start while its processes may still run.
        is_gone: Whether it no longer exists; these are then its last known facts.
        is_lost: Whether its node has not ended it in time, and it is fenced (`lost_pods`).
    """

    name: str
    namespace: str
    uid: str
    job_uid: str
    index: int
    owner_uid: str
    owner_name: str
    created: str
    deleted: str
    deletion_seconds: float
    grace_seconds: float | None
    is_fenced: bool
    node: str
    scheduler: str
    address: str
    phase: str
    reason: str
    message: str
    scheduled: ConditionFacts
    initialized: ConditionFacts
    ready: ConditionFacts
    containers_ready: ConditionFacts
    disruption: ConditionFacts
    containers: tuple[ContainerFacts, ...]
    is_gone: bool = False
    is_lost: bool = False

    @property
    def trainer(self) -> ContainerFacts:
        """The trainer's container, without a state before the kubelet has reported on it."""
        found = (one for one in self.containers if one.role is Role.TRAINER)
        return next(found, ContainerFacts(CONTAINER, Role.TRAINER))

    @property
    def has_report(self) -> bool:
        """Whether the kubelet has reported on the pod's containers."""
        return any(one.role is not Role.INIT for one in self.containers)

    @property
    def is_unreachable(self) -> bool:
        """Whether the node controller has set Ready to False, because the kubelet is silent.

        The node controller gives no reason, and does not change ContainersReady. The kubelet always
        gives a reason, for example for a readiness gate.
        """
        is_unset = self.ready.status == "False" and not self.ready.reason
        return is_unset and self.containers_ready.status == "True"


def read_pod(obj: Object) -> PodFacts:
    """Return the facts of a pod of the API server."""
    metadata, spec, status = obj["metadata"], obj.get("spec", {}), obj.get("status", {})
    owner, labels = owner_of(obj), metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    grace = annotations.get(GRACE_ANNOTATION)
    conditions = {one["type"]: _condition(one) for one in status.get("conditions") or ()}
    return PodFacts(
        name=metadata["name"],
        namespace=intern(metadata.get("namespace", "")),
        uid=metadata["uid"],
        job_uid=intern(labels.get(JOB_UID_LABEL, "")),
        index=int(labels.get(INDEX_LABEL, "0")),
        owner_uid=intern(owner.get("uid", "")),
        owner_name=intern(owner.get("name", "")),
        created=intern(metadata.get("creationTimestamp") or ""),
        deleted=metadata.get("deletionTimestamp") or "",
        deletion_seconds=float(metadata.get("deletionGracePeriodSeconds") or 0),
        grace_seconds=float(grace) if grace else None,
        is_fenced=annotations.get(FENCED_ANNOTATION) == "true",
        node=intern(spec.get("nodeName") or ""),
        scheduler=intern(spec.get("schedulerName") or ""),
        address=status.get("podIP") or "",
        phase=intern(status.get("phase") or ""),
        reason=intern(status.get("reason") or ""),
        message=status.get("message") or "",
        scheduled=conditions.get("PodScheduled", _ABSENT),
        initialized=conditions.get("Initialized", _ABSENT),
        ready=conditions.get("Ready", _ABSENT),
        containers_ready=conditions.get("ContainersReady", _ABSENT),
        disruption=conditions.get("DisruptionTarget", _ABSENT),
        containers=_containers(spec, status),
    )


_ABSENT = ConditionFacts()


def _condition(obj: Object) -> ConditionFacts:
    fields = ("status", "reason", "message", "lastTransitionTime")
    return ConditionFacts(*(intern(obj.get(field) or "") for field in fields))


def _containers(spec: Object, status: Object) -> tuple[ContainerFacts, ...]:
    """Return the containers in the order of their start; init containers come first."""
    # The status does not show which init containers are sidecars.
    sidecars = {
        one["name"]
        for one in spec.get("initContainers") or ()
        if one.get("restartPolicy") == "Always"
    }
    first, others = status.get("initContainerStatuses"), status.get("containerStatuses")
    return (
        *(_container(one, one["name"] in sidecars, Role.INIT) for one in first or ()),
        *(_container(one, one["name"] != CONTAINER, Role.TRAINER) for one in others or ()),
    )


def _container(obj: Object, is_sidecar: bool, role: Role) -> ContainerFacts:
    states: Object = obj.get("state") or {}
    state = next(iter(states), "")
    details: Object = states.get(state) or {}
    return ContainerFacts(
        name=intern(obj["name"]),
        role=Role.SIDECAR if is_sidecar else role,
        state=intern(state),
        reason=intern(details.get("reason") or ""),
        message=details.get("message") or "",
        started=intern(details.get("startedAt") or ""),
        exit_code=int(details.get("exitCode") or 0),
    )


def trim_pod(obj: Object) -> Object:
    """Return the cached form of a pod: its names, the label of its job, and its facts."""
    metadata, facts = obj["metadata"], read_pod(obj)
    names: Object = {"name": facts.name, "namespace": facts.namespace, "uid": facts.uid}
    if version := metadata.get("resourceVersion"):
        names["resourceVersion"] = version
    if job := (metadata.get("labels") or {}).get(JOB_LABEL):
        names["labels"] = {JOB_LABEL: intern(job)}
    return {"metadata": names, "facts": facts}


def facts_of_pod(cached: Object) -> PodFacts:
    """Return the facts in the result of `trim_pod`."""
    facts: PodFacts = cached["facts"]
    return facts
