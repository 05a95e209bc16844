"""Move tensors between memory and the files of one checkpoint; the only file that names DCP.

The store calls it; it knows nothing of commits. `torch.distributed.checkpoint` (DCP) writes a
replicated tensor once, by one of its ranks, and reads a sharded one on any world size.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Protocol

from finetune_trainer.checkpoint.agreement import RankError, describe, on_every_rank
from finetune_trainer.checkpoint.unpickling import METADATA_FILE, read_metadata
from finetune_trainer.errors import ConfigError
from finetune_trainer.failpoints import reach

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.metadata import Metadata

State = dict[str, Any]

LOSS_SCALE = "scaler"  # the section that only runs in fp16 have


class Shards(Protocol):
    """How a rank's part of a state comes into files and back."""

    def reserve(self, state: State) -> None:
        """Make room for the first copy of `state`."""

    def take(self, state: State) -> State:
        """Return a copy that later changes of `state` do not reach."""

    def write(
        self, state: State, folder: Path, group: "ProcessGroup | None", step: int
    ) -> list[str]:
        """Write this rank's part into `folder`, and return the names of the files it has made."""

    def read(self, state: State, folder: Path, group: "ProcessGroup | None") -> None:
        """Read what lies in `folder` into `state`, in place."""


class Snapshot:
    """Copies a state to host memory, into buffers that it keeps for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, state: State) -> None:
        """Make the buffers beside other work: a first copy into new memory takes ten times as long.

        It may read tensors while they change, as nobody reads what it copied.
        """
        import torch

        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        # Found here and now: dictionaries that grow meanwhile cannot be walked.
        tensors = list(_tensors_in(state))

        def copy() -> None:
            if device is not None:  # a new thread would open a context on GPU 0
                torch.cuda.set_device(device)
            for name, tensor in tensors:
                self._copy(tensor, name)

        self._reserving = threading.Thread(target=copy, name="reserve", daemon=True)
        self._reserving.start()

    def take(self, state: State) -> State:
        """Return a copy that later changes of `state` do not reach; syncs with the device.

        The copy made before is overwritten, so it must be on disk by now.
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
        if isinstance(value, DTensor):  # from_local would move it back to the mesh's device
            return DTensor(buffer, value._spec, requires_grad=False)
        return buffer


def _tensors_in(value: Any, name: str = "") -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of a state under the names that `Snapshot` keeps their buffers by."""
    import torch

    if isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield name, value


class TensorShards(Snapshot):
    """The real ones: tensors, by DCP."""

    def write(
        self, state: State, folder: Path, group: "ProcessGroup | None", step: int
    ) -> list[str]:
        """Write as `write_shards` does; rank 0 has made DCP's own file, too."""
        names = write_shards(state, folder, group, step)
        is_first = group is None or group.rank() == 0
        return [*names, METADATA_FILE] if is_first else names

    def read(self, state: State, folder: Path, group: "ProcessGroup | None") -> None:
        """Read as `read_shards` does."""
        read_shards(state, folder, group)


def write_shards(state: State, folder: Path, group: "ProcessGroup | None", step: int) -> list[str]:
    """Write this rank's part of `state` into `folder`, synced to disk; a collective over `group`.

    Returns:
        The names of the files this rank has written; METADATA_FILE, rank 0's, is not among them.

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
    return sorted(writer.names)


def read_shards(state: State, folder: Path, group: "ProcessGroup | None") -> None:
    """Read the checkpoint in `folder` into the tensors of `state`, in place, on every rank.

    Raises:
        RankError: what is in the folder does not fit `state`; raised on all ranks alike.
        ConfigError: a file in it holds other objects than tensors; raised on all ranks alike.
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
        if refused:  # by torch, which builds tensors alone
            raise ConfigError(
                f"{folder} holds other objects than tensors, so nothing of it is loaded "
                f"({describe(refused[0]).splitlines()[0]}); name another checkpoint in "
                "spec.checkpoint.resumeFrom"
            ) from error
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


def _writer(folder: Path, step: int) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class Writer(FileSystemWriter):
        """Says what was written, or why not, and can be killed between two ranks' shards."""

        names: frozenset[str] = frozenset()

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            try:
                written = super().write_data(plan, planner)
            except RuntimeError as error:
                raise _cause(error) from error
            self.names = frozenset(one.storage_data.relative_path for one in written.value())
            reach("saving", step)
            return written

    writer = Writer(folder, sync_files=True, overwrite=False)
    writer.fs = _without_rename()
    return writer


def _without_rename() -> "FileSystem":
    """Return torch's file system for layers that cannot rename; the manifest is the commit."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class WithoutRename(FileSystem):
        def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
            shutil.copyfile(path, new_path)
            os.unlink(path)

    return WithoutRename()


def _cause(error: BaseException) -> BaseException:
    """Find the OSError behind torch's writer, which reports a full disk as a wrong offset."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return error if behind is None else behind


def _reader(folder: Path, group: "ProcessGroup | None") -> Any:
    """Return DCP's reader, with the record that it would unpickle itself."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    read: list[Metadata] = []

    def try_it() -> ConfigError | None:
        try:
            read.append(read_metadata(folder))
        except ConfigError as error:
            return error  # keeps its class, and with it the exit code, on every rank
        return None

    if refusals := [one for one in on_every_rank(group, try_it) if one is not None]:
        raise refusals[0]

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return read[0]

    return Reader(folder)


def _exact_planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan

    class ExactPlanner(DefaultLoadPlanner):
        """Refuses a checkpoint that holds more than the state asks for.

        DCP reports only what is missing; an optimizer that was not initialised would silently
        start from nothing. The loss scale alone may be on one side only: it finds its place anew
        when a run goes on in fp16, or is of no use when it goes on in another precision.
        """

        def set_up_planner(
            self,
            state_dict: State,
            metadata: "Metadata | None" = None,
            is_coordinator: bool = False,
        ) -> None:
            assert metadata is not None, "DCP has read it by now"
            if not any(map(_is_loss_scale, metadata.state_dict_metadata)):
                state_dict = {key: state_dict[key] for key in state_dict if key != LOSS_SCALE}
            super().set_up_planner(state_dict, metadata, is_coordinator)

        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None, "DCP sets the metadata before it asks for a plan"
            held = self.metadata.state_dict_metadata.keys() - self.state_dict.keys()
            left_over = sorted(name for name in held if not _is_loss_scale(name))
            if left_over:
                raise ValueError(
                    f"it holds {len(left_over)} values that this run has no place for, first "
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
        # DCP warns that it works alone; that is what a run of one process asks for.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
