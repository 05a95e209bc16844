"""What `helm test` runs, on the operator's own pages."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from finetune_operator.kernel.health import Health, HealthServer
from finetune_operator.metrics.page import Snapshot
from support.charts.helm_chart import CHART
from support.charts.served_pages import served as served_pages
from support.kernel.loop_thread import loop_thread

SCRIPT = (CHART / "files" / "ask.py").read_text(encoding="utf-8")
STANDBY = Health(is_ready=True)
LEADER = Health(is_leading=True, is_ready=True, queue=3)
UNREADY = Health(is_leading=True, refused={"leases": "the account may not get leases"})


@contextmanager
def served(*states: Health) -> Iterator[str]:
    """Serve the pages of replicas in these states, one after the other, the last one for ever."""
    left = list(states)

    def read() -> Health:
        return left.pop(0) if len(left) > 1 else left[0]

    with loop_thread() as loop:
        server = HealthServer("127.0.0.1", 0, 300, read, Snapshot)
        loop.run(server.__aenter__())
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            loop.run(server.__aexit__(None, None, None))


def ask(address: str, seconds: str = "60") -> "subprocess.CompletedProcess[str]":
    """Run the script as the pod does, with another limit of time."""
    command = [sys.executable, "-c", SCRIPT, address, seconds]
    return subprocess.run(command, capture_output=True, text=True)


def test_release_works_where_a_replica_leads() -> None:
    with served(LEADER) as address:
        answer = ask(address)

    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "works: a replica is Ready and leads, and 3 jobs are in its queue\n"


def test_standby_and_new_replica_are_waited_for() -> None:
    with served(UNREADY, STANDBY, LEADER) as address:
        answer = ask(address)

    assert answer.returncode == 0
    first, second, third = answer.stdout.splitlines()
    assert "a replica is not Ready: " in first
    assert "the account may not get leases" in first
    assert second == "a replica is Ready and waits for the Lease"
    assert third.startswith("works")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        pytest.param(STANDBY, "a replica is Ready and waits for the Lease\n", id="no leader"),
        pytest.param(UNREADY, "the account may not get leases", id="none Ready"),
    ],
)
def test_release_that_does_not_work_says_what_was_found(state: Health, said: str) -> None:
    with served(state) as address:
        answer = ask(address, "0")

    assert answer.returncode == 1
    assert said in answer.stdout


def test_service_without_replicas_is_no_traceback() -> None:
    with served(LEADER) as address:
        pass

    answer = ask(address, "0")

    assert (answer.returncode, answer.stderr) == (1, "")
    assert f"{address} does not answer" in answer.stdout


def test_answer_that_is_cut_off_is_no_traceback() -> None:
    """As of a replica that is replaced while it answers."""
    with served_pages({"/readyz": lambda: '{"leading": true}'}, missing=1) as address:
        answer = ask(f"http://{address}", "0")

    assert (answer.returncode, answer.stderr) == (1, "")
    assert "does not answer (IncompleteRead" in answer.stdout
