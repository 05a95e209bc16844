"""The training loop, with all parts of an optimizer step in order.

`rank` builds everything and calls it. It does not depend on an engine, does not open files, and
reads clocks only for the timings that it reports. Results of a step are read one step later, so
that no micro-batch waits for the device.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import CheckpointRef, Phase, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import Agreement, StopSignal, preempted
from finetune_trainer.data.batch import MicroBatch, collate
from finetune_trainer.data.plan import DataPlan, Pack
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.errors import OvertakenError
from finetune_trainer.failpoints import failpoint
from finetune_trainer.garbage import gc_every
from finetune_trainer.gpu import device_clock
from finetune_trainer.model.loss import loss_inputs, scale_factor
from finetune_trainer.numerics import DeferredMetrics
from finetune_trainer.profiling import Profiler
from finetune_trainer.schedule import learning_rate
from finetune_trainer.step_counters import StepCounters
from finetune_trainer.stopping import Patience
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.telemetry import Lap, StepReport, Telemetry
from finetune_trainer.world import World

_UNSAVED = (
    " without a checkpoint, because spec.checkpoint.enabled is false; the next attempt starts "
    "where this attempt did"
)


@dataclass
class Run:
    """Everything that one rank trains with; built by `rank`, used by `train`."""

    config: TrainConfig
    world: World
    strategy: Strategy
    dataset: TokenDataset
    plan: DataPlan
    store: CheckpointStore
    telemetry: Telemetry
    stop: StopSignal
    agreement: Agreement
    fence: Fence | None  # None except on rank 0
    patience: Patience
    evaluate: (
        Callable[[], float | None] | None
    )  # returns the held-out loss over all ranks; None without held-out rows
    notes: Callable[[], dict[str, Any]]  # state of a checkpoint besides tensors
    pad_to: int | None  # tokens per row; None pads to the longest
    pad_id: int
    flops_of_rows: memoryview | None  # None if not known
    numbers: DeferredMetrics = field(init=False)
    profiler: Profiler = field(init=False)

    def __post_init__(self) -> None:
        origin = self.dataset.origin
        self.numbers = DeferredMetrics(self.world, self.agreement, self.telemetry, origin)
        self.profiler = Profiler(self.config, self.world, self.telemetry)


def train(run: Run, first_step: int) -> int:
    """Run the optimizer steps from `first_step`, counted from 0; return the number finished.

    At least one step must remain.

    Raises:
        Preempted: Asked to stop; every rank left after the same step, with a committed checkpoint
            unless `checkpoint.enabled` is false.
        CheckpointError: Asked to stop, and the last checkpoint could not be committed.
        OvertakenError: A later attempt owns one of the folders.
        NonFiniteLossError: The loss of a step is not finite; the step changed no weights.
    """
    try:
        with gc_every(run.config.training.collect_garbage_every_steps) as collect:
            return _train(run, first_step, collect)
    except BaseException:
        run.profiler.leave(run.stop.seconds_left(run.config.termination_grace_seconds))
        raise


def _train(run: Run, first_step: int, collect: Callable[[int], None]) -> int:
    config, plan, strategy = run.config, run.plan, run.strategy
    run.telemetry.phase(Phase.TRAINING)
    run.agreement.exchange(stop=run.stop.requested, save=False)
    phases, lap = run.telemetry.phases, Lap(run.telemetry.phases)
    phases.follow(device_clock(run.world.device))
    for step in range(first_step, plan.total_steps):
        run.profiler.begin_step(step + 1)
        label_tokens = plan.label_tokens(step)
        scale = scale_factor(label_tokens, run.world.world_size)
        micro_batches = plan.rank_packs(step, run.world.rank, run.world.world_size)
        losses, work = [], StepCounters(run.flops_of_rows)
        for index, packs in enumerate(micro_batches):
            phases.enter(TimedPhase.DATA_WAIT)
            batch = collate(run.dataset, packs, pad_to=run.pad_to, pad_id=run.pad_id)
            work.add(packs, batch)
            _reseed(config.training.seed, step, packs)
            is_last = index == len(micro_batches) - 1
            losses.append(_micro_batch(run, batch, scale, is_last=is_last))
            if not is_last:
                failpoint("mid-accumulation", step + 1)
        failpoint("before-optimizer", step + 1)
        phases.enter(TimedPhase.OPTIMIZER)
        rate = learning_rate(config.training, step, plan.total_steps)
        grad_norm = strategy.step(rate, config.training.max_grad_norm)
        failpoint("after-optimizer", step + 1)
        phases.enter(TimedPhase.COMM_EXPOSED)
        total = run.world.sum(torch.stack(losses).sum()) / max(label_tokens, 1)
        phases.enter(TimedPhase.LOGGING)
        run.numbers.report()
        if step == first_step:
            failpoint("first-step", step + 1)
        report = step_report(plan, step, rate, work, lap, run.profiler.is_recording)
        run.numbers.put(report, total, grad_norm, losses, micro_batches)
        phases.enter(TimedPhase.OTHER)
        run.profiler.end_step(step + 1)
        has_ended = _boundary(run, step + 1)
        collect(step + 1)
        if has_ended:
            break
    run.numbers.report()
    run.profiler.end_step(step + 1, is_last=True)
    phases.follow(None)
    run.agreement.finish_vote()
    return step + 1


def step_report(
    plan: DataPlan,
    step: int,
    rate: float,
    work: StepCounters,
    lap: Lap,
    is_profiled: bool = False,
) -> StepReport:
    """Return the report of a step, counted from 0; its loss and norm are added later."""
    return StepReport(
        step=step + 1,
        epoch=plan.epoch(step + 1),
        loss=None,
        grad_norm=None,
        learning_rate=rate,
        tokens=plan.tokens(step),
        samples=plan.samples(step),
        is_profiled=is_profiled,
        **work.done(),
        **lap.ended(),
    )


def _micro_batch(run: Run, batch: MicroBatch, scale: float, *, is_last: bool) -> Tensor:
    """Run one micro-batch forward and backward; return its summed loss, detached."""
    phases = run.telemetry.phases
    run.telemetry.alive()  # a step of many micro-batches is not a hang
    if run.world.device.type == "cuda":
        phases.enter(TimedPhase.H2D)
    inputs = loss_inputs(batch, run.world.device)
    phases.enter(TimedPhase.FORWARD)
    loss_sum = run.strategy.forward(inputs, is_last=is_last)
    phases.enter(TimedPhase.BACKWARD)
    run.strategy.backward(loss_sum, scale=scale)
    return loss_sum.detach()


def _boundary(run: Run, step: int) -> bool:
    """Evaluate, save or leave if that is due after `step` steps; return whether it was the last."""
    is_last = step == run.plan.total_steps
    eval_loss, is_better = None, False
    if is_evaluation_due(run, step):
        run.numbers.report()
        eval_loss = evaluate(run, step)
        is_better = run.patience.improves(eval_loss)
        is_last = is_last or run.patience.is_exhausted
        run.telemetry.phase(Phase.SAVING if is_last else Phase.TRAINING)
    wants = run.store.wants_save(step, perf_counter()) or run.telemetry.take_save_request()
    lost = run.fence.lost if run.fence is not None else None
    profile_steps = run.telemetry.profile_requests.take()
    agreed = run.agreement.exchange(run.stop.requested, wants, lost is not None, profile_steps)
    if agreed.is_overtaken:
        raise lost or OvertakenError("rank 0 found that a later attempt writes to its folders")
    if agreed.profile_steps:
        run.profiler.request(step + 1, agreed.profile_steps, run.plan.total_steps)
    is_leaving = agreed.stop and not is_last
    if is_leaving and run.store.is_enabled and _is_too_late_to_save(run):
        raise preempted(run.stop, f"after step {step}, too late to save it")
    if agreed.save and not run.store.is_enabled:
        run.telemetry.warn(
            "the request for a checkpoint is ignored, because spec.checkpoint.enabled is false"
        )
    is_due = run.store.cadence.is_due(step)
    if run.store.is_enabled and (agreed.save or is_leaving or is_last or is_better or is_due):
        run.numbers.report()
        with run.telemetry.phases.within(TimedPhase.CHECKPOINT_BLOCKING):
            state = run.strategy.state() | {"trainer": run.notes()}
            run.store.save(step, state, eval_loss=eval_loss)
    report_commit(run, run.store.poll())
    if is_leaving:
        run.telemetry.phase(Phase.STOPPING)
        with run.telemetry.phases.within(TimedPhase.CHECKPOINT_BLOCKING):
            committed = run.store.wait()
        report_commit(run, committed)
        raise preempted(run.stop, f"after step {step}{_UNSAVED * (not run.store.is_enabled)}")
    return is_last


def is_evaluation_due(run: Run, step: int) -> bool:
    """Whether the model is to be evaluated after `step` steps."""
    every = run.config.training.eval_every_steps or run.plan.total_steps
    return run.evaluate is not None and (step % every == 0 or step == run.plan.total_steps)


def evaluate(run: Run, step: int) -> float | None:
    """Return the held-out loss after `step` steps and report it; None if asked to stop."""
    assert run.evaluate is not None, "callers check whether it is due"
    run.telemetry.phase(Phase.EVALUATING)
    failpoint("evaluating", step)
    began = perf_counter()
    with run.telemetry.phases.within(TimedPhase.EVAL):
        loss = run.evaluate()
    if loss is not None:
        run.telemetry.evaluated(step, loss, perf_counter() - began)
    return loss


def report_commit(run: Run, committed: CheckpointRef | None) -> None:
    """Report a committed checkpoint and the best one so far."""
    if committed is not None:
        run.telemetry.checkpointed(committed, best=run.store.best)


def _is_too_late_to_save(run: Run) -> bool:
    """Whether a rank must be gone before a save as slow as the last one could be committed."""
    left = run.stop.seconds_left(run.config.termination_grace_seconds)
    return run.agreement.any((run.store.cadence.save_seconds or 0.0) > left)


def _reseed(seed: int, step: int, packs: tuple[Pack, ...]) -> None:
    """Seed dropout from the data of the micro-batch, independent of rank and history.

    A resume therefore needs no generator state, and a mask does not depend on the rank.
    """
    digest = hashlib.blake2b(repr((seed, step, packs)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
