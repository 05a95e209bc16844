"""Kinds that the kubernetes backend watches, and the fields of their objects that it caches."""

from collections.abc import Mapping
from typing import Any

from finetune_operator.backends.kubernetes.pod_facts import trim_pod
from finetune_operator.backends.profiles import PROFILES
from finetune_operator.kube import resources
from finetune_operator.kube.compact import compact
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import Object
from finetune_operator.kube.watch import Watch

_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "labels", "creationTimestamp",
    "deletionTimestamp", "ownerReferences",
)  # fmt: skip
_JOB_SPEC = ("activeDeadlineSeconds", "backoffLimit", "completions", "parallelism", "suspend")


def _only(source: Mapping[str, Any], *names: str) -> Object:
    return {name: source[name] for name in names if name in source}


def trim_job(obj: Object) -> Object:
    """Retain a batch Job's metadata, size, conditions and number of active pods.

    Also the fields by which it ends or creates pods again, because a client may change them.
    """
    return {
        "metadata": _only(obj["metadata"], *_METADATA, "annotations"),
        "spec": _only(obj.get("spec", {}), *_JOB_SPEC),
        "status": _only(obj.get("status", {}), "active", "conditions"),
    }


WATCHES = (
    Watch(resources.JOBS, trim=trim_job),
    Watch(resources.PODS, trim=trim_pod),
    PROFILES,
    Watch(resources.SERVICES, trim=compact, is_vital=False),
    Watch(resources.NETWORK_POLICIES, trim=compact, is_vital=False),
    Watch(
        resources.ENDPOINT_SLICES,
        # Controllers copy a Service's labels to the slices that they write.
        selector=f"{JOB_UID_LABEL},endpointslice.kubernetes.io/managed-by=finetune.dev",
        trim=compact,
        is_vital=False,
    ),
)
