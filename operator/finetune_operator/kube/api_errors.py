"""Errors of requests to an API server.

    KubeError
    ├── KubeConfigError         no cluster is configured, or its configuration cannot be read
    ├── LargePageError          a page of a list with more bytes than allowed; `list` asks for less
    ├── NotLeadingError         a write by a replica that does not lead or no longer leads
    └── ApiError                an error response; status, reason, message
        ├── NotFoundError       404
        ├── AlreadyExistsError  409 to a creation: the name is taken
        ├── ConflictError       409 otherwise: precondition failed (uid, resourceVersion)
        ├── GoneError           410: the resourceVersion or continue token is too old; list again
        ├── InvalidError        400, 422: the object will never be accepted as it is
        ├── ForbiddenError      403: RBAC, quota, admission; others may fix it
        ├── UnauthorizedError   401: the token is expired or unknown; status 0: there is no token
        ├── ThrottledError      429: wait for `retry_after` seconds
        └── UnavailableError    5xx, timeout, no connection

`retryable` is true if the same request can succeed later although the object is unchanged.
"""

from typing import ClassVar

from finetune_operator.errors import FineTuneError


class KubeError(FineTuneError):
    """The root of errors of a cluster."""


class KubeConfigError(KubeError):
    """No cluster is configured, or its configuration cannot be read."""


class LargePageError(KubeError):
    """A page of a list has more bytes than allowed."""


class NotLeadingError(KubeError):
    """The replica does not hold the Lease, so it may not write."""

    retryable = True


class ApiError(KubeError):
    """A request that failed.

    Attributes:
        status: HTTP status; 0 if there was no response.
        reason: The server's reason, such as `AlreadyExists`; a class name if there was no response.
        message: The server's message.
        retry_after: Seconds to wait, if the server names them; else None.
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
    """409 to a creation: an object of that name exists; read it to check its owner."""


class ConflictError(ApiError):
    """409: the object no longer has the uid or resourceVersion in the precondition."""

    retryable: ClassVar[bool] = True


class GoneError(ApiError):
    """410: the resourceVersion or the continue token is too old; list again."""

    retryable: ClassVar[bool] = True


class InvalidError(ApiError):
    """400 or 422: the server will never accept this object."""


class ForbiddenError(ApiError):
    """403: RBAC, a quota or an admission plugin; an administrator can change it, so retry later."""


class UnauthorizedError(ApiError):
    """401: the credentials are expired or unknown; status 0: there are no credentials now."""

    retryable: ClassVar[bool] = True


class ThrottledError(ApiError):
    """429: too many requests, or an eviction that a disruption budget forbids now."""

    retryable: ClassVar[bool] = True


class UnavailableError(ApiError):
    """5xx, timeout, connection refused or lost; a write may have succeeded nevertheless."""

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
    """Return an error of the class for an HTTP status."""
    kind = _BY_STATUS.get(status, UnavailableError if status >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExistsError
    elif reason == "Expired":
        kind = GoneError
    return kind(status, reason, message, retry_after)
