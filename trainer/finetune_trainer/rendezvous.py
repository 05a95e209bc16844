"""Rendezvous of an attempt's ranks: find rank 0, then agree whether all ranks start.

Called by `world` before process groups exist. The ranks use a key-value store served by rank 0 or
torchrun's agent. A waiting rank still handles a stop signal and logs what it waits for. It polls at
most once a second, because it may wait for days, and with short calls, because proxies close a
connection that is idle for long.
"""

import hashlib
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from finetune_trainer.config import ENV_NODE_NAME, TrainConfig
from finetune_trainer.errors import ConfigError, Preempted, TrainerError
from finetune_trainer.launchers import Launch, restart_count

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RENDEZVOUS_SECONDS = 600.0
ENV_STORE_FD = "FINETUNE_STORE_FD"  # socket bound by our supervisor for rank 0's store
ENV_STORE_ENTRANCE = "FINETUNE_STORE_ENTRANCE"  # loopback port that relays to rank 0's store
# Timeout of a connection to a store that was just reachable; a signal cannot interrupt it.
_CONNECT_TIMEOUT = timedelta(seconds=5)
_POLL_SECONDS = 1.0
_FIRST_POLL_SECONDS = 0.02  # ranks usually arrive together; each next pause is longer
_QUIET_SECONDS = 15.0  # before a rank first logs what it waits for; doubles each time
_MAX_NAMED = 8


def rendezvous_limit(environ: Mapping[str, str]) -> float:
    """Return how long a rank may wait for the others, in seconds; infinite on Kubernetes.

    Only the operator knows whether a pod of the gang still waits for a node, so it bounds the wait
    there. The variable is set by that backend alone.
    """
    return math.inf if ENV_NODE_NAME in environ else RENDEZVOUS_SECONDS


def open_store(
    config: TrainConfig,
    launch: Launch,
    environ: Mapping[str, str],
    should_stop: Callable[[], bool],
    limit_seconds: float,
) -> "Store":
    """Create the key-value store through which the groups connect, with a prefix for this attempt.

    torchrun keeps one store over all restarts and adds no prefix itself, so a restarted rank could
    read a dead peer's address; the restart count in the prefix prevents that.

    Raises:
        ConfigError: The launcher does not state rank 0's address.
        Preempted: `should_stop` returned True before rank 0 responded.
        TrainerError: Rank 0 did not respond within `limit_seconds`.
    """
    # Documented as torch.distributed.TCPStore, though the package does not list it for mypy.
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    address, port = _master(config, launch)
    agent_hosts_it = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = launch.rank == 0 and not agent_hosts_it
    listener, entrance = environ.get(ENV_STORE_FD), environ.get(ENV_STORE_ENTRANCE)

    def connect(wait: timedelta) -> "Store":
        return TCPStore(
            "127.0.0.1" if entrance else address,
            int(entrance) if entrance else port,
            world_size=launch.world_size,
            is_master=is_master,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=int(listener) if listener and is_master else None,
        )

    call_timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
    store = connect(call_timeout) if is_master else None
    deadline, log = time.monotonic() + limit_seconds, _Log()
    while store is None:
        if not entrance:  # with it our supervisor has waited
            wait_for_rank_zero(address, port, should_stop, limit_seconds=limit_seconds)
        try:
            store = connect(_CONNECT_TIMEOUT)
        except DistNetworkError as error:  # the store has just ended, or the server is not a store
            if should_stop():
                raise _stopped() from error
            problem = f"the program at {address}:{port} is not rank 0 ({error})"
            if time.monotonic() >= deadline:
                raise TrainerError(
                    f"{problem}; check whether another program has taken that port"
                ) from error
            if log.is_due:
                log.report(f"waits for rank 0, {problem}")
            time.sleep(_POLL_SECONDS)
    store.set_timeout(call_timeout)
    return PrefixStore(f"attempt-{config.job.attempt}.{restart_count(environ)}", store)


def _connect(address: tuple[str, int]) -> None:
    socket.create_connection(address, timeout=2).close()


