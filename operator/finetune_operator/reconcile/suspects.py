"""Records suspects, the ranks that slow an attempt down, in status and Events. Pure.

The node of rank 0 finds them. They cause no action: the attempt continues, and only
`deadlines.hangSeconds` ends an attempt that hangs.
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
    status: FineTuneJobStatus, report: Progress, *, is_due: bool = False
) -> FineTuneJobStatus:
    """Return the status with the suspects of the newest attempt.

    The status is unchanged if the suspected ranks are the same, unless `is_due`: the details of a
    suspect change with each report.
    """
    found = [_suspect(suspect) for suspect in report.suspects]
    if not is_due and _identities(found) == _identities(status.suspects):
        return status
    return status.model_copy(update={"suspects": found})


def new_suspects(
    old: FineTuneJobStatus, new: FineTuneJobStatus
) -> Iterator[tuple[str, SuspectStatus]]:
    """Yield each new suspect, with a name of its rank in the attempt."""
    known = {suspect.rank for suspect in old.suspects} if old.attempt == new.attempt else set()
    for suspect in new.suspects:
        if suspect.rank not in known:
            yield f"attempt {new.attempt} rank {suspect.rank}", suspect


def _identities(suspects: list[SuspectStatus]) -> list[tuple[int, str]]:
    return sorted((suspect.rank, suspect.cause) for suspect in suspects)


def _suspect(suspect: Suspect) -> SuspectStatus:
    since = rfc3339(datetime.fromtimestamp(suspect.since, UTC))
    return SuspectStatus(
        rank=suspect.rank,
        node=suspect.node[:253],
        cause=suspect.cause.value,
        score=None if suspect.score is None else round(suspect.score, 2),
        since=since,
        message=f"since {since} {_sentence(suspect)}"[:1024],
    )


def _sentence(suspect: Suspect) -> str:
    rank = f"rank {suspect.rank} on {suspect.node}"
    if suspect.score is not None:
        why = _LONGER.get(suspect.cause, "it has more work")
        return f"{rank} has been busy {suspect.score:.2f} times as long as the others: {why}"
    text = f"{rank} has not joined a collective in which the others wait"
    text += _MEANWHILE.get(suspect.cause, "")
    if suspect.process is not None:
        text += f"; its process is {suspect.process}"
    if suspect.evidence is not None:
        text += f"; its stacks are in {suspect.evidence} of the run directory"
    return text
