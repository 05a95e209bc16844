"""ZeRO-3 with parameters and optimizer on disk: the same numbers, and files that prove it.

DeepSpeed compiles its asynchronous input and output at the first use, for minutes; so this runs
where that was done before.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.checkpoint.shards import read_shards, write_shards
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies import create
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World
from support.checkpoint.checkpoint_fixtures import run_processes
from support.strategies.parity import Case, case_config, train_steps, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUILDS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
SAVED, STEPS = 3, 6


def is_built() -> bool:
    """Say whether it was compiled for this very environment; for another it is compiled again."""
    torch_here = str(Path(torch.__file__).parent)
    found = (one.with_name("build.ninja") for one in BUILDS.rglob("async_io.so"))
    return any(torch_here in one.read_text() for one in found)


pytestmark = pytest.mark.skipif(
    not is_built(),
    reason="DeepSpeed's async_io is not built (install libaio-dev, run a job with offload nvme)",
)


def prepared(case: Case, folder: Path, world: World) -> Strategy:
    """Return a strategy around a model whose shards are large enough for DeepSpeed to swap."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    )
    strategy = create(case_config(case, folder, world.world_size), world)
    strategy.prepare(CausalLoss(model))
    return strategy


def train_on_disk(group: "ProcessGroup", folder: Path) -> None:
    world = world_of(group)
    swap = folder / "swap"
    on_disk = Case("nvme", {"type": "zero3", "offload": "nvme", "nvme_path": str(swap)})
    strategy = prepared(on_disk, folder, world)
    before, _ = train_steps(strategy, on_disk, world, range(SAVED))
    files = [path.name for path in swap.rglob("*") if path.is_file() and path.stat().st_size]
    write_shards(strategy.state(), folder / "saved", group, SAVED)
    after, _ = train_steps(strategy, on_disk, world, range(SAVED, STEPS))

    strategy = prepared(on_disk, folder, world)
    state = strategy.state()
    read_shards(state, folder / "saved", group)
    strategy.load_state(state)
    resumed, _ = train_steps(strategy, on_disk, world, range(SAVED, STEPS))

    in_memory = Case("ddp", {"type": "ddp"})
    expected, _ = train_steps(prepared(in_memory, folder, world), in_memory, world, range(STEPS))
    found = {"files": files, "losses": before + after, "resumed": resumed, "expected": expected}
    torch.save(found, folder / f"{world.rank}.pt")


def test_a_job_trains_and_resumes_with_its_state_on_disk(tmp_path: Path) -> None:
    codes = run_processes(train_on_disk, tmp_path, world_size=2, deepspeed=True)
    assert codes == [0, 0]
    found = torch.load(tmp_path / "0.pt")
    assert any("exp_avg_sq" in name for name in found["files"]), found["files"]
    assert found["losses"] == pytest.approx(found["expected"], abs=3e-6, rel=0)
    assert found["resumed"] == found["losses"][SAVED:]
