"""Find in the cluster's Events whether rank 0's pod was killed by its liveness probe.

Neither the pod's status nor its trainer reports that. Called by `live_attempts` for the end of an
attempt with `deadlines.hangSeconds`, which alone has the probe.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.backends.root_cause import NO_EXIT_CODE, STOPPED_BY_SIGNAL
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import EVENTS
from finetune_trainer.config import ExitCode, FailureClass

log = logging.getLogger(__name__)

_STOPPED = frozenset({NO_EXIT_CODE, ExitCode.PREEMPTED, ExitCode.KILLED, *STOPPED_BY_SIGNAL})
_WORDS = "failed liveness probe"


class LivenessKills:
    """Whether pods were killed by their liveness probe, by the uid of the batch Job."""

    def __init__(self) -> None:
        self._killed: dict[str, bool] = {}

    async def explain(
        self, client: KubeClient, uid: str, seen: Observation, pods: Sequence[Verdict]
    ) -> Observation:
        """Return the observation of an ended attempt, as hung if rank 0's pod was killed for that.

        If the Events cannot be read, a log line reports it.
        """
        zero = next((one for one in pods if one.pod.index == 0 and _was_stopped(one)), None)
        if zero is None or seen.phase not in (AttemptPhase.FAILED, AttemptPhase.UNKNOWN):
            return seen
        if uid not in self._killed:
            self._killed[uid] = await _was_killed(client, zero)
        if not self._killed[uid]:
            return seen
        text = (
            f"pod {zero.pod.name} was killed by its liveness probe, because rank 0 reported no "
            f"progress for deadlines.hangSeconds; {zero.sentence}"
        )
        termination = zero.termination
        if termination is not None:
            termination = termination.model_copy(update={"message": text})
        return replace(
            seen,
            termination=termination,
            failure_class=FailureClass.HUNG,
            node=zero.pod.node,
            message=text,
        )

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        self._killed.pop(uid, None)


def _was_stopped(one: Verdict) -> bool:
    return one.end is not None and not one.end.is_decided and one.end.exit_code in _STOPPED


async def _was_killed(client: KubeClient, one: Verdict) -> bool:
    selector = f"involvedObject.uid={one.pod.uid},reason=Killing"
    try:
        events = await client.list(EVENTS, one.pod.namespace, field_selector=selector)
    except ApiError as error:
        log.warning("Events of pod %s cannot be read (%s)", one.pod.name, error)
        return False
    return any(_WORDS in str(event.get("message", "")) for event in events.items)
