"""`auto` by the memory of two ranks, and after an OutOfMemory: real ranks over gloo.

A parameter gives the memory, because the ranks compute on a CPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_trainer.config import ExitCode, FailureClass, PlanReport, TrainConfig, read_progress
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.sizing.choose import Hardware, choose
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict
from support.launch.forked_ranks import Ranks, events
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

SETTINGS = ("strategy", "activationCheckpointing", "microBatchSize")
STEPS = 12


def auto_config(folder: Path, usable: int, **auto: Any) -> TrainConfig:
    return train_config(
        folder,
        data={
            "format": "instruction",
            "columns": {"instruction": "prompt", "output": "completion"},
            "max_seq_len": 64,
        },
        training={"max_steps": STEPS, "global_batch_size": 8},
        checkpoint={"every_steps": 1},
        auto={"settings": SETTINGS, "usable_bytes": usable, **auto},
    )


def most_that_is_sharded(config: TrainConfig) -> int:
    """Return the largest memory of a rank with which the model is sharded."""
    sizing = Sizing(read_base_of(config), config.data.max_seq_len)
    low, high = 0, 2**36
    while high - low > 1:
        middle = (low + high) // 2
        choice = choose(config, sizing, Hardware(Gpu(middle)))
        is_whole = choice.config.strategy.type == "ddp" and choice.verdict is Verdict.FITS
        low, high = (low, middle) if is_whole else (middle, high)
    return low


def test_ranks_short_of_memory_shard_the_model_and_continue_lowered_after_an_out_of_memory(
    tmp_path: Path,
) -> None:
    inputs = write_inputs(tmp_path, hidden_size=256)
    usable = most_that_is_sharded(auto_config(inputs, 1))
    fault = "support.memory.out_of_memory:at_step_2"
    first = Ranks(auto_config(inputs, usable), entry=fault)
    assert first.codes()[0] == ExitCode.KILLED
    failed, before = first.termination(), read_progress(Path(first.config.run_dir))
    assert failed.failure_class is FailureClass.OUT_OF_MEMORY
    assert failed.is_gpu_memory is True
    plan = before.plan
    assert before.step == 2
    assert plan is not None
    assert plan.strategy == "fsdp"
    assert plan.usable_bytes == usable
    chosen = [event for event in events(first.config, 1) if event["event"] == "chosen"]
    assert [PlanReport.model_validate(without_time(one)) for one in chosen] == [plan]

    limit = plan.lower_peak_bytes
    assert limit is not None
    second = Ranks(auto_config(inputs, usable, peak_at_most=limit).continued())
    assert second.codes() == [ExitCode.DONE, ExitCode.DONE]
    found = read_progress(Path(second.config.run_dir))
    assert found.resumed_step == 1
    assert found.step == STEPS
    assert found.plan is not None
    assert found.plan.peak_bytes is not None
    assert plan.peak_bytes is not None
    assert found.plan.peak_bytes <= limit <= 0.9 * plan.peak_bytes


def without_time(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name in PlanReport.model_fields}


def test_auto_on_a_cpu_needs_the_memory(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"auto\.usableBytes"):
        train_config(tmp_path, auto={"settings": SETTINGS})


def test_without_auto_the_configuration_has_no_new_key(tmp_path: Path) -> None:
    assert "auto" not in json.loads(train_config(tmp_path).to_json())
