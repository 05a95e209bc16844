"""The request of `ftctl init` to inspect a data set, and the response of the trainer."""

from pydantic import Field

from finetune_trainer.config.contract_model import ContractModel
from finetune_trainer.config.inputs import ColumnMap, DataFormat, ModelConfig

PERCENT = 100


class InspectionRequest(ContractModel):
    """The model and the rows of a job to be."""

    model: ModelConfig
    has_model: bool = Field(
        True, description="False: the tokenizer cannot be loaded here, so lengths are estimated."
    )
    data: str = Field(description="File, folder, or name of a hub data set.")
    is_hub: bool = False
    columns: ColumnMap = Field(
        ColumnMap(), description="Columns that the user has named; all absent: detect them."
    )
    cache_dir: str


class RowLengths(ContractModel):
    """Tokens per row.

    Attributes:
        percentiles: 101 values: the shortest row, each percent, the longest row.
        is_at_least: Whether the longest row was cut, so that the last value is a lower bound.
        is_estimate: Whether the values are estimated from the size of the text.
        is_sample: Whether only some of the rows were tokenised.
    """

    percentiles: tuple[int, ...]
    mean: float
    is_at_least: bool = False
    is_estimate: bool = False
    is_sample: bool = False


class Inspection(ContractModel):
    """A data set that a run can read.

    Attributes:
        train: File, folder or data set to train on.
        held_out: File or folder with held-out rows beside it.
        format: Format of the rows.
        columns: Columns whose names differ from the usual names.
        names: Columns that are read.
        unread: Columns that are not read.
        rows: Rows that were read, all of them if `is_complete`.
        total_rows: Number of rows; the number of lines if not all were read.
        rows_without_labels: Rows without a turn or a text to learn.
        turns: Smallest and largest number of turns; (0, 0) for texts.
        characters: Characters of the rows that were read.
        prompts: Short first turns of the user.
        lengths: Tokens per row.
        eval_share: Share of the rows to hold out; None if there are too few.
        held_out_rows: Held-out rows among the rows that were read.
        context: Longest sequence of the model; None if unknown.
        allows_special_tokens: Whether the texts write special tokens of the model.
    """

    train: str
    held_out: str | None = None
    format: DataFormat
    columns: ColumnMap = ColumnMap()
    names: tuple[str, ...]
    unread: tuple[str, ...] = ()
    rows: int
    is_complete: bool = True
    total_rows: int
    rows_without_labels: int = 0
    turns: tuple[int, int] = (0, 0)
    characters: int
    prompts: tuple[str, ...] = ()
    lengths: RowLengths
    eval_share: float | None = None
    held_out_rows: int = 0
    context: int | None = None
    allows_special_tokens: bool = False
