"""What the collectives of some steps came to, under any strategy on real ranks of gloo."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.config import metrics
from finetune_trainer.config.metrics import Metric, TimedPhase, combinations
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies import create
from finetune_trainer.telemetry.collectives import Collectives
from finetune_trainer.telemetry.collectives.dump import read_dump
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.slots import Block
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import until
from support.strategies.parity import Case, build_model, case_config, train_steps, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WARM_UP = 2
"""Steps before those that are counted: after the first one DDP makes its buckets anew."""
COUNTED = 3

PHASE = "waited, by the clock of phases"

_COUNTERS = (
    metrics.COMM_CALLS,
    metrics.COMM_BYTES,
    metrics.COMM_BUS_BYTES,
    metrics.COMM_SECONDS,
    metrics.COMM_EXPOSED,
)

Counts = dict[str, float]
"""By the metric's name and the values of its labels, joined with blanks; of `COUNTED` steps."""


def count_steps(
    folder: Path, cases: Sequence[Case], *, world_size: int, deepspeed: bool = False
) -> dict[str, list[Counts]]:
    """Train every case on ranks that are started once; return what each rank counted, by case."""
    folder.mkdir(exist_ok=True)
    codes = run_processes(
        _count_all,
        folder,
        list(cases),
        world_size=world_size,
        timeout_seconds=240,
        deepspeed=deepspeed,
    )
    assert codes == [0] * world_size
    return {
        case.name: [
            json.loads((folder / f"{case.name}.{rank}.json").read_text())
            for rank in range(world_size)
        ]
        for case in cases
    }


def _count_all(group: "ProcessGroup | None", folder: Path, cases: Sequence[Case]) -> None:
    world = world_of(group)
    for case in cases:
        config = case_config(case, folder, world.world_size)
        block = Block.private()
        phases = PhaseClock(block)
        warnings: list[str] = []
        collectives = Collectives(block, config.strategy, warnings.append, phases)
        with collectives.watched(uses_nccl=False):
            strategy = create(config, world)
            strategy.prepare(CausalLoss(build_model(case)))
            collectives.begin()
            numbered = _enqueued(block)
            train_steps(strategy, case, world, range(WARM_UP))
            _read(collectives, block, numbered)
            before = _values(block)
            phases.enter(TimedPhase.BACKWARD)
            train_steps(strategy, case, world, range(WARM_UP, WARM_UP + COUNTED))
            phases.enter(TimedPhase.OTHER)
            _read(collectives, block, numbered)
        assert warnings == []
        _understands_a_real_recorder()
        after = _values(block)
        counted = {key: value - before.get(key, 0.0) for key, value in after.items()}
        counted[PHASE] = phases.spent(TimedPhase.COMM_EXPOSED)
        (folder / f"{case.name}.{world.rank}.json").write_text(json.dumps(counted))


def _read(collectives: Collectives, block: Block, numbered: float) -> None:
    """Read until all is known: of a bucket of DDP's a thread of gloo's tells, when it can.

    So many collectives had a number before counting began.
    """

    def is_known() -> bool:
        collectives.read()
        values = _values(block).items()
        counted = sum(value for key, value in values if key.startswith(metrics.COMM_CALLS.name))
        return counted == _enqueued(block) - numbered

    until(is_known)


def _enqueued(block: Block) -> float:
    values = _values(block).items()
    return sum(value for key, value in values if key.startswith(metrics.COMM_ENQUEUED.name))


def _understands_a_real_recorder() -> None:
    """Read gloo's, which torch writes by the same code as that of NCCL, but without ranks."""
    import torch

    dump = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    ring = read_dump(dump(True, False, False))
    assert {one.op for one in ring.collectives} >= {"all_reduce"}
    assert {one.group for one in ring.collectives} >= {"default_pg"}
    assert ring.progress


def _values(block: Block) -> Counts:
    found = {}
    for metric in (*_COUNTERS, metrics.COMM_ENQUEUED, metrics.COMM_COMPLETED):
        for values in combinations(metric.labels[1:]):
            value = block.numbers[block.place(metric, *values)]
            if value == value:  # known
                found[" ".join((metric.name, *values))] = value
    return found


def of(counts: Counts, metric: Metric, op: str, group: str) -> float:
    """Return what all size classes of an operation in a group come to."""
    prefix = f"{metric.name} {op} {group} "
    return sum(value for key, value in counts.items() if key.startswith(prefix))
