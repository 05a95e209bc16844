"""Adoption of first attempts that operator 0.1.0 created before it recorded them in the status.

This is only needed for an upgrade from 0.1.0, which recorded attempt 1 in the status up to 30
seconds after it had created the batch Job. Every later version writes the status first. Delete this
module with the release after the next one.
"""

import logging
from collections.abc import Callable
from datetime import datetime

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus
from finetune_operator.backends.base import Attempt, Found
from finetune_operator.backends.instances import Backends
from finetune_operator.kernel.jobs import JobIndex, JobView
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import describe, starting

log = logging.getLogger(__name__)


class Adoption:
    """Searches for the unrecorded first attempt of each job, once per leader term.

    Args:
        backends: Backends, which find attempts by name.
        index: Index of the jobs, which plans them.
        now: The time, with a zone.
    """

    def __init__(self, backends: Backends, index: JobIndex, now: Callable[[], datetime]) -> None:
        self._backends = backends
        self._index = index
        self._now = now

    async def adopted(self, view: JobView) -> FineTuneJobStatus | None:
        """Return the status with attempt 1 recorded; None if no attempt is missing in the status.

        The search does not send a request: 0.1.0 delayed the status only for backends that find
        attempts in their cache.

        Raises:
            FineTuneError: The backend cannot search now.
        """
        is_searchable = view.parsed is not None and self._backends.finds_from_cache(view.backend)
        if view.memory.is_adoption_done or view.status.attempt or not is_searchable:
            return None
        found = await self._backends.of(view.job).find(view.job, Attempt(1))
        if found is None:
            view.memory.is_adoption_done = True
            return None
        log.info("attempt adopted", extra={"job": str(view.key), "handle": found.handle.name})
        plan = self._index.plan(view)
        return _with_first_attempt(
            view.job, found, self._now(), plan if isinstance(plan, Plan) else None
        )


def _with_first_attempt(
    job: FineTuneJob, found: Found, now: datetime, plan: Plan | None
) -> FineTuneJobStatus:
    since = found.since or now
    status = job.status
    if plan is not None:
        status = attempts.with_plan(status, make_plan(job, leaves_open=False))
    status = attempts.open_next(status, since)
    # The attempt runs the first spec, because 0.1.0 wrote the status after each change of the spec.
    has_queue = bool(job.spec.queue)
    status = describe(status, starting(status.attempt), since, generation=1, has_queue=has_queue)
    return attempts.with_handle(status, found.handle)
