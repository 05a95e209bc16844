"""Which ranks train together, on which device, and through which process groups.

Called once per rank by `worker`; everything else receives the finished `World`. It reads what
our supervisor, torchrun, mpirun or Azure ML put into the environment, and refuses to go on when the
world that came up is not the one that `TrainConfig` states (`accelerate launch` on CPUs, for one,
starts a single unconnected process without a word).
"""

import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError, Preempted, TrainerError, WorldSizeError
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT, CONTROL
from finetune_trainer.waiting import SILENT_SECONDS, Waiting

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# Of one try to reach a store that was there a moment ago, as the library hears no signal meanwhile.
_CONNECT_TIMEOUT = timedelta(seconds=5)
_POLL_SECONDS = 0.02

ENV_STORE_FD = "FINETUNE_STORE_FD"  # the socket our supervisor bound for rank 0's store
ACCELERATE = "accelerate launch"  # by name, where it starts a single process
_ENV_OF_ACCELERATE = "ACCELERATE_DYNAMO_MODE"  # which it always sets, and a user hardly ever
_OF_LAUNCHERS = re.compile(
    r"((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|"
    rf"(TORCHELASTIC|OMPI_COMM_WORLD)_\w+|{_ENV_OF_ACCELERATE}"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Launch:
    """What a launcher says about the place of this process.

    `master_port` is 0 when the launcher named none; `open_world` then derives one from the job.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True)
class World:
    """The ranks of this attempt as one of them sees it.

    All groups are None when `world_size` is 1: one process needs no sockets.

    Attributes:
        device: where this rank computes; `cuda:<local_rank>` or `cpu`.
        group: the default group, for gradients; NCCL on GPUs, gloo on CPUs.
        control_group: gloo, for `control.Agreement` and `gather_objects` only, so that a vote
            in flight never pairs with a training collective.
        checkpoint_group: gloo, for the saver's background thread only (its collectives on the
            default group corrupt those of training).
        waiting: where ranks wait for what others do alone.
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
        """True on rank 0, which writes progress, manifests and the export."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait until every rank is here, however long one works alone; for the main thread.

        Raises:
            LostRankError: one is gone.
        """
        if self.waiting is not None:
            self.waiting.meet()

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """Add `values` up over all ranks, in place, and return them."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(values, group=self.group)
        return values


def launched_by_another(environ: Mapping[str, str]) -> bool:
    """Say whether a launcher made this process one rank among others (or the only one)."""
    single = "OMPI_COMM_WORLD_SIZE" in environ or _ENV_OF_ACCELERATE in environ
    return single or {"RANK", "WORLD_SIZE"} <= environ.keys()


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what makes a process a rank, or tells it about its peers."""
    return {name: text for name, text in environ.items() if not _OF_LAUNCHERS.fullmatch(name)}


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what the launcher of this process says, or None when there is no launcher.

    torchrun and Azure ML set RANK and WORLD_SIZE; Open MPI sets its own names and no address;
    `accelerate launch` without --multi_gpu sets neither, and starts one process.

    Raises:
        ConfigError: a variable is not a number, or one of a pair is missing.
    """
    if not launched_by_another(environ):
        return None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif "OMPI_COMM_WORLD_SIZE" not in environ:
        return Launch(ACCELERATE)
    else:
        launcher = "mpirun"
        prefix = "OMPI_COMM_WORLD_"
        names = (f"{prefix}RANK", f"{prefix}LOCAL_RANK", f"{prefix}SIZE", f"{prefix}LOCAL_SIZE")
    rank, world_size = _number(environ, names[0]), _number(environ, names[2])
    local_world_size = _number(environ, names[3], default=world_size)
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=_number(environ, names[1], default=rank % local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT", default=0),
    )


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often the ranks were started again, by our supervisor or by torchrun."""
    return _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)


def check_world_size(config: TrainConfig, launch: Launch | None) -> None:
    """Refuse a world of another size than the configuration states.

    Raises:
        WorldSizeError: names the launcher and both numbers.
    """
    expected = config.world.world_size
    actual = launch.world_size if launch else 1
    if actual != expected:
        launcher = launch.launcher if launch else "no launcher (a single process)"
        raise WorldSizeError(
            f"spec.topology: {launcher} started {actual} rank(s), but the configuration asks for "
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
    rendezvous_timeout: timedelta = RENDEZVOUS_TIMEOUT,
) -> Iterator[World]:
    """Connect this rank with the others, and take leave of them at the end.

    On the good path (and on `Preempted`, which all ranks raise at the same step) the ranks meet in
    a barrier before the groups are destroyed: without it gloo's teardown aborts up to half of all
    finished runs. After any other error there is no barrier, as it could only hang.

    Raises:
        ConfigError: the device is missing, or the launcher's variables are unusable.
        WorldSizeError: the launcher started another number of ranks.
        Preempted: `should_stop` before the ranks had met.
        TrainerError: rank 0, or another one, did not come within `rendezvous_timeout`.
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
    store = _store(config, place, environ, should_stop, rendezvous_timeout)
    _meet(store, place.world_size, should_stop, rendezvous_timeout)
    timeout = timedelta(seconds=config.control.collective_timeout_seconds)
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
        _take_leave(world)
        raise
    except BaseException:
        if world.waiting is not None:
            world.waiting.leave()
        raise
    _take_leave(world)


def _waiting(store: "Store", place: Launch, timeout: timedelta) -> Waiting:
    """Give the ranks a place to wait, on a connection of its own: torch may wait in another."""
    silent_seconds = min(SILENT_SECONDS, timeout.total_seconds())
    connection: Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
    connection.set_timeout(timedelta(seconds=silent_seconds))
    return Waiting(
        connection, rank=place.rank, world_size=place.world_size, silent_seconds=silent_seconds
    )


def _take_leave(world: World) -> None:
    import torch.distributed as dist

    barrier(world)
    if world.waiting is not None:
        world.waiting.close()
    dist.destroy_process_group()


def barrier(world: World) -> None:
    """Wait until every rank is here; nothing to do for one process."""
    world.meet()
    if world.control_group is not None:
        import torch.distributed as dist

        dist.barrier(group=world.control_group)


def gather_objects(group: "ProcessGroup | None", value: _T) -> list[_T]:
    """Return every rank's value, by rank (pickled, so for small values)."""
    if group is None:
        return [value]

    import torch.distributed as dist

    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set, but its companions are; set it for every rank")
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, not a number; the launcher must set it")
    return int(text)


