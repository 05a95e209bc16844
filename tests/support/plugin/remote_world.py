"""A cluster with jobs of the remote twin, the service that runs them, and an operator that may die.

`TwinWorld` has it in memory and in virtual time, `ProcessWorld` as processes.
"""

from abc import ABC, abstractmethod
from typing import Any

from fake_service import RemoteService
from finetune_operator.api.validation import defaulted
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS, Object
from support.api.builders import manifest


async def let_go(client: KubeClient, namespace: str) -> None:
    """Take the finalizers off all jobs, as no operator is left that would."""
    free: Object = {"metadata": {"finalizers": []}}
    for one in (await client.list(FINE_TUNE_JOBS, namespace)).items:
        await client.patch(FINE_TUNE_JOBS, one["metadata"]["name"], namespace, free)


class RemoteWorld(ABC):
    """What users do there, and what they see.

    Args:
        client: Of the cluster.
        namespace: Of the jobs.
        service: Who runs their attempts.

    Attributes:
        deaths: How often the operator has died so far.
    """

    def __init__(self, client: KubeClient, namespace: str, service: RemoteService) -> None:
        self.service = service
        self.deaths = 0
        self._client = client
        self._namespace = namespace

    @abstractmethod
    async def kill(self) -> None:
        """Kill the operator and start it again, with nothing in its memory."""

    async def apply(self, name: str = "tiny", **overrides: Any) -> None:
        """Apply a job of the twin."""
        fields: dict[str, Any] = {
            "model__source": "hf://a/b",
            "dataset__source": "hf://a/c",
            "backend": {"type": "remote"},
            "metadata__namespace": self._namespace,
            **overrides,
        }
        made = defaulted(manifest(name=name, **fields))
        await self._client.create(FINE_TUNE_JOBS, made, self._namespace)

    async def change(self, name: str = "tiny", **spec: Any) -> None:
        """Change the spec of a job."""
        await self._client.patch(FINE_TUNE_JOBS, name, self._namespace, {"spec": spec})

    async def delete(self, name: str = "tiny") -> None:
        """Delete a job."""
        await self._client.delete(FINE_TUNE_JOBS, name, self._namespace)

    async def job(self, name: str = "tiny") -> Object | None:
        """Return a job, or None once it is gone."""
        try:
            return await self._client.get(FINE_TUNE_JOBS, name, self._namespace)
        except NotFoundError:
            return None

    async def jobs(self) -> dict[str, Object]:
        """Return all jobs by name."""
        listing = await self._client.list(FINE_TUNE_JOBS, self._namespace)
        return {one["metadata"]["name"]: one for one in listing.items}

    async def told(self) -> list[str]:
        """Return the sentences of all Events."""
        listing = await self._client.list(EVENTS, self._namespace)
        return [one["message"] for one in listing.items]
