"""What the chart makes for a Prometheus and a Grafana, and that nothing of it is on by itself."""

from typing import Any

import pytest
import yaml

from finetune_operator.api.v1alpha1.profile import NetworkSettings
from finetune_operator.backends.kubernetes.child_names import METRICS_PORT_NAME
from finetune_operator.kube.labels import JOB_LABEL
from finetune_trainer.config.metrics import OF_TRAINING_NODE
from support.charts.helm_chart import CHART, Json, helm, needs_helm, of_kind, rendered

MANAGED = "azmonitoring.coreos.com"
MONITORS = {"PodMonitor", "ServiceMonitor"}
OF_MANAGED_PROMETHEUS = {
    "labelLimit": 63,
    "labelNameLengthLimit": 511,
    "labelValueLengthLimit": 1023,
}

pytestmark = needs_helm


def monitors(group: str = "monitoring.coreos.com", **values: Any) -> dict[str, Json]:
    """Return both monitors by kind."""
    made = rendered(monitoring={"group": group, "monitors": {"create": True, **values}})
    return {one["kind"]: one for one in made if one["kind"] in MONITORS}


def test_nothing_for_monitoring_is_made_by_default() -> None:
    assert {one["kind"] for one in rendered()} & {*MONITORS, "PrometheusRule", "ConfigMap"} == set()


def test_monitor_takes_the_pods_of_every_job_and_says_job_and_node() -> None:
    spec = monitors()["PodMonitor"]["spec"]

    assert spec == {
        "selector": {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]},
        "namespaceSelector": {"any": True},
        "podMetricsEndpoints": [
            {
                "port": METRICS_PORT_NAME,
                "path": "/metrics",
                "interval": "15s",
                "relabelings": [
                    {
                        "sourceLabels": ["__meta_kubernetes_pod_label_finetune_dev_job"],
                        "targetLabel": "finetunejob",
                    },
                    {
                        "sourceLabels": ["__meta_kubernetes_pod_node_name"],
                        "targetLabel": "node",
                    },
                ],
            }
        ],
    }


def test_page_of_a_training_node_says_the_rank_of_every_series_of_training() -> None:
    of_training = [one for one in OF_TRAINING_NODE if one.name.startswith("finetune_train_")]

    assert [one.name for one in of_training if "rank" not in one.label_names] == []


def test_labels_of_the_operators_series_win_over_those_of_its_pod() -> None:
    objects = rendered(monitoring={"monitors": {"create": True}})
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (service,) = of_kind(objects, "Service")

    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in [one["name"] for one in service["spec"]["ports"]]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ops"]}


def test_managed_prometheus_gets_the_same_monitors_with_its_limits() -> None:
    own, managed = monitors(), monitors(MANAGED)

    assert own.keys() == managed.keys() == MONITORS
    for kind, monitor in managed.items():
        assert monitor["apiVersion"] == f"{MANAGED}/v1"
        assert monitor["spec"] == {**own[kind]["spec"], **OF_MANAGED_PROMETHEUS}


def test_labels_interval_and_namespaces_are_values() -> None:
    made = monitors(labels={"release": "stack"}, interval="1m", namespaces=["team-a"])

    for monitor in made.values():
        assert monitor["metadata"]["labels"]["release"] == "stack"
    assert made["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["interval"] == "1m"
    assert made["ServiceMonitor"]["spec"]["endpoints"][0]["interval"] == "1m"
    assert made["PodMonitor"]["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert "interval" not in monitors(interval="")["ServiceMonitor"]["spec"]["endpoints"][0]


def test_operator_of_some_namespaces_has_pods_of_jobs_read_there_alone() -> None:
    (monitor,) = of_kind(
        rendered(settings={"namespaces": ["team-b"]}, monitoring={"monitors": {"create": True}}),
        "PodMonitor",
    )

    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-b"]}


def test_operator_and_jobs_let_in_the_same_readers_of_metrics() -> None:
    (policy,) = of_kind(rendered(), "NetworkPolicy")

    ((rule),) = policy["spec"]["ingress"]
    let_in = [
        (
            one["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
            one.get("podSelector", {}).get("matchLabels", {}),
        )
        for one in rule["from"]
        if "namespaceSelector" in one  # unlike the pod of helm test
    ]
    by_jobs = [(one.namespace, one.labels) for one in NetworkSettings().metrics_readers]
    assert let_in == by_jobs
    assert ("kube-system", {"rsName": "ama-metrics"}) in let_in


def test_rules_are_those_of_the_file_with_the_templates_of_prometheus() -> None:
    (made,) = of_kind(
        rendered(monitoring={"rules": {"create": True, "labels": {"release": "stack"}}}),
        "PrometheusRule",
    )

    assert made["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    assert made["metadata"]["labels"]["release"] == "stack"
    assert "{{ $labels.rank }}" in str(made)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param(
            {"monitoring": {"group": "monitoring.example.com"}},
            "value must be one of",
            id="a group that is none",
        ),
        pytest.param(
            {"monitoring": {"monitors": {"interval": "soon"}}},
            "/monitoring/monitors/interval",
            id="a time that is none",
        ),
    ],
)
def test_words_that_are_none_are_refused(values: Json, words: str) -> None:
    answer = helm(values=values)

    assert answer.returncode != 0
    assert words in answer.stderr
