"""The kinds that are served: a table of Kubernetes' own, and those that CRDs add.

Kubernetes' own kinds have no schema here but the names of their top-level fields, and nobody acts
on them: no Job makes pods. What is said of a kind to clients (discovery) is made here too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from finetune_operator.api.metadata import OBJECT_METADATA
from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import Finding
from finetune_operator.embedded.refusals import invalid
from finetune_operator.kube.resources import Object, Resource

VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")
_SUB_VERBS = ("get", "patch", "update")
_ITEM: Schema = {"x-kubernetes-preserve-unknown-fields": True}
_ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True, "items": _ITEM}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TYPED = {"ConfigMap": {"data": _TEXTS, "binaryData": _TEXTS}, "Secret": {"data": _TEXTS}}
_AGE: Object = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
)


@dataclass(frozen=True)
class Kind:
    """One kind of object.

    Attributes:
        resource: Its names.
        schema: What its objects may hold, metadata included.
        columns: What `kubectl get` shows beside the name, as in a CRD.
        has_status: Its status is written apart from everything else, and changes of the rest count
            as generations.
        scale: Where the scale subresource finds its numbers, as in a CRD.
        is_custom: It comes from a CRD.
    """

    resource: Resource
    schema: Schema
    columns: tuple[Object, ...] = (_AGE,)
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    scale: Object | None = None
    is_custom: bool = False

    @property
    def subresources(self) -> tuple[str, ...]:
        """Names of what is served below an object."""
        return (("status",) if self.has_status else ()) + (("scale",) if self.scale else ())

    @property
    def shape(self) -> Schema:
        """The schema as a CRD may say it: without metadata."""
        properties = {**self.schema["properties"], "metadata": {"type": "object"}}
        return {**self.schema, "properties": properties}


def _columns(*columns: str) -> tuple[Object, ...]:
    """Read `Name .json.path` of each column."""
    named = (column.split(" ") for column in columns)
    return (*({"name": name, "type": "string", "jsonPath": path} for name, path in named), _AGE)


# Group/version, plural, kind, short names, and the top-level fields.
_TABLE = """
v1 namespaces Namespace ns spec,status
v1 nodes Node no spec,status
v1 persistentvolumes PersistentVolume pv spec,status
v1 configmaps ConfigMap cm data,binaryData,immutable
v1 secrets Secret - data,stringData,type,immutable
v1 events Event ev involvedObject,reason,message,source,firstTimestamp,lastTimestamp,count,type,\
eventTime,series,action,related,reportingComponent,reportingInstance
v1 pods Pod po spec,status
v1 services Service svc spec,status
v1 serviceaccounts ServiceAccount sa secrets,imagePullSecrets,automountServiceAccountToken
v1 persistentvolumeclaims PersistentVolumeClaim pvc spec,status
v1 resourcequotas ResourceQuota quota spec,status
v1 limitranges LimitRange limits spec
apps/v1 deployments Deployment deploy spec,status
apps/v1 daemonsets DaemonSet ds spec,status
batch/v1 jobs Job - spec,status
coordination.k8s.io/v1 leases Lease - spec
discovery.k8s.io/v1 endpointslices EndpointSlice - addressType,endpoints,ports
networking.k8s.io/v1 networkpolicies NetworkPolicy netpol spec
policy/v1 poddisruptionbudgets PodDisruptionBudget pdb spec,status
rbac.authorization.k8s.io/v1 roles Role - rules
rbac.authorization.k8s.io/v1 rolebindings RoleBinding - roleRef,subjects
rbac.authorization.k8s.io/v1 clusterroles ClusterRole - rules,aggregationRule
rbac.authorization.k8s.io/v1 clusterrolebindings ClusterRoleBinding - roleRef,subjects
scheduling.k8s.io/v1 priorityclasses PriorityClass pc value,globalDefault,description,\
preemptionPolicy
storage.k8s.io/v1 storageclasses StorageClass sc provisioner,parameters,reclaimPolicy,\
volumeBindingMode,allowVolumeExpansion,mountOptions
apiextensions.k8s.io/v1 customresourcedefinitions CustomResourceDefinition crd spec,status
"""
_CLUSTER_SCOPED = {
    "namespaces", "nodes", "persistentvolumes", "clusterroles", "clusterrolebindings",
    "priorityclasses", "storageclasses", "customresourcedefinitions",
}  # fmt: skip
_ALL = {"pods", "services", "deployments", "daemonsets", "jobs"}
_COLUMNS = {
    "namespaces": _columns("Status .status.phase"),
    "pods": _columns("Status .status.phase"),
    "leases": _columns("Holder .spec.holderIdentity"),
    "events": _columns(
        "Type .type", "Reason .reason", "Object .involvedObject.name", "Message .message"
    ),
}


def builtin_kinds() -> Iterator[Kind]:
    """Yield Kubernetes' own kinds."""
    for line in _TABLE.strip().splitlines():
        api_version, plural, kind, short, fields = line.split(" ")
        group, _, version = api_version.rpartition("/")
        listed = fields.split(",")
        known = dict.fromkeys(listed, _ANY) | _TYPED.get(kind, {})
        yield Kind(
            Resource(group, version, plural, kind, plural not in _CLUSTER_SCOPED),
            _with_metadata({"type": "object", "properties": known}),
            _COLUMNS.get(plural, (_AGE,)),
            () if short == "-" else (short,),
            ("all",) if plural in _ALL else (),
            "status" in listed,
        )


