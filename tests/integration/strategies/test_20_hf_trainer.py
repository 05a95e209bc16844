"""The same steps as transformers' own Trainer makes, on rows that need no padding."""

from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, default_data_collator

from finetune_trainer.world import World
from support.strategies.parity import MAX_NORM, VOCAB, Case, Row, build_model, train_case

LENGTH = 16


def full_rows(case: Case, step: int) -> list[Row]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCAB, (case.rows, LENGTH), generator=generator)
    return [(row, [True] * LENGTH) for row in tokens.tolist()]


def test_twenty_losses_are_those_of_the_trainer(tmp_path: Path) -> None:
    case = Case("ours", {"type": "ddp"}, micro_batch_size=4, rows_of=full_rows)
    found = train_case(case, tmp_path, World(0, 0, 1, torch.device("cpu")))

    rows = [row for step in range(case.steps) for row, _ in full_rows(case, step)]
    trainer = Trainer(
        model=build_model(case),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=case.micro_batch_size,
            gradient_accumulation_steps=case.rows // case.micro_batch_size,
            max_steps=case.steps,
            learning_rate=case.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=default_data_collator,
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(theirs) == case.steps
    assert max(abs(a - b) for a, b in zip(found.losses, theirs, strict=True)) <= 1e-5
