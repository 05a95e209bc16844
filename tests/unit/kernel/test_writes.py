"""Which statuses are worth a write, what is patched, and which Events follow."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.api.v1alpha1.status import BackendRef, FineTuneJobStatus, JobPhase
from finetune_operator.backends.base import AttemptPhase, Observation, Obstacle
from finetune_operator.embedded.patches import merge
from finetune_operator.kernel.events import JobEvent, events_between
from finetune_operator.kernel.status_writer import is_worth_writing
from finetune_operator.kube.client import merge_patch
from finetune_trainer.config import FailureClass, Phase
from support.kernel.fake_backend import ended
from support.reconcile.decisions import PENDING, Life, running


def worth(saved: FineTuneJobStatus, new: FineTuneJobStatus) -> bool:
    return is_worth_writing(saved, new, with_handle=False)


def test_two_writes_lead_from_an_open_attempt_to_one_that_trains() -> None:
    life = Life()
    life.see()
    told = []
    for seen in (
        PENDING,
        Observation(AttemptPhase.PENDING, nodes_ready=1, message="ContainerCreating"),
        Observation(AttemptPhase.RUNNING, nodes_ready=2),
        running(0, Phase.TOKENIZING),
        running(0, Phase.LOADING),
        running(1),
    ):
        if worth(life.status, life.decide(seen).status):
            life.see(seen)
            told.append((life.condition("ResourcesReady")[0], life.status.nodes.ready))
    assert told == [("True", 2), ("True", 1)]
    assert life.status.phase is JobPhase.RUNNING


def test_an_obstacle_is_written_and_so_is_its_end() -> None:
    life = Life()
    life.see()
    saved = life.status
    stuck = Observation(AttemptPhase.PENDING, obstacle=Obstacle("Unschedulable", "no node"))
    told = life.decide(stuck).status
    assert worth(saved, told)
    life.see(stuck)
    assert worth(told, life.decide(PENDING).status)


def test_the_handle_counts_only_where_the_name_does_not_lead_to_it() -> None:
    life = Life()
    life.see()
    ref = BackendRef(kind="Fake", name="another")
    changed = life.status.model_copy(update={"backend_ref": ref})
    assert not is_worth_writing(life.status, changed, with_handle=False)
    assert is_worth_writing(life.status, changed, with_handle=True)


JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=2), JSON, max_size=4)


@given(old=OBJECTS, new=OBJECTS)
def test_a_merge_patch_turns_the_one_into_the_other(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert merge(old, merge_patch(old, new)) == new


@given(value=OBJECTS)
def test_there_is_nothing_to_patch_where_nothing_changed(value: dict[str, Any]) -> None:
    assert merge_patch(value, value) == {}


def test_a_life_is_told_in_few_events() -> None:
    life, told = Life(), list[tuple[str, str]]()

    def see(seen: Observation | None = None) -> None:
        before = life.status
        life.see(seen)
        told.extend((one.type, one.reason) for one in events_between(before, life.status))

    see()
    see(PENDING)
    see(running(1))
    see(running(2))
    see(ended(137, FailureClass.WORKER_LOST, "killed"))
    see(running(3))
    see(ended(0))
    see()
    assert told == [
        ("Normal", "AttemptCreated"),
        ("Normal", "Training"),
        ("Warning", "WorkerLost"),
        ("Normal", "AttemptCreated"),
        ("Normal", "Training"),
        ("Normal", "Completed"),
    ]


@pytest.mark.parametrize("code", [65, 78])
def test_a_failure_for_good_is_one_warning(code: int) -> None:
    life = Life()
    life.see()
    before = life.status
    life.see(ended(code, FailureClass.ERROR, "wrong"))
    (told,) = events_between(before, life.status)
    assert isinstance(told, JobEvent)
    assert told.type == "Warning"