def custom_kind(definition: Object) -> Kind:
    """Return the kind that a CRD adds, in its storage version; others are not served."""
    spec = definition["spec"]
    names = spec["names"]
    version = next(one for one in spec["versions"] if one["storage"])
    subresources = version.get("subresources") or {}
    return Kind(
        Resource(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            spec["scope"] == "Namespaced",
        ),
        _with_metadata(version["schema"]["openAPIV3Schema"]),
        tuple(version.get("additionalPrinterColumns") or (_AGE,)),
        tuple(names.get("shortNames", ())),
        tuple(names.get("categories", ())),
        "status" in subresources,
        subresources.get("scale"),
        is_custom=True,
    )


def _with_metadata(schema: Schema) -> Schema:
    text = {"type": "string"}
    known = {"apiVersion": text, "kind": text, "metadata": OBJECT_METADATA}
    return {**schema, "properties": {**schema.get("properties", {}), **known}}


def accepted(definition: Object) -> Object:
    """Return the CRD with what the API server fills in once it serves the kind.

    Raises:
        RefusalError: it lacks what a kind needs.
    """
    try:
        custom_kind(definition)
    except (KeyError, TypeError, StopIteration) as error:
        lacks = Finding(("spec",), f"is incomplete: {error!r}")
        raise invalid(_DEFINITIONS, definition, [lacks]) from error
    spec = definition["spec"]
    names = {"singular": spec["names"]["kind"].lower(), **spec["names"]}
    names = {"listKind": f"{names['kind']}List", **names}
    now = definition["metadata"]["creationTimestamp"]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now, "reason": reason, "message": ""}
        for kind, reason in (
            ("NamesAccepted", "NoConflicts"),
            ("Established", "InitialNamesAccepted"),
        )
    ]
    stored = [one["name"] for one in spec["versions"] if one["storage"]]
    return {
        **definition,
        "spec": {"conversion": {"strategy": "None"}, **spec, "names": names},
        "status": {"conditions": conditions, "acceptedNames": names, "storedVersions": stored},
    }


def _groups(kinds: Iterable[Kind]) -> dict[str, dict[str, list[Kind]]]:
    found: dict[str, dict[str, list[Kind]]] = {}
    for kind in kinds:
        resource = kind.resource
        found.setdefault(resource.group, {}).setdefault(resource.version, []).append(kind)
    return found


def group_list(kinds: Iterable[Kind]) -> Object:
    """Return the answer to `/apis`."""
    groups = []
    for name, versions in _groups(kinds).items():
        listed = [{"groupVersion": f"{name}/{one}", "version": one} for one in versions]
        if name:
            groups.append({"name": name, "versions": listed, "preferredVersion": listed[0]})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def resource_list(kinds: Iterable[Kind], group: str, version: str) -> Object | None:
    """Return the answer to `/api/VERSION` or `/apis/GROUP/VERSION`, or None."""
    there = _groups(kinds).get(group, {}).get(version)
    if there is None:
        return None
    name = f"{group}/{version}" if group else version
    resources = [entry for kind in there for entry in _entries(kind)]
    return {
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources
    }  # fmt: skip


def _entries(kind: Kind) -> Iterator[Object]:
    resource = kind.resource
    about = {"namespaced": resource.namespaced, "kind": resource.kind}
    yield {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        **about,
        "verbs": VERBS,
        "shortNames": kind.short_names,
        "categories": kind.categories,
    }
    for name in kind.subresources:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        entry = {"name": f"{resource.plural}/{name}", "singularName": "", **about}
        yield {**entry, "verbs": _SUB_VERBS, **(scale if name == "scale" else {})}
