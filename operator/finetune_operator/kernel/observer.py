"""Sees what an attempt does, through its backend, and remembers how long it could not be seen.

`Reconciler` asks once a look. Nothing here decides or writes.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.errors import BackendError
from finetune_operator.kernel.jobs import Backends
from finetune_operator.kube.cache import Key
from finetune_operator.kube.errors import ApiError
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, Reason, is_true
from finetune_operator.reconcile.creation import PATIENCE_SECONDS

LOOK_AGAIN_SECONDS = 1.0
"""When to look again at what could not be seen."""

_ABSENT = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="nothing of it was created")


class Observer:
    """Observes the open attempts of jobs.

    Args:
        backends: Who runs them.
        now: The time, with a zone.
    """

    def __init__(self, backends: Backends, now: Callable[[], datetime]) -> None:
        self._backends = backends
        self._now = now
        self._unseen: dict[Key, datetime] = {}  # since when looks at their attempts have failed

    async def observe(self, key: Key, job: FineTuneJob) -> Observation | None:
        """Return what is seen of the open attempt; None where there is none, or nobody knows it.

        Raises:
            BackendError: it cannot be seen until somebody mends the cause.
            ApiError: likewise.
        """
        if attempts.current(job.status) is None:
            return None
        if (handle := handle_of(job.status)) is None:
            return _ABSENT if is_or_was_suspended(job) else None  # it was looked for by its name
        try:
            seen = await self._backends.get(job.spec.backend.type).observe(handle)
        except (BackendError, ApiError) as error:
            if not error.retryable:
                raise
            since = self._unseen.setdefault(key, self._now())
            lasts = self._now() - since >= timedelta(seconds=PATIENCE_SECONDS)
            return Observation(
                AttemptPhase.UNKNOWN,
                reason=Reason.BACKEND_FAILED if lasts else "",
                message=str(error),
                look_again_seconds=LOOK_AGAIN_SECONDS,
            )
        self._unseen.pop(key, None)
        return seen

    def forget(self, key: Key) -> None:
        """Drop what is known of a job."""
        self._unseen.pop(key, None)


def is_or_was_suspended(job: FineTuneJob) -> bool:
    """Say whether a job is told to be suspended, or was when it was written about last."""
    return job.spec.suspend or is_true(job.status, ConditionType.SUSPENDED)
