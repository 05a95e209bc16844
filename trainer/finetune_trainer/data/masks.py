"""Read the fields that exclude a turn or a row from the loss, by the names that trainers use.

Called by `formats`. A field with two meanings is refused rather than guessed.
"""

from typing import Any

from finetune_trainer.data.rules import Rules
from finetune_trainer.errors import DataError

RELEASED = ("train", "weight")  # known to release 0.1.0, as fields of a turn
# Excluded by 0 or false: OpenAI and Axolotl (weight, training), ms-swift and XTuner (loss),
# LLaMA-Factory (loss_weight), slime (step_loss_mask).
LEARNS = (
    *RELEASED,
    *("training", "train_on_turn", "loss", "loss_weight", "loss_mask", "step_loss_mask"),
)
MASKED = "masked"  # torchtune excludes a turn by true
AMBIGUOUS = "mask"  # 1 excludes a turn in some data sets, and learns it in others
OF_ROW = (*LEARNS, MASKED)
WORDS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # a CSV file has only text


def pop_turn(message: dict[str, Any], role: str, where: str, rules: Rules) -> bool:
    """Remove the fields from a turn; return whether the turn may be learned.

    Raises:
        DataError: a field has another value than 0 and 1, or could mean both.
    """
    is_released = rules is Rules.RELEASE_0_1_0
    is_learned, is_named = True, not is_released and any(name in message for name in OF_ROW)
    for name in RELEASED if is_released else OF_ROW:
        if name not in message:
            continue
        value = message.pop(name)
        if value not in (0, 1):
            wanted, other = (0, 1) if name == MASKED else (1, 0)
            raise DataError(
                f"{where} has {name} {value!r}; write {wanted} to learn the turn, else {other}"
            )
        is_learned = is_learned and bool(value) != (name == MASKED)
    is_ambiguous = not is_released and message.pop(AMBIGUOUS, None) is not None
    if is_ambiguous and not is_named and role == "assistant":
        raise DataError(
            f'{where} has {AMBIGUOUS}, which could mean learned or not; write "train": true to '
            "learn the turn, else false"
        )
    return is_learned


def of_row(name: str, value: Any) -> bool | None:
    """Return whether a column of `OF_ROW` includes its row; None for a value without meaning."""
    number = WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if number not in (0, 1):
        return None
    return bool(number) != (name == MASKED)
