"""The trained model as others load it: adapter, merged weights, tokenizer, model card."""

from finetune_trainer.export.output import check_replaceable, check_writable, export

__all__ = ["check_replaceable", "check_writable", "export"]
