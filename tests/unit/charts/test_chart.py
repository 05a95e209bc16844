"""The chart: what follows from the code is up to date, and what helm makes of it is as meant."""

import json
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic.alias_generators import to_camel, to_snake

from finetune_operator import __version__
from finetune_operator.api.crd import RETAINED, crd_files
from finetune_operator.api.crd_revision import REVISION_ANNOTATION
from finetune_operator.api.v1alpha1 import FineTuneProfile
from finetune_operator.backends.azureml.workspace_client import REQUESTS_PER_SECOND
from finetune_operator.backends.kubernetes.network import OPERATOR_LABELS
from finetune_operator.kernel.settings import PREFIX, Settings, read_settings
from support.charts.helm_chart import CHART, Json, helm, needs_helm, of_kind, rendered
from support.cluster import permissions

ROOT = Path(__file__).parents[3]
AS_IN_A_POD = {"resources", "podSecurityContext", "securityContext", "affinity"}
"""Values whose fields, of which few are set, are those of Kubernetes."""
NAME_LABEL = "app.kubernetes.io/name"
KNOWN_TO_THE_CHART = {"lease_namespace", "pod_name", "pod_uid"}


def pod_of(objects: list[Json]) -> Json:
    (deployment,) = of_kind(objects, "Deployment")
    pod: Json = deployment["spec"]["template"]
    return pod


