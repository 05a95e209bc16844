"""The trained model as others load it: adapter, merged weights, tokenizer, model card."""

from finetune_trainer.export.output import check_replaceable, export
from finetune_trainer.export.tryout import try_export

__all__ = ["check_replaceable", "export", "try_export"]
