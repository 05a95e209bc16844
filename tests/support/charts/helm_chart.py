"""What helm makes of the chart."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "finetune-operator"
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not on the PATH")
IMAGE = {"repository": "registry.test/operator", "tag": "1"}

Json = dict[str, Any]


def run_helm(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run helm and return what it said, whatever it was."""
    assert HELM is not None
    return subprocess.run([HELM, *arguments], input=stdin, capture_output=True, text=True)


def template(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `helm template` on the chart in the namespace `ops`."""
    where = ("--namespace", "ops", "--kube-version", "1.34.0")
    return run_helm("template", "ft", str(CHART), *where, *arguments, stdin=stdin)


def helm(*arguments: str, values: Json) -> "subprocess.CompletedProcess[str]":
    """Run `helm template` with these values, and an image."""
    given = json.dumps({"image": IMAGE, **values})
    return template("--values", "-", *arguments, stdin=given)


def made_of(*arguments: str, stdin: str = "") -> list[Json]:
    """Return what `helm template` makes."""
    return _objects(template(*arguments, stdin=stdin))


def rendered(*arguments: str, **values: Any) -> list[Json]:
    """Return what helm makes; without the definitions, which take a second to read."""
    return _objects(helm(*arguments, values={"crds": {"install": False}, **values}))


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [one for one in objects if one["kind"] == kind]


def _objects(answer: "subprocess.CompletedProcess[str]") -> list[Json]:
    assert answer.returncode == 0, answer.stderr
    return [one for one in yaml.safe_load_all(answer.stdout) if one]
