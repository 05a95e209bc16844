"""An entry for a rank that records how many graphs are compiled before its first step."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.loop import Run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World


def run(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Run the rank, and write the numbers of graphs to `graphs.json` in the run directory."""
    from torch._dynamo.utils import counters

    from finetune_trainer import rank
    from finetune_trainer.model.compile import compile_layers
    from finetune_trainer.strategies import parallelize

    train: Callable[[Run, int], int] = vars(rank)["train"]

    def counted(run: Run, first_step: int) -> int:
        before = counters["stats"]["unique_graphs"]
        last = train(run, first_step)
        numbers = {"before": before, "after": counters["stats"]["unique_graphs"]}
        (Path(config.run_dir) / "graphs.json").write_text(json.dumps(numbers))
        return last

    vars(rank)["train"] = counted
    # Inductor would build a CPU's kernels for minutes.
    vars(parallelize)["compile_layers"] = partial(compile_layers, backend="aot_eager")
    return rank.run(config, world, stop, telemetry, fence)
