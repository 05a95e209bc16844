"""The definitions of PodMonitor, ServiceMonitor and PrometheusRule, from npm's registry.

The package has the Prometheus Operator's schemas as JSON in its JavaScript. Those of the group
azmonitoring.coreos.com are nowhere in a registry; they were derived from these, so that a monitor
is checked by the same schema there.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "@kubernetes-models/prometheus-operator@4.0.0"
# The newest whose schemas are JSON; in later ones they are compiled into functions.
SHA512 = "3d2aR/ezuAa0KLsbG618n1QUf8kQP0UV42FNGR6/+sec7/URCZqzOjy6sDBtHob3d/1/pBdov3PqUDK/kl9sFQ=="
GROUPS = {
    "monitoring.coreos.com": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "azmonitoring.coreos.com": ("PodMonitor", "ServiceMonitor"),
}

Json = dict[str, Any]


def definitions(folder: Path) -> list[Json]:
    """Return a CustomResourceDefinition for each kind of each group; skip the test without npm."""
    package = _package(folder)
    return [
        _definition(group, kind, _schema(package, kind))
        for group, kinds in GROUPS.items()
        for kind in kinds
    ]


def _package(folder: Path) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not on the PATH, from whose registry the definitions are")
    command = ["npm", "pack", PACKAGE, "--pack-destination", str(folder), "--fetch-retries", "1"]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if answer.returncode != 0:
        pytest.skip(f"npm's registry does not answer: {answer.stderr.strip()[-200:]}")
    (file,) = folder.glob("*.tgz")
    assert b64encode(hashlib.sha512(file.read_bytes()).digest()).decode() == SHA512
    return file


def _schema(package: Path, kind: str) -> Json:
    with tarfile.open(package) as archive:
        member = archive.extractfile(f"package/monitoring.coreos.com/v1/{kind}.js")
        assert member is not None
        text = member.read().decode()
    begin = "const schema = "
    found, _ = json.JSONDecoder().raw_decode(text, text.index(begin) + len(begin))
    spec = _structural(found["properties"]["spec"])
    return {"type": "object", "required": ["spec"], "properties": {"spec": spec}}


def _structural(schema: Any) -> Any:
    """Return what Kubernetes takes, of what a JSON schema says."""
    if isinstance(schema, list):
        return [_structural(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "oneOf" in schema:  # something, or null
        (schema,) = (one for one in schema["oneOf"] if one != {"type": "null"})
    if "anyOf" in schema:
        assert schema == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
        return {"x-kubernetes-int-or-string": True}
    if "additionalProperties" in schema:  # beside which Kubernetes takes no properties
        schema = {key: value for key, value in schema.items() if key != "properties"}
    return {key: _structural(value) for key, value in schema.items()}


def _definition(group: str, kind: str, schema: Json) -> Json:
    plural = f"{kind.lower()}s"
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }
