"""What documents see of each other is measured on sharded models, and all ranks decide alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import TrainConfig
from support.data.text_fixtures import tiny_model as tiny_llama
from support.data.text_fixtures import tiny_tokenizer
from support.launch.forked_ranks import Ranks, attempt, events
from support.launch.launches import train_config
from support.model.every_family import tiny_model, tiny_settings


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    tiny_tokenizer(folder)
    settings = tiny_settings("gpt_oss")
    settings.vocab_size = 768
    tiny_model(settings).save_pretrained(folder)
    return {"gpt_oss": folder, "llama": tiny_llama(tmp_path_factory.mktemp("llama"))}


def config(folder: Path, model: Path, strategy: str, **data: Any) -> TrainConfig:
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train_config(
        folder,
        model={"path": str(model)},
        data={"max_seq_len": 64, **data},
        strategy={"type": strategy},
        training={"max_steps": 1, "precision": "bf16"},
    )


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(one, marks=pytest.mark.full) for one in ("ddp", "zero3"))]
)
@pytest.mark.parametrize(("family", "is_packed"), [("llama", True), ("gpt_oss", False)])
def test_a_sharded_model_is_packed_where_it_keeps_documents_apart(
    models: dict[str, Path], family: str, is_packed: bool, strategy: str, tmp_path: Path
) -> None:
    made = config(tmp_path, models[family], strategy)
    assert attempt(made) == [0, 0]
    *_, told = [entry for entry in events(made) if entry["event"] == "data"]
    assert (told["train"]["packs"] < 8) == is_packed
    warned = [e["message"] for e in events(made) if e["event"] == "warning"]
    assert any("documents of a pack affect each other" in said for said in warned) != is_packed


def test_all_ranks_refuse_packing_that_is_asked_for(
    models: dict[str, Path], tmp_path: Path
) -> None:
    ranks = Ranks(config(tmp_path, models["gpt_oss"], "fsdp", is_packing_asked=True))
    assert ranks.codes() == [78, 78]
    assert "spec.training.packing true: in GptOssForCausalLM" in ranks.termination().message
