"""Turn a plan and a profile into the exact manifests of one attempt. Pure.

`KubernetesBackend.render` calls it, also for `ftctl render`. `submit` creates the objects in this
order.
"""

import json
from typing import Any

from finetune_operator.api.v1alpha1 import API_VERSION, KIND
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import RankZeroName
from finetune_operator.backends.base import Attempt, Request
from finetune_operator.backends.kubernetes import child_names, network, volumes
from finetune_operator.backends.kubernetes.attempt_profiles import Snapshot
from finetune_operator.backends.kubernetes.child_names import AttemptFacts, AttemptName, child_name
from finetune_operator.backends.kubernetes.kept import to_annotation
from finetune_operator.backends.kubernetes.pod import PodInputs, pod
from finetune_operator.backends.kubernetes.pod_template import requested_cpu
from finetune_operator.backends.kubernetes.quantity import amount
from finetune_operator.errors import BackendError
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL, JOB_UID_LABEL
from finetune_operator.planner.plan import Plan
from finetune_operator.planner.train_config import Locations, derive_train_config
from finetune_trainer.config import ExitCode

Json = dict[str, Any]

MAX_CONFIG_BYTES = 200 * 1024
"""Kubernetes allows 256 KiB for all annotations of a pod together."""

UNREACHABLE_SECONDS = 60
"""Default of `nodes.unreachableSeconds` of a profile."""

_FAIL_JOB_CODES = [ExitCode.DATA, ExitCode.PREEMPTED, ExitCode.CONFIG, ExitCode.DO_NOT_RESTART]


def render(plan: Plan, profile: Snapshot, attempt: Attempt, *, operator_namespace: str) -> Request:
    """Return the objects that `submit` creates: the children shared by attempts, then the Job.

    The operator's pods in `operator_namespace` may connect to training pods.

    Raises:
        BackendError: The trainer's configuration is too long.
    """
    job = plan.job
    name = AttemptName(job.metadata.namespace, job.metadata.name, attempt.number)
    objects: list[Json] = []
    once = _metadata(job, child_name(job.metadata.name))
    if profile.spec.network.policy:
        objects.append(network.network_policy(once, profile.spec, operator_namespace))
    if plan.nodes > 1:
        objects.append(network.service(once, profile.spec))
    kept = list(objects)
    if _writes_slice(plan, profile):
        # Without an address, which depends on the pod.
        kept.append(network.rank_zero_slice(once, once["name"], name.host, ""))
    objects.append(_batch_job(plan, profile, name, to_annotation(kept)))
    return Request(
        backend=child_names.BACKEND,
        job_uid=job.metadata.uid,
        attempt=attempt.number,
        name=str(name),
        objects=tuple(objects),
    )


def _metadata(job: FineTuneJob, name: str, number: int | None = None) -> Json:
    labels = {
        "app.kubernetes.io/managed-by": "finetune-operator",
        JOB_LABEL: job.metadata.name,
        JOB_UID_LABEL: job.metadata.uid,
    }
    if number is not None:
        labels[ATTEMPT_LABEL] = str(number)
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": labels,
        "ownerReferences": [owner],
    }


def _batch_job(plan: Plan, profile: Snapshot, name: AttemptName, children: str) -> Json:
    job = plan.job
    spec = job.spec
    metadata = _metadata(job, name.batch_job, name.number)
    labels = dict(metadata["labels"])  # without the queue's label, which only the batch Job has
    if spec.queue is not None:
        metadata["labels"] |= {child_names.QUEUE_LABEL: spec.queue.name}
        if spec.queue.priority_class is not None:
            priority = spec.queue.priority_class
            metadata["labels"] |= {"kueue.x-k8s.io/priority-class": priority}
    places = _places(plan, profile)
    metadata["annotations"] = {
        child_names.FACTS_ANNOTATION: _facts(plan, profile, places).model_dump_json(by_alias=True),
        child_names.PROFILE_ANNOTATION: profile.to_annotation(),
    }
    if children:
        metadata["annotations"][child_names.CHILDREN_ANNOTATION] = children
    host = network.rendezvous_host(name, child_name(name.job)) if plan.nodes > 1 else ""
    config = _config(plan, name, places)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": plan.nodes,
            "parallelism": plan.nodes,
            # Pods are never replaced within an attempt, because the operator restarts the whole
            # gang.
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules()},
            "suspend": spec.queue is not None,  # until the queue admits it
            "template": pod(PodInputs(job, profile.spec, labels, config, places.run_dir, host)),
        },
    }


def _facts(plan: Plan, profile: Snapshot, places: Locations) -> AttemptFacts:
    spec = plan.job.spec
    return AttemptFacts(
        nodes=plan.nodes,
        processes_per_node=plan.processes_per_node,
        metrics_port=spec.observability.metrics_port,
        status_interval_seconds=spec.observability.status_interval_seconds,
        output=spec.output.uri or "",
        output_folder=places.output_dir,
        service=child_name(plan.job.metadata.name) if _writes_slice(plan, profile) else "",
        unreachable_seconds=_unreachable_seconds(plan, profile),
    )


def _unreachable_seconds(plan: Plan, profile: Snapshot) -> int:
    if not volumes.is_fenced(plan.job, profile.spec):
        return 0
    return profile.spec.nodes.unreachable_seconds or UNREACHABLE_SECONDS


def _writes_slice(plan: Plan, profile: Snapshot) -> bool:
    return profile.spec.rank_zero_name is RankZeroName.ENDPOINT_SLICE and plan.nodes > 1


def _places(plan: Plan, profile: Snapshot) -> Locations:
    cpu = profile.spec.resources.cpu or requested_cpu(plan.job.spec.pod_template)
    threads = max(1, int(amount(cpu or 1)) // plan.processes_per_node)
    return volumes.locations(plan.job, profile.spec, threads)


def _config(plan: Plan, name: AttemptName, places: Locations) -> str:
    """Return the trainer's configuration as JSON."""
    config = derive_train_config(plan, name.number, places)
    value = config.model_dump(by_alias=True, exclude_none=True, mode="json")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if (size := len(text.encode())) > MAX_CONFIG_BYTES:
        raise BackendError(
            f"spec makes a configuration of {size} bytes, and at most {MAX_CONFIG_BYTES} reach a "
            "pod; shorten model.chatTemplate, observability.samplePrompts or the longest list"
        )
    return text


def _failure_rules() -> list[Json]:
    """Return rules that name the cause in the Job's condition; a lost pod always ends the Job."""
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"operator": "In", "values": [int(code) for code in _FAIL_JOB_CODES]},
        },
    ]
