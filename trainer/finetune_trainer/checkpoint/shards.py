"""Write tensors to the files of one checkpoint and read them back; only this module uses DCP.

The store calls it and commits the files itself. `torch.distributed.checkpoint` (DCP) writes a
replicated tensor once, on one of its ranks, and reads a sharded tensor on any world size.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

from finetune_trainer.checkpoint.agreement import RankError, describe, on_every_rank
from finetune_trainer.checkpoint.unpickling import METADATA_FILE, read_metadata
from finetune_trainer.errors import ConfigError
from finetune_trainer.failpoints import failpoint

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.metadata import Metadata

State = dict[str, Any]

LOSS_SCALE = "scaler"  # a section that exists only in fp16 runs


class Shards(Protocol):
    """Writes a rank's part of a state to files and reads it back."""

    def reserve(self, state: State) -> None:
        """Allocate memory for the first copy of `state`."""

    def take(self, state: State) -> State:
        """Return a copy that later changes of `state` do not affect."""

    def write(
        self, state: State, folder: Path, group: "ProcessGroup | None", step: int
    ) -> list[str]:
        """Write this rank's part into `folder`, and return the names of the written files."""

    def read(self, state: State, folder: Path, group: "ProcessGroup | None") -> None:
        """Read the files in `folder` into `state`, in place."""


class Snapshot:
    """Copies a state to host memory, into buffers that the next copy reuses."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, state: State) -> None:
        """Allocate the buffers in a thread: a copy into new memory takes ten times as long.

        The thread copies the tensors while training may change them. That race is safe: this copy
        only warms the buffers.
        """
        # Listed before the thread starts: a dictionary that grows cannot be iterated.
        tensors = list(_tensors_in(state))

        def copy() -> None:
            for name, tensor in tensors:
                self._copy(tensor, name)

        work = on_this_gpu(copy)
        self._reserving = threading.Thread(target=work, name="reserve", daemon=True)
        self._reserving.start()

    def take(self, state: State) -> State:
        """Return a copy that later changes of `state` do not affect; synchronises the device.

        The previous copy is overwritten, so it must already be on disk.
        """
        import torch

        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        copy: State = self._copy(state)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, name: str = "") -> Any:
        import torch
        from torch.distributed.tensor import DTensor

        if isinstance(value, dict):
            return {key: self._copy(part, f"{name}.{key}") for key, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return deepcopy(value)
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        if isinstance(value, DTensor):  # from_local would move the buffer to the mesh's device
            return DTensor(buffer, value._spec, requires_grad=False)
        return buffer


def on_this_gpu(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` for a new thread, with the GPU of this thread instead of GPU 0."""
    import torch

    if not torch.cuda.is_available():
        return work
    device = torch.cuda.current_device()

    def on_device() -> None:
        torch.cuda.set_device(device)
        work()

    return on_device


def _tensors_in(value: Any, name: str = "") -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of a state with the names under which `Snapshot` stores their buffers."""
    import torch

    if isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield name, value


class TensorShards(Snapshot):
    """Writes and reads tensors with DCP."""

    def write(
        self, state: State, folder: Path, group: "ProcessGroup | None", step: int
    ) -> list[str]:
        """Call `write_shards`; on rank 0 the names include DCP's own file."""
        names = write_shards(state, folder, group, step)
        is_first = group is None or group.rank() == 0
        return [*names, METADATA_FILE] if is_first else names

    def read(self, state: State, folder: Path, group: "ProcessGroup | None") -> None:
        """Call `read_shards`."""
        read_shards(state, folder, group)


