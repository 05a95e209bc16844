"""What of a new status is worth a write, and the patch that writes it.

A job that starts says much that nobody waits for. So what only passes by (the handle that can be
found again, progress before the first step) is written with the next change that matters; when that
one is written, `reports` says.
"""

from typing import Any

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.kube.merge import merge_patch
from finetune_operator.reconcile.conditions import Reason

PASSING = frozenset({Reason.PROVISIONING, Reason.STARTING})
"""Reasons of an attempt that starts with nothing in its way."""

_APART = frozenset({"attempts", "backend_ref", "conditions", "nodes", "progress"})


def is_worth_writing(
    saved: FineTuneJobStatus, new: FineTuneJobStatus, *, with_handle: bool
) -> bool:
    """Say whether `new` tells more than `saved` that should be seen now.

    Args:
        saved: What the API server has.
        new: What was decided.
        with_handle: Whether the handle counts, as it cannot be found again by its name alone.
    """
    return _essence(saved, with_handle) != _essence(new, with_handle)


def _essence(status: FineTuneJobStatus, with_handle: bool) -> tuple[object, ...]:
    return (*facts(status, with_handle=with_handle), *(_gist(one) for one in status.conditions))


def facts(status: FineTuneJobStatus, *, with_handle: bool) -> tuple[object, ...]:
    """Return what a status tells without a word: reasons and sentences are left out."""
    starts = status.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RESTARTING)
    return (
        {name: value for name, value in status if name not in _APART},
        [{**dict(one), "digest": None} for one in status.attempts],
        {name: value for name, value in status.nodes if name != "ready"},
        None if starts else status.progress,
        status.backend_ref if with_handle else None,
        *((one.type, one.status, one.observed_generation) for one in status.conditions),
    )


def _gist(condition: Condition) -> tuple[object, ...]:
    reason, message = condition.reason, condition.message
    if reason in PASSING:
        reason = message = ""
    return (reason, message)


def status_patch(old: FineTuneJobStatus, new: FineTuneJobStatus) -> dict[str, Any]:
    """Return the JSON merge patch that turns one status into another."""
    before, after = (
        one.model_dump(by_alias=True, exclude_none=True, mode="json") for one in (old, new)
    )
    return merge_patch(before, after)
