"""Which statuses are worth a write, what is patched, and which Events follow."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions import PENDING, Life, running
from finetune_operator.api.v1alpha1.status import BackendRef, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.fake import ended
from finetune_operator.embedded.patches import merge
from finetune_operator.kernel.events import JobEvent, events_between
from finetune_operator.kernel.writes import is_worth_writing, merge_patch, opening_left
from finetune_trainer.config import FailureClass, Phase


def worth(saved: FineTuneJobStatus, new: FineTuneJobStatus) -> bool:
    return is_worth_writing(saved, new, with_handle=False)


def test_between_opening_an_attempt_and_its_first_step_nothing_is_written() -> None:
    life = Life()
    life.see()
    saved = life.status
    for seen in (
        PENDING,
        Observation(AttemptPhase.PENDING, message="ContainerCreating"),
        Observation(AttemptPhase.RUNNING, nodes_ready=1),
        running(0, Phase.LOADING),
    ):
        assert not worth(saved, life.decide(seen).status), seen
    assert worth(saved, life.decide(running(1)).status)


def test_an_obstacle_is_written_and_so_is_its_end() -> None:
    life = Life()
    life.see()
    saved = life.status
    stuck = Observation(AttemptPhase.PENDING, reason="Unschedulable", message="no node")
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


@pytest.mark.parametrize(
    ("is_busy", "age", "left"),
    [
        pytest.param(False, 0, 3, id="three seconds"),
        pytest.param(False, 2.5, 0.5, id="the rest of three seconds"),
        pytest.param(False, 3, 0, id="no longer while nobody else waits"),
        pytest.param(True, 2.5, 0.5, id="busy or not, it is looked at after three"),
        pytest.param(True, 3, 1, id="a second longer at a time while others wait"),
        pytest.param(True, 9.5, 0.5, id="ten seconds in all"),
        pytest.param(True, 10, 0, id="no longer whoever waits"),
    ],
)
def test_that_an_attempt_was_opened_may_stay_untold(is_busy: bool, age: float, left: float) -> None:
    life = Life()
    saved, opened = life.status, life.decide().status
    now = life.now + timedelta(seconds=age)
    assert opening_left(saved, opened, now, is_busy=is_busy) == left


def test_what_keeps_a_first_attempt_from_running_is_told_at_once_however_busy() -> None:
    life = Life()
    saved = life.status
    life.see()
    stuck = Observation(AttemptPhase.PENDING, reason="Unschedulable", message="no node")
    assert opening_left(saved, life.decide(stuck).status, life.now, is_busy=True) == 0


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
