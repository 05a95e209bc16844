"""Choices of `auto`, by memory, links and generation of the GPUs."""

import random
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import AutoConfig, TrainConfig
from finetune_trainer.sizing.choose import Choice, Hardware, choose
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict
from unit.memory.test_fit import GIB, TOKENS, base_of, config_of

OPEN = ("strategy", "activationCheckpointing", "microBatchSize", "precision")
V100, A100, H100 = Gpu(round(31.5 * GIB), (7, 0)), Gpu(round(79.1 * GIB)), Gpu(93 * GIB)
T4 = Gpu(round(14.6 * GIB), (7, 5))


def opened(config: TrainConfig, *settings: str, **auto: Any) -> TrainConfig:
    """Return the configuration with settings left to the trainer."""
    values = AutoConfig.model_validate({"settings": settings or OPEN, "usable_bytes": 1, **auto})
    return config.model_copy(update={"auto": values})


def chosen(
    folder: Path, name: str, method: str, ranks: int, hardware: Hardware, **changed: Any
) -> Choice:
    changed = {"global_batch_size": 64, **changed}
    config = opened(config_of(folder, method, "ddp", "none", ranks=ranks, **changed))
    return choose(config, Sizing(base_of(name), TOKENS), hardware)


def words(choice: Choice) -> str:
    strategy, training = choice.config.strategy, choice.config.training
    kind = "hsdp" if strategy.replicas > 1 else strategy.type
    return (
        f"{kind} {strategy.activation_checkpointing} {training.micro_batch_size} "
        f"{training.precision} {choice.verdict}"
    )


@pytest.mark.parametrize(
    ("name", "method", "ranks", "hardware", "expected"),
    [
        pytest.param("Llama 8B", "qlora", 1, Hardware(T4), "ddp full 2 fp16 Fits", id="T4"),
        pytest.param(
            "Mistral 7B", "lora", 8, Hardware(V100), "ddp selective 1 fp16 Fits", id="8 x V100"
        ),
        pytest.param(
            "Llama 8B", "lora", 4, Hardware(A100), "ddp none 2 bf16 Fits", id="replicas come first"
        ),
        pytest.param(
            "Llama 8B",
            "full",
            4,
            Hardware(A100, has_nvlink=True),
            "fsdp none 2 bf16 Fits",
            id="NVLink: no recomputation first",
        ),
        pytest.param(
            "Llama 8B",
            "full",
            4,
            Hardware(A100),
            "fsdp full 4 bf16 Fits",
            id="without NVLink: the largest micro-batch first",
        ),
        pytest.param(
            "Llama 70B",
            "qlora",
            4,
            Hardware(A100, has_nvlink=True),
            "ddp full 4 bf16 Fits",
            id="replicas with full recomputation before sharding with it",
        ),
        pytest.param(
            "Llama 70B", "lora", 2, Hardware(H100), "fsdp full 2 bf16 Fits", id="2 x H100"
        ),
        pytest.param(
            "Qwen 72B", "lora", 8, Hardware(V100), "fsdp full 1 fp16 Tight", id="least memory"
        ),
        pytest.param("Llama 8B", "lora", 1, Hardware(T4), "ddp full 1 fp16 WouldNotFit", id="none"),
    ],
)
def test_the_choice_for_a_published_model(
    name: str, method: str, ranks: int, hardware: Hardware, expected: str, tmp_path: Path
) -> None:
    assert words(chosen(tmp_path, name, method, ranks, hardware)) == expected


def test_nodes_hold_replicas_that_are_sharded_inside(tmp_path: Path) -> None:
    config = config_of(tmp_path, "full", "ddp", "none", ranks=8, global_batch_size=64)
    nodes = config.world.model_copy(update={"nnodes": 2, "nproc_per_node": 8})
    config = opened(config.model_copy(update={"world": nodes}))
    choice = choose(config, Sizing(base_of("Llama 8B"), TOKENS), Hardware(A100, has_nvlink=True))
    assert words(choice).startswith("hsdp none")
    assert choice.config.strategy.replicas == 2
    assert choice.config.strategy.prefetch == 1


