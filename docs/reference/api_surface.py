"""The names that users, alerts and scripts rely on, today and in each release.

    python docs/reference/api_surface.py 0.2.0    # record the names of a release, after its tag

A record in `released/` never changes. `api_status_page` compares the latest one with today.
"""

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from field_table import OF_KUBERNETES, fields_below
from finetune_operator.api.crd import job_schema, profile_schema
from finetune_operator.api.openapi import Schema
from finetune_operator.api.v1alpha1.status import FIRST_CONDITIONS, JobPhase
from finetune_operator.backends.azureml.states import AzureMLReason
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.kernel import events
from finetune_operator.metrics.catalogue import ALL
from finetune_operator.reconcile.conditions import ConditionType, Reason
from finetune_trainer.config import FailureClass
from finetune_trainer.config.gpu_metrics import OF_GPU
from finetune_trainer.config.metrics import OF_TRAINING_NODE

Surface = dict[str, list[str]]
FOLDER = Path(__file__).parent / "released"


def surface() -> Surface:
    """Return the names of this version, by kind of name."""
    reasons = (*Reason, *(one.reason for one in FIRST_CONDITIONS), *KubernetesReason)
    return {
        "FineTuneJob": field_paths(job_schema()),
        "FineTuneProfile": field_paths(profile_schema()),
        "phases": _sorted(JobPhase),
        "conditions": _sorted(ConditionType),
        "reasons": _sorted((*reasons, *AzureMLReason)),
        "failure classes": _sorted(FailureClass),
        "Events": _sorted(_event_reasons()),
        "metrics": _sorted(one.name for one in (*OF_TRAINING_NODE, *OF_GPU, *ALL)),
    }


def field_paths(schema: Schema) -> list[str]:
    """Return the paths of the fields of spec and status, without fields of a PodSpec."""
    parts = schema["properties"]
    return _sorted(
        field.path
        for part in ("spec", "status")
        if part in parts
        for field in fields_below(parts[part], part)
        if not field.schema.get("description", "").endswith(OF_KUBERNETES)
    )


def released() -> tuple[str, Surface]:
    """Return the version and the names of the latest recorded release."""
    file = max(FOLDER.glob("*.json"), key=lambda file: tuple(map(int, file.stem.split("."))))
    names: Surface = json.loads(file.read_text(encoding="utf-8"))
    return file.stem, names


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted({str(name) for name in names})


def _event_reasons() -> Iterator[str]:
    """Yield the reasons of Events that are no reason of a condition and no failure class."""
    for path in Path(events.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "JobEvent":
                for one in ast.walk(node.args[1]):
                    if isinstance(one, ast.Constant):
                        yield str(one.value)


if __name__ == "__main__":
    target = FOLDER / f"{sys.argv[1]}.json"
    target.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target}")
