"""The azureml backend with short waits, for an operator's process that a test kills."""

from dataclasses import replace
from typing import ClassVar

from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.azureml.polling import Poller
from finetune_operator.backends.base import BackendContext, Limits

BOUND_SECONDS = 8.0
"""A deleted job waits no longer for a late submit, or for a cancel that nobody confirms."""


class HastyBackend(AzureMLBackend):
    """Backend `hasty`; looks twenty times as often."""

    name: ClassVar[str] = "hasty"
    limits: ClassVar[Limits] = replace(
        AzureMLBackend.limits,
        submit=BOUND_SECONDS,
        late_submit=BOUND_SECONDS,
        unconfirmed_cancel=BOUND_SECONDS,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._looks = Poller(self._workspace_of, context.now, jitter=lambda: -9.5)
