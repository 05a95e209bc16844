"""Sends requests to Azure ML in threads, with timeouts and a budget.

It never retries. A request that may succeed later raises a `TransientError`, and the budget obeys
the service's `Retry-After`.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from finetune_operator.backends.azureml.sdk import (
    Json,
    RefusedError,
    Sdk,
    credential,
    load,
    translated_errors,
)
from finetune_operator.backends.base import Services
from finetune_operator.backends.budget import Budget, Priority, pace
from finetune_operator.errors import TransientError

T = TypeVar("T")

REQUESTS_PER_SECOND = "FINETUNE_AZUREML_REQUESTS_PER_SECOND"  # variable: maximum for a workspace
_LOAD_SECONDS = 60.0
_CALL_SECONDS = 25.0  # a call that was abandoned after this time does not send further requests
_LAST = Priority.READ
_READS_AT_ONCE, _READS_OF_ONE = (
    4,
    2,
)  # for all workspaces, and for each; the other threads stay free for writes


@dataclass(frozen=True)
class RawJob:
    """A job in Azure ML.

    Attributes:
        status: Its raw state, such as `Preparing`.
        tags: Tags of the job; its run's tags may be newer.
        url: Its page in Studio.
        created: When it was created, if reported.
        nodes: Number of nodes.
        outputs: URI of each output, by name.
    """

    id: str
    name: str
    status: str
    tags: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    created: datetime | None = None
    nodes: int = 1
    outputs: Mapping[str, str] = field(default_factory=dict)


class Azure:
    """Every workspace, each accessed with the identities that profiles name.

    Args:
        environ: Identifies the operator, and limits the request rate of a workspace.

    Attributes:
        reading: Semaphore that each read holds while it uses a thread.

    Raises:
        ValueError: A variable of the environment is invalid.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._per_second = pace(environ, REQUESTS_PER_SECOND, "2")
        self.reading = asyncio.Semaphore(_READS_AT_ONCE)
        self._services: Services | None = None
        self._budgets: dict[str, Budget] = {}
        self._workspaces: dict[tuple[str, str | None], Workspace] = {}
        self._credentials: dict[str | None, Any] = {}
        self._making = threading.Lock()
        self._thread = threading.local()
        self._is_loaded = False

    def start(self, services: Services) -> None:
        """Allow requests from now on."""
        self._services = services

    def close(self) -> None:
        """Stop sending requests."""
        self._services = None

    def workspace(self, workspace_id: str, client_id: str | None) -> "Workspace":
        """Return a workspace whose requests use the identity with this client id."""
        lower = workspace_id.lower()  # Azure ignores case
        if (lower, client_id) not in self._workspaces:
            budget = self._budgets.setdefault(lower, Budget(self._per_second, _READS_OF_ONE))
            self._workspaces[lower, client_id] = Workspace(self, workspace_id, client_id, budget)
        return self._workspaces[lower, client_id]

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread and return its result.

        Raises:
            BackendError: There is no response, or an error response.
            NotLeadingError: The call writes, and this process may not.
        """
        if not self._is_loaded:
            await self._open().run_blocking(load, _LOAD_SECONDS)
            self._is_loaded = True
        until = time.monotonic() + _CALL_SECONDS

        def work() -> T:
            self._thread.until = until
            with translated_errors():
                return call()

        return await self._open().run_blocking(work, _CALL_SECONDS)

    def sdk(self, workspace_id: str, client_id: str | None) -> Sdk:
        """Return the SDK's clients of a workspace; call it in a thread."""
        with self._making:
            if client_id not in self._credentials:
                login = credential(self._environ, client_id, self._check)
                self._credentials[client_id] = login
            return Sdk(workspace_id, self._credentials[client_id], self._check)

    def forget_credential(self, client_id: str | None) -> None:
        """Create a new credential when the identity is needed next."""
        with self._making:
            self._credentials.pop(client_id, None)

    def _check(self, is_write: bool) -> None:
        """Admit a request of this thread, or raise an error."""
        services = self._open()
        if time.monotonic() > self._thread.until:
            raise TransientError("the request was abandoned before it was sent")
        if is_write:
            services.check_may_write()

    def _open(self) -> Services:
        if self._services is None:
            raise TransientError("the backend is closed")
        return self._services


