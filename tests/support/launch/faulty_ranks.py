"""Ranks that make steps together, of which one does what a test wants of it.

Compute is a sleep, so that many fit on a small machine; collectives, phases and reports are real.
What goes wrong is named by the environment: FAULT on rank FAULT_RANK, after FAULT_STEP steps.
FAULT_FLOATS is how many numbers a step adds up over the ranks.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Phase, Progress, Suspect, Termination, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import Agreement, StopSignal
from finetune_trainer.errors import Preempted
from finetune_trainer.launch.worker import run_rank
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.launches import free_port, train_config, until
from support.launch.rank_entries import report
from support.launch.warm_processes import forkserver
from support.telemetry.node_pages import ask, free_ports

STEP_SECONDS = 0.2
SLOWER = 1.2


def work(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Make steps until told to stop."""
    is_faulty = world.rank == int(os.environ.get("FAULT_RANK", "-1"))
    fault = os.environ["FAULT"] if is_faulty else "none"
    after = int(os.environ.get("FAULT_STEP", "20"))
    num_floats = int(os.environ.get("FAULT_FLOATS", "1000"))
    agreement, phases = Agreement(world), telemetry.phases
    telemetry.phase(Phase.TRAINING)
    telemetry.collectives.begin()
    for step in count(1):
        began = time.monotonic()
        if fault in HELD_UP:
            phases.enter(HELD_UP[fault])
            time.sleep(STEP_SECONDS / 2)
        phases.enter(TimedPhase.FORWARD)
        time.sleep(STEP_SECONDS * (SLOWER if fault == "slower" else 1.0))
        if step > after and fault in FAULTS:
            FAULTS[fault]()
        phases.enter(TimedPhase.COMM_EXPOSED)
        world.sum(torch.ones(num_floats))
        phases.enter(TimedPhase.LOGGING)
        telemetry.step(report(step, time.monotonic() - began))
        phases.enter(TimedPhase.OTHER)
        if agreement.exchange(stop.requested).stop:
            agreement.finish_vote()
            raise Preempted(f"stopped after step {step}")
    raise AssertionError("it counts for ever")


def stay_asleep() -> None:
    """Do nothing."""
    time.sleep(3600)


def hold_the_lock() -> None:
    """Wait in C for what never comes, and let no other thread of Python run meanwhile."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself
        libc.pthread_mutex_lock(mutex)


def be_stopped() -> None:
    """Be stopped, as by a debugger or a cgroup's freezer."""
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {
    "asleep": stay_asleep,
    "holds the lock": hold_the_lock,
    "stopped": be_stopped,
}
"""Ways to stay away from a collective."""

HELD_UP = {"starved": TimedPhase.DATA_WAIT, "slow storage": TimedPhase.CHECKPOINT_BLOCKING}
"""What a rank waits for in each step, for half as long as it computes."""


class FaultyRanks:
    """The ranks of one attempt on one node, forked from a process that has imported torch."""

    def __init__(self, folder: Path, num_ranks: int, fault: str, rank: int, **environ: str) -> None:
        """Start them."""
        folder.mkdir()
        self.num_ranks, self.fault, self.rank = num_ranks, fault, rank
        port = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.config = train_config(
            folder,
            world={"nproc_per_node": num_ranks},
            training={"global_batch_size": num_ranks},
            telemetry={"metrics_port": port},
        )
        environ |= {"FAULT": fault, "FAULT_RANK": str(rank), "FINETUNE_NODE_NAME": "node-a"}
        place = (self.config.to_json(), str(free_port()), environ)
        self.processes: list[BaseProcess] = [
            forkserver().Process(target=_be_rank, args=(one, *place), daemon=True)
            for one in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def progress(self) -> Progress:
        """Return what the page says; nothing of note while there is none."""
        try:
            answer = ask(self.url, "GET", "/progress")
        except ConnectionRefusedError:
            return Progress()
        return Progress.model_validate_json(answer.text) if answer.status == 200 else Progress()

    def wait_for_step(self, step: int) -> None:
        """Return when so many steps are made."""
        until(lambda: self.progress().step >= step)

    def wait_for_suspect(self, seconds: float) -> Suspect:
        """Return who is suspected first."""
        found: list[Suspect] = []

        def is_found() -> bool:
            found.extend(self.progress().suspects)
            return bool(found)

        until(is_found, timeout=seconds)
        return found[0]

    def close(self) -> None:
        """End them; the page ends with rank 0."""
        for process in self.processes:
            process.kill()
            process.join()


def _be_rank(rank: int, text: str, port: str, environ: dict[str, str]) -> None:
    config = TrainConfig.model_validate_json(text)
    world = str(config.world.world_size)
    place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    place |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, **environ)
    run_rank(config, "support.launch.faulty_ranks:work")