def _device(config: TrainConfig, launch: Launch) -> "torch.device":
    import torch

    # Without it DeepSpeed guesses, and it may be imported before it is asked for anything.
    os.environ["DS_ACCELERATOR"] = config.world.device
    # peft imports these, and they report what they miss for devices that nobody asked for.
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


def _store(
    config: TrainConfig,
    launch: Launch,
    environ: Mapping[str, str],
    should_stop: Callable[[], bool],
    timeout: timedelta,
) -> "Store":
    """Build the key-value store the groups connect through, with a prefix for this attempt.

    torchrun keeps one store over all restarts and adds no prefix itself, so a restarted rank could
    read a dead peer's address; the restart count in the prefix keeps them apart.
    """
    # Documented as torch.distributed.TCPStore, though the package does not list it for mypy.
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    address, port = _master(config, launch)
    agent_hosts_it = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = launch.rank == 0 and not agent_hosts_it
    listener = environ.get(ENV_STORE_FD)

    def connect(wait: timedelta) -> "Store":
        return TCPStore(
            address,
            port,
            world_size=launch.world_size,
            is_master=is_master,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=int(listener) if listener and is_master else None,
        )

    store = connect(timeout) if is_master else None
    deadline = time.monotonic() + timeout.total_seconds()
    while store is None:
        wait_for_rank_zero(address, port, should_stop, timeout_seconds=timeout.total_seconds())
        try:
            store = connect(_CONNECT_TIMEOUT)
        except DistNetworkError as error:  # it left just then, or is no store
            if should_stop():
                raise _stopped() from error
            if time.monotonic() >= deadline:
                raise TrainerError(
                    f"what answers at {address}:{port} is not rank 0 ({error}); check whether "
                    "another program has taken that port"
                ) from error
    store.set_timeout(timeout)
    return PrefixStore(f"attempt-{config.job.attempt}.{restart_count(environ)}", store)


def wait_for_rank_zero(
    address: str,
    port: int,
    should_stop: Callable[[], bool],
    *,
    timeout_seconds: float = RENDEZVOUS_TIMEOUT.total_seconds(),
) -> None:
    """Return when rank 0's store accepts connections.

    Only a connection counts: a name that resolves may still point nowhere, and one that does not
    may do so in a moment. The library would wait as well, but hear no signal meanwhile.

    Raises:
        TrainerError: nobody answered in time.
        Preempted: `should_stop`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TrainerError(
                    f"rank 0 does not answer at {address}:{port} after {timeout_seconds:.0f} s "
                    f"({error}); check whether its node was started, and whether a network "
                    "policy is in the way"
                ) from error
        if should_stop():
            raise _stopped()
        time.sleep(_POLL_SECONDS)


def _meet(
    store: "Store", world_size: int, should_stop: Callable[[], bool], timeout: timedelta
) -> None:
    """Wait until every rank has come, or agree that none begins: the first write decides."""
    if store.add("arrived", 1) == world_size:
        store.compare_set("start", "", "go")
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(["start"]):
        if should_stop():
            store.compare_set("start", "", "stop")
        if time.monotonic() >= deadline:
            raise TrainerError(
                f"{store.add('arrived', 0)} of {world_size} ranks came up within "
                f"{timeout}; see the logs of the others"
            )
        time.sleep(_POLL_SECONDS)
    if store.get("start") != b"go":
        raise _stopped()


def _stopped() -> Preempted:
    return Preempted("told to stop before training began; nothing is lost")


def _master(config: TrainConfig, launch: Launch) -> tuple[str, int]:
    address = launch.master_addr
    if not address:
        if launch.local_world_size != launch.world_size:
            raise ConfigError(
                f"MASTER_ADDR is not set, and {launch.launcher} started ranks on several nodes; "
                "set it to the host of rank 0 (mpirun: -x MASTER_ADDR=HOST)"
            )
        address = "127.0.0.1"
    if launch.master_port:
        return address, launch.master_port
    # mpirun names no port, and ranks cannot ask each other for one: derive it from what they share.
    name = f"{config.job.uid}/{config.job.attempt}".encode()
    return address, 20000 + int.from_bytes(hashlib.sha256(name).digest()[:4]) % 10000
