"""Do one piece of work on every rank, and let every rank know whether all of it succeeded.

The store and its writer call it for each stage of a restore or a save. A rank that failed alone
would leave the others waiting in the next collective; here all of them raise instead.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from finetune_trainer.errors import TrainerError
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT
from finetune_trainer.waiting import Waiting
from finetune_trainer.world import gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class RankError(Exception):
    """At least one rank failed; the message names each with its reason."""


def on_every_rank(
    group: "ProcessGroup | None", work: Callable[[], T], waiting: Waiting | None = None
) -> list[T]:
    """Call `work` here and on all other ranks of `group`; return what each returned, by rank.

    Without a group it is a plain call. It is a collective: every rank must come here, in time for
    the group unless they wait for each other in `waiting`.

    Raises:
        RankError: `work` raised on at least one rank; raised on all of them alike.
        LostRankError: a rank is gone that the others waited for.
    """
    outcome: tuple[T | None, str | None]  # what it returned, why it failed
    try:
        outcome = work(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        outcome = None, describe(error)
    if waiting is not None:
        waiting.meet(CHECKPOINT)
    outcomes = gather_objects(group, outcome)
    failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
    if failures:
        raise RankError("; ".join(failures))
    return [cast(T, value) for value, _ in outcomes]


def do_nothing() -> None:
    """Leave rank 0 alone."""


def on_rank_0(
    group: "ProcessGroup | None",
    rank: int,
    work: Callable[[], T],
    beside: Callable[[], None] = do_nothing,
    waiting: Waiting | None = None,
) -> T:
    """Call `work` on rank 0 and `beside` on the others; return what `work` did, on every rank.

    Raises:
        TrainerError: that of `work`; it keeps its class, and with it the exit code, on every rank.
        RankError: anything else that was raised.
    """

    def try_it() -> T | TrainerError | None:
        if rank != 0:
            beside()
            return None
        try:
            return work()
        except TrainerError as error:
            return error

    result = on_every_rank(group, try_it, waiting)[0]
    if isinstance(result, TrainerError):
        raise result
    return cast(T, result)


def describe(error: BaseException) -> str:
    """Return the reason in few words: the system's own for an OSError, else type and message."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
