"""Why nothing is done about a job: what its status says, and what somebody must fix."""

import logging

from finetune_operator.errors import FineTuneError, UnknownBackendError
from finetune_operator.kernel.informer import NotShown
from finetune_operator.kernel.jobs import JobView
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.reconcile.conditions import Reason
from finetune_operator.reconcile.decide import Rejection

log = logging.getLogger(__name__)

_STAYS = (
    "; the job stays until its attempt has ended. Fix that, or make sure that nothing of the "
    f"attempt runs, and then remove the finalizer {FINALIZER}"
)


def unseen(view: JobView, missing: NotShown) -> Rejection:
    """Return that the API server does not show what runs for a job."""
    text = (
        f"spec.backend.type {view.backend}: the operator cannot see what runs in this namespace "
        f"({missing.message}); {missing.cure}{_STAYS if view.is_deleted else ''}"
    )
    return Rejection(Reason.BACKEND_FAILED, text)


def unreadable(view: JobView, error: FineTuneError) -> Rejection:
    """Return why an attempt cannot be observed, and log it."""
    log.warning("attempt cannot be observed", extra={"job": str(view.key), "error": error})
    return Rejection(_reason_of(error), str(error))


def endless(error: FineTuneError) -> Rejection:
    """Return why a job that is deleted stays."""
    return Rejection(_reason_of(error), f"{error}{_STAYS}")


def _reason_of(error: FineTuneError) -> Reason:
    is_missing = isinstance(error, UnknownBackendError)
    return Reason.BACKEND_NOT_FOUND if is_missing else Reason.BACKEND_FAILED
