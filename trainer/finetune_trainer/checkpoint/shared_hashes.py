"""Distribute the hashing of a checkpoint over the ranks while rank 0 verifies it.

The store of every rank creates a `SharedHashes` for each verification: rank 0 leads, and the others
help until rank 0 is finished. Helpers only confirm files that match the manifest. Rank 0 reads the
unconfirmed files itself, so that it finds and reports the same damage as without helpers.
"""

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from finetune_trainer.checkpoint.agreement import on_every_rank
from finetune_trainer.checkpoint.commit import Confirm, FileDigest, Manifest, digest_file
from finetune_trainer.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class _Request(NamedTuple):
    """Files that rank 0 requests the others to hash."""

    folder: Path
    files: dict[str, FileDigest]


class SharedHashes:
    """The part of one rank; its collectives run in the group of the checkpoint store."""

    def __init__(
        self,
        group: "ProcessGroup | None",
        waiting: Waiting | None,
        *,
        rank: int,
        ranks_on_node: int,
        claim: Path | None,
        digest: Callable[[Path], FileDigest] = digest_file,
    ) -> None:
        """Prepare to hash.

        A rank on another node helps only if it has access to the files of rank 0. The test is
        `claim`, a file next to the checkpoints with a unique name, which rank 0 sends.
        """
        self._group, self._waiting = group, waiting
        self._rank, self._is_on_node_of_rank_0 = rank, rank < ranks_on_node
        self._claim = claim
        self._digest = digest

    def lead(self, work: Callable[[Confirm], T]) -> T:
        """Run `work` on rank 0 with a `Confirm` that all ranks with access contribute to."""
        if self._group is None:
            return work(lambda folder, manifest: frozenset())
        try:
            return work(self._confirm)
        finally:
            self._broadcast(None)

    def help(self) -> None:
        """Hash the files that rank 0 requests, until rank 0 is finished."""
        while (request := self._broadcast(None)) is not None:
            self._hash_together(request)

    def _confirm(self, folder: Path, manifest: Manifest) -> frozenset[str]:
        request = self._broadcast(_Request(folder, manifest.files))
        assert request is not None, "rank 0 has sent it"
        return self._hash_together(request)

    def _broadcast(self, request: _Request | None) -> _Request | None:
        message = (request, self._claim)
        kind = tuple[_Request | None, Path | None]
        request, self._claim = on_every_rank(self._group, lambda: message, kind, self._waiting)[0]
        return request

    def _hash_together(self, request: _Request) -> frozenset[str]:
        """Return the names of the files that a rank has confirmed."""
        have_access = on_every_rank(
            self._group, lambda: self._has_access(request.folder), bool, self._waiting
        )
        ranks = [rank for rank, has_access in enumerate(have_access) if has_access]
        assigned = _shares(request.files, ranks).get(self._rank, ())
        found = on_every_rank(
            self._group,
            lambda: [name for name in assigned if self._matches(request, name)],
            list[str],
            self._waiting,
        )
        return frozenset(name for names in found for name in names)

    def _has_access(self, folder: Path) -> bool:
        if self._is_on_node_of_rank_0:
            return True
        claim = self._claim
        return claim is not None and folder.parent == claim.parents[1] and claim.exists()

    def _matches(self, request: _Request, name: str) -> bool:
        path, expected = request.folder / name, request.files[name]
        try:
            return path.stat().st_size == expected.size and self._digest(path) == expected
        except OSError:
            return False  # rank 0 reads the file and reports the reason


def _shares(files: dict[str, FileDigest], ranks: list[int]) -> dict[int, list[str]]:
    """Distribute files over `ranks`: the largest first, each to the rank with the least to read."""
    load = [(0, rank) for rank in ranks]
    shares: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in sorted(files, key=lambda one: (-files[one].size, one)):
        size, rank = load[0]
        shares[rank].append(name)
        heapq.heapreplace(load, (size + files[name].size, rank))
    return shares
