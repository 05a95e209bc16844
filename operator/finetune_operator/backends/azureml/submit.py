"""Creates attempts and ends them: by name, so that whoever asks again finds what there is.

`AzureMLBackend` calls it. A write is never repeated here; the operator tries again.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from finetune_operator.backends.azureml import names
from finetune_operator.backends.azureml.runs import see_run, seen_of
from finetune_operator.backends.azureml.sdk import RefusedError
from finetune_operator.backends.azureml.states import Look, look_after
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import AlreadyOwnedError, TransientError
from finetune_trainer.config import STOP_TAG, StopRequest

log = logging.getLogger(__name__)

Before = Callable[[], Awaitable[None]]

_CONFLICTS = (400, 409)
"""How Azure ML refuses a job whose name another one has; a bad job is refused likewise."""

_ENDING = ("Finalizing", "CancelRequested", "Completed", "Failed", "Canceled")
"""A job in one of these states ends by itself, and Azure ML refuses to cancel most of them."""

_WITHOUT_EFFECT = timedelta(minutes=5)
"""A cancel of which nothing is seen for so long is sent again."""

_TAG_PATIENCE = timedelta(minutes=1)
"""So much longer a cancel waits for its tag: without that, the end looks like somebody else's."""

_SET_TAG = "/mlflow/v2.0{ws}/api/2.0/mlflow/runs/set-tag"


def handle_of(workspace: Workspace, job: RawJob) -> Handle:
    """Return the handle of an attempt."""
    name = f"{workspace.id}/jobs/{job.name}"
    return Handle(names.KIND, name, job.tags.get(names.UID_TAG, ""), job.url)


async def submit(
    workspace: Workspace, job: Mapping[str, Any], before: Before | None = None
) -> RawJob:
    """Return the job of that name, which is created where there is none.

    Args:
        workspace: Where.
        job: As `render` has it.
        before: Called before it is created; may raise a BackendError.

    Raises:
        AlreadyOwnedError: there is one that belongs to another FineTuneJob.
        BackendError: it cannot be created; `retryable` says whether to try again.
    """
    name = job["name"]
    there = await workspace.job(name, Priority.WRITE)
    if there is None:
        if before is not None:
            await before()
        try:
            there = await workspace.create(job)
        except RefusedError as error:
            if error.status not in _CONFLICTS:
                raise
            there = await workspace.job(name, Priority.WRITE)
            if there is None:
                raise
    if not is_own(there, job["tags"]):
        owner = there.tags.get(names.UID_TAG) or "nobody that we know"
        text = f"job {name} of {workspace.id} belongs to {owner}; rename this FineTuneJob"
        raise AlreadyOwnedError(text)
    return there


async def look_now(workspace: Workspace, ref: AttemptRef, now: datetime) -> Look:
    """Return what Azure ML says of an attempt that is to be stopped, before all other looks.

    Raises:
        TransientError: there is no answer, or no such job; then looks find out whether it is gone.
    """
    _, name = names.parts_of(ref.handle.name)
    there = await workspace.job(name, Priority.WRITE)
    if there is None:
        raise TransientError(f"job {name} is not found; looking again whether it is gone")
    look = look_after(None, seen_of(there), now)
    if look.is_running and look.heard is None:  # the tags of a job may be older than its run's
        run, _ = await see_run(workspace, name, Priority.WRITE)
        look = look_after(look, run, now) if run is not None else look
    return look


def is_own(there: RawJob, tags: Mapping[str, str]) -> bool:
    """Say whether a job has the tags that make it an attempt's own."""
    return all(there.tags.get(tag) == tags.get(tag) for tag in (names.UID_TAG, names.ATTEMPT_TAG))


@dataclass(frozen=True)
class _Order:
    """What has been sent to end an attempt.

    Attributes:
        tagged_until: What the stop tag says; None where it is not set.
        waits_until: Until when it is left alone.
        cancelled_at: When the service has accepted a cancel; None before that.
    """

    tagged_until: datetime | None = None
    waits_until: datetime | None = None
    cancelled_at: datetime | None = None


class Stops:
    """Ends attempts: by the stop tag where the trainer listens, and by a cancel once that is late.

    The tag is set before each cancel, too: by it another operator process tells our own cancel from
    one in Studio.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[str, str], _Order] = {}  # by job and name of the attempt

    async def stop(
        self, workspace: Workspace, ref: AttemptRef, look: Look, until: datetime, now: datetime
    ) -> bool:
        """Have an attempt end, unless that was accepted before.

        Returns:
            Whether to call again at `until`, which is said once.

        Raises:
            BackendError: it was not accepted.
        """
        key, (_, name) = (ref.job_uid, ref.handle.name), names.parts_of(ref.handle.name)
        order = self._orders.get(key, _Order(look.stop_until))
        if look.is_over or look.state in _ENDING:
            return False
        if order.cancelled_at is not None and now - order.cancelled_at < _WITHOUT_EFFECT:
            return False
        may_wait = look.is_running and look.is_listening and now < until
        if order.tagged_until is None or (may_wait and until < order.tagged_until):
            try:
                may_wait = await _tag(workspace, name, until) and may_wait
                order = self._orders[key] = replace(order, tagged_until=until)
            except TransientError:
                if may_wait or now < until + _TAG_PATIENCE:
                    raise
                log.warning("cancelled without stop tag", extra={"attempt": name})
        if not may_wait:
            await _cancel(workspace, name)
        self._orders[key] = replace(
            order, waits_until=until if may_wait else None, cancelled_at=None if may_wait else now
        )
        return may_wait and order.waits_until != until

    def forget(self, job_uid: str) -> None:
        """Drop what is known of the attempts of a job."""
        self._orders = {key: one for key, one in self._orders.items() if key[0] != job_uid}


async def _tag(workspace: Workspace, name: str, until: datetime) -> bool:
    """Set the stop tag; return whether that worked.

    Raises:
        TransientError: nobody knows, or it may work later.
    """
    value = StopRequest(until=until).model_dump_json(by_alias=True, exclude_none=True)
    try:
        await workspace.post(_SET_TAG, {"run_id": name, "key": STOP_TAG, "value": value})
    except RefusedError as error:
        log.warning("stop tag not set", extra={"attempt": name, "error": str(error)})
        return False
    return True


async def _cancel(workspace: Workspace, name: str) -> None:
    """Have the service cancel the job; one that is gone or ends by itself needs no cancel.

    Raises:
        BackendError: it has not accepted that.
    """
    try:
        await workspace.cancel(name)
    except RefusedError as error:
        if error.status == 404:
            return
        if error.status not in _CONFLICTS:
            raise
        there = await workspace.job(name, Priority.WRITE)
        if there is not None and there.status not in _ENDING:
            raise
