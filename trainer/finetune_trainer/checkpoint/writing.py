"""Write one checkpoint: the files, their hashes, and the manifest that commits them.

The store calls it in the saving thread of every rank. Because only the manifest commits the
checkpoint, the previous checkpoints stay valid after a failure.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.agreement import RankError, describe, on_every_rank, on_rank_0
from finetune_trainer.checkpoint.commit import HELD_OUT_FILE, Manifest
from finetune_trainer.checkpoint.retention import retire
from finetune_trainer.checkpoint.shards import Shards, State
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import CheckpointRef
from finetune_trainer.failpoints import failpoint
from finetune_trainer.files import recreate
from finetune_trainer.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TRAINER_FILE = "trainer.json"


class Written(NamedTuple):
    """A committed checkpoint, its duration and size, and a warning about a later failure."""

    ref: CheckpointRef
    seconds: float
    size_bytes: int
    warning: str | None


class CheckpointWriter:
    """Writes one rank's part of the checkpoints of a run."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        shards: Shards,
        rank: int,
        group: "ProcessGroup | None",
        waiting: Waiting | None,
        fence: Fence | None,
        held_out: str | None = None,
    ) -> None:
        """Take the arguments of `CheckpointStore`; `root` is the folder of all checkpoints."""
        self._root = root
        self._keep = keep
        self._shards = shards
        self._rank = rank
        self._group = group
        self._waiting = waiting
        self._fence = fence
        self._held_out = held_out

    def write(
        self,
        draft: Manifest,
        copy: State,
        trainer: str,
        *,
        lineage: commit.Lineage | None,
        started: float,
    ) -> Written:
        """Write, hash and commit one checkpoint; a collective that waits for every rank's disk.

        Args:
            draft: The manifest without files.
            copy: The tensors.
            trainer: The text of `TRAINER_FILE`.
            lineage: The lineage of this attempt, for retention.
            started: Start of the save, in seconds of `time.perf_counter`.

        Raises:
            RankError: at least one rank could not do its part.
            OSError: this rank could not write its tensors.
            RuntimeError: gloo lost a rank.
            OvertakenError: there is a higher claim on the folder.
        """
        step = draft.step
        folder = self._on_rank_0(lambda: self._open_folder(step), Path)
        try:
            names = self._shards.write(copy, folder, self._group, step)
            failpoint("before-manifest", step)
            texts = {TRAINER_FILE: trainer}
            if self._held_out is not None:
                texts[HELD_OUT_FILE] = self._held_out
            self._on_rank_0(lambda: _write_texts(folder, texts), NoneType)
            if self._rank == 0:
                names += texts
            files = self._digests(folder, names)
            manifest = draft.model_copy(update={"files": files})
            ref = self._on_rank_0(lambda: self._commit(folder, manifest), CheckpointRef)
        except (RankError, OSError, RuntimeError) as error:  # RuntimeError: gloo lost a rank
            if self._rank == 0 and not commit.is_committed(folder):
                shutil.rmtree(folder, ignore_errors=True)  # else the next start removes it
            if isinstance(error, RankError):  # the owner of a higher claim may have deleted it
                self._on_rank_0(self._check_claims, NoneType)
            raise
        seconds, size = time.perf_counter() - started, sum(one.size for one in files.values())
        return Written(ref, seconds, size, self._retire(lineage))

    def _open_folder(self, step: int) -> Path:
        claim = self._checked_fence().holding(self._root).claim
        return recreate(commit.step_folder(self._root, step, claim))

    def _checked_fence(self) -> Fence:
        """Return the fence of rank 0 after a check that its claims still hold."""
        assert self._fence is not None, "rank 0 has it"
        self._fence.check()
        return self._fence

    def _check_claims(self) -> None:
        self._checked_fence()

    def _digests(self, folder: Path, names: list[str]) -> dict[str, commit.FileDigest]:
        """Hash the files of `folder`, each on the rank that wrote it; `names` are this rank's."""
        parts = on_every_rank(
            self._group,
            lambda: {name: commit.digest_file(folder / name) for name in names},
            dict[str, commit.FileDigest],
            self._waiting,
        )
        return dict(sorted(item for part in parts for item in part.items()))

    def _commit(self, folder: Path, manifest: Manifest) -> CheckpointRef:
        """Write the manifest; the commit is valid if no other process had claimed the folder."""
        self._checked_fence()
        failpoint("before-commit", manifest.step)
        commit.write_manifest(folder, manifest)
        failpoint("after-commit", manifest.step)
        self._checked_fence()
        return commit.reference(folder, manifest, self._held_out)

    def _retire(self, lineage: commit.Lineage | None) -> str | None:
        """Delete surplus checkpoints on rank 0; return a warning if that is impossible."""
        if self._rank == 0:
            try:
                retire(self._root, self._keep, lineage, self._checked_fence, self._held_out)
            except OSError as error:
                return f"an old checkpoint in {self._root} was not deleted: {describe(error)}"
        return None

    def _on_rank_0(self, work: Callable[[], T], kind: Any) -> T:
        return on_rank_0(self._group, self._rank, work, kind, waiting=self._waiting)


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text)
