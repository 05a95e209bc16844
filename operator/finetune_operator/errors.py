"""Every error the operator raises on purpose.

    FineTuneError
    ├── ManifestError            a manifest cannot be read or is refused; holds the problems
    ├── UnknownBackendError      no backend of that name is installed
    ├── BrokenBackendError       a backend's plugin cannot be imported or breaks its contract
    ├── StateError               the embedded API's file is no good (embedded/store.py)
    ├── KubeError                a cluster refuses, or cannot be reached (kube/api_errors.py)
    └── BackendError             a backend could not do what it was asked
        ├── AlreadyOwnedError    the thing to create exists and belongs to somebody else
        ├── NoSuchRankError      a log is asked for that no attempt of this size has
        └── TransientError       the same call may work later (retryable)
            └── NotCreatedError  an attempt does not exist, and what is in its way may pass

Whether to try again is a property of the class (`retryable`); the message is one sentence: what is
wrong, with the value, then what to do.
"""

from typing import ClassVar


class FineTuneError(Exception):
    """The root; a command prints its message and exits with 1.

    Attributes:
        retry_after: Seconds after which the same call may be made again; None where nobody said.
    """

    retryable: ClassVar[bool] = False
    is_absent: ClassVar[bool] = False
    """Whether it proves that the attempt which was to be created does not exist."""

    retry_after: float | None = None


class ManifestError(FineTuneError):
    """A manifest cannot be read or is refused."""


class UnknownBackendError(FineTuneError):
    """No backend of that name is installed; the message lists those that are."""


class BrokenBackendError(FineTuneError):
    """A backend's plugin cannot be imported or does not keep the contract."""


class BackendError(FineTuneError):
    """A backend could not do what it was asked."""


class AlreadyOwnedError(BackendError):
    """What was to be created exists and belongs to somebody else; the message names the owner."""

    is_absent = True


class NoSuchRankError(BackendError):
    """A log is asked for of a rank that the attempt does not have."""


class TransientError(BackendError):
    """The same call may work later.

    Args:
        message: One sentence.
        retry_after: Seconds that the service asks to wait; None if it does not.
    """

    retryable = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotCreatedError(TransientError):
    """An attempt was searched for and does not exist; what is in its way may pass."""

    is_absent = True
