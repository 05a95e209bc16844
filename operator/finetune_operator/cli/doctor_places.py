"""`ftctl doctor --cluster`: profiles, shared storage, GPU nodes and the admission policy."""

from collections.abc import Sequence

from finetune_operator.backends.allow_rules import fits
from finetune_operator.cli.asking import Asking
from finetune_operator.cli.doctor_pods import CHART
from finetune_operator.cli.doctor_replicas import DEPLOYMENTS, SELECTOR, read
from finetune_operator.cli.top_rows import told_in
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

# A StorageClass does not say which access modes it has; its driver's documentation does.
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
"""Labels of nodes that have GPUs, whether or not their driver works."""

_GPU_OPERATOR = "helm install gpu-operator nvidia/gpu-operator -n gpu-operator --create-namespace"


async def check_profiles(asking: Asking) -> None:
    """Note each profile, and whether one is for the namespace."""
    topic = "profiles"
    found = await asking.list(topic, "FineTuneProfiles", FINE_TUNE_PROFILES)
    if found is None:
        return
    if not found:
        remedy = "kubectl apply -f examples/profiles/h100.yaml  # changed for this cluster"
        asking.wrong(topic, "FineTuneProfiles", "there are none, and jobs of aks need one", remedy)
        return
    usable = False
    for one in found:
        name, spec = one["metadata"]["name"], one.get("spec")
        allowed = [str(word) for word in told_in(spec, "allow", "namespaces") or ()]
        what = told_in(spec, "image") or f"workspace {told_in(spec, 'azureml', 'workspace')}"
        usable = usable or fits(asking.namespace, allowed)
        asking.ok(topic, name, f"{what}, for {', '.join(allowed) or 'no namespace'}")
    if not usable:
        first = found[0]["metadata"]["name"]
        is_new = not told_in(found[0], "spec", "allow", "namespaces")
        value = f'["{asking.namespace}"]' if is_new else f'"{asking.namespace}"'
        at = "/spec/allow/namespaces" + "/-" * (not is_new)
        patch = f'[{{"op":"add","path":"{at}","value":{value}}}]'
        asking.wrong(
            topic,
            f"namespace {asking.namespace}",
            "no profile may be used in it",
            f"kubectl patch finetuneprofile {first} --type=json -p '{patch}'",
        )


async def check_storage(asking: Asking) -> None:
    """Note which storage classes give volumes that several nodes can write."""
    topic = f"storage that several nodes write ({_MANY})"
    classes = await asking.list(topic, "StorageClasses", _CLASSES)
    volumes = await asking.list(topic, "PersistentVolumes", _VOLUMES)
    shared = [one for one in volumes or () if _MANY in (told_in(one, "spec", "accessModes") or ())]
    shown = {told_in(one, "spec", "storageClassName") or "" for one in shared}
    offers = False
    for one in classes or ():
        name, driver = one["metadata"]["name"], str(one.get("provisioner"))
        if driver in _SHARED or driver.endswith(_SHARED_ENDS):
            asking.ok(topic, name, driver)
            offers = True
        elif name in shown:
            asking.ok(topic, name, f"{driver}, as a volume of the cluster shows")
            offers = True
        elif driver in _ALONE:
            asking.absent(topic, name, f"{driver} is for one node")
        else:
            asking.unknown(topic, name, f"whether {driver} offers it is not known here")
            offers = True
    if by_hand := [one["metadata"]["name"] for one in shared if not _class_of(one, classes or ())]:
        asking.ok(topic, "volumes made by hand", ", ".join(sorted(by_hand)[:5]))
    elif classes is not None and not offers:
        text = "none; jobs of several nodes need one, or a profile with another shared volume"
        remedy = "az aks update --enable-file-driver --name CLUSTER --resource-group GROUP"
        asking.absent(topic, "StorageClasses", text, remedy)


def _class_of(volume: Object, classes: Sequence[Object]) -> bool:
    name = told_in(volume, "spec", "storageClassName")
    return any(one["metadata"]["name"] == name for one in classes)


async def check_gpus(asking: Asking) -> None:
    """Note the nodes with GPUs, and those whose GPUs no pod can ask for."""
    topic = "GPU nodes"
    nodes = await asking.list(topic, "Nodes", NODES)
    if nodes is None:
        return
    counts: dict[tuple[str, str], int] = {}
    for node in nodes:
        labels = told_in(node, "metadata", "labels") or {}
        offered = told_in(node, "status", "allocatable") or {}
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
            asking.wrong(topic, name, text, _GPU_OPERATOR)
    for (what, trouble), count in sorted(counts.items()):
        title = f"{count} node{'s' * (count != 1)}"
        if trouble:
            asking.absent(topic, title, f"{what} each, {trouble}")
        else:
            asking.ok(topic, title, f"{what} each")
    if not counts:
        text = f"none of {len(nodes)} nodes offers GPUs; a pool that scales to 0 has none now"
        remedy = (
            "az aks nodepool add --name gpu --node-vm-size Standard_NC24ads_A100_v4 --node-count 1 "
            "--cluster-name CLUSTER --resource-group GROUP"
        )
        asking.absent(topic, "Nodes", text, remedy)


def _trouble(node: Object) -> str:
    """Return why nothing can be scheduled there; empty where it can."""
    if told_in(node, "spec", "unschedulable"):
        return "cordoned"
    ready = [one for one in told_in(node, "status", "conditions") or () if one["type"] == "Ready"]
    return "" if ready and ready[0]["status"] == "True" else "not Ready"


async def check_policy(asking: Asking) -> None:
    """Note whether an admission policy limits what the operator's account may make."""
    topic = "admission policy"
    policies = await asking.list(
        topic, "ValidatingAdmissionPolicies", _POLICIES, label_selector=SELECTOR
    )
    if policies is None:
        return
    if not policies:
        text = "none limits what the operator's account may make"
        asking.absent(topic, "ValidatingAdmissionPolicy", text, await _limiting(asking))
        return
    bindings = await asking.list(topic, "its bindings", _BINDINGS)
    bound = {str(told_in(one, "spec", "policyName")) for one in bindings or ()}
    for one in policies:
        name = one["metadata"]["name"]
        warnings = told_in(one, "status", "typeChecking", "expressionWarnings") or ()
        if warnings:
            said = str(warnings[0].get("warning", "")).splitlines()[0]
            remedy = f"kubectl get validatingadmissionpolicy {name} -o yaml"
            asking.wrong(topic, name, f"cannot be evaluated ({said})", remedy)
        elif bindings is not None and name not in bound:
            text = "has no binding, and so no effect"
            asking.wrong(topic, name, text, await _limiting(asking))
        else:
            asking.ok(topic, name, "limits what the operator's account may make")


async def _limiting(asking: Asking) -> str:
    """Return the command that makes the policy of the operator that is there, however it came."""
    name, namespace, release = "finetune-operator", "finetune-operator", "finetune-operator"
    try:
        found = (await asking.client.list(DEPLOYMENTS, label_selector=SELECTOR)).items
    except (ApiError, TimeoutError):
        found = []  # told at the operator
    for one in map(read, found[:1]):
        name, namespace, release = one.name, one.namespace, one.release
    if release:
        return (
            f"helm upgrade {release} {CHART} -n {namespace} "
            "--reset-then-reuse-values --set admissionPolicy.create=true"
        )
    return (
        f"helm template {name} {CHART} -n {namespace} --set image.repository=finetune-operator "
        "--kube-version 1.30.0 --set admissionPolicy.create=true "
        "--show-only templates/admissionpolicy.yaml | kubectl apply --server-side -f -"
    )
