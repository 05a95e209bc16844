"""Every error that the operator raises deliberately.

    FineTuneError
    ├── ManifestError            a manifest cannot be read or is refused; has the problems
    ├── UnknownBackendError      no backend of that name is installed
    ├── BrokenBackendError       a backend's plugin cannot be imported or breaks its contract
    ├── CatalogueError           a GPU size or a file of prices cannot be used
    ├── StateError               the embedded API's file is invalid (embedded/store.py)
    ├── KubeError                a cluster refuses, or cannot be reached (kube/api_errors.py)
    └── BackendError             a backend could not do its work
        ├── AlreadyOwnedError    the object to create exists and has another owner
        ├── NoSuchRankError      the attempt has no rank of the requested log
        ├── NoLogYetError        the rank of the requested log has not started
        └── TransientError       a retry may succeed (retryable)
            └── NotCreatedError  an attempt does not exist, and the obstacle may pass

The class determines whether to retry (`retryable`). The message is one sentence: the fault, with
the value, then the remedy.
"""

from typing import ClassVar


class FineTuneError(Exception):
    """Root of the errors; a command prints its message and exits with 1.

    Attributes:
        retry_after: Seconds after which to retry; None if unknown.
    """

    retryable: ClassVar[bool] = False
    is_absent: ClassVar[bool] = False
    """Whether the error proves that the attempt to be created does not exist."""

    retry_after: float | None = None


class ManifestError(FineTuneError):
    """A manifest cannot be read or is refused."""


class UnknownBackendError(FineTuneError):
    """No backend of that name is installed; the message lists the installed ones."""


class BrokenBackendError(FineTuneError):
    """A backend's plugin cannot be imported or does not implement the contract."""


class CatalogueError(FineTuneError):
    """A GPU size is unknown or retired, or a file of prices is invalid."""


class BackendError(FineTuneError):
    """A backend could not do its work."""


class AlreadyOwnedError(BackendError):
    """The object to create exists and has another owner, whom the message names."""

    is_absent = True


class NoSuchRankError(BackendError):
    """The attempt does not have the rank whose log was requested."""


class NoLogYetError(BackendError):
    """The rank whose log was requested has not started."""


class TransientError(BackendError):
    """A retry may succeed.

    Args:
        message: One sentence.
        retry_after: Seconds that the service asks to wait; None if it does not.
    """

    retryable = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotCreatedError(TransientError):
    """An attempt was searched for and does not exist; the obstacle may pass."""

    is_absent = True
