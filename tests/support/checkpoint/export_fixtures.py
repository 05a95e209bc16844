"""A tiny model with trained-looking adapters, and the configuration it would be exported with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, take
from finetune_trainer.config import (
    CheckpointConfig,
    DataConfig,
    DataReport,
    DatasetSource,
    JobRef,
    LoraSettings,
    MethodConfig,
    ModelConfig,
    OutputConfig,
    Progress,
    TrainConfig,
    TrainingConfig,
)
from finetune_trainer.export.publish import job_of_export

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PROGRESS = Progress(
    step=30,
    loss=1.25,
    eval_loss_before=2.5,
    eval_loss=1.5,
    train_data=DataReport(rows=3, sequences=2, tokens=40, label_tokens=20, truncated_rows=1),
)


def export_config(base: Path, output: Path, *, method: str = "lora", **changes: Any) -> TrainConfig:
    """Return a configuration of `base` that exports to `output`.

    `format`, `base_name` and `precision` go to their sections; other changes to the top level.
    """
    rows = base / "train.jsonl"
    rows.write_text('{"messages": []}\n')
    return TrainConfig(
        job=JobRef(name="tiny-chat", uid="1234"),
        model=ModelConfig(path=str(base), base_name=changes.get("base_name", str(base))),
        data=DataConfig(
            train=DatasetSource(path=str(rows)), cache_dir=str(output.parent / "cache")
        ),
        method=MethodConfig(type=method, lora=LoraSettings(r=4) if method == "lora" else None),
        training=TrainingConfig(
            global_batch_size=1,
            max_steps=30,
            learning_rate=1e-3,
            precision=changes.get("precision", "fp32"),
        ),
        checkpoint=CheckpointConfig(dir=str(output.parent / "checkpoints")),
        output=OutputConfig(dir=str(output), format=changes.get("format", "adapter")),
        run_dir=str(output.parent),
        termination_path=str(output.parent / "termination"),
    )


def trained_model(
    config: TrainConfig, *, strength: float = 0.02, seed: int = 0, device: str = "cpu"
) -> Any:
    """Load the model; B and the rows of new tokens get random values of size `strength`."""
    import torch

    from finetune_trainer.model.adapters import choose_trained
    from finetune_trainer.model.load import load_model

    torch.manual_seed(seed)
    model: Any = choose_trained(load_model(config, torch.device(device)), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter, std=strength)
    return model


def output_fence(config: TrainConfig) -> Fence:
    """Claim the output folder as the rank that exports has done before it trained."""
    return claimed_output(Path(config.output.dir).absolute(), config.job)


def claimed_output(folder: Path, job: JobRef) -> Fence:
    """Claim a folder for exports of a job."""
    wanted = Wanted(folder, "spec.output.uri", job, left_by=job_of_export)
    return take([wanted], lambda _: Pace())


def export_from_ranks(group: "ProcessGroup", folder: Path, configs: list[TrainConfig]) -> None:
    """Export each model as its strategy hands it over, before any step.

    Writes the bytes that rank 0 has gathered beside the output.
    """
    from finetune_trainer.export import export
    from finetune_trainer.model.load import load_device, load_tokenizer
    from finetune_trainer.model.loss import CausalLoss
    from finetune_trainer.strategies import create
    from support.strategies.parity import world_of

    world = world_of(group)
    for config in configs:
        strategy = create(config, world)
        device = load_device(config, world.rank, world.device)
        strategy.prepare(CausalLoss(trained_model(config, device=device.type)))
        is_adapter = config.output.format == "adapter"
        whole = strategy.whole_model(trained_only=is_adapter)
        if whole is not None:
            tokenizer = load_tokenizer(config.model)
            export(
                whole,
                tokenizer,
                config,
                fence=output_fence(config),
                progress=PROGRESS,
                warn=print,
            )
            gathered = [p for p in whole.parameters() if not p.is_meta]
            size = sum(p.numel() * p.element_size() for p in gathered)
            Path(f"{config.output.dir}.gathered").write_text(str(size))
        group.barrier().wait()
