"""Every setting of the operator's process, in one typed place, read from its environment once.

The chart writes the same names. A variable with our prefix that is not a setting is refused, so
that a misspelt one is not silently without effect.
"""

import os
import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from finetune_operator.errors import FineTuneError

PREFIX = "FINETUNE_OPERATOR_"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class SettingsError(FineTuneError):
    """A variable of the environment cannot be used."""


class LogFormat(StrEnum):
    """Format of a line of the log."""

    TEXT = "text"
    JSON = "json"


def _listed(value: Any) -> Any:
    """Read `a,b` as two words."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseModel):
    """Settings; each is `FINETUNE_OPERATOR_` and its name in upper case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: str | None = Field(
        None, description="Kubeconfig; by default $KUBECONFIG or the pod's service account."
    )
    namespaces: Words = Field((), description="Namespaces served, by commas; empty serves all.")
    backends: Words = Field(
        (),
        description="Backends besides those of installed packages, as NAME=MODULE:CLASS, by "
        "commas.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        24,
        description="Jobs of one backend reconciled at once, and four of others; half as many more "
        "until all that were there at the start are reconciled.",
    )
    connections: Annotated[int, Field(ge=1, le=1024)] = Field(
        48, description="Requests to the API server at once, besides the watches."
    )
    request_seconds: Seconds = Field(20.0, description="Longest time for one request.")
    resync_seconds: Seconds = Field(
        300.0, description="A full LIST corrects what a watch has lost, after so long at most."
    )
    retry_seconds: Seconds = Field(0.25, description="Wait after the first failure of a job.")
    max_retry_seconds: Seconds = Field(30.0, description="Longest wait after a failure.")
    leader_election: bool = Field(
        True, description="Wait for a Lease; false only where there can be one process."
    )
    lease_name: str = Field("finetune-operator", description="Lease that the leader holds.")
    lease_namespace: str = Field(
        default_factory=_own_namespace, description="Its namespace; by default the pod's."
    )
    lease_seconds: Seconds = Field(
        15.0, description="A Lease not renewed for so long is taken over."
    )
    renew_deadline_seconds: Seconds = Field(
        10.0, description="A leader that could not renew for so long writes nothing any more."
    )
    renew_seconds: Seconds = Field(2.0, description="Time between two renewals.")
    identity: str = Field(
        default_factory=socket.gethostname, description="Name in the Lease; by default the host's."
    )
    health_host: str = Field("0.0.0.0", description="Address of /healthz, /readyz and /metrics.")
    health_port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        8080, description="Port of /healthz, /readyz and /metrics; 0 takes a free one."
    )
    stuck_seconds: Seconds = Field(
        300.0, description="A job or watch that stood still for so long makes /healthz fail."
    )
    log_format: LogFormat = Field(LogFormat.TEXT, description="text or json.")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")

    @model_validator(mode="after")
    def _deadlines_are_in_order(self) -> Self:
        if not self.renew_seconds < self.renew_deadline_seconds < self.lease_seconds:
            raise ValueError(
                "renew_seconds, renew_deadline_seconds and lease_seconds must each be longer than "
                f"the one before, and are {self.renew_seconds:g}, "
                f"{self.renew_deadline_seconds:g} and {self.lease_seconds:g}"
            )
        return self


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        SettingsError: a variable is not a setting, or its value is not usable; names all of them.
    """
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value
    }
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(one) for one in error.errors())) from error


def _sentence(error: Any) -> str:
    name = "".join(f"{PREFIX}{part}".upper() for part in error["loc"][:1])
    if error["type"] == "extra_forbidden":
        return f"{name} is not a setting; remove it or correct its name"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name} {error['input']!r}: {message[0].lower()}{message[1:]}" if name else message
