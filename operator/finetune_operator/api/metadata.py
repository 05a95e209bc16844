"""The part of Kubernetes object metadata a manifest may hold, as a schema.

A CRD must not describe it, since the API server checks metadata by itself; `validate.py` needs it
to refuse the same before anything is sent.
"""

from finetune_operator.api.openapi import Schema

_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer"}
_OBJECTS: Schema = {
    "type": "array",
    "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}

OBJECT_METADATA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "description": "Name of the job.", "maxLength": 253},
        "generateName": _TEXT,
        "namespace": {"type": "string", "pattern": _NAME, "maxLength": 63},
        "labels": {
            "type": "object",
            "additionalProperties": {"type": "string", "pattern": _LABEL_VALUE, "maxLength": 63},
        },
        "annotations": {"type": "object", "additionalProperties": _TEXT},
        "finalizers": {"type": "array", "items": _TEXT},
        "ownerReferences": _OBJECTS,
        "managedFields": _OBJECTS,
        "uid": _TEXT,
        "resourceVersion": _TEXT,
        "selfLink": _TEXT,
        "generation": _COUNT,
        "creationTimestamp": _TEXT,
        "deletionTimestamp": _TEXT,
        "deletionGracePeriodSeconds": _COUNT,
    },
}
