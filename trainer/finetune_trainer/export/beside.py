"""Write the files beside exported weights: tokenizer, template and model card.

`output` writes them after training. `tryout` writes them before, so that errors show early.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.export.model_card import CardFacts, Kind, model_card
from finetune_trainer.model.load import base_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CompanionFiles:
    """The files beside the weights, the same for each kind of export.

    Attributes:
        tokenizer: Tokenizer with the template and the tokens of the configuration.
        config: Configuration of the run.
        progress: Results for the card.
        data_hash: Content hash of each training set; None if unknown.
    """

    tokenizer: "PreTrainedTokenizerBase"
    config: TrainConfig
    progress: Progress
    data_hash: str | None

    def write(self, kind: Kind, folder: Path) -> None:
        """Write the files into `folder`.

        Raises:
            OSError: the disk is full or fails.
        """
        try:
            self.tokenizer.save_pretrained(folder)
        except Exception as error:  # the tokenizer raises a bare Exception for a full disk
            raise OSError(f"the tokenizer: {error}") from error
        public = base_name(self.config.model)
        base = public or self.config.model.path
        facts = CardFacts(kind, base, public is not None, self.data_hash)
        (folder / "README.md").write_text(model_card(self.config, self.progress, facts))
