"""The kinds that the server serves: built-in kinds that clients request, and the kinds of CRDs.

For built-in kinds only the names of top-level fields are validated. No controller acts on their
objects: a Job creates no pods.
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
    """A kind of object.

    Attributes:
        resource: Names of the kind.
        schema: Schema of its objects, metadata included.
        columns: Columns of `kubectl get` besides the name, in the form of a CRD.
        has_status: Whether the status is a subresource; other changes then raise the generation.
        scale: JSON paths of the scale subresource, in the form of a CRD.
        is_custom: Whether a CRD defines the kind.
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
        """Names of the subresources."""
        return (("status",) if self.has_status else ()) + (("scale",) if self.scale else ())


# Short name, and names of the top-level fields.
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
    """Yield the built-in kinds."""
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
    """Return the kind of a CRD, in the storage version; other versions are not served."""
    spec = definition["spec"]
    names = spec["names"]
    version = next(entry for entry in spec["versions"] if entry["storage"])
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
    """Return the CRD with the fields that the API server sets once it serves the kind.

    Raises:
        StatusError: a required field is missing.
    """
    try:
        version = custom_kind(definition).resource.version
    except (KeyError, TypeError, StopIteration) as error:
        finding = Finding(("spec",), f"is incomplete: {error!r}")
        raise invalid(CRDS, definition, [finding]) from error
    spec = definition["spec"]
    kind = spec["names"]["kind"]
    names = {"singular": kind.lower(), "listKind": f"{kind}List", **spec["names"]}
    now = definition["metadata"]["creationTimestamp"]
    condition = {"status": "True", "lastTransitionTime": now, "reason": "Accepted", "message": ""}
    conditions = [{"type": type_, **condition} for type_ in ("NamesAccepted", "Established")]
    status = {"conditions": conditions, "acceptedNames": names, "storedVersions": [version]}
    spec = {"conversion": {"strategy": "None"}, **spec, "names": names}
    return {**definition, "spec": spec, "status": status}
