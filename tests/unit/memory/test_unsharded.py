"""FSDP leaves tensors unsharded between micro-batches only if they fit by the formula."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.check import check_memory
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.memory.unsharded import choose_unsharded
from finetune_trainer.refusals import Refusals
from finetune_trainer.sizing.base_shape import BaseShape, Role
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.peak import step_peak
from finetune_trainer.sizing.reserve import measured_reserve, reserve_bytes
from support.launch.launches import train_config
from support.memory.memory_setups import EIGHT_B, ONE_B

GIB = 2**30
MODELS = {"1b": ONE_B, "8b": EIGHT_B}
METHODS = (("full", "adamw"), ("full", "adamw8bit"), ("lora", "adamw"))
WARNS = Refusals(is_new=True, warn=lambda _: None)
SHARDED, WEIGHTS, GRADIENTS, BOTH = (True, True), (False, True), (True, False), (False, False)


def config_of(folder: Path, model: dict[str, Any] = ONE_B, **changed: Any) -> TrainConfig:
    """Return full fine-tuning with FSDP of a model of which only `config.json` exists."""
    LlamaConfig(**model, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    training = {
        "precision": "bf16",
        "global_batch_size": 16,
        "micro_batch_size": 1,
        **changed.pop("training", {}),
    }
    values = {
        "world": {"nproc_per_node": 8},
        "strategy": {"type": "fsdp", **changed.pop("strategy", {})},
        "data": {"max_seq_len": 4096, **changed.pop("data", {})},
        **changed,
    }
    return train_config(folder, training=training, **values)


def chosen(config: TrainConfig, free: int, base: BaseShape | None = None) -> tuple[Any, Any]:
    """Return whether weights are resharded and gradients reduced per micro-batch."""
    strategy = choose_unsharded(config, free, base=base).strategy
    return strategy.reshard_after_forward, strategy.reduce_each_micro_batch


def needed(config: TrainConfig, choice: tuple[bool, bool]) -> int:
    """Return the free bytes from which a step with a choice fits."""
    values = {"reshard_after_forward": choice[0], "reduce_each_micro_batch": choice[1]}
    strategy = config.strategy.model_copy(update=values)
    chosen = config.model_copy(update={"strategy": strategy})
    peak = step_peak(with_method(read_base_of(config), chosen), chosen)
    return math.ceil(peak.nbytes * 1.05) + reserve_bytes(chosen) - measured_reserve(chosen)


def test_weights_have_priority_over_gradients(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    both, weights = (needed(config, choice) for choice in (BOTH, WEIGHTS))
    assert weights < both
    assert chosen(config, both) == BOTH
    assert chosen(config, both - 1) == WEIGHTS
    assert chosen(config, weights) == WEIGHTS
    assert chosen(config, weights - 1) == SHARDED


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"reshard_after_forward": True}, SHARDED, id="weights resharded"),
        pytest.param({"reshard_after_forward": False}, WEIGHTS, id="weights retained"),
        pytest.param({"reduce_each_micro_batch": False}, GRADIENTS, id="gradients retained"),
        pytest.param(
            {"reshard_after_forward": False, "reduce_each_micro_batch": False}, BOTH, id="both"
        ),
    ],
)
def test_configured_values_stay_without_memory_for_them(
    settings: dict[str, bool], expected: tuple[bool, bool], tmp_path: Path
) -> None:
    assert chosen(config_of(tmp_path, strategy=settings), free=0) == expected


def test_gradients_stay_unsharded_where_weights_are_configured(tmp_path: Path) -> None:
    config = config_of(tmp_path, strategy={"reshard_after_forward": True})
    assert chosen(config, free=200 * GIB) == GRADIENTS


def test_without_accumulation_no_gradient_waits_for_another_micro_batch(tmp_path: Path) -> None:
    config = config_of(tmp_path, training={"global_batch_size": 8})
    assert chosen(config, free=200 * GIB) == WEIGHTS


def test_unknown_layers_are_sharded(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    base = read_base_of(config)
    known = base.kinds[0].tensors
    tensors = tuple(one for one in known if one.role is not Role.OUT_OF_MLP)
    unknown = base.kinds[0].model_copy(update={"tensors": tensors})
    order = (1, *base.order[1:])
    one_unknown = base.model_copy(update={"kinds": (*base.kinds, unknown), "order": order})
    without_layers = base.model_copy(update={"kinds": (), "order": ()})
    for one in (one_unknown, without_layers):
        assert chosen(config, free=200 * GIB, base=one) == SHARDED
    assert check_memory(config, 0, row_tokens=1, base=without_layers) is None


def test_eight_billion_parameters_on_eighty_gigabytes(tmp_path: Path) -> None:
    """State and weights take half of the free memory here, and activations most of the rest."""
    tokens = 13_312
    config = config_of(tmp_path, EIGHT_B, data={"max_seq_len": tokens}, training={"compile": True})
    found = check_memory(config, 79 * GIB, row_tokens=tokens, refusals=WARNS)
    assert found is not None
    assert found.verdict == "Tight"
    assert chosen(config, 79 * GIB) == SHARDED
    assert needed(config, chosen(config, 90 * GIB)) <= 90 * GIB < needed(config, BOTH)


@pytest.mark.full
def test_no_choice_exceeds_the_free_memory(tmp_path: Path) -> None:
    """500 random configurations that the memory check accepts."""
    draw = random.Random(30)
    bases = {name: read_base_of(drawn(tmp_path, draw, name, "full", "adamw")) for name in MODELS}
    accepted = retained = 0
    while accepted < 500:
        name, (method, optimizer) = draw.choice(list(MODELS)), draw.choice(METHODS)
        config = drawn(tmp_path, draw, name, method, optimizer)
        base, free = bases[name], draw.choice((24, 40, 80, 141)) * GIB
        try:
            tokens = config.data.max_seq_len
            check_memory(config, free, row_tokens=tokens, base=base, refusals=WARNS)
        except ConfigError:
            continue
        accepted += 1
        resolved = choose_unsharded(config, free, base=base)
        is_by_choice = any(
            getattr(resolved.strategy, field) is False and getattr(config.strategy, field) is None
            for field in ("reshard_after_forward", "reduce_each_micro_batch")
        )
        if is_by_choice:
            retained += 1
            peak = step_peak(with_method(base, resolved), resolved)
            assert peak.nbytes * 1.05 + GIB / 4 <= free, config.strategy
    assert 100 < retained < 400


def drawn(folder: Path, draw: random.Random, name: str, method: str, optimizer: str) -> TrainConfig:
    """Return a random configuration of a model, a method and an optimizer."""
    ranks, unset = draw.choice((2, 4, 8)), (None, None, True, False)
    return config_of(
        folder,
        MODELS[name],
        method={"type": method, **({"lora": {"r": 16}} if method == "lora" else {})},
        world={"nproc_per_node": ranks},
        strategy={
            "activation_checkpointing": draw.choice(("none", "selective", "full")),
            "reshard_after_forward": draw.choice(unset),
            "reduce_each_micro_batch": draw.choice(unset),
        },
        data={"max_seq_len": draw.choice((1024, 4096, 16_384))},
        training={"global_batch_size": ranks * draw.choice((1, 2, 8)), "optimizer": optimizer},
    )
