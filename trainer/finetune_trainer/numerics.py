"""Read a step's results from the device one step later, and handle non-finite values.

On every rank, the loop passes each step to it and then reports the previous step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finetune_trainer.control import Agreement
from finetune_trainer.data.plan import Pack
from finetune_trainer.errors import NonFiniteLossError
from finetune_trainer.gpu import begin_copy, is_on_gpu
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.phases import Marks
from finetune_trainer.world import World, gather_values

if TYPE_CHECKING:
    from torch.cuda import Event

# fp16 halves its scale from 65,536 to 1 in 16 skipped steps; beyond that no step can succeed.
MAX_SKIPPED_IN_A_ROW = 40

MicroBatches = Sequence[tuple[Pack, ...]]


@dataclass(frozen=True)
class _InFlight:
    """Loss, norm and this rank's losses of one step while they are copied to the host."""

    report: StepReport
    micro_batches: MicroBatches
    values: Tensor
    arrived: "Event | None"
    marks: Marks


def _remedy(step: int) -> str:
    """Return the remedy for a non-finite loss; the first step has other causes."""
    if step > 1:
        return "check these rows, lower spec.training.learningRate or use another precision"
    return (
        "no weight has changed yet, so look for non-finite weights in spec.model.source, "
        "check these rows, or use spec.training.precision bf16 or fp32"
    )


class DeferredMetrics:
    """Completes a step's report when its results have arrived, without waiting for them."""

    def __init__(
        self, world: World, agreement: Agreement, telemetry: Telemetry, origin: Callable[[int], str]
    ) -> None:
        """Prepare; `origin` returns the source of a data set row."""
        self._world = world
        self._origin_of = origin
        self._agreement = agreement
        self._telemetry = telemetry
        self._in_flight: _InFlight | None = None
        self._skipped_in_a_row = 0

    def put(
        self,
        report: StepReport,
        loss: Tensor,
        grad_norm: Tensor,
        own_losses: Sequence[Tensor],
        micro_batches: MicroBatches,
    ) -> None:
        """Start to copy a step's results to the host.

        Args:
            report: The step's report without results.
            loss: Mean over the step's label tokens of all ranks.
            grad_norm: Not finite if the step was skipped.
            own_losses: Summed losses of this rank's micro-batches.
            micro_batches: Packs of these micro-batches.
        """
        values = torch.stack([loss, grad_norm.to(loss.dtype), *own_losses])
        arrived: Event | None = None
        if is_on_gpu(values):
            values, arrived = begin_copy(values)
        marks = self._telemetry.phases.take_marks()
        self._in_flight = _InFlight(report, micro_batches, values, arrived, marks)

    def report(self) -> None:
        """Report the newest step if it has not been reported yet.

        Raises:
            NonFiniteLossError: Its loss is not finite, or too many steps in a row were skipped.
        """
        if self._in_flight is None:
            return
        step, self._in_flight = self._in_flight, None
        if step.arrived is not None:
            step.arrived.synchronize()
        self._telemetry.phases.count(step.marks)
        loss, norm, *own = step.values.tolist()
        if not math.isfinite(loss):
            self._telemetry.loss_was_not_finite(step.report.step)
            raise NonFiniteLossError(
                f"the loss of step {step.report.step} is {loss} ({self._origin(step, own)}); "
                f"no weight was updated with it; {_remedy(step.report.step)}"
            )
        self._skipped_in_a_row = 0 if math.isfinite(norm) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(
                f"the gradients of the last {self._skipped_in_a_row} steps were not finite, so "
                "none of them changed anything; lower spec.training.learningRate or use "
                "spec.training.precision bf16 or fp32"
            )
        self._telemetry.step(step.report._replace(loss=loss, grad_norm=norm))

    def _origin(self, step: _InFlight, own: list[float]) -> str:
        """Name the rows of the packs with non-finite losses, over all ranks; a collective."""
        self._agreement.finish_vote()  # a vote in flight would interleave with the next collective
        mine = [
            [", ".join(map(self._origin_of, pack)) for pack in packs if pack]
            for value, packs in zip(own, step.micro_batches, strict=True)
            if not math.isfinite(value)
        ]
        return "; ".join(
            f"rank {rank}, a pack of {pack}"
            for rank, found in enumerate(
                gather_values(self._world.control_group, mine, list[list[str]])
            )
            for packs in found
            for pack in packs
        )
