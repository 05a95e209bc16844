"""Move tensors between memory and the files of one checkpoint; the only file that names DCP.

The store calls it; it knows nothing of commits. `torch.distributed.checkpoint` (DCP) writes a
replicated tensor once, by one of its ranks, and reads a sharded one on any world size.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune_trainer.checkpoint.agreement import RankError, describe
from finetune_trainer.failpoints import reach

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager

State = dict[str, Any]


class Snapshot:
    """Copies a state to host memory, into buffers that it keeps for the next copy."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def take(self, state: State) -> State:
        """Return a copy that later changes of `state` do not reach; syncs with the device.

        The copy made before is overwritten, so it must be on disk by now.
        """
        if self._stager is None:
            self._stager = _new_stager()
        return cast(State, self._stager.stage(state))  # a future only from an async stager


def write_shards(state: State, folder: Path, group: "ProcessGroup | None", step: int) -> None:
    """Write this rank's part of `state` into `folder`, synced to disk; a collective over `group`.

    Raises:
        RankError: a rank could not write; raised on all of them alike.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    _expect_single_process(group)
    writer = _writer(folder, step)
    try:
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise RankError(_failures(error)) from error


def read_shards(state: State, folder: Path, group: "ProcessGroup | None") -> None:
    """Read the checkpoint in `folder` into the tensors of `state`, in place, on every rank.

    Raises:
        RankError: what is in the folder does not fit `state`; raised on all ranks alike.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    _expect_single_process(group)
    try:
        load(
            state,
            storage_reader=FileSystemReader(folder),
            planner=_exact_planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise RankError(_failures(error)) from error


def size_bytes(state: State) -> int:
    """Return what `state` takes on disk: every tensor once, whole even where it is sharded."""
    import torch

    total, stack = 0, list(state.values())
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return total


def _new_stager() -> "DefaultStager":
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    has_cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=has_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_cuda,
        )
    )


def _writer(folder: Path, step: int) -> "FileSystemWriter":
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class Writer(FileSystemWriter):
        """Says why a write failed, and can be killed with some shards on disk and some not."""

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            try:
                written = super().write_data(plan, planner)
            except RuntimeError as error:
                raise _cause(error) from error
            reach("saving", step)
            return written

    return Writer(folder, sync_files=True, overwrite=False)


def _cause(error: BaseException) -> BaseException:
    """Find the OSError behind torch's writer, which reports a full disk as a wrong offset."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return error if behind is None else behind


def _exact_planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan

    class ExactPlanner(DefaultLoadPlanner):
        """Refuses a checkpoint that holds more than the state asks for.

        DCP reports only what is missing; an optimizer that was not initialised would silently
        start from nothing.
        """

        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None, "DCP sets the metadata before it asks for a plan"
            left_over = sorted(self.metadata.state_dict_metadata.keys() - self.state_dict.keys())
            if left_over:
                raise ValueError(
                    f"it holds {len(left_over)} values that this run has no place for, first "
                    f"{left_over[0]}"
                )
            return super().create_local_plan()

    return ExactPlanner()


def _failures(error: "CheckpointException") -> str:
    items = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {describe(reason)}" for rank, (reason, _) in items)


def _expect_single_process(group: "ProcessGroup | None") -> None:
    if group is None:
        # DCP warns that it works alone; that is what a run of one process asks for.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
