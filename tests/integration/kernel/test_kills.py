"""The operator is killed after each of its writes, and started again: a job's whole life."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.operators import Api, OperatorProcess, condition, wait_until
from support.cluster.proxies import WriteProxy

MOST_STARTS = 40


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.namespace("kills") as name:
        yield name


class Killer:
    """Starts operators, of which each lives until its first write."""

    def __init__(self, api: Api, namespace: str, folder: Path) -> None:
        self.api = api
        self.namespace = namespace
        self.writes: list[str] = []
        self.starts = 0
        self.proxy = WriteProxy(api.kubeconfig, folder, self._kill)
        self._operator: OperatorProcess | None = None

    def _kill(self, method: str, path: str, answer: bytes) -> None:
        self.writes.append(f"{method} {path.partition(f'/{self.namespace}/')[2]}")
        if self._operator is not None:
            self._operator.send(signal.SIGKILL)

    def settle(self) -> None:
        """Start one operator after the other, until one finds nothing to write."""
        while self.starts < MOST_STARTS:
            self.starts += 1
            with OperatorProcess(self.proxy.kubeconfig, self.namespace) as operator:
                self._operator = operator
                wait_until(lambda: not operator.is_running or rests(operator), 60)
                if operator.is_running:
                    operator.kill()
                    return
        raise AssertionError(f"no rest after {self.starts} starts: {self.writes}")


def rests(operator: OperatorProcess) -> bool:
    if not operator.said("synced"):
        return False
    try:
        return bool(operator.health()["queue"] == 0)
    except (OSError, AssertionError):
        return False  # it was killed meanwhile


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_killed_after_each_of_its_writes_it_goes_on_with_one_attempt_at_a_time(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    killer = Killer(api, namespace, tmp_path)
    with killer.proxy:
        api.apply(namespace, restart_policy={"backoff": {"baseSeconds": 0, "maxSeconds": 1}})
        killer.settle()
        assert api.attempts(namespace) == ["tiny-1"]
        api.play(namespace, "tiny-1", phase="Running", ready="1", step="1")
        killer.settle()
        assert api.phase(namespace) == "Running"
        api.play(namespace, "tiny-1", phase="Failed", code="137", gone="yes")
        killer.settle()
        assert api.attempts(namespace) == ["tiny-1", "tiny-2"]
        api.play(namespace, "tiny-2", phase="Succeeded", code="0", gone="yes")
        killer.settle()
    job = api.job(namespace)
    assert job is not None
    assert condition(job, "Complete")["status"] == "True"
    assert [one["number"] for one in job["status"]["attempts"]] == [1, 2]
    # No Event: each follows the status that tells the same, and is not told again after a crash.
    created, status = ["POST configmaps"], ["PATCH finetunejobs/tiny/status"]
    # Each attempt is opened in the status and then created; then it trains, fails or completes.
    assert killer.writes == [*status, *created, *status, *status, *created, *status]
