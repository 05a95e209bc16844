"""`ftctl doctor --cluster`: check profiles, shared storage, GPU nodes and admission policy."""

from collections.abc import Sequence

from finetune_operator.backends.allow_rules import fits
from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.doctor_pods import CHART
from finetune_operator.cli.doctor_replicas import DEPLOYMENTS, SELECTOR, read
from finetune_operator.cli.top_rows import get_in
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, NODES, Object, Resource

_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", False)
_VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
_ADMISSION = "admissionregistration.k8s.io"
_POLICIES = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", False
)
_BINDINGS = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", False
)
_MANY = "ReadWriteMany"

# A StorageClass does not list its access modes; the documentation of the driver does.
_SHARED = (
    "blob.csi.azure.com", "file.csi.azure.com", "kubernetes.io/azure-file",
    "azurelustre.csi.azure.com",
    "nfs.csi.k8s.io", "smb.csi.k8s.io", "efs.csi.aws.com", "fsx.csi.aws.com",
    "filestore.csi.storage.gke.io", "gcsfuse.csi.storage.gke.io", "driver.longhorn.io",
)  # fmt: skip
_SHARED_ENDS = (".cephfs.csi.ceph.com", "cephfs.csi.ceph.com")
_ALONE = (
    "disk.csi.azure.com", "kubernetes.io/azure-disk", "ebs.csi.aws.com", "pd.csi.storage.gke.io",
    "rancher.io/local-path", "kubernetes.io/no-provisioner", "k8s.io/minikube-hostpath",
)  # fmt: skip

_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_GPU_LABELS = {
    "nvidia.com/gpu.present": "true",
    "kubernetes.azure.com/accelerator": "nvidia",
    "accelerator": "nvidia",
}
"""Labels of nodes with GPUs, whether or not the driver works."""

_GPU_OPERATOR = "helm install gpu-operator nvidia/gpu-operator -n gpu-operator --create-namespace"


async def check_profiles(probe: Probe) -> None:
    """List the profiles, and check that one may be used in the namespace."""
    topic = "profiles"
    found = await probe.list(topic, "FineTuneProfiles", FINE_TUNE_PROFILES)
    if found is None:
        return
    if not found:
        remedy = "kubectl apply -f examples/profiles/h100.yaml  # changed for this cluster"
        probe.wrong(topic, "FineTuneProfiles", "none; jobs of backend kubernetes need one", remedy)
        return
    usable = False
    for one in found:
        name, spec = one["metadata"]["name"], one.get("spec")
        allowed = [str(word) for word in get_in(spec, "allow", "namespaces") or ()]
        what = get_in(spec, "image") or f"workspace {get_in(spec, 'azureml', 'workspace')}"
        usable = usable or fits(probe.namespace, allowed)
        probe.ok(topic, name, f"{what}, for {', '.join(allowed) or 'no namespace'}")
    if not usable:
        first = found[0]["metadata"]["name"]
        is_new = not get_in(found[0], "spec", "allow", "namespaces")
        value = f'["{probe.namespace}"]' if is_new else f'"{probe.namespace}"'
        at = "/spec/allow/namespaces" + "/-" * (not is_new)
        patch = f'[{{"op":"add","path":"{at}","value":{value}}}]'
        probe.wrong(
            topic,
            f"namespace {probe.namespace}",
            "no profile may be used in it",
            f"kubectl patch finetuneprofile {first} --type=json -p '{patch}'",
        )


async def check_storage(probe: Probe) -> None:
    """Check which storage classes offer volumes that several nodes can write."""
    topic = f"storage that several nodes write ({_MANY})"
    classes = await probe.list(topic, "StorageClasses", _CLASSES)
    volumes = await probe.list(topic, "PersistentVolumes", _VOLUMES)
    shared = [one for one in volumes or () if _MANY in (get_in(one, "spec", "accessModes") or ())]
    shown = {get_in(one, "spec", "storageClassName") or "" for one in shared}
    offers = False
    for one in classes or ():
        name, driver = one["metadata"]["name"], str(one.get("provisioner"))
        if driver in _SHARED or driver.endswith(_SHARED_ENDS):
            probe.ok(topic, name, driver)
            offers = True
        elif name in shown:
            probe.ok(topic, name, f"{driver}; a volume of the cluster shows it")
            offers = True
        elif driver in _ALONE:
            probe.absent(topic, name, f"{driver} is for one node")
        else:
            probe.unknown(topic, name, f"unknown whether {driver} offers it")
            offers = True
    if by_hand := [one["metadata"]["name"] for one in shared if not _class_of(one, classes or ())]:
        probe.ok(topic, "volumes created by hand", ", ".join(sorted(by_hand)[:5]))
    elif classes is not None and not offers:
        text = "none; jobs of several nodes need one, or a profile with another shared volume"
        remedy = "az aks update --enable-file-driver --name CLUSTER --resource-group GROUP"
        probe.absent(topic, "StorageClasses", text, remedy)


