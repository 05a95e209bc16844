"""Faults that a test asks for: of a kind of request, for the next few or until cleared."""

import math
import threading
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from azureml_service.answers import Answer, RefusalError

_CODES = {401: "AuthenticationFailed", 403: "AuthorizationFailed", 429: "TooManyRequests"}


@dataclass(frozen=True)
class Fault:
    """What happens to requests.

    A fault with nothing but a delay answers late; what is not carried out before the delay is
    carried out after it, also if the client has given up meanwhile.

    Attributes:
        kind: Of the requests; a pattern such as "job.put", "mlflow.*" or "*".
        name: Of the job or compute that they are about; a pattern.
        delay: Seconds; infinite means until the fault is cleared.
        status: Of the answer that says it instead; None for the real answer.
        retry_after: Of that answer, in seconds.
        is_lost: Whether the connection is closed instead of an answer.
        is_carried_out: Whether the request is carried out before all this.
        is_late: Whether the connection is closed at once, and the request carried out after the
            delay.
        times: How many requests; None means until cleared.
    """

    kind: str
    name: str = "*"
    delay: float = 0.0
    status: int | None = None
    retry_after: float | None = None
    is_lost: bool = False
    is_carried_out: bool = False
    is_late: bool = False
    times: int | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the request gets no real answer."""
        return self.is_lost or self.status is not None

    def refusal(self) -> Answer:
        """Return the answer with its status."""
        assert self.status is not None, "it has no answer of its own"
        wait = {} if self.retry_after is None else {"Retry-After": f"{self.retry_after:g}"}
        code = _CODES.get(self.status, "ServiceError")
        return RefusalError(self.status, code, f"A fault of {self.kind}.", headers=wait).answer()


class Faults:
    """The faults that are asked for now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._num_cleared = 0

    def add(self, fault: Fault) -> None:
        """Have it; one that was asked for earlier comes first."""
        with self._changed:
            self._faults.append(fault)

    def clear(self) -> None:
        """Have none any more, and let go who waits for that."""
        with self._changed:
            self._faults.clear()
            self._num_cleared += 1
            self._changed.notify_all()

    def take(self, kind: str, name: str) -> Fault | None:
        """Return the fault of a request that has come."""
        with self._changed:
            for index, fault in enumerate(self._faults):
                if fnmatchcase(kind, fault.kind) and fnmatchcase(name, fault.name):
                    if fault.times == 1:
                        del self._faults[index]
                    elif fault.times is not None:
                        self._faults[index] = replace(fault, times=fault.times - 1)
                    return fault
        return None

    def wait(self, fault: Fault) -> None:
        """Wait as long as the fault says."""
        seconds = None if math.isinf(fault.delay) else fault.delay
        with self._changed:
            before = self._num_cleared
            self._changed.wait_for(lambda: self._num_cleared != before, seconds)
