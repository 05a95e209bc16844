"""Errors of requests to an API server.

    KubeError
    ├── KubeConfigError         no cluster is configured, or its configuration cannot be read
    ├── NotLeadingError         a write that this replica may not make (any more)
    └── ApiError                the answer to one request; status, reason, message
        ├── NotFoundError       404
        ├── AlreadyExistsError  409 to a creation: the name is taken
        ├── ConflictError       409 otherwise: precondition failed (uid, resourceVersion)
        ├── GoneError           410: the resourceVersion or continue token is too old; list again
        ├── InvalidError        400, 422: the object will never be accepted as it is
        ├── ForbiddenError      403: RBAC, quota, admission; others may fix it
        ├── UnauthorizedError   401: the token has expired or is unknown, or there is none now
        ├── ThrottledError      429: wait for `retry_after` seconds
        └── UnavailableError    5xx, no answer in time, no connection

`retryable` says whether the same request can succeed later without anybody changing the object.
"""

from typing import ClassVar

from finetune_operator.errors import FineTuneError


class KubeError(FineTuneError):
    """The root of errors of a cluster."""


class KubeConfigError(KubeError):
    """No cluster is configured, or its configuration cannot be read."""


class NotLeadingError(KubeError):
    """This replica does not hold the Lease, so it may not write."""

    retryable = True


class ApiError(KubeError):
    """The API server's answer to a request that did not succeed.

    Attributes:
        status: HTTP status; 0 where there was no answer.
        reason: The server's word, such as `AlreadyExists`; a class name where there was no answer.
        message: The server's sentence.
        retry_after: Seconds the server asks to wait; None if it does not.
    """

    def __init__(
        self, status: int, reason: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFoundError(ApiError):
    """404: no such object, namespace or kind."""


class AlreadyExistsError(ApiError):
    """409 to a creation: an object of that name exists; read it to see whose it is."""


class ConflictError(ApiError):
    """409: the uid or resourceVersion in the precondition is not the object's any more."""

    retryable: ClassVar[bool] = True


class GoneError(ApiError):
    """410: the resourceVersion or the continue token is too old; list again."""

    retryable: ClassVar[bool] = True


class InvalidError(ApiError):
    """400 or 422: the object will never be accepted as it is."""


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission plugin; somebody else can fix it, so try again later."""


class UnauthorizedError(ApiError):
    """401: the credentials have expired or are unknown, or (status 0) there are none now."""

    retryable: ClassVar[bool] = True


class ThrottledError(ApiError):
    """429: too many requests, or an eviction that a disruption budget forbids now."""

    retryable: ClassVar[bool] = True


class UnavailableError(ApiError):
    """5xx, no answer in time, connection refused or lost; a write may have happened anyway."""

    retryable: ClassVar[bool] = True


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: ThrottledError,
}


def error_of(status: int, reason: str, message: str, retry_after: float | None = None) -> ApiError:
    """Return the error of the class that belongs to an HTTP status."""
    kind = _BY_STATUS.get(status, UnavailableError if status >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExistsError
    elif reason == "Expired":
        kind = GoneError
    return kind(status, reason, message, retry_after)
