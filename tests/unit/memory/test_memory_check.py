"""A model that does not fit is refused in one sentence, before any of its weights is loaded."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from transformers import LlamaConfig

from finetune_trainer.config import AutoConfig, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.gpu import has_nvlink
from finetune_trainer.memory import resolve
from finetune_trainer.memory.check import check_memory
from finetune_trainer.memory.check_host import HostMemory
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.memory.resolve import read_base_if_needed, resolve_by_memory
from finetune_trainer.refusals import STRICT, Refusals
from finetune_trainer.sizing.fit import changes
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.peak import step_peak
from finetune_trainer.world import World
from support.launch.launches import train_config
from support.memory.memory_setups import ONE_B

GIB = 2**30
ROW = 4096


def config_of(folder: Path, **changed: Any) -> TrainConfig:
    """Return full fine-tuning of a 1B model of which nothing but `config.json` is there."""
    settings = LlamaConfig(**ONE_B, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    settings.save_pretrained(folder / "model")
    training = {"precision": "bf16", "global_batch_size": 1, **changed.pop("training", {})}
    values = {"world": {"nproc_per_node": 1}, **changed}
    return train_config(folder, training=training, **values)


def needed(config: TrainConfig) -> float:
    """Return the peak in GiB."""
    tokens = config.training.micro_batch_size * ROW
    return step_peak(with_method(read_base_of(config), config), config, tokens=tokens).nbytes / GIB


def test_what_fits_is_started_with_its_peak_known(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    found = check_memory(config, 80 * GIB, row_tokens=ROW)
    assert found is not None
    assert found.verdict == "Fits"
    peak = found.peak
    assert peak.nbytes / GIB == pytest.approx(needed(config))
    assert sum(peak.parts.values()) == peak.nbytes == max(peak.moments.values())


@pytest.mark.parametrize(
    ("free", "component", "change"),
    [
        pytest.param(23, "moments", "activationCheckpointing selective", id="a little short"),
        pytest.param(
            12,
            "moments",
            "spec.training.optimizer adamw8bit with spec.strategy.activationCheckpointing full",
            id="the moments alone are too large",
        ),
        pytest.param(5, "moments", "spec.method.type lora", id="its gradients are too large, too"),
        pytest.param(1, "moments", "no single setting makes it fit", id="nothing helps"),
    ],
)
def test_a_refusal_names_the_largest_component_and_the_cheapest_change(
    free: int, component: str, change: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_memory(config_of(tmp_path), free * GIB, row_tokens=ROW)
    said = str(refused.value)
    assert said.startswith("spec.training: a step of this model takes 26.1 GiB")
    assert f"of which {component} take 9.2 GiB, and {free}.0 GiB are free" in said
    assert change in said
    assert "spec.training.checkMemory false" in said


def test_smaller_micro_batches_and_sharding_are_named_where_they_help(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        world={"nproc_per_node": 8},
        training={"micro_batch_size": 4, "global_batch_size": 32},
    )
    all_logits = config.model_copy(
        update={"training": config.training.model_copy(update={"fused_head": False})}
    )
    assert next(name for name, _ in changes(all_logits)) == "spec.training.fusedHead true"
    assert needed(all_logits) > needed(config)
    named = [name for name, _ in changes(config)]
    assert named == [
        "spec.strategy.activationCheckpointing selective",
        "spec.training.microBatchSize 2",
        "spec.training.microBatchSize 1",
        "spec.strategy.activationCheckpointing full",
        "spec.strategy.type fsdp with spec.strategy.activationCheckpointing full",
        "spec.training.optimizer adamw8bit with spec.strategy.activationCheckpointing full",
        "spec.method.type lora with spec.strategy.activationCheckpointing full",
        "spec.method.type qlora with spec.strategy.activationCheckpointing full",
    ]
    whole = needed(config)
    assert all(needed(changed) < whole for _, changed in changes(config))


def test_a_gpu_is_asked_and_the_check_can_be_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gpu = config_of(tmp_path), World(0, 0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    resolved = partial(resolve_by_memory, base=None, row_tokens=ROW, refusals=STRICT, warn=print)
    with pytest.raises(ConfigError, match=r"10\.0 GiB are free"):
        resolved(config, gpu)
    off = config.training.model_copy(update={"check_memory": False})
    unchecked = config.model_copy(update={"training": off})
    assert resolved(unchecked, gpu).config == unchecked
    assert resolved(config, World(0, 0, 1, torch.device("cpu"))).config == config


def test_a_tight_configuration_starts_on_a_gpu_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, warnings = World(0, 0, 1, torch.device("cuda", 0)), list[str]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (26 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    config = config_of(tmp_path, data={"max_seq_len": ROW})
    refusals, base = Refusals(is_new=True, warn=warnings.append), read_base_if_needed(config, gpu)
    resolved = resolve_by_memory(
        config,
        gpu,
        base,
        row_tokens=ROW,
        refusals=refusals,
        warn=warnings.append,
        host=lambda: HostMemory(free=900 * GIB, total=900 * GIB),
    )
    assert resolved.config.strategy == config.strategy
    assert resolved.report is None
    assert ["may not be enough" in one for one in warnings] == [True]


def test_auto_is_chosen_by_the_total_memory_of_a_gpu_and_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, warnings, free = World(0, 0, 1, torch.device("cuda", 0)), list[str](), [31, 30, 2]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free.pop(0) * GIB, 32 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(resolve, "has_nvlink", lambda _: False)
    plain = config_of(tmp_path, data={"max_seq_len": ROW})
    auto = AutoConfig(settings=("activationCheckpointing", "precision"))
    config = plain.model_copy(update={"auto": auto})
    resolved = partial(
        resolve_by_memory,
        base=read_base_if_needed(config, gpu),
        row_tokens=ROW,
        refusals=STRICT,
        warn=warnings.append,
        host=lambda: HostMemory(free=512 * GIB, total=512 * GIB),
    )
    first, again = resolved(config, gpu), resolved(config, gpu)
    assert first == again
    assert first.report is not None
    assert (first.report.precision, first.report.usable_bytes) == ("fp16", 32 * GIB)
    assert first.config.auto is None
    assert warnings == []
    with pytest.raises(ConfigError, match=r"2\.0 GiB are free"):
        resolved(config, gpu)


@pytest.mark.parametrize(
    ("method", "card", "total", "small_host"),
    [
        pytest.param({"type": "full"}, (9, 0), 32 * GIB, 4, id="fp32 weights"),
        pytest.param(
            {"type": "lora", "lora": {}},
            (7, 0),
            23 * GIB // 2,
            2,
            id="fp16 weights of files in bf16",
        ),
    ],
)
def test_auto_does_not_shard_what_the_host_cannot_load(
    method: dict[str, Any],
    card: tuple[int, int],
    total: int,
    small_host: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, warnings = World(0, 0, 2, torch.device("cuda", 0)), list[str]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card)
    monkeypatch.setattr(resolve, "has_nvlink", lambda _: True)
    plain = config_of(
        tmp_path,
        method=method,
        world={"nproc_per_node": 2},
        data={"max_seq_len": ROW},
        training={"global_batch_size": 2},
    )
    auto = AutoConfig(settings=("strategy", "precision"))
    config = plain.model_copy(update={"auto": auto})
    chosen = {}
    for host in (64, small_host):
        found = resolve_by_memory(
            config,
            gpu,
            read_base_if_needed(config, gpu),
            row_tokens=ROW,
            refusals=Refusals(is_new=True, warn=warnings.append),
            warn=print,
            host=partial(HostMemory, free=900 * GIB, total=host * GIB),
        )
        chosen[host] = found.config.strategy.type
    assert chosen == {64: "fsdp", small_host: "ddp"}
    assert not any("strategy.type fsdp" in warning for warning in warnings)


def test_nvlink_has_to_connect_a_gpu_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that pairs which are bridged, as in NC96ads_A100_v4, do not count."""
    pairs = {frozenset(pair) for pair in ("01", "23")}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid[-1])
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetP2PStatus",
        lambda one, two, index: 0 if frozenset((one, two)) in pairs else 1,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    described = {index: SimpleNamespace(uuid=f"uuid-{index}") for index in range(4)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", described.get)
    assert not has_nvlink(torch.device("cuda", 0))
    pairs |= {frozenset(("0", other)) for other in "23"}
    assert has_nvlink(torch.device("cuda", 0))


def test_a_run_with_a_checkpoint_and_a_tight_one_start_with_a_warning(tmp_path: Path) -> None:
    config, warnings = config_of(tmp_path), list[str]()
    resumed, new = Refusals(is_new=False, warn=warnings.append), Refusals(True, warnings.append)
    check_memory(config, 10 * GIB, row_tokens=ROW, refusals=resumed)
    check_memory(config, 26 * GIB, row_tokens=ROW, refusals=new)
    first, second = warnings
    assert "10.0 GiB are free; the cheapest change" in first
    assert first.endswith("this one resumes from its checkpoint")
    assert "26.0 GiB are free, which may not be enough; the cheapest change that fits is" in second
    assert "checkMemory" not in second


def test_the_formula_needs_no_torch() -> None:
    code = "import sys, finetune_trainer.sizing.peak; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