def settings_of(objects: list[Json]) -> Settings:
    """Read the container's environment as the operator does."""
    (container,) = pod_of(objects)["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return read_settings(given)


def rules_of(objects: list[Json], kind: str, namespace: str | None) -> list[Json]:
    """Return the rules that the operator's account is bound to by one kind of role."""
    roles = {
        (one["metadata"].get("namespace"), one["metadata"]["name"]): one["rules"]
        for one in of_kind(objects, kind)
    }
    (account,) = of_kind(objects, "ServiceAccount")
    bound = []
    for binding in of_kind(objects, f"{kind}Binding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "ops")
        if binding["metadata"].get("namespace") == namespace:
            bound += roles[(namespace, binding["roleRef"]["name"])]
    return bound


def default_values() -> Json:
    made: Json = yaml.safe_load((CHART / "values.yaml").read_text())
    return made


def schema() -> Json:
    made: Json = json.loads((CHART / "values.schema.json").read_text())
    return made


def test_files_of_the_chart_that_follow_from_the_code_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "charts" / "generate.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True)

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_chart_carries_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == __version__


def test_every_setting_has_a_value_and_starts_as_the_code_would() -> None:
    values = {to_snake(name): value for name, value in default_values()["settings"].items()}
    given = {name: value for name, value in values.items() if value != ""}

    assert values.keys() == Settings.model_fields.keys() - KNOWN_TO_THE_CHART
    assert values.keys() - given.keys() == {"kubeconfig", "identity"}
    assert Settings.model_validate(given) == Settings()


def test_schema_names_every_value_and_refuses_others() -> None:
    def compare(values: Json, described: Json, path: str) -> None:
        described = resolved(described)
        assert described["additionalProperties"] is False, path
        assert set(values) == set(described["properties"]) - {"global"}, path
        for name, value in values.items():
            below = resolved(described["properties"][name])
            if "properties" in below and name not in AS_IN_A_POD:
                compare(value, below, f"{path}.{name}")

    def resolved(described: Json) -> Json:
        reference = described.get("$ref", "")
        return schema()["definitions"][reference.rpartition("/")[2]] if reference else described

    compare(default_values(), schema(), "values")


def test_profile_that_the_installation_page_shows_is_one() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    applied = re.findall(r"^kubectl apply -f - <<END\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    (shown,) = (text for text in applied if "kind: FineTuneProfile" in text)

    profile = FineTuneProfile.model_validate(
        yaml.safe_load(string.Template(shown).substitute(REGISTRY="ghcr.io", TEAM="nlp"))
    )

    assert profile.spec.allow.claims == ["data"]


@needs_helm
def test_defaults_need_an_image_and_nothing_else() -> None:
    answer = helm(values={"image": {}})

    assert "image.repository is empty, and only a released chart knows its image" in answer.stderr
    assert rendered()


@needs_helm
def test_definitions_are_those_of_the_code_and_outlive_the_release() -> None:
    wanted = [yaml.safe_load(text) for text in crd_files().values()]

    found = of_kind(rendered(crds={"install": True}), "CustomResourceDefinition")

    assert found == wanted
    assert all(one["metadata"]["annotations"].items() >= RETAINED.items() for one in found)
    assert of_kind(rendered(), "CustomResourceDefinition") == []


@needs_helm
def test_definitions_go_with_the_release_where_that_is_asked_for() -> None:
    found = of_kind(rendered(crds={"install": True, "keep": False}), "CustomResourceDefinition")

    assert [list(one["metadata"]["annotations"]) for one in found] == [[REVISION_ANNOTATION]] * 2


@needs_helm
def test_operator_of_the_whole_cluster_has_the_rights_of_the_table_everywhere() -> None:
    objects = rendered()

    jobs = [one.to_rule() for one in permissions.WHERE_JOBS_ARE]
    profiles = [one.to_rule() for one in permissions.CLUSTER_WIDE]
    assert rules_of(objects, "ClusterRole", None) == profiles + jobs
    create, renew = (one.to_rule() for one in permissions.FOR_THE_LEASE)
    lease = [create, {**renew, "resourceNames": ["finetune-operator"]}]
    own = [one.to_rule() for one in permissions.ABOUT_ITSELF]
    assert rules_of(objects, "Role", "ops") == own + lease


@needs_helm
def test_operator_of_some_namespaces_has_rights_there_alone_and_reads_profiles() -> None:
    objects = rendered(settings={"namespaces": ["team-a", "team-b"]})

    jobs = [one.to_rule() for one in permissions.WHERE_JOBS_ARE]
    assert rules_of(objects, "ClusterRole", None) == [
        one.to_rule() for one in permissions.CLUSTER_WIDE
    ]
    assert rules_of(objects, "Role", "team-a") == jobs
    assert rules_of(objects, "Role", "team-b") == jobs
    assert settings_of(objects).namespaces == ("team-a", "team-b")


@needs_helm
def test_every_setting_reaches_the_process() -> None:
    other: Json = {
        "kubeconfig": "/etc/operator/kubeconfig",
        "namespaces": ["team-a", "team-b"],
        "backends": ["mine=package.module:Class"],
        "workers": 3,
        "connections": 5,
        "request_seconds": 7.5,
        "resync_seconds": 86_400,
        "retry_seconds": 0.001,
        "max_retry_seconds": 61,
        "leader_election": False,
        "lease_name": "mine",
        "lease_seconds": 33,
        "renew_deadline_seconds": 22,
        "renew_seconds": 11,
        "identity": "me",
        "health_host": "::",
        "health_port": 9000,
        "stuck_seconds": 77,
        "log_format": "json",
        "log_level": "DEBUG",
    }
    assert other.keys() == Settings.model_fields.keys() - KNOWN_TO_THE_CHART

    objects = rendered(replicas=1, settings={to_camel(key): value for key, value in other.items()})

    assert settings_of(objects) == Settings.model_validate({**other, "lease_namespace": "ops"})
    (container,) = pod_of(objects)["spec"]["containers"]
    assert container["ports"] == [{"name": "health", "containerPort": 9000}]
    (service,) = of_kind(objects, "Service")
    assert service["spec"]["ports"][0]["port"] == 9000


@needs_helm
def test_pods_need_no_rights_on_their_node_and_are_let_in_by_jobs() -> None:
    objects = rendered(podLabels={"team": "a"})

    pod = pod_of(objects)
    (container,) = pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == {
        **OPERATOR_LABELS,
        "app.kubernetes.io/instance": "ft",
        "team": "a",
    }
    assert settings_of(objects).lease_namespace == "ops"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


@needs_helm
def test_operator_asks_azure_as_the_identity_that_the_values_name() -> None:
    azure = {"clientId": "an-id", "tenantId": "a-tenant", "requestsPerSecond": 0.5}
    objects = rendered(
        azure=azure,
        podLabels={"team": "a"},
        serviceAccount={"annotations": {"azure.workload.identity/client-id": "another-id"}},
    )

    (account,) = of_kind(objects, "ServiceAccount")
    assert account["metadata"]["annotations"] == {
        "azure.workload.identity/client-id": "another-id",
        "azure.workload.identity/tenant-id": "a-tenant",
    }
    pod = pod_of(objects)
    labels = pod["metadata"]["labels"]
    assert (labels["azure.workload.identity/use"], labels["team"]) == ("true", "a")
    (container,) = pod["spec"]["containers"]
    assert {"name": REQUESTS_PER_SECOND, "value": "0.5"} in container["env"]
    assert "azure.workload.identity/use" not in pod_of(rendered())["metadata"]["labels"]


@needs_helm
def test_service_called_like_the_operator_does_not_pass_for_settings() -> None:
    assert pod_of(rendered())["spec"]["enableServiceLinks"] is False


@needs_helm
def test_service_policy_and_budget_select_the_pods_of_the_deployment() -> None:
    objects = rendered(networkPolicy={"from": [{"podSelector": {}}]})

    own = {**OPERATOR_LABELS, "app.kubernetes.io/instance": "ft"}
    (deployment,) = of_kind(objects, "Deployment")
    (service,) = of_kind(objects, "Service")
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    (policy,) = of_kind(objects, "NetworkPolicy")
    its_test = {"podSelector": {"matchLabels": own | {NAME_LABEL: "finetune-operator-test"}}}
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["selector"] == {"matchLabels": own}
    assert service["spec"]["selector"] == own
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": own}}
    assert policy["spec"]["podSelector"] == {"matchLabels": own}
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {}}, its_test], "ports": [{"protocol": "TCP", "port": "health"}]}
    ]


