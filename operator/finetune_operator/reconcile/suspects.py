"""Who holds an attempt back: what its rank 0's node has found, for the status and its Events. Pure.

Nothing follows from it: an attempt with suspects goes on, and `deadlines.hangSeconds` ends one that
hangs.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus, SuspectStatus
from finetune_operator.reconcile.conditions import rfc3339
from finetune_trainer.config import Progress, Suspect, SuspectCause

_LONGER = {
    SuspectCause.COMPUTE: "it computes longer",
    SuspectCause.DATA: "it waits longer for data",
    SuspectCause.CHECKPOINT: "it saves longer",
}
_MEANWHILE = {
    SuspectCause.DATA: " and waits for data",
    SuspectCause.CHECKPOINT: " and saves",
}


def with_suspects(
    status: FineTuneJobStatus, said: Progress, *, is_due: bool = False
) -> FineTuneJobStatus:
    """Return the status with whom the newest attempt suspects; unchanged if nobody is new or gone.

    What is known of the same ranks changes with each look: that is taken over where `is_due`.
    """
    found = [_suspect(one) for one in said.suspects]
    if not is_due and _who(found) == _who(status.suspects):
        return status
    return status.model_copy(update={"suspects": found})


def new_suspects(
    old: FineTuneJobStatus, new: FineTuneJobStatus
) -> Iterator[tuple[str, SuspectStatus]]:
    """Yield who is suspected now and was not before, and a name of that rank in its attempt."""
    known = {one.rank for one in old.suspects} if old.attempt == new.attempt else set()
    for one in new.suspects:
        if one.rank not in known:
            yield f"attempt {new.attempt} rank {one.rank}", one


def _who(suspects: list[SuspectStatus]) -> list[tuple[int, str]]:
    return sorted((one.rank, one.cause) for one in suspects)


def _suspect(one: Suspect) -> SuspectStatus:
    since = rfc3339(datetime.fromtimestamp(one.since, UTC))
    return SuspectStatus(
        rank=one.rank,
        node=one.node[:253],
        cause=one.cause.value,
        score=None if one.score is None else round(one.score, 2),
        since=since,
        message=f"since {since} {_sentence(one)}"[:1024],
    )


def _sentence(one: Suspect) -> str:
    who = f"rank {one.rank} on {one.node}"
    if one.score is not None:
        why = _LONGER.get(one.cause, "it does more")
        return f"{who} has been busy {one.score:.2f} times as long as the others, as {why}"
    text = f"{who} has stayed away from a collective in which the others wait"
    text += _MEANWHILE.get(one.cause, "")
    if one.process is not None:
        text += f"; its process is {one.process}"
    if one.evidence is not None:
        text += f"; its stacks are in {one.evidence} of the run directory"
    return text
