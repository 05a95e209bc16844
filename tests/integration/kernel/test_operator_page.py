"""The operator's page of metrics over HTTP: real processes, one of which leads, and a job."""

import time
from datetime import datetime
from typing import Any

import pytest

from finetune_operator.metrics import catalogue
from finetune_operator.reconcile.categories import Category
from finetune_trainer.config import Phase, Progress, TimeSpent
from support.cluster.operator_pages import OperatorPage, read_page
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.telemetry.node_pages import ask

QUICK: dict[str, Any] = {"lease_seconds": 3, "renew_deadline_seconds": 2, "renew_seconds": 0.5}
JOB = {"finetunejob": "tiny"}
BACKEND = {"backend": "configmap"}
SUCCEEDED = BACKEND | {"phase": "Succeeded"}


def page_of(operator: OperatorProcess) -> OperatorPage:
    port = operator.wait_for("started")["health_port"]
    answer = ask(f"http://127.0.0.1:{port}/metrics", "GET", "/metrics")
    assert answer.status == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return read_page(answer.text)


def trained(seconds: float, steps: int) -> dict[str, str]:
    """Return what an attempt says that has trained so long."""
    spent = TimeSpent(starting=0.25, training=seconds)
    now = time.time()
    said = Progress(phase=Phase.TRAINING, time=now, step=steps, total_steps=9, spent=spent)
    return {"phase": "Running", "ready": "1", "progress": said.to_json()}


def live(seconds: float) -> None:
    """Let an attempt be as old as it will say that it is."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, 2 * seconds)


def total(operator: OperatorProcess, created: float) -> dict[str, float]:
    """Return the job's ledger, and show that it sums to the age that the job had meanwhile."""
    before = time.time()
    times = page_of(operator).values(catalogue.WALLCLOCK, "category", **JOB)
    after = time.time()
    millisecond = 0.001
    assert before - created - millisecond <= sum(times.values()) <= after - created + millisecond
    return times


@pytest.mark.full
def test_a_new_leader_goes_on_from_the_ledger_of_one_that_was_killed(api: Api) -> None:
    with (
        api.namespace("ledger") as namespace,
        OperatorProcess(api.kubeconfig, namespace, "first", **QUICK) as first,
    ):
        first.wait_for("synced")
        with OperatorProcess(api.kubeconfig, namespace, "second", **QUICK) as second:
            second.wait_for("started")
            made = api.apply(namespace, observability={"statusIntervalSeconds": 5})
            created = datetime.fromisoformat(made["metadata"]["creationTimestamp"]).timestamp()
            wait_until(lambda: api.attempts(namespace), 20)
            live(1.0)
            api.play(namespace, "tiny-1", **trained(0.5, 3))
            wait_until(lambda: api.phase(namespace) == "Running", 20)
            times = total(first, created)
            assert times["productive"] >= 0.5
            standby = page_of(second)
            assert standby.value(catalogue.LEADER) == 0
            assert catalogue.WALLCLOCK not in standby.metrics
            first.kill()
            second.wait_for("synced", QUICK["lease_seconds"] + 20)
            wait_until(lambda: page_of(second).value(catalogue.BACKLOG) == 0, 20)
            assert page_of(second).value(catalogue.LEADER) == 1
            later = total(second, created)
            settled = set(times) - {Category.PRODUCTIVE}
            assert {one: later[one] for one in settled} == {one: times[one] for one in settled}
            api.play(namespace, "tiny-1", phase="Failed", code="137", gone="yes")
            wait_until(lambda: "tiny-2" in api.attempts(namespace), 20)
            live(1.0)
            api.play(namespace, "tiny-2", **trained(0.5, 2))
            wait_until(lambda: api.phase(namespace) == "Running", 20)
            later = total(second, created)
            assert later["recomputed"] >= 0.5  # it goes on
            assert later["productive"] == 0.5  # what was reported; the rest nobody knows
            restarts = page_of(second).values(catalogue.RESTARTS, "reason", **JOB)
            assert {name: one for name, one in restarts.items() if one} == {"WorkerLost": 1}
            api.play(namespace, "tiny-2", phase="Succeeded", code="0", gone="yes")
            wait_until(lambda: api.phase(namespace) == "Succeeded", 20)
            # The operator counts an end after it has written the status.
            wait_until(lambda: page_of(second).value(catalogue.ENDS, **SUCCEEDED), 20)
            done = page_of(second).values(catalogue.WALLCLOCK, "category", **JOB)
            assert done == page_of(second).values(catalogue.WALLCLOCK, "category", **JOB)
            ended = page_of(second).values(catalogue.ENDED_WALLCLOCK, "category", **BACKEND)
            assert {name: one for name, one in ended.items() if one} == done
