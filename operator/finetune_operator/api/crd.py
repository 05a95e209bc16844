"""Generate the CustomResourceDefinitions from the models, and the files of `crds/`.

`openapi.py` converts the models, because the API server refuses the `$ref`, the `anyOf` for null
and the `const` of pydantic's `model_json_schema`. This file adds the parts outside of the models.
"""

from typing import Any

import yaml

from finetune_operator import __version__
from finetune_operator.api.crd_revision import REVISION_ANNOTATION, revision
from finetune_operator.api.one_rule import with_one_rule
from finetune_operator.api.openapi import DETAIL, READS, Schema, field_schema, with_rules
from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1 import (
    GROUP,
    KIND,
    PLURAL,
    PROFILE_KIND,
    PROFILE_PLURAL,
    VERSION,
    FineTuneJob,
    FineTuneProfile,
)

HEADER = "# Generated from the models: ftctl crd --write crds\n---\n"


def _column(name: str, path: str, type_: str = "string", **more: int) -> dict[str, Any]:
    return {"name": name, "type": type_, "jsonPath": path, **more}


COLUMNS = (
    _column("Phase", ".status.phase"),
    _column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
    _column("Step", ".status.progress.step", "integer"),
    _column("Steps", ".status.progress.totalSteps", "integer"),
    _column("Loss", ".status.progress.loss", "number"),
    _column("Nodes", ".status.nodes.ready", "integer"),
    _column("Restarts", ".status.restarts.counted", "integer"),
    _column("ETA-seconds", ".status.progress.etaSeconds", "number"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Held-out-loss", ".status.progress.evalLoss", "number", priority=1),
    _column("Checkpoint", ".status.checkpoint.last.step", "integer", priority=1),
    _column("Strategy", ".status.plan.strategy", priority=1),
    _column("Backend", ".spec.backend.type", priority=1),
    _column("Queue", ".spec.queue.name", priority=1),
)
"""Columns of `kubectl get`; columns of priority 1 are shown only with `-o wide`."""

PROFILE_COLUMNS = (
    _column("Image", ".spec.image"),
    _column("Workspace", ".spec.azureml.workspace"),
    _column("Namespaces", ".spec.allow.namespaces"),
    _column("Max-nodes", ".spec.allow.maxNodes", "integer"),
    _column("Age", ".metadata.creationTimestamp", "date"),
)

RETAINED = {
    "helm.sh/resource-policy": "keep",
    "argocd.argoproj.io/sync-options": "Prune=false",
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
}
"""Annotations with which GitOps tools do not prune a CRD, because that would delete every job."""

_NAME: Schema = {"type": "string", "maxLength": 253}  # a bound on the cost of the rule about it


def job_schema() -> Schema:
    """Return the structural schema of a FineTuneJob.

    The API server checks apiVersion, kind and metadata itself; a schema may restrict only the name
    in them.
    """
    metadata: Schema = {"type": "object", "properties": {"name": _NAME}}
    return _root_schema(FineTuneJob, metadata, "spec", "status")


def profile_schema() -> Schema:
    """Return the structural schema of a FineTuneProfile."""
    return _root_schema(FineTuneProfile, {"type": "object"}, "spec")


def _root_schema(model: type[ApiModel], metadata: Schema, *fields: str) -> Schema:
    text = {"type": "string"}
    properties = {"apiVersion": text, "kind": text, "metadata": metadata}
    properties |= {field: field_schema(model, field) for field in fields}
    schema: Schema = {"description": model.__doc__, "type": "object", "required": ["spec"]}
    return with_rules({**schema, "properties": properties}, model.cel_rules)


def _for_api_server(part: Any) -> Any:
    """Return a part of a schema with merged rules and without details that only `ftctl` uses."""
    if isinstance(part, dict):
        part = with_one_rule(part) if READS in part else part
        dropped = {DETAIL} if "rule" in part else set()
        return {key: _for_api_server(part[key]) for key in part if key not in dropped}
    if isinstance(part, list):
        return [_for_api_server(item) for item in part]
    return part


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD of FineTuneJob as an object for `kubectl apply`."""
    version = {
        **_version(job_schema(), COLUMNS),
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.topology.nodes",
                "statusReplicasPath": ".status.nodes.desired",
            },
        },
    }
    names = {"kind": KIND, "plural": PLURAL, "shortNames": ["ftj"], "categories": ["all", "ai"]}
    return _definition(names, "Namespaced", version)


def profile_definition() -> dict[str, Any]:
    """Return the CRD of FineTuneProfile."""
    names = {
        "kind": PROFILE_KIND,
        "plural": PROFILE_PLURAL,
        "shortNames": ["ftp"],
        "categories": ["ai"],
    }
    return _definition(names, "Cluster", _version(profile_schema(), PROFILE_COLUMNS))


def _version(schema: Schema, columns: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": list(columns),
        "schema": {"openAPIV3Schema": _for_api_server(schema)},
    }


def _definition(names: dict[str, Any], scope: str, version: dict[str, Any]) -> dict[str, Any]:
    kind, plural = names["kind"], names["plural"]
    name = f"{plural}.{GROUP}"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/part-of": "finetune-operator",
                "app.kubernetes.io/version": __version__,
            },
            "annotations": {REVISION_ANNOTATION: str(revision(name)), **RETAINED},
        },
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {**names, "listKind": f"{kind}List", "singular": kind.lower()},
            "versions": [version],
        },
    }


def crd_yaml(definition: dict[str, Any]) -> str:
    """Return the text of a CRD, a YAML document; the same models produce the same text."""

    class Dumper(yaml.SafeDumper):
        """Dumper without aliases, because anchors make a CRD hard to read."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump(definition, Dumper=Dumper, sort_keys=False, width=96, allow_unicode=True)
    return HEADER + text


def crd_files() -> dict[str, str]:
    """Return the text of every file of `crds/` by name, in order."""
    definitions = (custom_resource_definition(), profile_definition())
    return {f"{one['spec']['names']['plural']}.yaml": crd_yaml(one) for one in definitions}
