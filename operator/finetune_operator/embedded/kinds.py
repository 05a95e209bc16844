"""The kinds that are served: those of Kubernetes that clients ask for, and those that CRDs add.

Of Kubernetes' own kinds only the names of top-level fields are checked. No controller acts on them:
no Job creates pods.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from finetune_operator.api.metadata import OBJECT_METADATA
from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import Finding
from finetune_operator.embedded.status_errors import invalid
from finetune_operator.kube import resources
from finetune_operator.kube.resources import CRDS, Object, Resource

_ITEM: Schema = {"x-kubernetes-preserve-unknown-fields": True}
_ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True, "items": _ITEM}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TYPED = {"data": _TEXTS, "binaryData": _TEXTS}
_AGE: Object = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


@dataclass(frozen=True)
class Kind:
    """One kind of object.

    Attributes:
        resource: Its names.
        schema: What its objects may hold, metadata included.
        columns: What `kubectl get` shows beside the name, as in a CRD.
        has_status: Its status is a subresource, and changes of the rest raise the generation.
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


# Short name, and the top-level fields.
_BUILTIN = {
    resources.NAMESPACES: ("ns", "spec status"),
    resources.CONFIG_MAPS: ("cm", "data binaryData immutable"),
    resources.SECRETS: ("", "data stringData type immutable"),
    resources.EVENTS: (
        "ev",
        "involvedObject reason message source firstTimestamp lastTimestamp count type eventTime "
        "series action related reportingComponent reportingInstance",
    ),
    resources.NODES: ("no", "spec status"),
    resources.PODS: ("po", "spec status"),
    resources.SERVICES: ("svc", "spec status"),
    resources.ENDPOINT_SLICES: ("", "addressType endpoints ports"),
    resources.NETWORK_POLICIES: ("netpol", "spec"),
    resources.JOBS: ("", "spec status"),
    resources.LEASES: ("", "spec"),
    CRDS: ("crd", "spec status"),
}
_EVENT_COLUMNS = tuple(
    {"name": name, "type": "string", "jsonPath": path}
    for name, path in (
        ("Type", ".type"),
        ("Reason", ".reason"),
        ("Object", ".involvedObject.name"),
        ("Message", ".message"),
    )
)


def builtin_kinds() -> Iterator[Kind]:
    """Yield Kubernetes' own kinds."""
    for resource, (short, fields) in _BUILTIN.items():
        listed = fields.split(" ")
        has_status = "status" in listed
        typed = {name: schema for name, schema in _TYPED.items() if name in listed}
        yield Kind(
            resource,
            _with_metadata({"type": "object", "properties": dict.fromkeys(listed, _ANY) | typed}),
            columns=(*_EVENT_COLUMNS, _AGE) if resource == resources.EVENTS else (_AGE,),
            short_names=(short,) if short else (),
            categories=("all",) if has_status and resource.namespaced else (),
            has_status=has_status,
        )


def custom_kind(definition: Object) -> Kind:
    """Return the kind that a CRD adds, in its storage version; others are not served."""
    spec = definition["spec"]
    names = spec["names"]
    version = next(one for one in spec["versions"] if one["storage"])
    subresources = version.get("subresources") or {}
    is_namespaced = spec["scope"] == "Namespaced"
    return Kind(
        Resource(spec["group"], version["name"], names["plural"], names["kind"], is_namespaced),
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
        StatusError: it lacks what a kind needs.
    """
    try:
        version = custom_kind(definition).resource.version
    except (KeyError, TypeError, StopIteration) as error:
        lacks = Finding(("spec",), f"is incomplete: {error!r}")
        raise invalid(CRDS, definition, [lacks]) from error
    spec = definition["spec"]
    kind = spec["names"]["kind"]
    names = {"singular": kind.lower(), "listKind": f"{kind}List", **spec["names"]}
    now = definition["metadata"]["creationTimestamp"]
    said = {"status": "True", "lastTransitionTime": now, "reason": "Accepted", "message": ""}
    conditions = [{"type": type_, **said} for type_ in ("NamesAccepted", "Established")]
    status = {"conditions": conditions, "acceptedNames": names, "storedVersions": [version]}
    spec = {"conversion": {"strategy": "None"}, **spec, "names": names}
    return {**definition, "spec": spec, "status": status}