def wait_for_rank_zero(
    address: str,
    port: int,
    should_stop: Callable[[], bool],
    *,
    limit_seconds: float = RENDEZVOUS_SECONDS,
    connect: Callable[[tuple[str, int]], None] = _connect,
) -> None:
    """Wait until `connect` succeeds, which raises an OSError until rank 0 responds.

    By default rank 0's store must accept a connection. A resolved name may still point elsewhere,
    and an unknown name may resolve soon. torch would wait, too, but ignore signals meanwhile.

    Raises:
        TrainerError: Rank 0 did not respond before the deadline.
        Preempted: `should_stop` returned True.
    """
    deadline, log = time.monotonic() + limit_seconds, _Log()
    while True:
        try:
            connect((address, port))
            return
        except OSError as error:
            if log.is_due:
                log.report(f"waits for rank 0, no response from {address}:{port} ({error})")
            if time.monotonic() >= deadline:
                raise TrainerError(
                    f"rank 0 does not respond at {address}:{port} after {limit_seconds:.0f} s "
                    f"({error}); check whether its node was started, and whether a network "
                    "policy is in the way"
                ) from error
        if should_stop():
            raise _stopped()
        time.sleep(_POLL_SECONDS)


def rendezvous(
    store: "Store",
    rank: int,
    world_size: int,
    should_stop: Callable[[], bool],
    limit_seconds: float,
    on_wait: Callable[[str], None],
) -> None:
    """Wait until every rank has arrived, or agree that none starts.

    The first write to the store decides. On rank 0, `on_wait` is called with a sentence about the
    missing ranks, and with an empty one at the end.

    Raises:
        Preempted: `should_stop` returned True on a rank before all had arrived.
        TrainerError: A rank did not arrive within `limit_seconds`.
    """
    store.set(f"arrived/{rank}", "")
    if store.add("arrived", 1) == world_size:
        store.compare_set("start", "", "go")
    deadline, log = time.monotonic() + limit_seconds, _Log()
    pause, missing = _FIRST_POLL_SECONDS, _Missing(store, world_size)
    while not store.check(["start"]):
        if should_stop():
            store.compare_set("start", "", "stop")
            continue
        if log.is_due:
            log.report(f"waits for the other ranks: {missing.sentence()}")
        if rank == 0 and pause == _POLL_SECONDS:
            on_wait(missing.sentence())
        if time.monotonic() >= deadline:
            raise TrainerError(
                f"{missing.sentence()} within {limit_seconds:.0f} s; see the logs of those ranks, "
                "and whether their nodes were started"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL_SECONDS)
    if rank == 0 and pause == _POLL_SECONDS:
        on_wait("")
    if store.get("start") != b"go":
        raise _stopped()


class _Missing:
    """Describes the ranks that have not arrived, with the first few numbers."""

    def __init__(self, store: "Store", world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self._known: tuple[int, str] = (0, "")

    def sentence(self) -> str:
        """Return the description; it asks for each rank only if another one has arrived."""
        num_arrived = self._store.add("arrived", 0)
        if num_arrived != self._known[0]:
            self._known = (num_arrived, self._describe())
        return self._known[1]

    def _describe(self) -> str:
        ranks = range(self._world_size)
        missing = [rank for rank in ranks if not self._store.check([f"arrived/{rank}"])]
        names = ", ".join(map(str, missing[:_MAX_NAMED]))
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        return f"{len(missing)} of {self._world_size} ranks have not arrived ({names}{more})"


class _Log:
    """Logs on stderr what a waiting rank waits for, so that its log is not silent for minutes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._quiet_seconds = _QUIET_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next message."""
        return time.monotonic() - self._began >= self._quiet_seconds

    def report(self, activity: str) -> None:
        """Log the activity of this rank and its duration."""
        self._quiet_seconds *= 2
        with suppress(OSError):  # a full disk or a closed reader must not end the rank
            seconds = time.monotonic() - self._began
            print(f"{activity}, for {seconds:.0f} s so far", file=sys.stderr, flush=True)


def _stopped() -> Preempted:
    return Preempted("asked to stop before training began; no work is lost")


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
    # mpirun names no port, and ranks cannot exchange one yet: derive it from shared values.
    name = f"{config.job.uid}/{config.job.attempt}".encode()
    return address, 20000 + int.from_bytes(hashlib.sha256(name).digest()[:4]) % 10000
