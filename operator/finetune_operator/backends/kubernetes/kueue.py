"""Whether the cluster has Kueue, which must admit the batch Jobs of a queue.

Called by `live_attempts` for each queued gang. API discovery shows it, which every account may
read; objects of Kueue are never read.
"""

import asyncio
import logging

from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import KUEUE_GROUP

log = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0  # while Kueue is absent
_VALID_SECONDS = 600.0  # Kueue is hardly ever removed


class Kueue:
    """The last result of the discovery, for all jobs of a cluster."""

    def __init__(self) -> None:
        self._is_installed, self._due = True, 0.0

    async def check(self, client: KubeClient, queued: Obstacle) -> tuple[Obstacle, float | None]:
        """Return `queued`, or that no Kueue can admit the gang; then also when to check again."""
        now = asyncio.get_running_loop().time()
        if now >= self._due:
            self._due = now + AGAIN_SECONDS  # also for calls during the request
            try:
                self._is_installed = await client.serves(KUEUE_GROUP)
            except ApiError as error:
                log.warning("whether the cluster has Kueue is unknown (%s)", error)
            if self._is_installed:
                self._due = now + _VALID_SECONDS
        if self._is_installed:
            return queued, None
        text = (
            f"{queued.message}, but the cluster has no Kueue: the API server does not serve "
            f"{KUEUE_GROUP}; install Kueue, or create the job again without spec.queue"
        )
        obstacle = Obstacle(KubernetesReason.KUEUE_NOT_INSTALLED, text, Effect.UNADMITTED)
        return obstacle, AGAIN_SECONDS
