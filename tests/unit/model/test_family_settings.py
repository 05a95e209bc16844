"""What class and configuration say of a model is said before weights or rows are looked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.errors import ConfigError
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.families import resolve_packing
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.launches import train_config

ALONE = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
LONGROPE = {
    "rope_theta": 10_000.0,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
    "rope_parameters": LONGROPE,
}
DYNAMIC = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 4.0},
}


def config_of(folder: Path, settings: dict[str, Any], **changes: Any) -> TrainConfig:
    """Return a job whose model's folder holds a configuration and nothing else."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(settings))
    return train_config(folder, **changes)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        pytest.param(
            {"model_type": "t5"}, "family t5, for which .* no causal", id="no causal class"
        ),
        pytest.param(
            {"model_type": "bart"}, "family bart, an encoder-decoder", id="encoder-decoder"
        ),
        pytest.param({"model_type": "bert"}, "bert, .* has is_decoder false", id="encoder"),
        pytest.param({"model_type": "xlm"}, "xlm, .* has causal false", id="XLM"),
        pytest.param({"model_type": "xlnet"}, "family xlnet, which", id="XLNet"),
        pytest.param(
            {"model_type": "mixtral", "output_router_logits": True},
            "mixtral, .* output_router_logits true: .*; set it to false",
            id="router loss",
        ),
        pytest.param(
            {"model_type": "llama", "is_causal": False}, "llama, .* is_causal false", id="two ways"
        ),
    ],
)
def test_a_family_that_cannot_be_trained_is_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^spec.model.source .* is of the .*{sentence}"):
        resolve_packing(config_of(tmp_path, settings), print)


def test_a_family_is_refused_before_rows_tokenizer_or_weights_are_looked_for(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, {"model_type": "bert"}, world={"nproc_per_node": 1})
    fence = claim_folders(config, lambda: False)
    telemetry = Telemetry(config, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="is_decoder false"):
        run(config, ALONE, StopSignal(), telemetry, fence)
    telemetry.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(
            {"model_type": "mamba"},
            r"MambaForCausalLM has layers \(linear_attention\) that reach",
            id="state",
        ),
        pytest.param({"model_type": "qwen3_next"}, r"\(linear_attention\) that reach", id="some"),
        pytest.param(
            {"model_type": "bloom"},
            "BloomFor.* takes no positions, which mark the start",
            id="no positions",
        ),
        pytest.param(PHI3, "beyond 64 tokens the rotary scaling of Phi3", id="LongRoPE"),
    ],
)
def test_a_family_known_to_leak_gets_a_row_for_each_document(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    said: list[str] = []
    config = config_of(tmp_path, settings)
    assert not resolve_packing(config, said.append).data.packing
    assert len(said) == 1
    data = config.data.model_copy(update={"is_packing_asked": True})
    asked = config.model_copy(update={"data": data})
    with pytest.raises(ConfigError, match=f"^spec.training.packing true: .*{reason}"):
        resolve_packing(asked, print)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [pytest.param(PHI3, 64, id="LongRoPE"), pytest.param(DYNAMIC, 64, id="dynamic")],
)
def test_rows_within_the_first_range_of_rotary_scaling_are_packed(
    settings: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, settings, data={"max_seq_len": longest})
    assert resolve_packing(config, print) is config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        pytest.param(PHI3, "a micro-batch; lower it to 64, or set .*microBatchSize", id="LongRoPE"),
        pytest.param(DYNAMIC, "longest row so far; lower it to 64", id="dynamic"),
    ],
)
def test_rows_whose_positions_would_depend_on_other_rows_are_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path, settings, data={"max_seq_len": 65}, training={"micro_batch_size": 2}
    )
    with pytest.raises(ConfigError, match=rf"^spec.training.maxSeqLength 65 .*{sentence}"):
        resolve_packing(config, print)
