"""The operator is killed after each of its writes while a job of two nodes fails and goes on.

The batch Job's controller, the scheduler and the API server are real; pods are played. What the
operator writes is enumerated in memory by `tests/unit/backends/kubernetes/test_crashes.py`.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.resources import ENDPOINT_SLICES, JOBS, NETWORK_POLICIES, SERVICES
from finetune_trainer.config import FailureClass, Termination
from support.cluster.operators import KUBECONFIG, Api, OperatorProcess, open_api, wait_until
from support.cluster.played_job import NODES, PlayedJob, place
from support.cluster.played_pods import end_pod
from support.cluster.proxies import WriteProxy
from support.kernel.loop_thread import loop_thread

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
]
MOST_STARTS = 60
DONE = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


class Life(PlayedJob):
    """One job's, under operators of which each lives until its first write.

    Attributes:
        writes: What they wrote, in order.
    """

    def __init__(self, api: Api, namespace: str, folder: Path) -> None:
        super().__init__(api, namespace)
        self.writes: list[str] = []
        self.proxy = WriteProxy(api.kubeconfig, folder, self._kill)
        self._operator: OperatorProcess | None = None

    def _kill(self, method: str, path: str, answer: bytes) -> None:
        self.writes.append(f"{method} {path.partition(f'/{self.namespace}/')[2]}")
        if self._operator is not None:
            self._operator.send(signal.SIGKILL)

    def until(self, check: Callable[[], bool], what: str) -> None:
        """Start one operator after the other, until something is so."""
        for _ in range(MOST_STARTS):
            with OperatorProcess(self.proxy.kubeconfig, self.namespace) as operator:
                self._operator = operator
                wait_until(lambda: not operator.is_running or check(), 60, f"{what}: {self.writes}")
                if operator.is_running:
                    operator.kill()
                    return
        raise AssertionError(f"not {what} after {MOST_STARTS} starts: {self.writes}")


def test_killed_after_each_of_its_writes_it_trains_on_with_one_attempt_at_a_time(
    api: Api, tmp_path: Path
) -> None:
    with api.namespace("kills") as namespace, loop_thread() as loop, place(api, namespace, loop):
        life = Life(api, namespace, tmp_path)
        with life.proxy:
            life.until(lambda: life.names(JOBS) == ["tiny-1"], "created")
            life.run_pods("tiny-1")
            life.until(lambda: life.is_told("Running", 1), "Running")
            _, last = life.placed("tiny-1")
            api.run(end_pod(api.client, last, 137))
            life.until(life.has_deleted_pods, "the other pod is told to stop")
            assert life.names(JOBS) == ["tiny-1"]
            life.end_deleted()
            life.until(lambda: life.names(JOBS) == ["tiny-1", "tiny-2"], "started again")
            life.run_pods("tiny-2")
            life.until(lambda: life.is_told("Running", 2), "Running again")
            for pod in life.placed("tiny-2"):
                api.run(end_pod(api.client, pod, 0, DONE.to_json()))
            life.until(lambda: life.is_told("Complete", 2), "Complete")
        first, _ = life.children(JOBS)
        assert "last lines of pod" in first["metadata"]["annotations"]["finetune.dev/last-lines"]
        # Its controller counts when it gets to it; the operator has seen the pods themselves.
        wait_until(lambda: life.children(JOBS)[1]["status"].get("succeeded") == NODES, 30)
        (named,) = life.children(ENDPOINT_SLICES)
        assert named["endpoints"][0]["hostname"] == "tiny-2-0"
        assert life.names(SERVICES) == life.names(NETWORK_POLICIES) == ["tiny-finetune"]
        job = api.job(namespace)
        assert job is not None
        ended = [(one["number"], one["failureClass"]) for one in job["status"]["attempts"]]
        assert ended == [(1, "WorkerLost"), (2, "Completed")]
        created = sorted(
            one for one in life.writes if one.startswith("POST") and "events" not in one
        )
        once = ("endpointslices", "jobs", "jobs", "networkpolicies", "services")
        assert created == [f"POST {kind}" for kind in once]
