"""Each values file of the chart: what helm makes of it, and that every Kubernetes would take it."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import yaml

from finetune_operator.api.v1alpha1 import FineTuneProfile
from support.charts import kubernetes_schemas
from support.charts.chart_goldens import GOLDENS, VALUES, golden, objects
from support.charts.helm_chart import CHART, Json, made_of, needs_helm, of_kind, run_helm, template

pytestmark = needs_helm
DEFINED = (".coreos.com/v1", "finetune.dev/v1alpha1")
"""Ends of the API versions that only a definition makes known."""


COMMON_LABELS = {"cost-center": "research", "example.com/team": "platform"}.items()


def oldest_minor() -> str:
    """Return the oldest Kubernetes that the chart says it supports."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return str(chart["kubeVersion"]).removeprefix(">=").rpartition(".0")[0]


def distinct() -> Iterator[Json]:
    """Yield every object that any values file makes, each once."""
    seen: list[Json] = []
    for name in VALUES:
        for made in objects(name).values():
            if made not in seen and not made["apiVersion"].endswith(DEFINED):
                seen.append(made)
                yield made


def containers() -> Iterator[tuple[Json, Json]]:
    """Yield each pod's spec with each of its containers."""
    for made in distinct():
        pod = made["spec"] if made["kind"] == "Pod" else made.get("spec", {}).get("template")
        if pod:
            spec = pod.get("spec", pod)
            for one in [*spec["containers"], *spec.get("initContainers", [])]:
                yield spec, one


@pytest.mark.parametrize("name", VALUES)
def test_values_file_makes_what_its_golden_shows(name: str) -> None:
    shown = (GOLDENS / f"{name}.yaml").read_text(encoding="utf-8")

    assert golden(name) == shown, (
        "wanted? then: PYTHONPATH=tests python tests/support/charts/chart_goldens.py"
    )


def test_every_golden_is_of_a_values_file() -> None:
    assert sorted(file.stem for file in GOLDENS.glob("*")) == list(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_values_file_passes_the_strict_lint_of_helm(name: str) -> None:
    answer = run_helm("lint", "--strict", str(CHART), "--values", str(VALUES[name]))

    said = [line for line in answer.stdout.splitlines() if line.startswith(("[WARN", "[ERR"))]
    assert (answer.returncode, said) == (0, []), answer.stdout


@kubernetes_schemas.needs_schemas
def test_every_supported_kubernetes_knows_every_field() -> None:
    minors = kubernetes_schemas.minors(oldest_minor())

    assert minors[0] == oldest_minor()
    assert len(minors) >= 8
    found = {
        f"{minor} {made['kind']} {made['metadata']['name']}: {fault}"
        for made in distinct()
        for minor in minors
        for fault in kubernetes_schemas.faults(made, minor)
    }
    assert found == set()


@kubernetes_schemas.needs_schemas
def test_every_supported_kubernetes_knows_every_field_of_the_definitions() -> None:
    definitions = made_of("--show-only", "templates/crds.yaml", *("--values", str(VALUES["named"])))

    assert len(definitions) == 2
    found = {
        f"{minor} {made['metadata']['name']}: {fault}"
        for made in definitions
        for minor in kubernetes_schemas.minors(oldest_minor())
        for fault in kubernetes_schemas.faults(made, minor)
    }
    assert found == set()
    for made in definitions:
        assert made["metadata"]["labels"].items() >= COMMON_LABELS
        assert made["metadata"]["labels"]["app.kubernetes.io/part-of"] == "finetune-operator"


@kubernetes_schemas.needs_schemas
def test_field_that_only_newer_versions_know_would_be_found() -> None:
    pod = deepcopy(next(one for one in distinct() if one["kind"] == "Pod"))
    pod["spec"]["hostnameOverride"] = "new-in-1-34"

    assert kubernetes_schemas.faults(pod, "1.34") == []
    (fault,) = kubernetes_schemas.faults(pod, "1.30")
    assert "'hostnameOverride' was unexpected" in fault


def test_same_values_make_the_same_text() -> None:
    first, second = (template("--values", str(VALUES["prometheus"])) for _ in range(2))

    assert first.stdout == second.stdout != ""


def test_every_container_is_what_pod_security_and_safeguards_of_kubernetes_ask_for() -> None:
    for pod, container in containers():
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["nodeSelector"]["kubernetes.io/os"] == "linux"
        assert pod.keys().isdisjoint({"hostNetwork", "hostPID", "hostIPC"})
        assert "latest" not in container["image"]
        assert ":" in container["image"]


def test_replicas_spread_and_every_served_container_has_both_probes() -> None:
    for made in of_kind(list(distinct()), "Deployment"):
        pod = made["spec"]["template"]["spec"]
        own = made["spec"]["selector"]["matchLabels"].items()
        keys = {one["topologyKey"] for one in pod["topologySpreadConstraints"]}
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for one in pod["topologySpreadConstraints"]:
            assert one["labelSelector"]["matchLabels"].items() <= own
        assert pod["containers"][0].keys() >= {"livenessProbe", "readinessProbe"}


def test_profile_of_the_values_is_one() -> None:
    (made,) = of_kind(list(objects("profile").values()), "FineTuneProfile")

    assert FineTuneProfile.model_validate(made).spec.allow.max_nodes == 2


def test_service_of_a_release_selects_neither_its_test_nor_another_release() -> None:
    made = list(objects("defaults").values())
    (service,), (test,) = of_kind(made, "Service"), of_kind(made, "Pod")

    assert not service["spec"]["selector"].items() <= test["metadata"]["labels"].items()
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == "ft"


def test_common_labels_are_on_every_object_and_pod() -> None:
    for made in objects("named").values():
        assert made["metadata"]["labels"].items() >= COMMON_LABELS
        if made["kind"] == "Deployment":
            assert made["spec"]["template"]["metadata"]["labels"].items() >= COMMON_LABELS
            assert not made["spec"]["selector"]["matchLabels"].items() >= COMMON_LABELS
