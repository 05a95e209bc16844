"""The plain way to tokens, which the trainer went before: everything is made by itself.

Each beginning of a conversation is rendered anew, and the prompt of each turn tokenised anew, at a
cost that grows with the square of the turns. What is made in one go must be the same.
"""

from typing import Any

from finetune_trainer.config import DataConfig
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.template import ChatTemplate


class _PlainTemplate(ChatTemplate):
    def beginnings(self, *args: Any, **options: Any) -> None:
        """Know of no beginning what the whole conversation says of it."""
        return None


class PlainEncoder(RowEncoder):
    """Renders and tokenises each beginning by itself."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if self._template is not None:
            self._template = _PlainTemplate(tokenizer)

    def _count_prompt(self, *given: Any) -> None:
        """Know of no prompt how many of the whole text's tokens it has."""
        return None
