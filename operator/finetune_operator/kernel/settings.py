"""Settings of the operator's process, read from its environment once.

The chart writes the same names. A variable with our prefix that is not a setting is refused, so
that a misspelt name does not go unnoticed.
"""

import os
import re
import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from finetune_operator.errors import FineTuneError

PREFIX = "FINETUNE_OPERATOR_"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class SettingsError(FineTuneError):
    """A variable of the environment cannot be used."""


class LogFormat(StrEnum):
    """Format of a line of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """Lowest level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def _in_capitals(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _as_namespace(value: str) -> str:
    """Refuse a name that is not a DNS label (RFC 1123), as namespaces need."""
    if len(value) > 63 or not _LABEL.fullmatch(value):
        raise ValueError(
            "is not a valid namespace name; use up to 63 of a-z, 0-9 and - between them"
        )
    return value


def _as_object_name(value: str) -> str:
    """Refuse a name that is not a DNS subdomain (RFC 1123), as Leases need."""
    if len(value) > 253 or not all(map(_LABEL.fullmatch, value.split("."))):
        raise ValueError("is not a valid Lease name; use a-z, 0-9, and - or . between them")
    return value


def _listed(value: Any) -> Any:
    """Split `a,b` into two words."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
NamespaceName = Annotated[str, AfterValidator(_as_namespace)]
Namespaces = Annotated[tuple[NamespaceName, ...], BeforeValidator(_listed)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseModel):
    """Settings of the operator, read from `FINETUNE_OPERATOR_` and the name in upper case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: str | None = Field(
        None, description="Kubeconfig; by default $KUBECONFIG or the pod's service account."
    )
    namespaces: Namespaces = Field(
        (), description="Namespaces to serve, separated by commas; empty means all."
    )
    backends: Words = Field(
        (),
        description="Further backends, as NAME=MODULE:CLASS, separated by commas.",
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        24,
        description="Jobs of a backend that are reconciled at once; four more for other backends.",
    )
    connections: Annotated[int, Field(ge=1, le=1024)] = Field(
        48, description="Concurrent requests to the API server, without watches."
    )
    request_seconds: Seconds = Field(20.0, description="Timeout of a request.")
    resync_seconds: Seconds = Field(
        300.0,
        description="Longest time between two full lists, which correct caches after lost events.",
    )
    retry_seconds: Seconds = Field(0.25, description="Wait after the first failure of a job.")
    max_retry_seconds: Seconds = Field(30.0, description="Longest wait after a failure.")
    leader_election: bool = Field(
        True, description="Elect a leader by a Lease; false only if a single process can run."
    )
    lease_name: Annotated[str, AfterValidator(_as_object_name)] = Field(
        "finetune-operator", description="Lease that the leader holds."
    )
    lease_namespace: NamespaceName = Field(
        default_factory=_own_namespace, description="Namespace of the Lease; by default the pod's."
    )
    lease_seconds: Seconds = Field(
        15.0, description="Time without renewal after which a standby takes the Lease over."
    )
    renew_deadline_seconds: Seconds = Field(
        10.0, description="Time without renewal after which a leader stops writing."
    )
    renew_seconds: Seconds = Field(2.0, description="Time between two renewals.")
    identity: str = Field(
        default_factory=socket.gethostname, description="Name in the Lease; by default the host's."
    )
    pod_name: str = Field("", description="Name of the process's pod, for Events about it.")
    pod_uid: str = Field("", description="Uid of the pod; empty posts no Events.")
    health_host: str = Field("0.0.0.0", description="Address of /healthz, /readyz and /metrics.")
    health_port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        8080, description="Port of /healthz, /readyz and /metrics; 0 chooses a free port."
    )
    stuck_seconds: Seconds = Field(
        300.0, description="Time after which a stuck job or watch makes /healthz fail."
    )
    log_format: LogFormat = Field(LogFormat.TEXT, description="text or json.")
    log_level: Annotated[LogLevel, BeforeValidator(_in_capitals)] = Field(
        LogLevel.INFO, description="DEBUG, INFO, WARNING or ERROR."
    )

    @model_validator(mode="after")
    def _deadlines_are_in_order(self) -> Self:
        if not self.renew_seconds < self.renew_deadline_seconds < self.lease_seconds:
            raise ValueError(
                f"{PREFIX}RENEW_SECONDS, {PREFIX}RENEW_DEADLINE_SECONDS and {PREFIX}LEASE_SECONDS "
                f"are {self.renew_seconds:g}, {self.renew_deadline_seconds:g} and "
                f"{self.lease_seconds:g}; make each longer than the previous one, such as 2, 10, 15"
            )
        return self

    @model_validator(mode="after")
    def _longest_wait_is_no_shorter_than_the_first(self) -> Self:
        if self.retry_seconds > self.max_retry_seconds:
            raise ValueError(
                f"{PREFIX}RETRY_SECONDS is {self.retry_seconds:g} and {PREFIX}MAX_RETRY_SECONDS "
                f"{self.max_retry_seconds:g}; make the second no shorter than the first"
            )
        return self


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        SettingsError: A variable is not a setting, or its value is invalid; lists all of them.
    """
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value
    }
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(detail) for detail in error.errors())) from error


def usage() -> str:
    """Return all variables with their meanings, for `finetune-operator --help`."""
    lines = ["environment variables:"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default_factory or not field.default else f" ({field.default})"
        lines += [f"  {PREFIX}{name.upper()}{default}", f"      {field.description}"]
    return "\n".join(lines)


def _sentence(error: Any) -> str:
    name = "".join(f"{PREFIX}{part}".upper() for part in error["loc"][:1])
    if error["type"] == "extra_forbidden":
        return f"{name} is not a setting; remove it or correct its name"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name} {error['input']!r}: {message[0].lower()}{message[1:]}" if name else message
