"""Connect the ranks that train together by process groups, and choose each rank's device.

`worker` calls it once per rank; all other code receives the finished `World`. It reads this rank's
place through `launchers`, finds the others through `rendezvous`, and refuses a number of ranks that
differs from the `TrainConfig`. For example, `accelerate launch` on CPUs silently starts a single
unconnected process.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError, Preempted, TrainerError, WorldSizeError
from finetune_trainer.launchers import Launch, read_launch
from finetune_trainer.peer_objects import guard_object_collectives
from finetune_trainer.rendezvous import open_store, rendezvous, rendezvous_limit
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT, CONTROL
from finetune_trainer.waiting import SILENT_SECONDS, Waiting

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """Ranks of this attempt, as seen by one rank.

    All groups are None if `world_size` is 1: one process needs no sockets.

    Attributes:
        device: Device of this rank, `cuda:<local_rank>` or `cpu`.
        group: Default group, for gradients; NCCL on GPUs, gloo on CPUs.
        control_group: gloo, for `control.Agreement` and values of the host only, so that a vote in
            flight never pairs with a training collective.
        checkpoint_group: gloo, only for the background thread of checkpoints, whose collectives
            would corrupt the collectives of training in the default group.
        waiting: Barrier for ranks that wait while others work alone.
    """

    rank: int
    local_rank: int
    world_size: int
    device: "torch.device"
    group: "ProcessGroup | None" = None
    control_group: "ProcessGroup | None" = None
    checkpoint_group: "ProcessGroup | None" = None
    waiting: Waiting | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes progress, manifests and the export."""
        return self.rank == 0

    def liveness_barrier(self, silent_seconds: float | None = None) -> None:
        """Wait until every rank is here, however long one works alone; for the main thread.

        `silent_seconds` is the time without a heartbeat after which a rank is lost, if it differs
        from the usual time.

        Raises:
            LostRankError: A rank is gone.
        """
        if self.waiting is not None:
            self.waiting.liveness_barrier(silent_seconds=silent_seconds)

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """Sum `values` over all ranks, in place, and return them."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(values, group=self.group)
        return values

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return for each place the smallest value of all ranks; a collective in host memory."""
        if self.control_group is None:
            return list(values)
        import torch
        import torch.distributed as dist

        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.control_group)
        return [int(value) for value in found]


def check_world_size(config: TrainConfig, launch: Launch | None) -> None:
    """Refuse a world of another size than configured.

    Raises:
        WorldSizeError: Names the launcher and both numbers.
    """
    expected = config.world.world_size
    actual = launch.world_size if launch else 1
    if actual != expected:
        launcher = launch.launcher if launch else "no launcher (a single process)"
        raise WorldSizeError(
            f"spec.topology: {launcher} started {actual} rank(s), but the configuration requires "
            f"{expected} ({config.world.nnodes} node(s) x {config.world.nproc_per_node} "
            "process(es)); start `python -m finetune_trainer` once per node, or give the "
            f"launcher {expected} processes (accelerate launch connects them with --multi_gpu, "
            "also on CPUs)"
        )


@contextmanager
def open_world(
    config: TrainConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_wait: Callable[[str], None] = lambda missing: None,
    limit_seconds: float | None = None,
) -> Iterator[World]:
    """Connect this rank with the others, and disconnect at the end.

    Rank 0 passes a sentence about the missing ranks to `on_wait`. `limit_seconds` replaces the
    limit of the wait that follows from the environment.

    After success (and on `Preempted`, which all ranks raise at the same step) the ranks run a
    barrier before the groups are destroyed: without it gloo's teardown aborts up to half of all
    finished runs. After any other error there is no barrier, because it could hang.

    Raises:
        ConfigError: The device is missing, or the launcher's variables are invalid.
        WorldSizeError: The launcher started another number of ranks.
        Preempted: `should_stop` returned True before all ranks had arrived.
        TrainerError: A rank did not arrive within the limit.
    """
    launch = read_launch(environ)
    check_world_size(config, launch)
    place = launch or Launch("")
    device = _device(config, place)
    if place.world_size == 1:
        yield World(rank=0, local_rank=place.local_rank, world_size=1, device=device)
        return

    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = rendezvous_limit(environ) if limit_seconds is None else limit_seconds
    store = open_store(config, place, environ, should_stop, limit)
    rendezvous(store, place.rank, place.world_size, should_stop, limit, on_wait)
    timeout = timedelta(seconds=config.control.collective_timeout_seconds)
    guard_object_collectives()
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    world = World(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=dist.get_world_size(),
        device=device,
        group=dist.group.WORLD,
        control_group=_gloo_group(CONTROL, timeout),
        checkpoint_group=_gloo_group(CHECKPOINT, timeout),
        waiting=_waiting(store, place, timeout),
    )
    try:
        yield world
    except Preempted:
        _disconnect(world)
        raise
    except BaseException:
        if world.waiting is not None:
            world.waiting.leave()
        raise
    _disconnect(world)


