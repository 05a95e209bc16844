"""Node selection of a job's pods: affinity and tolerations, required and preferred. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.api.v1alpha1.topology import Capacity, Placement, Rdma

Json = dict[str, Any]

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
AGENT_POOL = "kubernetes.azure.com/agentpool"
HOST = "kubernetes.io/hostname"
# AKS deprecates the first label and does not set the second on all nodes yet.
SPOT_LABELS = ("kubernetes.azure.com/scalesetpriority", "kubernetes.azure.com/priority")
SPOT_TAINT = {
    "key": "kubernetes.azure.com/scalesetpriority",
    "operator": "Equal",
    "value": "spot",
    "effect": "NoSchedule",
}
GPU_TAINTS = (
    {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
)


def uses_rdma(spec: FineTuneJobSpec, profile: FineTuneProfileSpec) -> bool:
    """Return whether the pods request InfiniBand: on several nodes, if the profile offers it."""
    wanted = spec.topology.rdma is not Rdma.NONE and spec.topology.nodes > 1
    return wanted and profile.resources.rdma is not None


def node_selector(profile: FineTuneProfileSpec) -> dict[str, str]:
    """Return the labels that a node must have; a cluster on AKS may have Windows nodes, too."""
    return {"kubernetes.io/os": "linux", **profile.nodes.selector}


def tolerations(spec: FineTuneJobSpec, profile: FineTuneProfileSpec) -> list[Json]:
    """Return the pods' tolerations."""
    found = [one.model_dump(by_alias=True, exclude_none=True) for one in profile.nodes.tolerations]
    if spec.topology.gpus_per_node:
        found += [dict(taint) for taint in GPU_TAINTS]
    if spec.capacity is not Capacity.ON_DEMAND:
        found.append(dict(SPOT_TAINT))
    return found


def affinity(
    spec: FineTuneJobSpec, profile: FineTuneProfileSpec, own_pods: Mapping[str, str]
) -> Json:
    """Return the pods' affinity; empty if every node is suitable.

    Args:
        spec: Spec of the job.
        profile: The job's profile.
        own_pods: Labels that only the job's own pods have.
    """
    rules: Json = {}
    if (node := _node_affinity(spec, profile)) != {}:
        rules["nodeAffinity"] = node
    if spec.topology.nodes == 1:
        return rules
    selector: Json = {"labelSelector": {"matchLabels": dict(own_pods)}}
    key = profile.nodes.topology_key
    if spec.topology.placement is Placement.SPREAD:
        apart = [{**selector, "topologyKey": HOST}]
        rules["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    elif key and uses_rdma(spec, profile):
        # InfiniBand does not reach beyond a pool, so a pod elsewhere could never join.
        close = [{**selector, "topologyKey": key}]
        rules["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": close}
    elif key:
        close = [{"weight": 100, "podAffinityTerm": {**selector, "topologyKey": key}}]
        rules["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": close}
    return rules


def _node_affinity(spec: FineTuneJobSpec, profile: FineTuneProfileSpec) -> Json:
    instance = spec.topology.instance_type
    types = [instance] if instance is not None else profile.nodes.instance_types
    needed = []
    if types:
        needed.append(_is_in(INSTANCE_TYPE, types))
    if profile.nodes.agent_pools:
        needed.append(_is_in(AGENT_POOL, profile.nodes.agent_pools))
    spot = [_is_in(label, ["spot"]) for label in SPOT_LABELS]
    node: Json = {}
    terms = [{"matchExpressions": needed}] if needed else []
    if spec.capacity is Capacity.SPOT:
        terms = [{"matchExpressions": [*needed, one]} for one in spot]  # terms are alternatives
    if terms:
        node["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if spec.capacity is Capacity.SPOT_PREFERRED:
        node["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": [one]}} for one in spot
        ]
    return node


def _is_in(key: str, values: Sequence[str]) -> Json:
    return {"key": key, "operator": "In", "values": list(values)}
