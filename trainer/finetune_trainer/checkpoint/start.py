"""Resolve `resumeFrom` to a checkpoint, and prepare the folder for new checkpoints.

The store calls it on rank 0 before the first step, and before any other write to the folder.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.commit import Confirm, Fingerprint, Lineage, Manifest
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.claims.enter import Wanted
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import CheckpointConfig, CheckpointRef, JobRef
from finetune_trainer.errors import CheckpointError, ConfigError


class Start(NamedTuple):
    """The starting point, and the last and best checkpoints in the ledger."""

    lineage: Lineage
    source: tuple[Path, Manifest] | None
    last: CheckpointRef | None
    best: CheckpointRef | None


def prepare_start(
    root: Path,
    config: CheckpointConfig,
    fingerprint: Fingerprint,
    fence: Fence,
    warn: Callable[[str], None],
    confirm: Confirm,
    held_out: str | None = None,
) -> Start:
    """Choose the starting checkpoint, and prepare the folder for the next ones.

    Leftovers of a killed process are deleted. Checkpoints of later steps stay and are ignored from
    now on; the new lineage is recorded in the folder.

    Args:
        root: The folder of all checkpoints.
        config: Names the checkpoint to resume from.
        fingerprint: Fingerprint of this training; the checkpoint must have the same one.
        fence: Proves that this process owns `root`.
        warn: Receives a sentence for each anomaly that does not prevent the start.
        confirm: Returns files that need not be read here.
        held_out: Fingerprint of the held-out rows, by which losses can be compared.

    Raises:
        ConfigError: the folder contains checkpoints of another job, or the checkpoint to start
            from is missing or was written with another model, method, data set or order.
        CheckpointError: the named checkpoint is damaged.
    """
    wanted, claim, _ = fence.holding(root)
    _refuse_another_job(root, wanted)
    fence.check()
    commit.remove_leftovers(root, claim)
    source = _choose(root, config, wanted.job, warn, confirm)
    if source is not None:
        _refuse_foreign(*source, wanted, config)
        _refuse_other_training(*source, wanted, fingerprint)
    step = source[1].step if source else 0
    lineage, later = commit.begin_lineage(root, claim, step)
    if later:
        warn(
            f"training starts from step {step}; later checkpoints in {root} are ignored: "
            f"{', '.join(later)}; delete them if they are not needed"
        )
    refs = commit.ledger(root, lineage, held_out)
    last = next((ref for ref in refs if ref.step == step), None)
    return Start(lineage, source, last, best(refs))


def recorded(config: CheckpointConfig, job: JobRef) -> Fingerprint | None:
    """Return the fingerprint of the checkpoint that `job` will resume from; None without any.

    Only manifests are read, so the caller can use the fingerprint before it loads the model.
    """
    found = []
    if config.resume_from == "auto" or config.is_continued:
        writer = _writer(config, job)
        present = commit.manifests(Path(config.dir).absolute())
        found = [one for one in present if writer in (None, one[1].job.identity)][:1]
    if config.resume_from not in ("auto", "none"):
        folder = Path(config.resume_from).absolute()
        with suppress(CheckpointError):  # `prepare_start` will raise it
            found.append((folder, commit.read_manifest(folder)))
    newest = max(found, key=lambda one: one[1].step, default=None)
    return newest[1].fingerprint if newest else None


def job_of_checkpoints(root: Path) -> JobRef | None:
    """Return the job that wrote the newest checkpoint in `root`; None without any."""
    return next((manifest.job for _, manifest in commit.manifests(root)), None)


def _refuse_another_job(root: Path, wanted: Wanted) -> None:
    """Refuse a folder with checkpoints of another job, regardless of `resumeFrom`.

    Resuming from them would train the other job's weights, and this job's retention would delete
    them.
    """
    for folder, manifest in commit.manifests(root):
        owner, job = manifest.job, wanted.job
        if not wanted.may_follow(owner):
            raise ConfigError(
                f"spec.checkpoint.uri {root} contains {folder.name} of the job "
                f"{owner.namespace}/{owner.name} (uid {owner.uid}), not of this one (uid "
                f"{job.uid}); set another spec.checkpoint.uri, and to start from that checkpoint "
                f"on purpose also spec.checkpoint.resumeFrom file://{folder} and "
                "spec.checkpoint.allowForeign true"
            )


def _refuse_foreign(
    folder: Path, manifest: Manifest, wanted: Wanted, config: CheckpointConfig
) -> None:
    """Refuse a checkpoint of another job, unless the job takes over or foreign ones are allowed."""
    owner = manifest.job
    if wanted.may_follow(owner) or config.allow_foreign:
        return
    is_namesake = (owner.namespace, owner.name) == (wanted.job.namespace, wanted.job.name)
    take_over = " (spec.takeOver true makes that job's work this one's)" if is_namesake else ""
    raise ConfigError(
        f"spec.checkpoint.resumeFrom {folder} was written by the job {owner.namespace}/"
        f"{owner.name} (uid {owner.uid}), not by this one (uid {wanted.job.uid}){take_over}; to "
        "load it anyway, set spec.checkpoint.allowForeign true on this machine; in a cluster, an "
        "administrator sets the profile's allow.foreignCheckpoints"
    )


def _refuse_other_training(
    folder: Path, manifest: Manifest, wanted: Wanted, fingerprint: Fingerprint
) -> None:
    difference = manifest.fingerprint.difference(fingerprint)
    if not difference:
        return
    if folder.parent == wanted.folder and manifest.job.uid != wanted.job.uid:
        raise ConfigError(
            f"{folder} was written with another {difference}, by the job whose folders this one "
            "takes over (spec.takeOver); use the same setting, or set "
            "spec.checkpoint.resumeFrom none to start from step 0"
        )
    if folder.parent == wanted.folder:
        raise ConfigError(
            f"{folder} was written by this job with another {difference}; restore that setting, "
            "set another spec.checkpoint.uri, or start from step 0 with ftctl run --fresh"
        )
    raise ConfigError(
        f"spec.checkpoint.resumeFrom {folder} was written with another {difference}; use the same "
        "setting, or set spec.checkpoint.resumeFrom to another checkpoint, auto or none"
    )


def _choose(
    root: Path,
    config: CheckpointConfig,
    job: JobRef,
    warn: Callable[[str], None],
    confirm: Confirm,
) -> tuple[Path, Manifest] | None:
    """Return the named checkpoint, or the newest of the job's own checkpoints if it is later.

    A later attempt must not return to the starting point of the first attempt, which is the folder
    that `resumeFrom` names, or step 0 if `resumeFrom` is `none`.
    """
    own = named = None
    if config.resume_from == "auto" or config.is_continued:
        own = commit.newest_verified(root, warn, _writer(config, job), confirm)
    if config.resume_from not in ("auto", "none"):
        folder = Path(config.resume_from).absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"spec.checkpoint.resumeFrom {config.resume_from} is not a folder; name the "
                "folder of one checkpoint (status.checkpoint.last.uri), auto or none"
            )
        named = folder, commit.verify(folder, confirm)
    if own is None or named is None:
        return own or named
    return own if own[1].step > named[1].step else named


def _writer(config: CheckpointConfig, job: JobRef) -> str | None:
    """Return the only writer to resume from; `none` excludes the job that is taken over."""
    return job.identity if config.resume_from == "none" else None
