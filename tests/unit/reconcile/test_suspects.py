"""Whom the operator tells to hold a job back: in its status, in Events and as a metric."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_operator.api.v1alpha1 import ObjectMeta
from finetune_operator.kernel.events import EventPoster, events_between
from finetune_operator.kernel.status_writer import is_worth_writing
from finetune_operator.kube.resources import EVENTS
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.job_values import JobNow
from finetune_operator.reconcile.ledger import Ledger
from finetune_trainer.config import (
    SUSPECTS_FILE,
    FailureClass,
    Phase,
    Progress,
    Suspect,
    SuspectCause,
    Suspects,
    read_progress,
)
from support.kernel.fake_api import FakeApi
from support.kernel.fake_backend import ended
from support.reconcile.decisions import START, Life, running

SLOW = Suspect(rank=3, node="gpu-1", cause=SuspectCause.COMPUTE, score=1.204, since=1_767_225_600.4)
STUCK = Suspect(
    rank=2,
    node="gpu-0",
    cause=SuspectCause.STUCK,
    since=1_767_225_605,
    process="stopped",
    evidence="logs/attempt-1.1/stall-1",
)
INTERVAL = 30.0  # spec.observability.statusIntervalSeconds


def trains(*suspects: Suspect, step: int = 1) -> Any:
    return running(step, suspects=suspects)


def begun() -> Life:
    life = Life()
    life.see()
    life.see(trains())
    return life


def is_written(life: Life, seen: Any) -> bool:
    after = life.decide(seen).status
    return is_worth_writing(life.status, after, with_handle=False)


def shown(life: Life) -> list[tuple[tuple[str, ...], float]]:
    """Return the series of suspects on the operator's page."""
    made = {"status": life.status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    return list(JobNow(made, Ledger(START), START).series(catalogue.SUSPECT))


def test_a_suspect_is_told_at_once_with_a_sentence() -> None:
    life = begun()
    assert is_written(life, trains(SLOW, STUCK))
    life.see(trains(SLOW, STUCK))
    first, second = life.status.suspects
    assert (first.rank, first.node, first.cause, first.score, first.since) == (
        3,
        "gpu-1",
        "compute",
        1.2,
        "2026-01-01T00:00:00Z",
    )
    assert first.message == (
        "since 2026-01-01T00:00:00Z rank 3 on gpu-1 has been busy 1.20 times as long as the "
        "others: it computes longer"
    )
    assert (second.cause, second.score) == ("stuck", None)
    assert second.message == (
        "since 2026-01-01T00:00:05Z rank 2 on gpu-0 has not joined a collective in which the "
        "others wait; its process is stopped; its stacks are in logs/attempt-1.1/stall-1 of the "
        "run directory"
    )


def test_a_run_without_suspects_costs_no_write() -> None:
    life = begun()
    assert not is_written(life, trains(step=2))


def test_what_is_known_of_the_same_suspects_is_written_with_the_progress() -> None:
    life = begun()
    life.see(trains(SLOW))
    worse = SLOW.model_copy(update={"score": 1.4})
    assert not is_written(life, trains(worse, step=2))
    life.wait(INTERVAL)
    life.see(trains(worse, step=2))
    assert [one.score for one in life.status.suspects] == [1.4]


def test_who_is_well_again_is_taken_off_at_once() -> None:
    life = begun()
    life.see(trains(SLOW))
    assert is_written(life, trains())
    life.see(trains())
    assert life.status.suspects == []


def test_nothing_is_restarted_for_a_suspect() -> None:
    life = begun()
    assert life.see(trains(SLOW, STUCK)) == ()
    assert life.condition("Ready") == ("True", "Training")


def test_a_failed_attempt_keeps_its_suspects_until_the_next_one() -> None:
    life = begun()
    life.see(trains(STUCK))
    life.see(ended(65, FailureClass.DATA_ERROR, "hung"))
    assert [one.rank for one in life.status.suspects] == [2]
    assert shown(life) == []


def test_neither_the_next_attempt_nor_a_complete_job_has_those_of_before() -> None:
    life = begun()
    life.see(trains(STUCK))
    life.see(ended(137, FailureClass.WORKER_LOST, "killed"))
    life.wait(3600)
    life.see()
    assert (life.status.attempt, life.status.suspects) == (2, [])
    life.see(trains(SLOW))
    life.see(ended(0))
    assert life.status.suspects == []


def test_each_suspect_is_a_series_while_its_attempt_runs() -> None:
    life = begun()
    assert shown(life) == []
    life.see(trains(SLOW, STUCK))
    assert shown(life) == [
        (("gpu-1", "3", "compute"), 1.0),
        (("gpu-0", "2", "stuck"), 1.0),
    ]


def test_a_rank_is_one_event_of_its_attempt_whatever_is_found_later() -> None:
    async def live() -> list[str]:
        api, life = FakeApi(), begun()

        async def see(poster: EventPoster, *suspects: Suspect) -> None:
            before = life.status
            life.see(trains(*suspects))
            for event in events_between(before, life.status):
                await poster.post(ObjectMeta(name="tiny", namespace="ns", uid="u"), event)

        poster = EventPoster(api, "one")
        await see(poster, SLOW)
        await see(poster)
        await see(poster, SLOW.model_copy(update={"cause": SuspectCause.DATA}))
        await see(EventPoster(api, "the next leader"))
        await see(EventPoster(api, "the next leader"), SLOW.model_copy(update={"score": 2.0}))
        await see(poster, SLOW, STUCK)
        return [one["message"] for one in api.objects(EVENTS)]

    first, second = asyncio.run(live())
    assert "rank 3 on gpu-1 has been busy 1.20 times as long" in first
    assert "rank 2 on gpu-0 has not joined a collective" in second


def said(**changes: Any) -> bytes:
    """Return what a trainer of another version may publish."""
    known = Progress(phase=Phase.TRAINING, step=7, loss=2.0, suspects=(SLOW,))
    return known.model_copy(update=changes).model_dump_json(by_alias=True).encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(b'"compute"', b'"network"', id="an unknown cause"),
        pytest.param(b'"rank":3', b'"rank":"third"', id="a rank that is no number"),
        pytest.param(b'"suspects":[', b'"suspects":[{"rank":1},', id="a suspect without a node"),
        pytest.param(b'"suspects":[{', b'"suspects":[{"more":1,', id="a suspect with more fields"),
    ],
)
def test_suspects_of_another_version_are_left_out_and_the_rest_is_read(
    old: bytes, new: bytes
) -> None:
    text = said()
    assert old in text
    found = Progress.of_any_version(text.replace(old, new, 1))
    assert (found.step, found.loss, found.phase) == (7, 2.0, Phase.TRAINING)
    assert found.suspects == ()


