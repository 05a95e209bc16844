"""Inputs of a run: the base model and the rows."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from finetune_trainer.config.contract_model import ContractModel


class ModelConfig(ContractModel):
    """The base model, in terms of `from_pretrained`."""

    path: str = Field(description="Local folder, or a repository name on the hub.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    base_name: str | None = Field(
        None,
        description="Name written as base_model_name_or_path, which another machine can resolve.",
    )
    chat_template: str | None = Field(
        None, description="Jinja text that replaces the tokenizer's template; exported with it."
    )
    chat_template_arguments: dict[str, str | int | float | bool] = Field(
        {}, description="Default values for variables of the chat template."
    )
    add_tokens: tuple[str, ...] = Field(
        (), description="Special tokens that are added, trained and exported."
    )


class DataFormat(StrEnum):
    """Contents of a row of the data set."""

    CHAT = "chat"
    INSTRUCTION = "instruction"
    TEXT = "text"


class LongRows(StrEnum):
    """Treatment of a row of more than `max_seq_len` tokens; always counted and reported."""

    TRUNCATE = "truncate"
    SPLIT = "split"


DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of files that rows can be read from."""

COMPRESSIONS = (".gz", ".zst")
"""Suffixes of compressed files; not after `.parquet`, which is compressed inside."""


def data_suffix(name: str) -> str | None:
    """Return the suffix of a file name that determines how rows are read; None for other files.

    `rows.jsonl.gz` has `.jsonl.gz`.
    """
    plain, packed = name, ""
    for ending in COMPRESSIONS:
        if name.endswith(ending):
            plain, packed = name.removesuffix(ending), ending
    for suffix in DATA_SUFFIXES:
        if plain.endswith(suffix) and not (packed and suffix == ".parquet"):
            return suffix + packed
    return None


def is_data_file(name: str) -> bool:
    """Whether a file that was found in a folder, rather than named, contains rows.

    Hidden files belong to other programs, such as the `._a.jsonl` of a Mac.
    """
    return not name.startswith(".") and data_suffix(name) is not None


class DatasetSource(ContractModel):
    """Source of rows: a local file or folder, or a data set on the hub."""

    path: str = Field(
        description="A .jsonl, .json or .csv file, optionally compressed (.gz, .zst), a .parquet "
        "file, a folder of them, or a hub data set name."
    )
    split: str = Field("train", description="Split to read; files have only 'train'.")
    is_hub: bool = Field(False, description="The path is a hub data set name.")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="How often an epoch contains each of its rows. With 0.25, each epoch takes the "
        "next quarter of them, in whole packs and at least one, so four epochs see every row once.",
    )


class ColumnMap(ContractModel):
    """Names of the data set's columns if they differ from the usual ones."""

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    system: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    text: str | None = None


class DataConfig(ContractModel):
    """Rows for training and evaluation, and their conversion to token sequences."""

    train: DatasetSource
    also: tuple[DatasetSource, ...] = Field(
        (), description="Further rows to train on, mixed with the rows of `train` by weight."
    )
    eval: DatasetSource | None = None
    eval_share: Annotated[float, Field(gt=0, le=0.5)] | None = Field(
        None,
        description="Share of the rows of `train` and `also` that is held out, chosen by a hash of "
        "each row.",
    )
    format: DataFormat = DataFormat.CHAT
    columns: ColumnMap = ColumnMap()
    max_seq_len: Annotated[int, Field(ge=8)] = 2048
    long_rows: LongRows = LongRows.TRUNCATE
    packing: bool = True
    is_packing_asked: bool = Field(
        False,
        description="Refuse a model that does not separate the rows of a pack; otherwise each row "
        "becomes its own sequence, with a warning.",
    )
    special_tokens: tuple[str, ...] = Field(
        (), description="Special tokens that rows may contain as text, from `model.add_tokens`."
    )
    allow_special_tokens: bool = Field(
        False, description="Treat all special tokens in the text of a row as special tokens."
    )
    cache_dir: str = Field(description="Folder of the token cache, keyed by content.")

    @model_validator(mode="after")
    def _held_out_rows_are_not_weighed(self) -> Self:
        if self.eval is not None and self.eval.weight != 1:
            raise ValueError(
                "the weight of held-out rows has no effect: each is evaluated once; remove it"
            )
        return self

    @model_validator(mode="after")
    def _held_out_rows_are_named_once(self) -> Self:
        if self.eval is not None and self.eval_share is not None:
            raise ValueError(
                "spec.dataset.evalShare cannot be combined with evalSource or evalSplit, which "
                "name the held-out rows; remove evalShare, or the others"
            )
        return self

    @model_validator(mode="after")
    def _packing_is_asked_for_with_packing(self) -> Self:
        if self.is_packing_asked and not self.packing:
            raise ValueError("packing cannot be both requested and turned off")
        return self

    @property
    def sources(self) -> tuple[DatasetSource, ...]:
        """All data sets for training; `train` comes first."""
        return (self.train, *self.also)

    @property
    def held_out(self) -> tuple[DatasetSource, ...]:
        """All data sets with held-out rows, each of weight 1."""
        if self.eval_share is not None:
            return tuple(one.model_copy(update={"weight": 1.0}) for one in self.sources)
        return () if self.eval is None else (self.eval,)
