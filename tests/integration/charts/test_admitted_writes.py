"""Under the chart's admission policy the operator makes every write that its roles allow.

The audit log of a real API server tells which; pods are played.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.resources import JOBS, NETWORK_POLICIES, SERVICES, Object, Resource
from finetune_trainer.config import FailureClass, Termination
from support.charts.helm_chart import needs_helm
from support.cluster import permissions
from support.cluster.admitted import installed
from support.cluster.audit import AuditLog, counted
from support.cluster.operators import KUBECONFIG, Api, OperatorProcess, open_api, wait_until
from support.cluster.played_job import PlayedJob, place
from support.cluster.played_pods import end_pod
from support.kernel.loop_thread import loop_thread
from support.kubernetes.kubernetes_cases import JOB

AUDIT_LOG = os.environ.get("FINETUNE_TEST_AUDIT_LOG")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
    pytest.mark.skipif(AUDIT_LOG is None, reason="FINETUNE_TEST_AUDIT_LOG names no audit log"),
    needs_helm,
]
DONE = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")
WRITES = {"create", "delete", "patch", "update"}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


def writes_of_the_roles() -> set[str]:
    """Return every write that the chart's roles allow, as the audit log calls it."""
    made = {
        f"{verb} {one.resource.plural}{f'/{one.subresource}' if one.subresource else ''}"
        for one in (*permissions.WHERE_JOBS_ARE, *permissions.ABOUT_ITSELF)
        for verb in WRITES & set(one.verbs)
    }
    return made - {"update finetunejobs/finalizers"}  # which an admission plugin asks for


class Lived(PlayedJob):
    """A job of whose life every write of the operator is a part."""

    def run_attempt(self, number: int) -> None:
        wait_until(lambda: f"tiny-{number}" in self.names(JOBS), 30, f"attempt {number}")
        self.run_pods(f"tiny-{number}")
        wait_until(lambda: self.is_told("Running", number), 30, f"attempt {number} runs")

    def lose_attempt(self, number: int) -> None:
        self.run_attempt(number)
        _, last = self.placed(f"tiny-{number}")
        self.api.run(end_pod(self.api.client, last, 137))
        wait_until(self.has_deleted_pods, 30, "the other pod is told to stop")
        self.end_deleted()

    def disturb(self, kind: Resource, **spec: object) -> None:
        """Change a child, and wait until it is put back."""
        before = self.spec(kind)
        change = {"spec": spec}
        self.api.run(self.api.client.patch(kind, "tiny-finetune", self.namespace, change))
        assert self.spec(kind) != before or not spec
        wait_until(lambda: self.spec(kind) == before, 30, f"{kind} is put back")

    def spec(self, kind: Resource) -> Object:
        (made,) = self.children(kind)
        found: Object = made["spec"]
        return found


def test_every_write_that_the_roles_allow_passes_where_the_operator_makes_it(
    api: Api, tmp_path: Path
) -> None:
    assert AUDIT_LOG is not None
    ends = {"ttlSecondsAfterFinished": 0}
    with (
        api.namespace("admitted") as home,
        installed(api, home, tmp_path) as release,
        AuditLog(Path(AUDIT_LOG), release.user) as log,
        api.namespace("lived") as namespace,
        loop_thread() as loop,
        place(api, namespace, loop, **ends) as profile,
        OperatorProcess(release.kubeconfig, namespace, lease_namespace=home) as operator,
    ):
        job = Lived(api, namespace)
        job.lose_attempt(1)
        job.lose_attempt(2)
        job.run_attempt(3)
        job.disturb(SERVICES, publishNotReadyAddresses=False)
        job.disturb(NETWORK_POLICIES, policyTypes=["Ingress", "Egress"])
        give_up_in_a_queue(job, profile)
        api.apply(namespace, "outside", backend={"type": "fake"})
        wait_until(lambda: has_finalizer(api, namespace, "outside"), 30, "it is held")
        for pod in job.placed("tiny-3"):
            api.run(end_pod(api.client, pod, 0, DONE.to_json()))
        wait_until(lambda: api.job(namespace) is None, 60, "its time is over")
        assert [line for line in operator.lines if "denied request" in str(line)] == []
        assert set(counted(log.writes())) >= writes_of_the_roles()


def give_up_in_a_queue(job: PlayedJob, profile: str) -> None:
    """Suspend a job whose attempt waits in a queue, so that it must never start."""
    kubernetes = {
        "backend": {"type": "kubernetes", "kubernetes": {"profile": profile}},
        "queue": {"name": "q"},
    }
    folders = {"output__uri": "pvc://models/q", "checkpoint__uri": "pvc://checkpoints/q"}
    api, namespace = job.api, job.namespace
    api.apply(namespace, "queued", **{**JOB, **folders, **kubernetes})
    wait_until(lambda: "queued-1" in job.names(JOBS), 30, "it is queued")
    api.change(namespace, "queued", suspend=True)
    wait_until(lambda: api.phase(namespace, "queued") == "Suspended", 30, "it is given up")


def has_finalizer(api: Api, namespace: str, name: str) -> bool:
    made = api.job(namespace, name)
    return bool(made and made["metadata"].get("finalizers"))