def test_only_open_settings_change_and_the_batch_stays(tmp_path: Path) -> None:
    plain = config_of(
        tmp_path, "full", "ddp", "selective", ranks=4, global_batch_size=12, micro_batch_size=3
    )
    config = opened(plain, "strategy")
    hardware = Hardware(A100, has_nvlink=True)
    choice = choose(config, Sizing(base_of("Llama 8B"), TOKENS), hardware)
    assert words(choice).startswith("fsdp selective 3 bf16")
    config = opened(plain, "microBatchSize")
    small = choose(config, Sizing(base_of("Llama 1B"), 8192), hardware).config
    assert small.strategy == plain.strategy
    assert small.training.micro_batch_size == 1  # 12 / 4 rows; 3 x 8,192 tokens are too many
    assert small.training.global_batch_size == 12
    assert small.auto is None


def test_no_candidate_is_chosen_that_would_be_refused_later(tmp_path: Path) -> None:
    plain = config_of(tmp_path, "full", "ddp", "none", ranks=4, global_batch_size=64)
    sizing, hardware = Sizing(base_of("Llama 8B"), TOKENS), Hardware(A100, has_nvlink=True)
    single = choose(opened(plain), sizing, hardware, needs_single_rows=True)
    assert single.config.training.micro_batch_size == 1
    assert choose(opened(plain), sizing, hardware, can_shard=False).config.strategy.type == "ddp"
    method = plain.method.model_copy(update={"quantization": "int8"})
    int8 = opened(plain.model_copy(update={"method": method}))
    assert choose(int8, sizing, Hardware(V100)).config.strategy.type == "ddp"


def test_after_an_out_of_memory_each_choice_needs_a_tenth_less(tmp_path: Path) -> None:
    sizing, hardware = Sizing(base_of("Llama 8B"), TOKENS), Hardware(A100, has_nvlink=True)
    config = config_of(tmp_path, "lora", "ddp", "none", ranks=4, global_batch_size=64)
    choice, peaks = choose(opened(config), sizing, hardware), list[int]()
    while choice.lower_peak_bytes is not None:
        assert choice.peak_bytes is not None
        peaks.append(choice.peak_bytes)
        limit = choice.lower_peak_bytes
        assert limit <= 0.9 * choice.peak_bytes
        choice = choose(opened(config, peak_at_most=limit), sizing, hardware)
        assert choice.peak_bytes is not None
        assert choice.peak_bytes <= limit
    assert len(peaks) > 2


def test_less_free_memory_changes_a_choice_that_would_not_fit(tmp_path: Path) -> None:
    usual = chosen(tmp_path, "Llama 8B", "lora", 4, Hardware(A100))
    same = chosen(tmp_path, "Llama 8B", "lora", 4, Hardware(A100, free=A100.usable - 2 * GIB))
    less = chosen(tmp_path, "Llama 8B", "lora", 4, Hardware(A100, free=30 * GIB))
    assert same == usual
    assert less.passed_over == usual.config
    assert less.peak_bytes is not None
    assert less.peak_bytes < 30 * GIB
    none = chosen(tmp_path, "Llama 8B", "lora", 4, Hardware(A100, free=GIB))
    assert none == usual  # the start check refuses it by the free memory


def test_random_choices_repeat_and_fit_wherever_a_candidate_fits(tmp_path: Path) -> None:
    draw = random.Random(37)
    plain = {
        (method, ranks): config_of(tmp_path, method, "ddp", "none", ranks=ranks)
        for method in ("lora", "qlora", "full")
        for ranks in (1, 2, 8)
    }
    fitting = 0
    for _ in range(60):
        name, (method, ranks) = draw.choice(("Llama 1B", "Llama 8B")), draw.choice(list(plain))
        rows = ranks * draw.choice((1, 3, 4, 16))
        training = plain[method, ranks].training.model_copy(update={"global_batch_size": rows})
        config = opened(plain[method, ranks].model_copy(update={"training": training}))
        sizing = Sizing(base_of(name), draw.choice((512, 2048, 8192)))
        gpu = Gpu(draw.choice((16, 24, 40, 80)) * GIB, draw.choice(((7, 0), (8, 0))))
        hardware = Hardware(gpu, has_nvlink=draw.choice((True, False)))
        choice = choose(config, sizing, hardware)
        assert choose(config, sizing, hardware) == choice
        assert choice.verdict == sizing.verdict(choice.config, gpu)
        TrainConfig.model_validate_json(choice.config.to_json())
        if choice.verdict is Verdict.FITS:
            fitting += 1
            larger = Gpu(2 * gpu.usable, gpu.capability)
            more = choose(config, sizing, Hardware(larger, has_nvlink=hardware.has_nvlink))
            assert more.verdict is Verdict.FITS
    assert 20 < fitting < 60
