"""Find in the cluster's Events why a gang does not start, if its objects do not show the reason.

Because there are many Events, they are read only for a gang that has been silent for some seconds,
and less often once they give a reason. Gangs of one namespace share a list, because in a burst each
gang would otherwise read all Events.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune_operator.backends.base import Obstacle
from finetune_operator.backends.kubernetes.reasons import from_events
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import EVENTS, Object

log = logging.getLogger(__name__)

SILENT_SECONDS = 3.0  # a node may report late; its reason must show within five seconds
AGAIN_SECONDS = 10.0
SHARED_SECONDS = 2.0
_KEPT = ("metadata", "reason", "message", "involvedObject", "lastTimestamp", "eventTime")


@dataclass
class _Wait:
    """The time of the next read of a gang's Events, and the obstacle found by the last one."""

    due: float
    obstacle: Obstacle | None


class WarningEvents:
    """Gangs that wait without an obstacle in their objects, by the attempt's uid."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._lists: dict[str, tuple[float, asyncio.Task[Mapping[str, list[Object]]]]] = {}

    async def read(
        self, client: KubeClient, namespace: str, uid: str, pods: Sequence[Verdict]
    ) -> tuple[Obstacle | None, float]:
        """Return the obstacle in the Events of the batch Job and its pods, and when to read again.

        If Events cannot be read, a log line reports it.
        """
        now = asyncio.get_running_loop().time()
        wait = self._waits.setdefault(uid, _Wait(now + SILENT_SECONDS, None))
        if now >= wait.due:
            uids = frozenset({uid, *(one.pod.uid for one in pods)})
            try:
                events = await self._events(client, namespace)
                wait.obstacle = from_events(
                    [one for about in uids for one in events.get(about, ())], uids
                )
            except ApiError as error:
                log.warning("Events of namespace %s cannot be read (%s)", namespace, error)
            wait.due = now + (AGAIN_SECONDS if wait.obstacle else SILENT_SECONDS)
        return wait.obstacle, max(0.1, wait.due - now)

    def forget(self, uid: str) -> None:
        """Drop the state of a gang that runs or has finished."""
        self._waits.pop(uid, None)
        if not self._waits:
            self._lists.clear()

    async def _events(self, client: KubeClient, namespace: str) -> Mapping[str, list[Object]]:
        """Return the namespace's Events by the object's uid, at most SHARED_SECONDS old."""
        now = asyncio.get_running_loop().time()
        read_at, reading = self._lists.get(namespace, (now, None))
        if reading is None or now - read_at > SHARED_SECONDS:
            reading = asyncio.create_task(_read(client, namespace))
            self._lists[namespace] = (now, reading)
        return await asyncio.shield(reading)  # other gangs may await it, too


async def _read(client: KubeClient, namespace: str) -> Mapping[str, list[Object]]:
    # Only warnings are listed: a burst of healthy jobs causes thousands of Normal Events.
    listing = await client.list(
        EVENTS,
        namespace,
        field_selector="type=Warning",
        trim=lambda event: {key: event[key] for key in _KEPT if key in event},
    )
    found: dict[str, list[Object]] = defaultdict(list)
    for event in listing.items:
        found[event["involvedObject"].get("uid", "")].append(event)
    return found
