"""Run a function on every rank, and raise on every rank if any of them failed.

The store and its writer use it for each stage of a restore or a save. If one rank failed alone,
the others would block in the next collective.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from finetune_trainer import errors
from finetune_trainer.errors import TrainerError
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT
from finetune_trainer.waiting import Waiting
from finetune_trainer.world import gather_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


_CLASSES: dict[str, type[TrainerError]] = {
    name: one
    for name, one in vars(errors).items()
    if isinstance(one, type) and issubclass(one, TrainerError)
}


class RankError(Exception):
    """At least one rank failed; the message names each failed rank with its reason."""


def on_every_rank(
    group: "ProcessGroup | None",
    work: Callable[[], T],
    kind: Any,
    waiting: Waiting | None = None,
) -> list[T]:
    """Call `work` on all ranks of `group`, and return the results by rank; a collective.

    `kind` is the type of the results, see `gather_values`. Without a group this is a plain call.
    Every rank must make the call within the group's timeout, or for as long as they wait for each
    other in `waiting`.

    Raises:
        RankError: `work` raised on at least one rank; raised on every rank.
        LostRankError: a rank that the others waited for is gone.
    """
    outcome: tuple[T | None, str | None]  # result, reason of the failure
    try:
        outcome = work(), None
    except Exception as error:  # any error must reach the other ranks
        outcome = None, describe(error)
    if waiting is not None:
        waiting.liveness_barrier(CHECKPOINT)
    outcomes = gather_values(group, outcome, tuple[kind | None, str | None])
    failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
    if failures:
        raise RankError("; ".join(failures))
    return [cast(T, value) for value, _ in outcomes]


def do_nothing() -> None:
    """Do nothing while rank 0 works."""


def on_rank_0(
    group: "ProcessGroup | None",
    rank: int,
    work: Callable[[], T],
    kind: Any,
    beside: Callable[[], None] = do_nothing,
    waiting: Waiting | None = None,
) -> T:
    """Call `work` on rank 0 and `beside` on the others; return the result of `work` on every rank.

    `kind` is the type of the result, see `gather_values`.

    Raises:
        TrainerError: `work` raised it. Its class, and thus the exit code, is the same on every
            rank.
        RankError: `work` or `beside` raised another error.
    """

    def attempt() -> tuple[T | None, tuple[str, str] | None]:
        if rank != 0:
            beside()
            return None, None
        try:
            return work(), None
        except TrainerError as error:
            return None, (_class_name(error), str(error))

    kinds = tuple[kind | None, tuple[str, str] | None]
    result, failure = on_every_rank(group, attempt, kinds, waiting)[0]
    if failure is not None:
        name, message = failure
        raise _CLASSES.get(name, TrainerError)(message)
    return cast(T, result)


def _class_name(error: TrainerError) -> str:
    return next(one.__name__ for one in type(error).__mro__ if one.__name__ in _CLASSES)


def describe(error: BaseException) -> str:
    """Return a short reason: the system's message for an OSError, otherwise type and message."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
