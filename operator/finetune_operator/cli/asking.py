"""Questions that `ftctl doctor --cluster` asks an API server: each ends, and none ends the others.

The `doctor_*` modules ask; a question without an answer becomes a finding that says why.
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
class Asking:
    """What is asked, by whom, and what was found so far.

    Attributes:
        namespace: Where the caller wants to make jobs.
        who: Name of the caller in the cluster; empty where that is not known.
    """

    client: KubeClient
    namespace: str
    who: str = ""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, topic: str, name: str, detail: str) -> None:
        """Note what is as it should be."""
        self.findings.append(Finding(topic, name, State.OK, detail))

    def wrong(self, topic: str, name: str, detail: str, remedy: str) -> None:
        """Note a fault, with the command that mends it."""
        self.findings.append(Finding(topic, name, State.MISSING, detail, remedy=remedy))

    def absent(self, topic: str, name: str, detail: str, remedy: str = "") -> None:
        """Note what is not there, and which only some need."""
        self.findings.append(Finding(topic, name, State.ABSENT, detail, remedy=remedy))

    def unknown(self, topic: str, name: str, detail: str) -> None:
        """Note what could not be asked."""
        self.findings.append(Finding(topic, name, State.UNKNOWN, detail))

    async def ask(self, topic: str, name: str, question: Awaitable[T]) -> T | None:
        """Return the answer; None where there is none, which is noted.

        Raises:
            NotFoundError: that is an answer, too.
        """
        try:
            return await question
        except NotFoundError:
            raise
        except ForbiddenError as error:
            self.unknown(topic, name, f"you may not ask for it ({error})")
        except (ApiError, TimeoutError) as error:
            self.unknown(topic, name, str(error) or "no answer in time")
        return None

    async def list(
        self, topic: str, name: str, resource: Resource, namespace: str | None = None, **how: Any
    ) -> list[Object] | None:
        """Return the objects of a kind; None where that cannot be asked, which is noted.

        There are none of a kind that the API server does not know.
        """
        try:
            found = await self.ask(topic, name, self.client.list(resource, namespace, **how))
        except NotFoundError:
            return []
        return None if found is None else found.items

    async def get_path(self, path: str) -> Object:
        """Return what the API server says at a path that is no object's, such as /version."""
        resource = Resource("", "v1", path.strip("/").replace("/", "-"), "", False)
        return await self.client.exchange(Call("get", resource, path))
