"""Prepare the rows of a run, with the rules that the tokens of its checkpoint come from.

Called by `rank`. A checkpoint names its training data by the hash of all tokens and labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune_trainer.config import DataConfig
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.sequences import TokenDataset, prepare
from finetune_trainer.data.share import EmptySideError
from finetune_trainer.errors import ConfigError, DataError
from finetune_trainer.refusals import STRICT, Refusals


@dataclass(frozen=True, eq=False)
class RunData:
    """The tokens of a run, and the tokenizer and the rules that they come from."""

    train: TokenDataset
    held_out: TokenDataset | None
    tokenizer: Any
    rules: Rules


def prepare_run(
    config: DataConfig,
    tokenizer_of: Callable[[Rules], Any],
    recorded: str | None,
    warn: Callable[[str], None],
) -> RunData:
    """Return the tokens of a run, by the current rules or by the rules of its checkpoint.

    Args:
        config: Rows for training and evaluation.
        tokenizer_of: Loads the tokenizer of a version.
        recorded: Fingerprint of the training data in the checkpoint to resume from, if there is a
            checkpoint.
        warn: Receives a sentence if the rows are read by earlier rules.

    Raises:
        TrainerError: see `sequences.prepare`. The current rules refuse the data, and the earlier
            rules do not give the recorded tokens.
    """
    refused: Exception | None = None
    current = None
    try:
        current = prepare_with(
            config, tokenizer_of, Rules.CURRENT, Refusals(recorded is None, warn)
        )
    # Whatever the current rules cannot read must not stop a run that the earlier rules can.
    except (
        DataError,
        ConfigError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:
        if recorded is None:
            raise
        refused = error
    except (ValueError, RecursionError) as error:
        if recorded is None:
            raise
        refused = error
    if current is not None and recorded in (None, current.train.fingerprint):
        return current
    earlier = _earlier(config, tokenizer_of)
    if earlier is not None and earlier.train.fingerprint == recorded:
        why = refused or "some rows give other tokens now"
        warn(
            f"{why}; this run has a checkpoint and continues with the tokens of release 0.1.0, but "
            "a new run would not"
        )
        return earlier
    if current is None:
        assert refused is not None
        raise refused
    return current


def prepare_with(
    config: DataConfig,
    tokenizer_of: Callable[[Rules], Any],
    rules: Rules,
    refusals: Refusals = STRICT,
) -> RunData:
    """Return the tokens of a run with these rules.

    A run that has a checkpoint is not evaluated if `evalShare` no longer holds out a row.

    Raises:
        TrainerError: see `sequences.prepare`.
    """
    tokenizer = tokenizer_of(rules)
    train = prepare(config, config.sources, tokenizer, name="train", rules=rules)
    held_out = None
    if config.held_out:
        try:
            held_out = prepare(config, config.held_out, tokenizer, name="eval", rules=rules)
        except EmptySideError as error:
            refusals.refuse(error)
    return RunData(train, held_out, tokenizer, rules)


def _earlier(config: DataConfig, tokenizer_of: Callable[[Rules], Any]) -> RunData | None:
    """Return the tokens with the rules of the release; None if they refuse the data as well."""
    try:
        return prepare_with(config, tokenizer_of, Rules.RELEASE_0_1_0)
    except (DataError, ConfigError):
        return None
