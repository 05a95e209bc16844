"""Creates and ends attempts by name, so that a repeated request finds the existing job.

`AzureMLBackend` calls it. Failed writes are not repeated here, because the operator retries.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from finetune_operator.backends.azureml import names
from finetune_operator.backends.azureml.runs import see_run, seen_of
from finetune_operator.backends.azureml.sdk import RefusedError
from finetune_operator.backends.azureml.states import AttemptView, updated_view
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import AlreadyOwnedError, TransientError
from finetune_trainer.config import STOP_TAG, StopRequest

log = logging.getLogger(__name__)

Before = Callable[[], Awaitable[None]]

_CONFLICTS = (400, 409)
"""Status of Azure ML if a job name is taken; an invalid job gets the same status."""

_ENDING = ("Finalizing", "CancelRequested", "Completed", "Failed", "Canceled")
"""A job in these states ends by itself, and Azure ML refuses to cancel most of them."""

_WITHOUT_EFFECT = timedelta(minutes=5)
"""A cancel without a visible effect is sent again after this time."""

_TAG_PATIENCE = timedelta(minutes=1)
"""A cancel waits this much longer for the stop tag, because without the tag it would look like a
user's cancel.
"""

_SET_TAG = "/mlflow/v2.0{ws}/api/2.0/mlflow/runs/set-tag"


def handle_of(workspace: Workspace, job: RawJob) -> Handle:
    """Return the handle of an attempt."""
    name = f"{workspace.id}/jobs/{job.name}"
    return Handle(names.KIND, name, job.tags.get(names.UID_TAG, ""), job.url)


async def submit(
    workspace: Workspace, job: Mapping[str, Any], before: Before | None = None
) -> RawJob:
    """Return the job of that name; create it if it does not exist.

    Args:
        workspace: The workspace.
        job: Result of `render`.
        before: Called before the creation; may raise a BackendError.

    Raises:
        AlreadyOwnedError: The existing job belongs to another FineTuneJob.
        BackendError: The job cannot be created; `retryable` is True if a retry may succeed.
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
        owner = there.tags.get(names.UID_TAG) or "an unknown owner"
        text = f"job {name} of {workspace.id} belongs to {owner}; rename this FineTuneJob"
        raise AlreadyOwnedError(text)
    return there


async def poll_now(workspace: Workspace, ref: AttemptRef, now: datetime) -> AttemptView:
    """Poll an attempt that is to be stopped, ahead of all other polls.

    Raises:
        TransientError: There is no response, or no such job. Later polls show whether it was
            deleted.
    """
    _, name = names.parts_of(ref.handle.name)
    there = await workspace.job(name, Priority.WRITE)
    if there is None:
        raise TransientError(f"job {name} is not found; checking again whether it is deleted")
    view = updated_view(None, seen_of(there), now)
    if view.is_running and view.heard is None:  # a job's tags may be older than its run's
        run, _ = await see_run(workspace, name, Priority.WRITE)
        view = updated_view(view, run, now) if run is not None else view
    return view


def is_own(there: RawJob, tags: Mapping[str, str]) -> bool:
    """Return whether a job has the tags of an attempt's own job."""
    return all(there.tags.get(tag) == tags.get(tag) for tag in (names.UID_TAG, names.ATTEMPT_TAG))


@dataclass(frozen=True)
class _Order:
    """Requests that were sent to end an attempt.

    Attributes:
        tagged_until: Time in the stop tag; None if the tag is not set.
        waits_until: Time before which no cancel is sent.
        cancelled_at: Time when the service accepted a cancel; None before that.
    """

    tagged_until: datetime | None = None
    waits_until: datetime | None = None
    cancelled_at: datetime | None = None


class Stops:
    """Ends attempts: by the stop tag if the trainer listens, and by a cancel after the deadline.

    The tag is also set before each cancel, so that another operator process can distinguish our
    cancel from one in Studio.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[str, str], _Order] = {}  # by job and name of the attempt

    async def stop(
        self,
        workspace: Workspace,
        ref: AttemptRef,
        view: AttemptView,
        until: datetime,
        now: datetime,
    ) -> bool:
        """Stop an attempt, unless an earlier stop was accepted.

        Returns:
            Whether to call again at `until`; True only once.

        Raises:
            BackendError: The stop was not accepted.
        """
        key, (_, name) = (ref.job_uid, ref.handle.name), names.parts_of(ref.handle.name)
        order = self._orders.get(key, _Order(view.stop_until))
        if view.is_finished or view.state in _ENDING:
            return False
        if order.cancelled_at is not None and now - order.cancelled_at < _WITHOUT_EFFECT:
            return False
        may_wait = view.is_running and view.is_listening and now < until
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
        """Drop the state of a job's attempts."""
        self._orders = {key: one for key, one in self._orders.items() if key[0] != job_uid}


async def _tag(workspace: Workspace, name: str, until: datetime) -> bool:
    """Set the stop tag; return whether that worked.

    Raises:
        TransientError: The result is unknown, or a retry may succeed.
    """
    value = StopRequest(until=until).model_dump_json(by_alias=True, exclude_none=True)
    try:
        await workspace.post(_SET_TAG, {"run_id": name, "key": STOP_TAG, "value": value})
    except RefusedError as error:
        log.warning("stop tag not set", extra={"attempt": name, "error": str(error)})
        return False
    return True


async def _cancel(workspace: Workspace, name: str) -> None:
    """Cancel the job, unless it was deleted or is already ending.

    Raises:
        BackendError: The service has not accepted the cancel.
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
