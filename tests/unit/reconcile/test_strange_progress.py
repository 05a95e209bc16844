"""Progress with numbers that no clock and no counter has: a job goes on, and its time adds up."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
from pydantic import ValidationError

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.job_values import JobNow
from finetune_operator.reconcile.ledger import accrue_until
from finetune_trainer.config import CheckpointRef, Progress, Suspect, SuspectCause, TimeSpent
from support.api.fuzz_inputs import places
from support.reconcile.decisions import PENDING, START, running
from support.reconcile.ledgers import LedgerLife

NOW = START.timestamp()
SAID = Progress(
    time=NOW + 100,
    step=7,
    total_steps=10,
    resumed_step=2,
    epoch=0.5,
    eta_seconds=4.0,
    first_step_seconds=5.0,
    spent=TimeSpent(starting=5, training=40),
    checkpoint=CheckpointRef(step=3, path="/x/step-3", time=NOW, world_size=2),
    suspects=(Suspect(rank=1, node="n", cause=SuspectCause.COMPUTE, score=1.2, since=NOW),),
)


def variants(value: float) -> list[bytes]:
    """Return what is said with this value in each place, one after the other."""
    tree = json.loads(SAID.to_json())
    found = []
    for place in range(len(places(tree))):
        changed = deepcopy(tree)
        parent, key = places(changed)[place]
        parent[key] = value
        found.append(json.dumps(changed).encode())
    return found


def live(said: Progress, *, is_first: bool) -> None:
    """Let a job hear this and write its status; check that its time adds up."""
    life = LedgerLife()
    life.look()
    life.look(PENDING)
    life.wait(40)
    if not is_first:
        life.look(running(1))
    life.wait(60)
    life.look(replace(running(), progress=said))
    life.wait(10)
    life.look(running(8))
    life.write()
    assert sum(life.times().values()) == 110_000
    assert min(life.times().values()) >= 0
    status = life.status.model_dump(by_alias=True, exclude_none=True, mode="json")
    FineTuneJobStatus.model_validate(status)
    made = {"metadata": {"namespace": "n", "name": "j"}, "spec": {}, "status": status}
    job = JobNow(made, accrue_until(life.ledger, life.now), life.now, said)
    for metric in (*catalogue.OF_JOBS, *catalogue.OF_RANK_ZERO):
        list(job.series(metric))


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    "value",
    [
        -5,
        0.5,
        1e13,
        1e308,
        -1e308,
        float("inf"),
        float("nan"),
        2**63,
        pytest.param(10**400, id="of 401 digits"),
    ],
    ids=str,
)
def test_a_job_goes_on_whatever_its_progress_says(value: float, *, is_first: bool) -> None:
    for text in variants(value):
        try:
            said = Progress.of_any_version(text)
        except ValidationError:  # as if there was no answer
            continue
        live(said, is_first=is_first)


def test_what_cannot_be_is_left_out_and_the_rest_is_read() -> None:
    """As of a version whose times are in milliseconds."""
    tree = json.loads(SAID.to_json())
    tree["checkpoint"]["time"] *= 1000
    tree["etaSeconds"] = float("inf")

    said = Progress.of_any_version(json.dumps(tree).encode())

    assert said == SAID.model_copy(update={"checkpoint": None, "eta_seconds": None})
