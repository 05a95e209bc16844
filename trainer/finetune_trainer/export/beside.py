"""What lies beside exported weights of either kind: tokenizer, template and model card.

`output` writes it after training, `tryout` before, so that nothing of it fails at the end alone.
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
class Beside:
    """The same for each kind of an export.

    Attributes:
        tokenizer: With the template and the tokens of the configuration.
        config: Of the run.
        progress: What the card reports.
        data_hash: Content hash of each training set; None when it is not known.
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
        except Exception as error:  # a full disk is no OSError there, but a bare Exception
            raise OSError(f"the tokenizer: {error}") from error
        public = base_name(self.config.model)
        base = public or self.config.model.path
        facts = CardFacts(kind, base, public is not None, self.data_hash)
        (folder / "README.md").write_text(model_card(self.config, self.progress, facts))
