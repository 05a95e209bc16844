"""The service's API: its runs, its errors, and the four requests that the backend sends."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

JOB_UID = "job-uid"
"""Tag that holds the uid of the job that a run belongs to."""


class RunState(StrEnum):
    """State of a run."""

    QUEUED = "Queued"
    RUNNING = "Running"
    CANCELLING = "Cancelling"  # a cancel was accepted, and its processes may still run
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


_FINAL = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELED})


@dataclass(frozen=True)
class RemoteRun:
    """A run in a response.

    Attributes:
        name: Unique, also among finished runs: the service never reuses a name.
        tags: Set by the client that created the run.
        created: Time of creation.
        state: Present state.
        moves: How often the service has moved the run to another machine.
        cancel_until: When a cancelled run is killed; None if no client has cancelled it.
        error: Reason of a failure, in one word.
        lines: Log lines of rank 0.
        outputs: URIs of the exported artifacts.
    """

    name: str
    tags: Mapping[str, str]
    created: datetime
    state: RunState = RunState.QUEUED
    moves: int = 0
    cancel_until: datetime | None = None
    error: str = ""
    lines: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether no process of the run can be alive."""
        return self.state in _FINAL


class ServiceError(Exception):
    """An error response, or a failed connection.

    Attributes:
        status: HTTP status; 0 if the service cannot be reached.
        retry_after: Seconds to wait; None if the response has no Retry-After header.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ServiceClient(Protocol):
    """Sends the four requests. Each raises `ServiceError` on an error response."""

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run; None if it does not exist."""

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run; 409 if the name is taken."""

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Have a run save a checkpoint and stop; it is killed at `until`."""
