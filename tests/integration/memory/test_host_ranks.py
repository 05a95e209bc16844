"""The host memory of two real ranks, when they load, copy a checkpoint and export, by formula."""

import ctypes
import gc
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from finetune_trainer.checkpoint.division import own_part
from finetune_trainer.checkpoint.shards import Snapshot
from finetune_trainer.config import TrainConfig
from finetune_trainer.export.merge import cast_copy, merged_copy
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import load_device, load_model
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.sizing.host import host_peak
from finetune_trainer.sizing.method import with_method
from finetune_trainer.strategies import create
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import train_config
from support.strategies.parity import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_M_MMAP_THRESHOLD = -3
PRECISION_OF_FILES = torch.bfloat16


class Grown:
    """Anonymous memory of this process while the block runs: files and code do not count.

    Attributes:
        most: Bytes at the peak beside those before the block.
        retained: Bytes that the block did not release.
    """

    def __enter__(self) -> "Grown":
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.most, self._before, self._is_over = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.retained = anonymous_bytes() - self._before

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.most = max(self.most, anonymous_bytes() - self._before)
            time.sleep(0.002)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def measure(group: "ProcessGroup", folder: Path, config: TrainConfig) -> None:
    """Do as `rank` and `export` do, and write the bytes of each moment."""
    # Otherwise the heap retains up to 200 MiB of tensors below 32 MiB, whatever the model.
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 2**16)
    world, found = world_of(group), {}
    strategy = create(config, world)
    with Grown() as loading:
        base = load_model(config, load_device(config, world.rank, world.device), quantises=False)
    found["loading"] = loading.most
    module = CausalLoss(choose_trained(base, config))
    del base
    strategy.prepare(module)
    snapshot, part = Snapshot(), own_part(strategy.state(), world.rank, world.world_size)
    with Grown() as staged:
        snapshot.take(part)
    found["checkpoint"] = staged.most
    with Grown() as gathered:  # a GPU's own buffers are released
        whole: Any = strategy.whole_model()
    with Grown() as export:
        if whole is not None and config.method.lora is not None:
            for name, parameter in whole.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.02)
            merged_copy(whole, None, lambda _: None)
        elif whole is not None:
            cast_copy(whole, PRECISION_OF_FILES)
    found["export"] = gathered.retained + export.most
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "strategy"), [("full", "fsdp"), ("lora", "fsdp"), ("lora", "ddp")]
)
def test_two_ranks_take_the_host_memory_of_the_formula(
    method: str, strategy: str, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=4096, hidden_size=4096, intermediate_size=4608, num_hidden_layers=1
    )
    LlamaForCausalLM(settings).to(PRECISION_OF_FILES).save_pretrained(tmp_path / "model")
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 2},
        model={"path": str(tmp_path / "model")},
        strategy={"type": strategy},
        method={"type": method, **({} if method == "full" else {"lora": {"r": 64}})},
        training={"precision": "bf16", "global_batch_size": 2},
        output={"format": "merged"},
    )
    assert run_processes(measure, tmp_path, config, world_size=2) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    exact = "pinned_max_round_threshold_mb:0"  # a CPU has no pinned memory
    shape = with_method(read_base_of(config), config)
    moments = host_peak(shape, config, converts=method == "full", allocator=exact).moments
    staged = moments["checkpoint"]
    pairs = {
        "checkpoint": (staged, first["checkpoint"] + second["checkpoint"]),
        "export": (moments["export"] - staged, first["export"]),
    }
    if strategy == "fsdp":
        pairs["loading"] = (moments["loading"], first["loading"])
        assert second["loading"] < 2**25
    for moment, (expected, found) in pairs.items():
        print(f"{strategy} {method} {moment}: {expected / 2**20:.0f} by {found / 2**20:.0f} MiB")
        # 24 MiB for what is not a weight, such as buffers of gloo.
        assert -(3 * 2**23) - 0.05 * found < expected - found < 0.15 * found + 3 * 2**23, moment