def test_more_than_five_suspects_are_left_out() -> None:
    found = Progress.of_any_version(said(suspects=(SLOW,) * 6))
    assert (found.step, found.suspects) == (7, ())


def test_a_field_of_a_later_version_is_left_out() -> None:
    text = said().replace(b'"step":7', b'"step":7,"later":{"a":1}')
    assert Progress.of_any_version(text) == Progress.of_any_version(said())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(said()[:-20], id="cut off"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]", id="a list"),
        pytest.param(said().replace(b'"Training"', b'"Dreaming"'), id="an unknown phase"),
        pytest.param(said().replace(b'"step":7', b'"step":"7th"'), id="a step that is no number"),
    ],
)
def test_what_is_no_progress_is_refused(text: bytes) -> None:
    with pytest.raises(ValidationError):
        Progress.of_any_version(text)


def test_the_suspects_of_a_run_directory_are_those_of_its_newest_attempt(tmp_path: Path) -> None:
    said = Progress(attempt=2, step=7)
    (tmp_path / "progress.json").write_text(said.to_json())
    assert read_progress(tmp_path) == said
    for attempt, expected in ((1, ()), (2, (SLOW,))):
        found = Suspects(attempt=attempt, suspects=(SLOW,))
        (tmp_path / SUSPECTS_FILE).write_text(found.to_json())
        assert read_progress(tmp_path).suspects == expected
