"""The Service, EndpointSlice and NetworkPolicy of a job. Pure."""

from typing import Any

from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec, RankZeroName
from finetune_operator.backends.kubernetes.child_names import (
    INDEX_LABEL,
    METRICS_PORT_NAME,
    RENDEZVOUS_PORT,
    AttemptName,
)
from finetune_operator.kube.labels import JOB_UID_LABEL

Json = dict[str, Any]

OPERATOR_LABELS = {"app.kubernetes.io/name": "finetune-operator"}
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
_SERVICE_NAME = "kubernetes.io/service-name"


def rendezvous_host(name: AttemptName, service: str) -> str:
    """Return the host name of rank 0, which differs per attempt because resolvers cache addresses.

    It omits the cluster's domain, which a pod's search list adds.
    """
    return f"{name.host}.{service}.{name.namespace}.svc"


def service(metadata: Json, profile: FineTuneProfileSpec) -> Json:
    """Return the headless Service that gives rank 0 its name.

    Without a selector `rank_zero_slice` is its only EndpointSlice, because no controller writes
    one.
    With a selector it selects only rank 0's pod, the only pod that is looked up.
    """
    spec: Json = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
    }
    if profile.rank_zero_name is RankZeroName.SERVICE:
        uid = metadata["labels"][JOB_UID_LABEL]
        spec["selector"] = {JOB_UID_LABEL: uid, INDEX_LABEL: "0"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def rank_zero_slice(metadata: Json, service: str, host: str, address: str) -> Json:
    """Return the EndpointSlice that gives rank 0's pod its name."""
    labels = {
        **metadata["labels"],
        _SERVICE_NAME: service,
        "endpointslice.kubernetes.io/managed-by": "finetune.dev",
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": labels},
        "addressType": "IPv6" if ":" in address else "IPv4",
        "endpoints": [{"addresses": [address], "hostname": host, "conditions": {"ready": True}}],
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
    }


def network_policy(metadata: Json, profile: FineTuneProfileSpec, operator_namespace: str) -> Json:
    """Return the policy that admits the job's own pods, the operator and readers of metrics.

    The job's own pods may use every port, because NCCL and gloo choose ports at run time.
    """
    own = {"matchLabels": {JOB_UID_LABEL: metadata["labels"][JOB_UID_LABEL]}}
    readers = [_peer(operator_namespace, OPERATOR_LABELS)]
    readers += [_peer(one.namespace, one.labels) for one in profile.network.metrics_readers]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": readers, "ports": [{"protocol": "TCP", "port": METRICS_PORT_NAME}]},
            ],
        },
    }


def _peer(namespace: str, labels: dict[str, str]) -> Json:
    peer: Json = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: namespace}}}
    return {**peer, "podSelector": {"matchLabels": dict(labels)}} if labels else peer