def set_group_timeouts(config: TrainConfig, *groups: "ProcessGroup") -> None:
    """Set our timeout on groups that a library has created.

    torch's default for NCCL is 10 minutes, after which NCCL aborts the process. That is before the
    watchdog's limit, at which every rank writes its stacks and reports the hang.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in groups:
        _set_pg_timeout(timedelta(seconds=config.control.collective_timeout_seconds), group)


def _waiting(store: "Store", place: Launch, timeout: timedelta) -> Waiting:
    """Create the barrier with a separate connection: torch may block in the original one."""
    silent_seconds = min(SILENT_SECONDS, timeout.total_seconds())
    connection: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
    connection.set_timeout(timedelta(seconds=silent_seconds))
    return Waiting(
        connection, rank=place.rank, world_size=place.world_size, silent_seconds=silent_seconds
    )


def _disconnect(world: World) -> None:
    import torch.distributed as dist

    barrier(world)
    if world.waiting is not None:
        world.waiting.close()
    dist.destroy_process_group()


def barrier(world: World) -> None:
    """Wait until every rank is here; does nothing in a single process."""
    world.liveness_barrier()
    if world.control_group is not None:
        import torch.distributed as dist

        dist.barrier(group=world.control_group)


def gather_values(group: "ProcessGroup | None", value: _T, kind: Any) -> list[_T]:
    """Return every rank's value, by rank; a collective in host memory, for small values.

    The ranks send JSON, so that no rank can send code to another.

    Args:
        group: A gloo group; without a group this returns the value itself.
        value: Value of this rank.
        kind: Type of the values, as pydantic reads it. Received values are checked against it.

    Raises:
        TrainerError: A rank sent a value of another type.
    """
    if group is None:
        return [value]
    import torch
    import torch.distributed as dist

    codec = _codec(kind)
    # A file name that is not UTF-8 gets a question mark for each such byte.
    text = json.dumps(codec.dump_python(value, mode="json"), ensure_ascii=False)
    own = torch.frombuffer(bytearray(text, "utf-8", "replace"), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    room = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    room[: own.numel()] = own
    texts = [torch.empty_like(room) for _ in sizes]
    dist.all_gather(texts, room, group=group)
    return [
        _decoded(codec, bytes(one[: int(size)].numpy()), rank)
        for rank, (one, size) in enumerate(zip(texts, sizes, strict=True))
    ]


@cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _decoded(codec: TypeAdapter[Any], text: bytes, rank: int) -> Any:
    try:
        return codec.validate_json(text)
    except ValidationError as error:
        raise TrainerError(
            f"rank {rank} sent an invalid message ({error.errors()[0]['msg']}); find out which "
            "pods can connect to the ports of this job's pods"
        ) from error


def _device(config: TrainConfig, launch: Launch) -> "torch.device":
    import torch

    # Otherwise DeepSpeed guesses the device, possibly on import.
    os.environ["DS_ACCELERATOR"] = config.world.device
    # peft imports these, and they warn about dependencies of devices that are not used.
    for chatty in ("torchao", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if config.world.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if launch.local_rank >= num_gpus:
        raise ConfigError(
            f"spec.topology.gpusPerNode {config.world.nproc_per_node}: there is no GPU "
            f"{launch.local_rank} on this node, {num_gpus} are visible; lower "
            "spec.topology.gpusPerNode, or set it to 0 to train without GPUs"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _gloo_group(name: str, timeout: timedelta) -> "ProcessGroup":
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    return cast("ProcessGroup", group)
