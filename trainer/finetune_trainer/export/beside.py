"""Write the files beside exported weights: tokenizer, template, settings and model card.

`output` writes them after training. `tryout` writes them before, so that errors show early.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.export.end_tokens import EndTokens
from finetune_trainer.export.model_card import CardFacts, Kind, model_card, notes
from finetune_trainer.export.settings import GENERATION_CONFIG, complete_config, set_end_tokens
from finetune_trainer.export.tokenizer import reader_notes, write_tokenizer
from finetune_trainer.model.load import base_name
from finetune_trainer.model.snapshot import model_folder
from finetune_trainer.model.unread import Unread, unread_tensors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


NO_PROGRESS = Progress()


@dataclass(frozen=True)
class CompanionFiles:
    """The files beside the weights, the same for each kind of export.

    Attributes:
        tokenizer: Tokenizer with the template and the tokens of the configuration.
        config: Configuration of the run.
        progress: Results for the card.
        data_hash: Content hash of each training set; None if unknown.
        ends: End tokens of the exported model.
        base: Folder of the base model; None if it is gone.
        unread: Tensors of the base that its class does not read; None if its files are gone.
    """

    tokenizer: "PreTrainedTokenizerBase"
    config: TrainConfig
    progress: Progress
    data_hash: str | None
    ends: EndTokens
    base: Path | None
    unread: Unread | None

    @classmethod
    def of(
        cls,
        model: "nn.Module",
        tokenizer: "PreTrainedTokenizerBase",
        config: TrainConfig,
        *,
        stops: Sequence[int],
        warn: Callable[[str], None],
        progress: Progress = NO_PROGRESS,
        data_hash: str | None = None,
    ) -> Self:
        """Find the end tokens, and the name and the files of the base.

        Args:
            model: Trained model.
            tokenizer: See the class, like all other arguments without a description here.
            config: See the class.
            stops: Special tokens that ended the learned turns, the most frequent one first.
            warn: Receives a sentence if the name or the files of the base are not known.
            progress: See the class.
            data_hash: See the class.
        """
        if base_name(config.model) is None:
            warn(
                f"the public name of the base model is unknown, so the export names "
                f"{config.model.path}, which another machine cannot load; set spec.model.baseName"
            )
        base: Path | None = model_folder(config.model)
        if base is not None and not (base / "config.json").is_file():
            warn(
                f"spec.model.source {base} is gone, so tokenizer and config.json are exported as "
                "transformers saves them, which earlier versions may not read"
            )
            base = None
        ends = EndTokens.of(model, tokenizer, stops)
        unread = _unread_tensors(config, warn) if base is not None else None
        return cls(tokenizer, config, progress, data_hash, ends, base, unread)

    def notes(self, kind: Kind) -> list[str]:
        """Return notes for users of this kind of export, one sentence each."""
        unread = self.unread.notes(kind == "model") if self.unread is not None else []
        return [*notes(self.config, kind), *self.ends.notes(kind), *unread]

    def write(self, kind: Kind, folder: Path) -> None:
        """Write the files into `folder`, which already contains the weights.

        Raises:
            OSError: the disk is full or fails.
        """
        try:
            write_tokenizer(self.tokenizer, self.config.model, self.base, self.ends, folder)
        except Exception as error:  # the tokenizer raises a bare Exception for a full disk
            raise OSError(f"the tokenizer: {error}") from error
        if kind == "model" and self.base is not None:
            base_config = json.loads((self.base / "config.json").read_text())
            complete_config(folder / "config.json", base_config)
        if kind == "model" or self.ends.ids is not None:
            set_end_tokens(folder / GENERATION_CONFIG, self.ends.ids)
        public = base_name(self.config.model)
        base = public or self.config.model.path
        found = [*self.notes(kind), *reader_notes(folder)]
        facts = CardFacts(kind, base, public is not None, self.data_hash, found)
        (folder / "README.md").write_text(model_card(self.config, self.progress, facts))


def _unread_tensors(config: TrainConfig, warn: Callable[[str], None]) -> Unread | None:
    from safetensors import SafetensorError

    try:
        return unread_tensors(config.model)
    except (OSError, SafetensorError) as error:
        warn(
            f"the weights of spec.model.source {config.model.path} cannot be read ({error}), so "
            "the export lacks any tensors that its class does not read"
        )
        return None
