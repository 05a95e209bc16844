"""What the service is asked, what it answers, and how it refuses, in the words of Azure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer with a JSON body, or with bytes as they are."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """A request as it came.

    Attributes:
        kind: Such as "job.put", or "mlflow.runs.get".
        query: Without signatures.
        name: Job or compute that it is about.
        client: Client id of who asked; of a run's own requests, the name of the run.
        time: `time.monotonic()` at which it came.
        status: Of the answer; 0 where there was none yet, or the connection was closed instead.
        problem: What the service said against it.
    """

    method: str
    path: str
    kind: str
    query: dict[str, str]
    name: str
    time: float
    client: str = ""
    status: int = 0
    problem: str = ""


class RefusalError(Exception):
    """The service refuses a request.

    Args:
        status: HTTP status.
        code: Of the error.
        message: Of the error.
        inner: Codes of the errors inside, the outer ones first.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        inner: tuple[str, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.inner = status, code, inner
        self.headers = headers or {}

    def answer(self) -> Answer:
        """Return it as Azure Resource Manager says it."""
        error: Json = {"code": self.code, "message": str(self), "details": []}
        if self.inner:
            info: Json | None = None
            for code in reversed(self.inner):
                info = {"code": code, "innerError": info}
            error["additionalInfo"] = [{"type": "InnerError", "info": {"value": info}}]
        return Answer({"error": error}, self.status, self.headers)


def bad(message: str, *inner: str) -> RefusalError:
    """Return the refusal of a request that cannot be right."""
    return RefusalError(400, "UserError", message, inner=inner)


def missing(what: str) -> RefusalError:
    """Return the refusal of a request for what is not there."""
    return RefusalError(404, "UserError", f"{what} was not found.", inner=("NotFound",))
