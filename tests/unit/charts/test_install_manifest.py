"""charts/kustomize: what the chart makes, for people who use kubectl or kustomize alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from install_manifest import CHART, IMAGE, MANIFEST, NAMESPACE, digest_of_chart, is_of
from support.charts.helm_chart import Json, needs_helm

ROOT = Path(__file__).parents[3]
HELM_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
OURS = ("app.kubernetes.io/name", "finetune-operator")


def objects(text: str) -> dict[tuple[str, str], Json]:
    made = [one for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in made}


def check(**environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "charts" / "install_manifest.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, env=environ or None)


def test_manifest_is_what_the_chart_makes() -> None:
    answer = check()

    assert answer.returncode == 0, answer.stdout


def test_without_helm_the_check_goes_by_digests_and_says_so() -> None:
    answer = check(PATH="")

    assert answer.returncode == 0
    assert answer.stdout.startswith("helm is not on the PATH: install.yaml was compared by its ")


def test_without_helm_another_chart_and_a_change_by_hand_are_seen() -> None:
    text = MANIFEST.read_text()

    assert is_of(text, digest_of_chart())
    assert not is_of(text, "0123456789abcdef")
    assert not is_of(text.replace("replicas: 2", "replicas: 1"), digest_of_chart())
    assert not is_of("", digest_of_chart())


@needs_helm
def test_manifest_differs_from_the_release_by_what_is_helms_alone() -> None:
    command = ["helm", "template", NAMESPACE, str(CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", "1.34.0", "--skip-tests", "--set", f"image.repository={IMAGE}"]
    made = objects(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for one in made.values():
        for label in HELM_LABELS:
            one["metadata"]["labels"].pop(label, None)
    (container,) = made["Deployment", NAMESPACE]["spec"]["template"]["spec"]["containers"]
    lease = {"name": "FINETUNE_OPERATOR_LEASE_NAMESPACE", "value": NAMESPACE}
    container["env"].remove(lease)

    found = objects(MANIFEST.read_text())

    assert found.pop(("Namespace", NAMESPACE))
    assert found == made


def test_everything_but_the_definitions_and_their_guard_can_be_deleted_by_a_label() -> None:
    kept = {
        kind
        for (kind, _), one in objects(MANIFEST.read_text()).items()
        if OURS not in one["metadata"]["labels"].items()
    }

    guards = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert kept == {"CustomResourceDefinition", *guards}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_kustomize_makes_the_same_and_gives_it_another_namespace_and_image(tmp_path: Path) -> None:
    base = MANIFEST.parent
    same = subprocess.run(
        ["kubectl", "kustomize", str(base)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    relative = os.path.relpath(base.resolve(), tmp_path.resolve())  # it takes no other paths
    image = {"name": IMAGE, "newName": "registry.test/operator", "newTag": "1"}
    overlay = {"resources": [relative], "namespace": "elsewhere", "images": [image]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    moved = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout

    assert objects(same) == objects(MANIFEST.read_text())
    places = [
        [one["metadata"].get("namespace"), *(who["namespace"] for who in one.get("subjects", ()))]
        for one in objects(moved).values()
    ]
    assert {place for one in places for place in one} == {None, "elsewhere"}
    pod = objects(moved)["Deployment", NAMESPACE]["spec"]["template"]["spec"]
    assert [one["image"] for one in pod["containers"]] == ["registry.test/operator:1"]