class Workspace:
    """A workspace with one identity; every request waits for its turn in the budget.

    Each verb raises TransientError if a retry may succeed, RefusedError if a person must change
    something, and NotLeadingError if it writes and this process may not.

    Args:
        azure: Runs its calls.
        id: Azure's id of the workspace.
        client_id: Client id of the identity; None for the operator's own.
        budget: Shared by all identities that access this workspace.
    """

    def __init__(self, azure: Azure, id: str, client_id: str | None, budget: Budget) -> None:
        self.id = id
        self._azure = azure
        self.client_id = client_id
        self._budget = budget
        self._finding = asyncio.Lock()
        self._client: Sdk | None = None
        self._base = ""

    async def job(self, name: str, priority: Priority = Priority.READ) -> RawJob | None:
        """Return a job, or None if it does not exist; one GET."""
        try:
            return _raw(await self.ask(lambda sdk: sdk.ml.jobs.get(name), priority))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, job: Mapping[str, Any]) -> RawJob:
        """Create a job that is written as for the CLI; one PUT."""
        return _raw(await self.ask(lambda sdk: sdk.create(job), Priority.WRITE))

    async def cancel(self, name: str) -> None:
        """Cancel a job; one POST, whose response comes long before the job has ended."""
        await self.ask(lambda sdk: sdk.ml.jobs.begin_cancel(name, polling=False), Priority.WRITE)

    async def get(self, path: str, params: Json | None = None, priority: Priority = _LAST) -> Json:
        """Read from the data plane at a path, in which `{ws}` stands for the workspace."""
        url = await self._url(path)
        return await self.ask(lambda sdk: sdk.send("GET", url, params), priority)

    async def post(self, path: str, body: Json) -> Json:
        """Write to the data plane at a path, and return the response."""
        url = await self._url(path)
        return await self.ask(lambda sdk: sdk.send("POST", url, body=body), Priority.WRITE)

    async def get_range(
        self, url: str, start: int, length: int, priority: Priority = _LAST
    ) -> bytes:
        """Read a byte range from a signed URL, like `Sdk.read`; exempt from the budget."""
        async with self._budget.held(priority), self._azure.reading:
            return await self._azure.run(lambda: self._sdk().read(url, start, length))

    async def ask(self, call: Callable[[Sdk], T], priority: Priority) -> T:
        """Wait for a turn in the budget, then return the result of `call`, one request."""
        async with self._budget.held(priority), AsyncExitStack() as stack:
            if self._client is None:  # otherwise turns would accumulate until the SDK is imported
                await self._azure.run(lambda: self._sdk().ml)
            await self._budget.turn(priority)
            if priority is not Priority.WRITE:
                await stack.enter_async_context(self._azure.reading)
            try:
                return await self._azure.run(lambda: call(self._sdk()))
            except TransientError as error:
                if error.retry_after is not None:
                    error.retry_after = self._budget.hold(error.retry_after)
                raise
            except RefusedError as error:
                if error.status == 401:  # otherwise the credential would retain its token
                    self._client = None
                    self._azure.forget_credential(self.client_id)
                raise

    def _sdk(self) -> Sdk:
        self._client = client = self._client or self._azure.sdk(self.id, self.client_id)
        return client  # the loop may have dropped the other meanwhile

    async def _url(self, path: str) -> str:
        """Return the URL of a data-plane path; the workspace reports the host once."""
        async with self._finding:  # a write may wait for this, so reads must not go first
            if not self._base:
                name, first = self.id.rpartition("/")[2], Priority.WRITE
                url = (await self.ask(lambda sdk: sdk.ml.workspaces.get(name), first)).discovery_url
                self._base = await self.ask(lambda sdk: json.loads(sdk.read(url))["api"], first)
        return self._base.rstrip("/") + path.replace("{ws}", self.id)


def _raw(job: Any) -> RawJob:
    outputs = {name: one.path for name, one in (job.outputs or {}).items() if one.path}
    return RawJob(
        job.id,
        job.name,
        str(getattr(job.status, "value", job.status)),  # the SDK returns an unknown state as text
        dict(job.tags or {}),
        job.studio_url or "",
        job.creation_context.created_at if job.creation_context else None,
        (job.resources.instance_count if job.resources else None) or 1,
        outputs,
    )