def _class_of(volume: Object, classes: Sequence[Object]) -> bool:
    name = get_in(volume, "spec", "storageClassName")
    return any(one["metadata"]["name"] == name for one in classes)


async def check_gpus(probe: Probe) -> None:
    """Count the nodes with GPUs, and report nodes whose GPUs no pod can request."""
    topic = "GPU nodes"
    nodes = await probe.list(topic, "Nodes", NODES)
    if nodes is None:
        return
    counts: dict[tuple[str, str], int] = {}
    for node in nodes:
        labels = get_in(node, "metadata", "labels") or {}
        offered = get_in(node, "status", "allocatable") or {}
        kind = next((one for one in _GPUS if str(offered.get(one, "0")) != "0"), "")
        name = node["metadata"]["name"]
        if kind:
            product = labels.get("nvidia.com/gpu.product") or labels.get(
                "node.kubernetes.io/instance-type", ""
            )
            what = f"{offered[kind]} {kind}" + f" ({product})" * bool(product)
            key = (what, _trouble(node))
            counts[key] = counts.get(key, 0) + 1
        elif any(labels.get(label) == value for label, value in _GPU_LABELS.items()):
            text = "has GPUs, and offers none: its driver or device plugin does not run"
            probe.wrong(topic, name, text, _GPU_OPERATOR)
    for (what, trouble), count in sorted(counts.items()):
        title = f"{count} node{'s' * (count != 1)}"
        if trouble:
            probe.absent(topic, title, f"{what} each, {trouble}")
        else:
            probe.ok(topic, title, f"{what} each")
    if not counts:
        text = f"none of {len(nodes)} nodes offers GPUs; a pool that scales to 0 has none now"
        remedy = (
            "az aks nodepool add --name gpu --node-vm-size Standard_NC24ads_A100_v4 --node-count 1 "
            "--cluster-name CLUSTER --resource-group GROUP"
        )
        probe.absent(topic, "Nodes", text, remedy)


def _trouble(node: Object) -> str:
    """Return why no pod can be scheduled on a node; empty if pods can be."""
    if get_in(node, "spec", "unschedulable"):
        return "cordoned"
    ready = [one for one in get_in(node, "status", "conditions") or () if one["type"] == "Ready"]
    return "" if ready and ready[0]["status"] == "True" else "not Ready"


async def check_policy(probe: Probe) -> None:
    """Check that an admission policy limits the objects that the operator may create."""
    topic = "admission policy"
    policies = await probe.list(
        topic, "ValidatingAdmissionPolicies", _POLICIES, label_selector=SELECTOR
    )
    if policies is None:
        return
    if not policies:
        text = "none limits the objects that the operator may create"
        probe.absent(topic, "ValidatingAdmissionPolicy", text, await _policy_command(probe))
        return
    bindings = await probe.list(topic, "its bindings", _BINDINGS)
    bound = {str(get_in(one, "spec", "policyName")) for one in bindings or ()}
    for one in policies:
        name = one["metadata"]["name"]
        warnings = get_in(one, "status", "typeChecking", "expressionWarnings") or ()
        if warnings:
            warning = str(warnings[0].get("warning", "")).splitlines()[0]
            remedy = f"kubectl get validatingadmissionpolicy {name} -o yaml"
            probe.wrong(topic, name, f"cannot be evaluated ({warning})", remedy)
        elif bindings is not None and name not in bound:
            text = "has no binding, so it has no effect"
            probe.wrong(topic, name, text, await _policy_command(probe))
        else:
            probe.ok(topic, name, "limits the objects that the operator may create")


async def _policy_command(probe: Probe) -> str:
    """Return the command that creates the admission policy of the installed operator."""
    name, namespace, release = "finetune-operator", "finetune-operator", "finetune-operator"
    try:
        found = (await probe.client.list(DEPLOYMENTS, label_selector=SELECTOR)).items
    except (ApiError, TimeoutError):
        found = []  # check_operator reports the error
    for one in map(read, found[:1]):
        name, namespace, release = one.name, one.namespace, one.release
    if release:
        return (
            f"helm upgrade {release} {CHART} -n {namespace} "
            "--reset-then-reuse-values --set admissionPolicy.create=true"
        )
    return (
        f"helm template {name} {CHART} -n {namespace} --set image.repository=finetune-operator "
        "--kube-version 1.30.0 "
        "--show-only templates/admissionpolicy.yaml | kubectl apply --server-side -f -"
    )
