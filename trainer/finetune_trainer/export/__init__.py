"""Export the trained model: adapter, merged weights, tokenizer, model card."""

from finetune_trainer.export.output import check_replaceable, export

__all__ = ["check_replaceable", "export"]
