"""Stand-ins for `finetune_trainer.rank:run`: what a rank may do, without a model.

`stand_in_main` runs them. What a rank does beside its peers is named by the environment: ACT on
rank ACT_RANK.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import (
    CheckpointRef,
    ExitCode,
    FailureClass,
    Phase,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import Agreement, StopSignal, unless_stopped
from finetune_trainer.errors import (
    DataError,
    LostRankError,
    Preempted,
)
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.world import World, barrier
from support.launch.launches import until

STEP_SECONDS = 0.02


def finish(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Use every group once, log the current folder and finish."""
    barrier(world)
    telemetry.log("folder", path=os.getcwd(), files=os.listdir())
    total = world.sum(torch.ones(1))
    message = f"rank {world.rank} of {world.world_size}, sum {int(total.item())}"
    return Termination(
        failure_class=FailureClass.COMPLETED, exit_code=ExitCode.DONE, message=message, step=3
    )


def run_out_of_gpu_memory(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Raise the error of torch's allocator."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def need_a_kernel(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Compute what torch does not compute alike each time."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # which of the two stays?
    return finish(config, world, stop, telemetry, fence)


def act(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Let one rank fail in the way that ACT names, while the others wait for it."""
    if world.rank == int(os.environ["ACT_RANK"]):
        _ACTS[os.environ["ACT"]]()
    barrier(world)
    return finish(config, world, stop, telemetry, fence)


def stay_away(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Let rank 0 wait in a collective for rank 1, which lives and does not come."""
    barrier(world)
    telemetry.phase(Phase.TRAINING)
    if world.rank == 1:
        time.sleep(600)
    world.sum(torch.ones(1))
    return finish(config, world, stop, telemetry, fence)


def blame_late(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Let rank 0 lose rank 1 before that one has said what is wrong with it."""
    if world.is_main:
        raise LostRankError("rank 1 has ended with an error; see its log")
    until(Path(config.termination_path).exists)
    raise DataError("data.train x.jsonl has no rows; add some")


def act_at_first(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Act as `act` says in the first ACT_STARTS starts, and tell of the one after."""
    restarts = telemetry.progress.restarts_in_place
    if restarts < int(os.environ["ACT_STARTS"]):
        return act(config, world, stop, telemetry, fence)
    message = f"start {restarts}, continued {config.checkpoint.is_continued}"
    return finish(config, world, stop, telemetry, fence).model_copy(update={"message": message})


def hang(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Let rank 1 get nowhere, and rank 0 wait for it, once both have begun to train."""
    barrier(world)
    telemetry.phase(Phase.TRAINING)
    if world.rank == 1:
        time.sleep(600)
    return finish(config, world, stop, telemetry, fence)


def wait_with_the_lock() -> None:
    """Wait in C for what never comes, with the interpreter lock."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself
        libc.pthread_mutex_lock(mutex)


def hold_the_lock(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Get nowhere with the interpreter lock, so that no thread of Python runs."""
    telemetry.phase(Phase.TRAINING)
    time.sleep(2)  # the watchdog sets its timer each second
    wait_with_the_lock()
    return finish(config, world, stop, telemetry, fence)


def work_alone(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Let rank 0 work alone for three times as long as a collective waits."""
    telemetry.phase(Phase.EXPORTING)
    seconds = 3.0 * config.control.collective_timeout_seconds

    def work() -> None:
        (Path(config.run_dir) / f"pid-{world.rank}").write_text(str(os.getpid()))
        if world.is_main:
            time.sleep(seconds)

    unless_stopped(Agreement(world), stop, work)
    return finish(config, world, stop, telemetry, fence)


def train(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Make tiny steps until told to stop; leave at an agreed step with a pretended checkpoint."""
    agreement = Agreement(world)
    telemetry.plan(10**6)
    step = 0
    while True:
        step += 1
        time.sleep(STEP_SECONDS)
        world.sum(torch.ones(1))
        telemetry.step(report(step))
        if step == 1:
            (Path(config.run_dir) / f"pid-{world.rank}").write_text(str(os.getpid()))
        if agreement.exchange(stop.requested).stop:
            agreement.finish_vote()
            telemetry.checkpointed(CheckpointRef(step=step, path="c", time=1.0, world_size=2))
            raise Preempted(f"stopped by {stop.reason or 'another rank'} after step {step}")


def few_steps(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Make three steps and an evaluation after the last, and write the names of the variables."""
    (Path(config.run_dir) / "environment.txt").write_text("\n".join(os.environ))
    telemetry.plan(3)
    for step in range(1, 4):
        telemetry.step(report(step))
    telemetry.evaluated(3, 0.5, 0.1)
    return finish(config, world, stop, telemetry, fence)


def train_on(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Make steps indefinitely and ignore stop requests."""
    return train(config, world, StopSignal(), telemetry, fence)


def leave_late(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Leave as `train` does, but let rank 1 take two seconds longer, as for a slow save."""
    try:
        return train(config, world, stop, telemetry, fence)
    except Preempted:
        if world.rank == 1:
            time.sleep(2)
        raise


def report(step: int, seconds: float = STEP_SECONDS) -> StepReport:
    """Return the report of a rank about a step."""
    return StepReport(
        step=step,
        epoch=step / 100,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=10,
        samples=1,
        rank_tokens=5,
        seconds=seconds,
    )


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _abort_as_nccl_does() -> None:
    """Be ended by the watchdog of NCCL, which no CPU has; it reaches no Python."""
    words = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78)"
    os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\n")
    os.write(2, f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] {words}\n".encode())
    os.abort()


_ACTS: dict[str, Callable[[], None]] = {
    "data": _raise(DataError("data.train x.jsonl has no rows; add some")),
    "bug": _raise(ZeroDivisionError("division by zero")),
    "memory": _raise(MemoryError()),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nccl-timeout": _abort_as_nccl_does,
}
