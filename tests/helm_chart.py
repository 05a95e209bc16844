"""What helm makes of the chart."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[1] / "charts" / "finetune-operator"
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not on the PATH")
IMAGE = {"repository": "registry.test/operator", "tag": "1"}

Json = dict[str, Any]


def helm(*arguments: str, values: Json) -> subprocess.CompletedProcess[str]:
    """Run `helm template` on the chart in the namespace `ops`."""
    assert HELM is not None
    return subprocess.run(
        [
            *(HELM, "template", "ft", str(CHART), "--namespace", "ops"),
            *("--kube-version", "1.34.0", "--values", "-", *arguments),
        ],
        input=json.dumps({"image": IMAGE, **values}),
        capture_output=True,
        text=True,
    )


def rendered(*arguments: str, **values: Any) -> list[Json]:
    """Return what helm makes; without the definitions, which take a second to read."""
    answer = helm(*arguments, values={"crds": {"install": False}, **values})
    assert answer.returncode == 0, answer.stderr
    return [one for one in yaml.safe_load_all(answer.stdout) if one]


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [one for one in objects if one["kind"] == kind]
