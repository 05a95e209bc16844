"""The revision of each CRD's schema: a number that says which of two CRDs is the older one.

A CRD carries it as an annotation. The operator works with CRDs of its own revision and with newer
ones; with an older one the API server would drop fields of the status that the operator writes.
"""

import hashlib
import json
from typing import Any

from finetune_operator.api.v1alpha1 import GROUP

REVISION_ANNOTATION = f"{GROUP}/schema-revision"

REVISIONS: dict[str, tuple[str, ...]] = {
    "finetunejobs.finetune.dev": (
        "5631438be5f0f0e9",
        "2f78f945c8cd6a6c",
        "96101c3c64796ffb",
        "1f1abc858e01c143",
    ),
    "finetuneprofiles.finetune.dev": ("362787d33b140532", "6f98f3cd2cb98ef1", "157fd2c5fd3280ea"),
}
"""The digests of all schemas that a CRD has had, oldest first: the revision is their number.

A changed schema gets a line of its own at the end; a line that is there never changes, as clusters
have CRDs of its revision.
"""

_TEXTS = frozenset({"description", "title"})


def revision(name: str) -> int:
    """Return the revision of the schema that this package has for the CRD of that name."""
    return len(REVISIONS[name])


def revision_of(definition: dict[str, Any]) -> int:
    """Return the revision that a CRD of a cluster carries; 0 where it carries no number."""
    annotations = definition.get("metadata", {}).get("annotations") or {}
    written = str(annotations.get(REVISION_ANNOTATION, ""))
    return int(written) if written.isdecimal() else 0


def unrecorded(definition: dict[str, Any]) -> str | None:
    """Say how to raise the revision of a CRD whose schema changed; None where it has its own."""
    name, digest = definition["metadata"]["name"], schema_digest(definition)
    if REVISIONS.get(name, ())[-1:] == (digest,):
        return None
    return (
        f"the schema of {name} changed, so that its revision must be raised: append"
        f' "{digest}" to its lines in finetune_operator/api/crd_revision.py, then run: make crd'
    )


def schema_digest(definition: dict[str, Any]) -> str:
    """Return a digest of all that the API server does with objects of this CRD.

    Descriptions and the columns of `kubectl get` do not count: no object is stored differently for
    them.
    """
    spec = dict(definition["spec"])
    spec["versions"] = [_counted(version) for version in spec["versions"]]
    text = json.dumps(spec, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _counted(version: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in version.items() if key != "additionalPrinterColumns"}
    return {**kept, "schema": {"openAPIV3Schema": _node(version["schema"]["openAPIV3Schema"])}}


def _node(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without its texts; a property may be called as they are."""
    found = {key: value for key, value in schema.items() if key not in _TEXTS}
    if "properties" in found:
        found["properties"] = {name: _node(one) for name, one in found["properties"].items()}
    for below in ("items", "additionalProperties"):
        if isinstance(found.get(below), dict):
            found[below] = _node(found[below])
    return found
