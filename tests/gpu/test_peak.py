"""The peak of a step is what the formula says, beside what the libraries keep for themselves.

What a CPU can show of the formula, by a trace, is in tests/unit/memory/test_memory_peak.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Phase, Termination, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.rank import run
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.peak import step_peak
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.data.text_fixtures import tiny_tokenizer
from support.launch.device_runs import Device, device_config, needs_cuda, train

pytestmark = [pytest.mark.gpu, pytest.mark.full]
TOKENS = 2048
LORA = {"type": "lora", "lora": {"r": 16}}
QLORA = {"type": "qlora", "quantization": "nf4", "lora": {"r": 16}}
FULL = {"type": "full"}
EIGHT_BIT = {"optimizer": "adamw8bit"}


@pytest.fixture(scope="module")
def wide(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.4B parameters, whose activations outweigh what libraries keep."""
    from transformers import LlamaConfig, LlamaForCausalLM

    needs_cuda(
        device, "a CPU's allocator keeps no peak; tests/unit/memory/test_memory_peak.py traces it"
    )
    folder: Path = tmp_path_factory.mktemp("wide")
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        **ids,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "model")
    tiny_tokenizer(folder / "model")
    words = "gradient descent follows the slope of the loss " * TOKENS
    rows = "".join(json.dumps({"text": f"{n} {words}"}) + "\n" for n in range(8))
    (folder / "train.jsonl").write_text(rows)
    return folder


def kept_by_libraries() -> int:
    """Return what cuBLAS has taken of the allocator: its workspace, which stays."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    one = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    _ = one @ one
    taken = torch.cuda.memory_allocated() - before
    del one
    return max(taken, 0)


@pytest.mark.parametrize(
    ("method", "how", "training"),
    [
        pytest.param(LORA, "none", {}, id="adapters"),
        pytest.param(LORA, "selective", {}, id="adapters, selective"),
        pytest.param(LORA, "full", {}, id="adapters, recomputed"),
        pytest.param(QLORA, "full", {}, id="adapters on 4 bits, recomputed"),
        pytest.param(FULL, "none", {}, id="full"),
        pytest.param(FULL, "full", EIGHT_BIT, id="full in 8 bits, recomputed"),
        pytest.param(LORA, "none", {"compile": True}, id="adapters, compiled"),
    ],
)
def test_the_peak_of_a_step_is_that_of_the_formula(
    method: dict[str, Any],
    how: str,
    training: dict[str, Any],
    wide: Path,
    device: Device,
    tmp_path: Path,
) -> None:
    peaks: list[int] = []

    def watch(config: TrainConfig, world: World, telemetry: Telemetry, fence: Fence) -> Termination:
        tell = telemetry.phase

        def phase_of_run(phase: Phase) -> None:
            if phase is Phase.TRAINING:
                torch.cuda.reset_peak_memory_stats()
            if phase is Phase.EXPORTING:
                peaks.append(torch.cuda.max_memory_allocated())
            tell(phase)

        telemetry.phase = phase_of_run  # type: ignore[method-assign]
        return run(config, world, StopSignal(), telemetry, fence)

    constant = kept_by_libraries() or 32 * 2**20  # an earlier product has taken it already
    config = device_config(
        wide,
        tmp_path / "job",
        device,
        method=method,
        strategy={"activation_checkpointing": how},
        data={"format": "text", "max_seq_len": TOKENS, "packing": False, "long_rows": "truncate"},
        training={"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 4, **training},
        checkpoint={"enabled": False},
    )
    train(config, watch)
    expected = step_peak(with_method(read_base_of(config), config), config, tokens=TOKENS).nbytes
    (found,) = peaks
    assert found == pytest.approx(expected + constant, rel=0.1)
