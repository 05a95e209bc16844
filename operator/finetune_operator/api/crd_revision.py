"""The revision of each CRD's schema: a number that orders the schemas of a CRD by age.

A CRD has its revision as an annotation. The operator works with CRDs of its own revision or a newer
one. With an older CRD the API server would drop fields of the status that the operator writes.
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
        "44fab74958eb6b11",
        "3d8dcc33e9bb9d9b",
        "66817c20ac1efe2a",
    ),
    "finetuneprofiles.finetune.dev": (
        "362787d33b140532",
        "6f98f3cd2cb98ef1",
        "157fd2c5fd3280ea",
        "60e0d4cb14facb52",
        "6df90dc7a8bb076b",
    ),
}
"""Digests of all schemas of a CRD, oldest first; the revision is the number of digests.

A changed schema adds a line at the end. Existing lines never change, because clusters have CRDs of
these revisions.
"""

_TEXTS = frozenset({"description", "title"})


def revision(name: str) -> int:
    """Return the revision of this package's schema for the CRD of that name."""
    return len(REVISIONS[name])


def revision_of(definition: dict[str, Any]) -> int:
    """Return the revision of a CRD in a cluster; 0 if it has none."""
    annotations = definition.get("metadata", {}).get("annotations") or {}
    written = str(annotations.get(REVISION_ANNOTATION, ""))
    return int(written) if written.isdecimal() else 0


def unrecorded(definition: dict[str, Any]) -> str | None:
    """Return an instruction to raise the revision of a CRD; None if its schema is recorded."""
    name, digest = definition["metadata"]["name"], schema_digest(definition)
    if REVISIONS.get(name, ())[-1:] == (digest,):
        return None
    return (
        f"the schema of {name} has changed; raise its revision: append"
        f' "{digest}" to its lines in finetune_operator/api/crd_revision.py, then run: make crd'
    )


def schema_digest(definition: dict[str, Any]) -> str:
    """Return a digest of the parts of a CRD that determine how its objects are stored.

    Descriptions and the columns of `kubectl get` are excluded, because they do not affect stored
    objects.
    """
    spec = dict(definition["spec"])
    spec["versions"] = [_counted(version) for version in spec["versions"]]
    text = json.dumps(spec, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _counted(version: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in version.items() if key != "additionalPrinterColumns"}
    return {**kept, "schema": {"openAPIV3Schema": _node(version["schema"]["openAPIV3Schema"])}}


def _node(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without its texts; a property may have the name of a text."""
    found = {key: value for key, value in schema.items() if key not in _TEXTS}
    if "properties" in found:
        found["properties"] = {name: _node(one) for name, one in found["properties"].items()}
    for below in ("items", "additionalProperties"):
        if isinstance(found.get(below), dict):
            found[below] = _node(found[below])
    return found
