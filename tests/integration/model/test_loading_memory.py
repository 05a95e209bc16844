"""A model that does not fit into memory is reported as a failure of loading, not of the batch."""

import json
from pathlib import Path

from safetensors.torch import save_file

from finetune_trainer.config import FailureClass
from support.launch.launches import launch, train_config
from support.launch.tiny_run import write_inputs


def test_out_of_memory_while_loading_names_the_loading(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    model, train = inputs / "model", {"path": str(inputs / "train.jsonl")}
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 10**13}))
    save_file({}, model / "model.safetensors", {"format": "pt"})  # every weight is allocated
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        model={"path": str(model)},
        data={"train": train, "format": "text", "columns": {"text": "prompt"}},
    )
    run = launch(config, "finetune_trainer.rank:run")
    assert run.wait() != 0, run.stderr
    assert run.termination.failure_class is FailureClass.OUT_OF_MEMORY
    assert run.termination.message.startswith("out of memory while the model was loaded: ")
    assert "spec.training.microBatchSize" not in run.termination.message
