"""Requests of `ftctl doctor --cluster` to an API server, which may fail independently.

The `doctor_*` modules use it. A request without a response becomes a finding with the reason.
"""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from finetune_operator.cli.findings import Finding, State
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.client import Call, KubeClient
from finetune_operator.kube.resources import Object, Resource

T = TypeVar("T")


@dataclass
class Probe:
    """Sends requests to a cluster and collects the findings.

    Attributes:
        namespace: Namespace in which the caller wants to create jobs.
        user: User name of the caller in the cluster; empty if unknown.
    """

    client: KubeClient
    namespace: str
    user: str = ""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, topic: str, name: str, detail: str) -> None:
        """Record a check that passed."""
        self.findings.append(Finding(topic, name, State.OK, detail))

    def wrong(self, topic: str, name: str, detail: str, remedy: str) -> None:
        """Record a fault, with the command that fixes it."""
        self.findings.append(Finding(topic, name, State.MISSING, detail, remedy=remedy))

    def absent(self, topic: str, name: str, detail: str, remedy: str = "") -> None:
        """Record the absence of an optional thing."""
        self.findings.append(Finding(topic, name, State.ABSENT, detail, remedy=remedy))

    def unknown(self, topic: str, name: str, detail: str) -> None:
        """Record a check that could not be run."""
        self.findings.append(Finding(topic, name, State.UNKNOWN, detail))

    async def ask(self, topic: str, name: str, request: Awaitable[T]) -> T | None:
        """Return the response; None if the request failed, which is recorded.

        Raises:
            NotFoundError: the object does not exist; the caller decides what that means.
        """
        try:
            return await request
        except NotFoundError:
            raise
        except ForbiddenError as error:
            self.unknown(topic, name, f"you may not read it ({error})")
        except (ApiError, TimeoutError) as error:
            self.unknown(topic, name, str(error) or "no response before the timeout")
        return None

    async def list(
        self, topic: str, name: str, resource: Resource, namespace: str | None = None, **how: Any
    ) -> list[Object] | None:
        """Return the objects of a kind; None if the request failed, which is recorded.

        The list of a kind that the API server does not know is empty.
        """
        try:
            found = await self.ask(topic, name, self.client.list(resource, namespace, **how))
        except NotFoundError:
            return []
        return None if found is None else found.items

    async def get_path(self, path: str) -> Object:
        """Return the response at a path that is not an object's, such as /version."""
        resource = Resource("", "v1", path.strip("/").replace("/", "-"), "", False)
        return await self.client.exchange(Call("get", resource, path))
