"""Where training starts from: which checkpoint `resumeFrom` means, and a folder made ready for it.

The store calls it on rank 0 before the first step; nothing is written into the folder earlier.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.commit import Confirm, Course, Fingerprint, Manifest
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.claims.enter import Wanted
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import CheckpointConfig, CheckpointRef, JobRef
from finetune_trainer.errors import CheckpointError, ConfigError


class Start(NamedTuple):
    """What to start from, and what the ledger of the folder says."""

    course: Course
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
) -> Start:
    """Choose the checkpoint to start from and clear the way for those that will follow it.

    `confirm` says which files need not be read here. Leftovers of a killed process are deleted.
    Checkpoints beyond the chosen step stay, and count no more: that is written down.

    Raises:
        ConfigError: the folder holds checkpoints of another job, the one to start from was
            written with another model, method, data set or order, or it is not there.
        CheckpointError: the folder that was named is damaged.
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
    course, beyond = commit.begin_course(root, claim, step)
    if beyond:
        warn(
            f"training starts from step {step}, so what lies beyond it in {root} counts no more: "
            f"{', '.join(beyond)}; delete it when it is not needed"
        )
    refs = commit.ledger(root, course)
    last = next((ref for ref in refs if ref.step == step), None)
    return Start(course, source, last, best(refs))


def recorded(config: CheckpointConfig, job: JobRef) -> Fingerprint | None:
    """Return what the checkpoint that `job` will go on from was made of; None without any.

    Its files are not read, so that it is known before anything is loaded.
    """
    found = []
    if config.resume_from == "auto" or config.is_continued:
        writer = _writer(config, job)
        there = commit.manifests(Path(config.dir).absolute())
        found = [one for one in there if writer in (None, one[1].job.identity)][:1]
    if config.resume_from not in ("auto", "none"):
        folder = Path(config.resume_from).absolute()
        with suppress(CheckpointError):  # `prepare_start` will say it
            found.append((folder, commit.read_manifest(folder)))
    newest = max(found, key=lambda one: one[1].step, default=None)
    return newest[1].fingerprint if newest else None


def job_of_checkpoints(root: Path) -> JobRef | None:
    """Return the job that wrote the newest checkpoint in `root`; None without any."""
    return next((manifest.job for _, manifest in commit.manifests(root)), None)


def _refuse_another_job(root: Path, wanted: Wanted) -> None:
    """Refuse a folder in which another job keeps its checkpoints, whatever `resumeFrom` says.

    Gone on from by chance they would make this job finish with the other's weights, and deleted by
    retention they would be lost to their owner.
    """
    for folder, manifest in commit.manifests(root):
        owner, job = manifest.job, wanted.job
        if not wanted.may_follow(owner):
            raise ConfigError(
                f"spec.checkpoint.uri {root} holds {folder.name} of the job "
                f"{owner.namespace}/{owner.name} (uid {owner.uid}), not of this one (uid "
                f"{job.uid}); set another spec.checkpoint.uri, and to start from that checkpoint "
                f"on purpose also spec.checkpoint.resumeFrom file://{folder} and "
                "spec.checkpoint.allowForeign true"
            )


def _refuse_foreign(
    folder: Path, manifest: Manifest, wanted: Wanted, config: CheckpointConfig
) -> None:
    """Refuse to load what another job has written, unless somebody who may has said so."""
    owner = manifest.job
    if wanted.may_follow(owner) or config.allow_foreign:
        return
    is_namesake = (owner.namespace, owner.name) == (wanted.job.namespace, wanted.job.name)
    take_over = " (spec.takeOver true makes that job's work this one's)" if is_namesake else ""
    raise ConfigError(
        f"spec.checkpoint.resumeFrom {folder} was written by the job {owner.namespace}/"
        f"{owner.name} (uid {owner.uid}), not by this one (uid {wanted.job.uid}){take_over}; to "
        "load it all the same set spec.checkpoint.allowForeign true on this machine, and in a "
        "cluster have the profile's allow.foreignCheckpoints set"
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
            "takes over (spec.takeOver); set that as it was there, or set "
            "spec.checkpoint.resumeFrom none to start anew"
        )
    if folder.parent == wanted.folder:
        raise ConfigError(
            f"{folder} was written by this job with another {difference}; set that back, set "
            "another spec.checkpoint.uri, or start anew with ftctl run --fresh"
        )
    raise ConfigError(
        f"spec.checkpoint.resumeFrom {folder} was written with another {difference}; set that "
        "as it was there, or spec.checkpoint.resumeFrom to another checkpoint, auto or none"
    )


def _choose(
    root: Path,
    config: CheckpointConfig,
    job: JobRef,
    warn: Callable[[str], None],
    confirm: Confirm,
) -> tuple[Path, Manifest] | None:
    """Return the named checkpoint, or the newest of the job's own where that is further on.

    A later start must not fall back to where the job once began: neither to the folder that
    `resumeFrom` names, nor, with `none`, to step 0.
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
    """Return whose checkpoints alone count: with `none` not those of a job that is taken over."""
    return job.identity if config.resume_from == "none" else None
