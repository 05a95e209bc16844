"""torchrun's agent, with an ending that keeps what the ranks wanted to say.

The stock agent turns every exit code but 0 into 1, kills all ranks 30 s after the first one left,
and takes a preemption for a fault. This one keeps its rendezvous protocol, its rank assignment and
its worker environment, and leaves the watching to its caller. Used by `supervisor` alone.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from finetune_trainer.launch.watch import Processes

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# Ranks leave together, so nodes do too; this only bounds the wait for a node that was lost.
_EXIT_BARRIER_SECONDS = 30.0


@dataclass(frozen=True)
class NodeSpec:
    """This node's place among the others, and what it shall run.

    Attributes:
        run_id: job and attempt; keeps the keys of two attempts apart in one store.
        node_rank: 0 hosts the store.
        port: of the store; 0 takes a free one, which only one node alone can do.
        arguments: of the Python interpreter.
        log_dir: for torchrun's own files; removed by the caller.
    """

    run_id: str
    node_rank: int
    nnodes: int
    nproc_per_node: int
    host: str
    port: int
    arguments: tuple[str, ...]
    log_dir: Path


class FixedRendezvous(RendezvousHandler):
    """A rendezvous of nodes whose number and ranks are known beforehand.

    torchrun's dynamic one numbers nodes in the order of their host names, sends heartbeats, and
    takes a node that left after its work for a change of membership. The operator decides who
    takes part in an attempt, so none of that is wanted.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name it for torchrun's logs."""
        return "fixed"

    @property
    def use_agent_store(self) -> bool:
        """Tell the ranks that node 0's agent hosts the store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect to the store.

        A restart in place would come through here again with the same store, in which a dead
        rank's address is still to be found; `world` keeps restarts apart by a prefix of its own.
        """
        spec = self._spec
        # Node 0 asks itself by address: its own name may not resolve before the pod is ready.
        host = "127.0.0.1" if spec.node_rank == 0 else spec.host
        self._store = TCPStore(
            host,
            spec.port,
            is_master=spec.node_rank == 0,
            timeout=RENDEZVOUS_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return RendezvousInfo(
            PrefixStore(spec.run_id, self._store),
            spec.node_rank,
            spec.nnodes,
            RendezvousStoreInfo(host, self._store.port),
        )

    def is_closed(self) -> bool:
        """Return False: an attempt has one rendezvous."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node ever waits to join a running attempt."""
        return 0

    def get_run_id(self) -> str:
        """Return the job and attempt."""
        return self._spec.run_id

    def shutdown(self) -> bool:
        """Return True: the store goes with the process."""
        return True


class RankAgent(LocalElasticAgent):
    """Starts the ranks of this node once, and lets `watch` see them through to their end."""

    def __init__(self, spec: NodeSpec, watch: Callable[[Processes], bool]) -> None:
        """Prepare; nothing starts before `run`.

        Args:
            spec: place and command.
            watch: receives the processes by rank, returns when all have ended, and says whether
                the other nodes will come to a good end as well and are worth waiting for.
        """
        # All nodes run alike, so ranks follow from node ranks without a round through the store.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        # The supervisor's own handlers stay; torchrun's would throw out of the middle of `watch`.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        workers = WorkerSpec(
            role="rank",
            local_world_size=spec.nproc_per_node,
            rdzv_handler=FixedRendezvous(spec),
            entrypoint=sys.executable,
            args=spec.arguments,
            max_restarts=0,
        )
        logs = DefaultLogsSpecs(log_dir=str(spec.log_dir))
        super().__init__(workers, logs, exit_barrier_timeout=_EXIT_BARRIER_SECONDS)
        self._watch = watch

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take the place of torchrun's monitoring loop; called by `run`."""
        group = self._worker_group
        self._initialize_workers(group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)  # as the entry point is a command
        handlers = context.subprocess_handlers
        ended_well = self._watch(
            {worker.global_rank: handlers[worker.local_rank].proc for worker in group.workers}
        )
        if not ended_well:
            return RunResult(WorkerState.FAILED)
        if group.group_world_size is not None and group.group_world_size > 1:
            self._exit_barrier()  # node 0 hosts the store that the others may still read
        ranks = [worker.global_rank for worker in group.workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