@needs_helm
def test_what_is_not_wanted_is_not_made() -> None:
    off = {"create": False}
    objects = rendered(
        rbac=off,
        admissionPolicy=off,
        serviceAccount=off,
        service=off,
        networkPolicy=off,
        podDisruptionBudget=off,
    )

    assert {one["kind"] for one in objects} == {"Deployment"}


@needs_helm
def test_process_that_may_not_have_a_twin_is_replaced_only_when_it_is_gone() -> None:
    objects = rendered(replicas=1, settings={"leaderElection": False})

    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    own = [one.to_rule() for one in permissions.ABOUT_ITSELF]
    assert rules_of(objects, "Role", "ops") == own


@needs_helm
def test_example_profile_renders_before_its_kind_is_known() -> None:
    spec = {"image": "registry.test/trainer:1", "allow": {"maxNodes": 4096}}
    example = {"create": True, "name": "gpu", "spec": spec}

    (profile,) = of_kind(rendered(exampleProfile=example), "FineTuneProfile")

    assert (profile["metadata"]["name"], profile["spec"]) == ("gpu", spec)


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param({"replica": 1}, "replica", id="a name that is no value"),
        pytest.param({"settings": {"worker": 1}}, "worker", id="a name that is no setting"),
        pytest.param({"settings": {"workers": 0}}, "workers", id="a setting below its bound"),
        pytest.param({"settings": {"healthPort": 0}}, "healthPort", id="a port nobody could know"),
        pytest.param({"settings": {"logFormat": "xml"}}, "logFormat", id="a word that is none"),
        pytest.param(
            {"extraEnv": [{"name": f"{PREFIX}WORKERS", "value": "1"}]},
            "extraEnv",
            id="a setting beside the settings",
        ),
        pytest.param(
            {"settings": {"leaseNamespace": "elsewhere"}},
            "leaseNamespace",
            id="a lease that would misname the operator's namespace",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: Json, words: str) -> None:
    answer = helm(values=values)

    assert answer.returncode != 0
    assert words in answer.stderr
