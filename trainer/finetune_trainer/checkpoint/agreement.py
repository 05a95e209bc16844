"""Do one piece of work on every rank, and let every rank know whether all of it succeeded.

The store calls it for each stage of a save or a restore. A rank that failed alone would leave
the others waiting in the next collective; here all of them raise instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class RankError(Exception):
    """At least one rank failed; the message names each with its reason."""


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    failure: str | None


def on_every_rank(group: "ProcessGroup | None", work: Callable[[], T]) -> list[T]:
    """Call `work` here and on all other ranks of `group`; return what each returned, by rank.

    Without a group it is a plain call. It is a collective: every rank must come here.

    Raises:
        RankError: `work` raised on at least one rank; raised on all of them alike.
    """
    outcome = _attempt(work)
    outcomes = [outcome] if group is None else _gather(group, outcome)
    failures = [f"rank {rank}: {o.failure}" for rank, o in enumerate(outcomes) if o.failure]
    if failures:
        raise RankError("; ".join(failures))
    return [o.value for o in outcomes]  # type: ignore[misc]  # None is a T where nothing failed


def describe(error: BaseException) -> str:
    """Return the reason in few words: the system's own for an OSError, else type and message."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"


def _attempt(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(work(), None)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return _Outcome(None, describe(error))


def _gather(group: "ProcessGroup", outcome: _Outcome[T]) -> list[_Outcome[T]]:
    import torch.distributed as dist

    gathered: list[_Outcome[T]] = [outcome] * dist.get_world_size(group)
    dist.all_gather_object(gathered, outcome, group=group)
    return gathered
