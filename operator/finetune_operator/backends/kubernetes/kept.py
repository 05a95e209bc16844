"""Record how an attempt's Service, EndpointSlice and NetworkPolicy were created. Pure.

An annotation of the attempt's batch Job stores them, because another version of the operator would
render them differently. It must not grant permissions to users who may patch only batch Jobs: the
digest in the job's status (`attempt_profiles`) covers it, and it contains no names or namespaces.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_operator.backends.kubernetes.child_names import (
    CHILDREN_ANNOTATION,
    AttemptName,
    child_name,
)
from finetune_operator.kube.client import merge_patch
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)

KINDS = (NETWORK_POLICIES, SERVICES, ENDPOINT_SLICES)

_ONE_VALUE = frozenset({"selector", "podSelector", "namespaceSelector"})
"""Fields that are compared as a whole, because an addition changes their meaning."""

_Json = dict[str, Any]


def to_annotation(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return the annotation for these children, or an empty string without children."""
    if not objects:
        return ""
    first = objects[0]["metadata"]
    kept: _Json = {"metadata": {key: first[key] for key in ("labels", "ownerReferences")}}
    for one in objects:
        labels = one["metadata"]["labels"].items()
        extra = {key: value for key, value in labels if key not in first["labels"]}
        rest = {key: value for key, value in one.items() if key not in _NAMED_ELSEWHERE}
        if one["kind"] == SERVICES.kind:
            # If a client added a selector, controllers would write endpoints.
            rest["spec"] = {"selector": None, **rest["spec"]}
        kept[one["kind"]] = {**rest, "labels": extra} if extra else rest
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


_NAMED_ELSEWHERE = ("apiVersion", "kind", "metadata")


def has_annotation(batch_job: Object) -> bool:
    """Return whether a batch Job has the annotation."""
    return CHILDREN_ANNOTATION in (batch_job["metadata"].get("annotations") or {})


def wanted(batch_job: Object, name: AttemptName, address: str) -> dict[Resource, Object]:
    """Return the desired children of an attempt by kind; none without the annotation.

    A field that must be absent is None. Without the address of rank 0's pod, the EndpointSlice is
    omitted. The caller has compared the batch Job's digest.
    """
    if not has_annotation(batch_job):
        return {}
    kept: _Json = json.loads(batch_job["metadata"]["annotations"][CHILDREN_ANNOTATION])
    metadata = {"name": child_name(name.job), "namespace": name.namespace, **kept["metadata"]}
    found: dict[Resource, Object] = {}
    for resource in KINDS:
        fields = dict(kept.get(resource.kind) or {})
        if not fields or (resource == ENDPOINT_SLICES and not address):
            continue
        labels = {**metadata["labels"], **fields.pop("labels", {})}
        if resource == ENDPOINT_SLICES:
            fields |= {
                "addressType": "IPv6" if ":" in address else "IPv4",
                "endpoints": [{**one, "addresses": [address]} for one in fields["endpoints"]],
            }
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        found[resource] = {**kind, "metadata": {**metadata, "labels": labels}, **fields}
    return found


def to_create(child: Object) -> Object:
    """Return the body that creates a child."""
    merged: Object = _overlaid({}, child)
    return merged


def change(there: Object, child: Object) -> Object:
    """Return the merge patch that restores a child, or an empty patch for an unchanged child.

    Fields that others have added, such as the server's defaults, stay.
    """
    known = {key: value for key, value in child.items() if key not in ("apiVersion", "kind")}
    owners = there["metadata"].get("ownerReferences") or []
    (ours,) = child["metadata"]["ownerReferences"]
    others = [one for one in owners if one["uid"] != ours["uid"]]
    mine = next((one for one in owners if one["uid"] == ours["uid"]), None)
    is_ours = mine is not None and _overlaid(mine, ours) == mine
    references = owners if is_ours else [*others, ours]
    known["metadata"] = {**known["metadata"], "ownerReferences": references}
    return merge_patch(there, _overlaid(there, known))


def _overlaid(there: Any, ours: Any, field: str = "") -> Any:
    """Return the object with our fields merged into it."""
    if isinstance(ours, dict) and isinstance(there, dict) and field not in _ONE_VALUE:
        merged = dict(there)
        for key, value in ours.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _overlaid(there.get(key, {}), value, key)
        return merged
    if isinstance(ours, list) and isinstance(there, list) and len(ours) == len(there):
        pairs = zip(there, ours, strict=True)
        # The list is compared as a whole, because the server's defaults of an item may depend on
        # its changed fields.
        return there if all(_overlaid(one, mine) == one for one, mine in pairs) else ours
    return ours