def write_shards(state: State, folder: Path, group: "ProcessGroup | None", step: int) -> list[str]:
    """Write this rank's part of `state` into `folder`, synced to disk; a collective over `group`.

    Returns:
        The names of the files that this rank wrote, without METADATA_FILE, which rank 0 writes.

    Raises:
        RankError: a rank could not write; raised on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    _expect_single_process(group)
    writer = _writer(folder, step)
    try:
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise RankError(_failures(error)) from error
    return sorted(writer.names)


def read_shards(state: State, folder: Path, group: "ProcessGroup | None") -> None:
    """Read the checkpoint in `folder` into the tensors of `state`, in place, on every rank.

    Raises:
        RankError: the checkpoint does not fit `state`; raised on every rank.
        ConfigError: a file contains objects other than tensors; raised on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    _expect_single_process(group)
    reader = _reader(folder, group)
    try:
        load(
            state,
            storage_reader=reader,
            planner=_exact_planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        refused = [why for why, _ in error.failures.values() if isinstance(why, UnpicklingError)]
        if refused:  # by torch, which unpickles only tensors
            raise ConfigError(
                f"{folder} contains objects other than tensors and was not loaded "
                f"({describe(refused[0]).splitlines()[0]}); name another checkpoint in "
                "spec.checkpoint.resumeFrom"
            ) from error
        raise RankError(_failures(error)) from error


def size_bytes(state: State) -> int:
    """Return the size of `state` on disk: every tensor once, and whole even if it is sharded."""
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


def _writer(folder: Path, step: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class Writer(FileSystemWriter):
        """Records the written files; a failpoint can kill it between the shards of two ranks."""

        names: frozenset[str] = frozenset()

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            try:
                written = super().write_data(plan, planner)
            except RuntimeError as error:
                raise _cause(error) from error
            self.names = frozenset(one.storage_data.relative_path for one in written.value())
            failpoint("saving", step)
            return written

    # With 0, DCP does not use its loader for GPUs, which waits for the stream of the training.
    writer = Writer(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=0)
    writer.fs = _without_rename()
    return writer


def _without_rename() -> "FileSystem":
    """Return torch's file system for storage without rename; the manifest is the commit."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class WithoutRename(FileSystem):
        def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
            shutil.copyfile(path, new_path)
            os.unlink(path)

    return WithoutRename()


def _cause(error: BaseException) -> BaseException:
    """Return the OSError behind a torch error, which reports a full disk as a wrong offset."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return error if behind is None else behind


def _reader(folder: Path, group: "ProcessGroup | None") -> Any:
    """Return DCP's reader with a metadata record that was unpickled safely."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    read: list[Metadata] = []

    def attempt() -> str | None:
        try:
            read.append(read_metadata(folder))
        except ConfigError as error:
            return str(error)  # each rank raises the same class, and thus has the same exit code
        return None

    found = on_every_rank(group, attempt, str | None)
    if refusals := [one for one in found if one is not None]:
        raise ConfigError(refusals[0])

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return read[0]

    return Reader(folder)


def _exact_planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan

    class ExactPlanner(DefaultLoadPlanner):
        """Refuses a checkpoint with values that the state lacks.

        DCP reports only values that the checkpoint lacks, so an uninitialised optimizer would
        silently start from zero. Only the loss scale may be on one side alone: a run that resumes
        in fp16 finds a new one, and a run that resumes in another precision needs none.
        """

        def set_up_planner(
            self,
            state_dict: State,
            metadata: "Metadata | None" = None,
            is_coordinator: bool = False,
        ) -> None:
            assert metadata is not None, "DCP has read it before"
            if not any(map(_is_loss_scale, metadata.state_dict_metadata)):
                state_dict = {key: state_dict[key] for key in state_dict if key != LOSS_SCALE}
            super().set_up_planner(state_dict, metadata, is_coordinator)

        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None, "DCP sets the metadata before it asks for a plan"
            held = self.metadata.state_dict_metadata.keys() - self.state_dict.keys()
            left_over = sorted(name for name in held if not _is_loss_scale(name))
            if left_over:
                raise ValueError(
                    f"the checkpoint has {len(left_over)} values that this run lacks, first "
                    f"{left_over[0]}"
                )
            return super().create_local_plan()

    return ExactPlanner()


def _is_loss_scale(name: str) -> bool:
    return name.startswith(f"{LOSS_SCALE}.")


def _failures(error: "CheckpointException") -> str:
    items = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {describe(reason)}" for rank, (reason, _) in items)


def _expect_single_process(group: "ProcessGroup | None") -> None:
    if group is None:
        # DCP warns that no process group exists, which is right for a run of one process.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
