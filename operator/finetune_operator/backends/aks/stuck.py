"""Ask the cluster's Events why a gang does not start, where its objects do not say.

Only about a gang that has said nothing for some seconds, and seldom: Events are many.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_operator.backends.aks.reasons import Obstacle, from_events
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import ApiError
from finetune_operator.kube.resources import EVENTS, Object

log = logging.getLogger(__name__)

FIRST_SECONDS = 3.0
AGAIN_SECONDS = 10.0
_KEPT = ("metadata", "reason", "message", "involvedObject", "lastTimestamp", "eventTime")


@dataclass
class _Wait:
    """Since when a gang waits, when its Events are read next, and what they said last."""

    due: float
    said: Obstacle


class StuckGangs:
    """Gangs of this process that wait without a word, by the attempt's uid."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    async def ask(
        self, client: KubeClient, namespace: str, uid: str, pods: Sequence[Object]
    ) -> tuple[Obstacle, float]:
        """Return what Events say of the batch Job and its pods, and when to ask again.

        Where they may not be read, the log says so.
        """
        now = asyncio.get_running_loop().time()
        wait = self._waits.setdefault(uid, _Wait(now + FIRST_SECONDS, Obstacle()))
        if now >= wait.due:
            uids = frozenset({uid, *(pod["metadata"]["uid"] for pod in pods)})
            try:
                listing = await client.list(EVENTS, namespace, trim=_trim)
                wait.said = from_events(listing.items, uids)
            except ApiError as error:
                log.warning("Events of namespace %s cannot be read (%s)", namespace, error)
            wait.due = now + AGAIN_SECONDS
        return wait.said, max(0.1, wait.due - now)

    def forget(self, uid: str) -> None:
        """Drop what is known of a gang that runs, or is over."""
        self._waits.pop(uid, None)


def _trim(event: Object) -> Object:
    return {key: event[key] for key in _KEPT if key in event}
