"""`ftctl doctor --cluster`: whether the cluster enforces NetworkPolicies.

The API server stores NetworkPolicies also if no network plugin enforces them, so this recognizes
the plugins by their DaemonSets, by node labels of AKS, and by their API groups.
"""

from collections.abc import Sequence

from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.top_rows import get_in
from finetune_operator.kube.resources import NODES, Object, Resource

_TOPIC = "NetworkPolicies"
_DAEMON_SETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
_ENGINES = {
    "cilium": "Cilium",
    "anetd": "Cilium of GKE",
    "calico-node": "Calico",
    "canal": "Calico (Canal)",
    "azure-npm": "Azure NPM",
    "antrea-agent": "Antrea",
    "kube-router": "kube-router",
    "kube-network-policies": "kube-network-policies",
    "ovnkube-node": "OVN-Kubernetes",
}
"""Plugins that enforce policies, by the name of their DaemonSet."""
_GROUPS = {"cilium.io": "Cilium", "crd.projectcalico.org": "Calico", "crd.antrea.io": "Antrea"}
_AKS_POLICY = "kubernetes.azure.com/network-policy"
_AKS_NAMES = {"azure": "Azure NPM", "calico": "Calico", "cilium": "Cilium"}
_OPEN = (
    "so every pod of the cluster can connect to training pods; docs/how-to/network-policies.md "
    "lists the ports"
)
_REMEDY = (
    "az aks update --network-policy cilium --network-dataplane cilium --name CLUSTER "
    "--resource-group GROUP"
)


async def check_network(probe: Probe) -> None:
    """Report whether a network plugin enforces the NetworkPolicies of jobs."""
    sets = await _readable(probe, _DAEMON_SETS)
    nodes = await _readable(probe, NODES)
    found = [one for one in sets or () if one["metadata"]["name"] in _ENGINES]
    for one in found:
        _engine(probe, one)
    if found:
        return
    labels = [get_in(one, "metadata", "labels") or {} for one in nodes or ()]
    policies = {str(one[_AKS_POLICY]) for one in labels if _AKS_POLICY in one}
    names = {_AKS_NAMES[one] for one in policies if one in _AKS_NAMES}
    if names and "none" not in policies:
        probe.ok(_TOPIC, ", ".join(sorted(names)), f"enforced, by label {_AKS_POLICY} of nodes")
    elif "none" in policies and not names:
        text = f"not enforced: AKS enforces none in this cluster ({_AKS_POLICY}=none), {_OPEN}"
        probe.absent(_TOPIC, "enforcement", text, _REMEDY)
    else:
        probe.unknown(_TOPIC, "enforcement", await _reason(probe, sets))


async def _readable(probe: Probe, resource: Resource) -> list[Object] | None:
    """Return the objects of all namespaces; None if the caller may not list them."""
    apart = Probe(probe.client, probe.namespace)  # the reason is part of the finding
    return await apart.list(_TOPIC, resource.plural, resource)


def _engine(probe: Probe, one: Object) -> None:
    metadata = one["metadata"]
    name, where = _ENGINES[metadata["name"]], f"{metadata['namespace']}/{metadata['name']}"
    wanted = int(get_in(one, "status", "desiredNumberScheduled") or 0)
    ready = int(get_in(one, "status", "numberReady") or 0)
    if 0 < wanted <= ready:
        probe.ok(_TOPIC, name, f"enforced; DaemonSet {where} is ready on {ready} nodes")
    else:
        text = (
            f"DaemonSet {where} is ready on {ready} of {wanted} nodes; on others, no policy holds"
        )
        remedy = f"kubectl -n {metadata['namespace']} rollout status daemonset/{metadata['name']}"
        probe.absent(_TOPIC, name, text, remedy)


async def _reason(probe: Probe, sets: Sequence[Object] | None) -> str:
    """Return why it cannot be determined."""
    if sets is not None:
        text = "cannot be determined: no DaemonSet of a known network plugin; if none enforces them"
        return f"{text}, {_OPEN}"
    groups = await probe.ask(_TOPIC, "API groups", probe.get_path("/apis"))
    known = {str(one.get("name")) for one in get_in(groups or {}, "groups") or ()}
    hint = "; ".join(
        f"the API has {group} of {_GROUPS[group]}" for group in _GROUPS if group in known
    )
    text = "cannot be determined: you may list neither DaemonSets nor labels of AKS in nodes"
    return f"{text} ({hint})" if hint else text
