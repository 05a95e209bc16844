"""The example plugin's backend with shorter or longer timeouts, for an operator process."""

from typing import ClassVar

from finetune_operator.backends.base import BackendContext, Limits
from remote_backend.http_backend import HttpBackend

HASTY_POLL_SECONDS = 0.25


class HastyBackend(HttpBackend):
    """The backend with timeouts for tests in real time."""

    limits: ClassVar[Limits] = Limits(submit=5.0, late_submit=5.0, unconfirmed_cancel=5.0)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, poll_seconds=HASTY_POLL_SECONDS, request_seconds=1.0)


class PatientBackend(HttpBackend):
    """The backend without a timeout in practice, so a test can count the requests."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, poll_seconds=HASTY_POLL_SECONDS, request_seconds=60.0)
