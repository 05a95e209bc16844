"""A batch Job that the API server creates long after the operator has given up waiting for it."""

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Attempt
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL
from finetune_operator.kube.resources import JOBS, PODS, Object, Resource
from finetune_operator.planner.plan import make_plan
from support.cluster.operators import Api, OperatorProcess, condition, phase_of, wait_until
from support.kubernetes.kubernetes_cases import JOB, backend, profile

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")


def ration(api: Api, namespace: str) -> None:
    """Let no batch Job be created."""
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    api.run(api.client.create(QUOTAS, quota, namespace))

    def is_counted() -> bool:
        return "hard" in (api.get(QUOTAS, namespace, "none") or {}).get("status", {})

    wait_until(is_counted, 20, "the quota counts")


def create_late(api: Api, namespace: str) -> None:
    """Create attempt 1 as the operator would have."""
    plan = make_plan(FineTuneJob.model_validate(api.job(namespace)))
    *_, batch_job = backend(profile(), namespace).render(plan, Attempt(1)).objects
    api.run(api.client.create(JOBS, batch_job, namespace))


def alive(api: Api, namespace: str) -> list[Object]:
    found = api.run(api.client.list(PODS, namespace, label_selector=f"{JOB_LABEL}=tiny")).items
    return [pod for pod in found if judge(read_pod(pod)).may_write]


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_batch_job_that_is_created_after_its_job_was_suspended_is_stopped(api: Api) -> None:
    with (
        api.namespace("late") as namespace,
        api.profile(namespace, profile()),
        OperatorProcess(api.kubeconfig, namespace) as operator,
    ):
        operator.wait_for("synced")
        ration(api, namespace)
        api.apply(
            namespace,
            **{**JOB, "backend": {"type": "kubernetes", "kubernetes": {"profile": namespace}}},
        )
        wait_until(lambda: condition(api.job(namespace), "Stalled")["status"] == "True", 30)
        api.change(namespace, suspend=True)
        wait_until(lambda: api.phase(namespace) == "Suspended", 30)
        api.run(api.client.delete(QUOTAS, "none", namespace))
        create_late(api, namespace)

        def is_over() -> bool:
            job = api.job(namespace)
            assert job is not None
            ended = job["status"]["attempts"][0].get("endTime")
            return bool(ended) and phase_of(job) == "Suspended"

        wait_until(is_over, 30, "it is stopped")
        assert alive(api, namespace) == []
        api.change(namespace, suspend=False)
        (pod,) = wait_until(lambda: alive(api, namespace), 20, "the next attempt")
        assert pod["metadata"]["labels"][ATTEMPT_LABEL] == "2"
