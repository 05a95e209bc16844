"""The CustomResourceDefinition, made from the models; `crds/finetunejobs.yaml` is its text.

Structural, so without `$ref`, `anyOf` for null or `const`: what `model_json_schema` writes is
refused by the API server. `openapi.py` converts the models; here stands what is not in them.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from finetune_operator.api.openapi import DETAIL, Schema, field_schema, with_rules
from finetune_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, FineTuneJob

HEADER = "# Generated from the models: ftctl crd --write crds/finetunejobs.yaml\n"


@dataclass(frozen=True)
class PrinterColumn:
    """One column of `kubectl get`.

    Attributes:
        type: OpenAPI type the API server reads the cell as.
        wide: Shown only with `-o wide`.
    """

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def to_object(self) -> dict[str, Any]:
        """Return the entry of `additionalPrinterColumns`."""
        column: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return column | {"priority": 1} if self.wide else column


COLUMNS = (
    PrinterColumn("Phase", ".status.phase"),
    PrinterColumn("Step", ".status.progress.step", "integer"),
    PrinterColumn("Steps", ".status.progress.totalSteps", "integer"),
    PrinterColumn("Loss", ".status.progress.loss", "number"),
    PrinterColumn("Nodes", ".status.nodes.ready", "integer"),
    PrinterColumn("Restarts", ".status.restarts.counted", "integer"),
    PrinterColumn("ETA-seconds", ".status.progress.etaSeconds", "number"),
    PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
    PrinterColumn("Held-out-loss", ".status.progress.evalLoss", "number", wide=True),
    PrinterColumn("Checkpoint", ".status.checkpoint.last.step", "integer", wide=True),
    PrinterColumn("Strategy", ".status.plan.strategy", wide=True),
    PrinterColumn("Backend", ".spec.backend.type", wide=True),
    PrinterColumn("Queue", ".spec.queue.name", wide=True),
    PrinterColumn("Reason", '.status.conditions[?(@.type=="Ready")].reason', wide=True),
)


_NAME: Schema = {"type": "string", "maxLength": 253}  # a bound on the cost of the rule about it


def job_schema() -> Schema:
    """Return the structural schema of a FineTuneJob.

    The API server knows apiVersion, kind and metadata by itself and lets a schema say nothing but
    the name's bounds about them.
    """
    schema: Schema = {
        "description": "A fine-tuning job: one manifest, one status.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": _NAME}},
            "spec": field_schema(FineTuneJob, "spec"),
            "status": field_schema(FineTuneJob, "status"),
        },
    }
    return with_rules(schema, FineTuneJob.cel_rules)


def _without_details(part: Any) -> Any:
    """Leave out what only `ftctl` reads."""
    if isinstance(part, dict):
        dropped = {DETAIL} if "rule" in part else set()
        return {key: _without_details(part[key]) for key in part if key not in dropped}
    if isinstance(part, list):
        return [_without_details(item) for item in part]
    return part


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as the object `kubectl apply` takes."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.topology.nodes",
                "statusReplicasPath": ".status.nodes.desired",
            },
        },
        "additionalPrinterColumns": [column.to_object() for column in COLUMNS],
        "schema": {"openAPIV3Schema": _without_details(job_schema())},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ftj"],
                "categories": ["all", "ai"],
            },
            "versions": [version],
        },
    }


def crd_yaml() -> str:
    """Return the text of `crds/finetunejobs.yaml`; the same models give the same text."""

    class Dumper(yaml.SafeDumper):
        """Writes equal parts out in full: an anchor in a CRD helps no reader."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump(
        custom_resource_definition(), Dumper=Dumper, sort_keys=False, width=96, allow_unicode=True
    )
    return HEADER + text
