"""The inputs of a job: `spec.model` and `spec.dataset`."""

from typing import Annotated

from pydantic import Field

from finetune_operator.api.placeholders import ONLY_KNOWN
from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule
from finetune_trainer.config import DataFormat, LongRows

Uri = Annotated[str, Field(min_length=1, max_length=2048)]
ColumnName = Annotated[str, Field(min_length=1, max_length=256)]

_SOURCE_RULE = Rule(
    "self.matches('^(hf|azureml|pvc|file)://.+')",
    "must start with hf://, azureml://, pvc:// or file://; write a local folder as file://./FOLDER",
)
Source = Annotated[Uri, _SOURCE_RULE, ONLY_KNOWN]
SplitName = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(ge=0, le=1000), ABOVE_ZERO]
EvalShare = Annotated[float, Field(ge=0, le=0.5), ABOVE_ZERO]

_SPLIT_RULE = Rule(
    "self.split == 'train' || self.source.startsWith('hf://')",
    "has an effect only with an hf:// source; remove it",
    field="split",
)


class SecretKeyRef(ApiModel):
    """A key of a Secret in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key within the Secret."""


class ModelSpec(ApiModel):
    """The base model."""

    source: Source
    """Location of the base model: hf://ORG/NAME, pvc://CLAIM/PATH, or file://PATH
    (file://./x is relative to the manifest; local backend). On Azure ML also
    azureml://models/NAME/versions/VERSION or
    azureml://registries/REGISTRY/models/NAME/versions/VERSION, both optionally with /PATH, or
    azureml://datastores/DATASTORE/paths/PATH."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a hub model; absent means the default branch."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret that holds the hub token; the local backend uses HF_TOKEN."""
    base_name: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Name of the base model in the adapter, so that other machines find it. Absent means the hub
    name, or for a folder the name in its config.json."""
    chat_template: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """Jinja text that replaces the tokenizer's chat template. Rows are rendered with it, and it is
    saved with the trained model."""
    chat_template_arguments: Annotated[
        dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=32)
    ] = Field({})
    """Variables that the chat template reads, by name: enable_thinking: "false". true, false and
    numbers are converted. Rows and sample prompts are rendered with them, and they become the
    defaults of the exported template."""
    add_tokens: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=256)
    ] = Field([])
    """Special tokens to add to the tokenizer. With every method their embeddings are trained, and
    exported with the model."""

    cel_rules = (
        Rule(
            "!has(self.revision) || self.source.startsWith('hf://')",
            "has an effect only with an hf:// source; remove it",
            field="revision",
        ),
    )


class DatasetColumns(ApiModel):
    """Column names of the data set that differ from the default names."""

    messages: ColumnName | None = None
    """Chat: list of messages. Default: messages or conversations."""
    prompt: ColumnName | None = None
    """Chat: the user's turn. Default: prompt."""
    completion: ColumnName | None = None
    """Chat: the assistant's turn. Default: completion."""
    system: ColumnName | None = None
    """Chat: the system turn. Default: system."""
    instruction: ColumnName | None = None
    """Instruction: the task. Default: instruction."""
    input: ColumnName | None = None
    """Instruction: the input of the task. Default: input."""
    output: ColumnName | None = None
    """Instruction: the expected output. Default: output."""
    text: ColumnName | None = None
    """Text: the text. Default: text."""


_COLUMNS_OF_FORMAT = (
    ("chat", ("messages", "prompt", "completion", "system")),
    ("instruction", ("instruction", "input", "output")),
    ("text", ("text",)),
)


def _columns_of(format_: str, names: tuple[str, ...]) -> Rule:
    """Return the rule that refuses columns of another format, which are never read."""
    unset = " && ".join(f"!has(self.columns.{name})" for name in names)
    return Rule(
        f"!has(self.columns) || self.format == '{format_}' || ({unset})",
        f"sets a column that only format {format_} has ({', '.join(names)}); "
        f"remove it or use format: {format_}",
        field="columns",
    )


class DatasetPart(ApiModel):
    """An additional data set to train on."""

    source: Source
    """Location of the rows, as in dataset.source."""
    split: SplitName = "train"
    """Split of a hub data set; a file has only train."""
    weight: Weight = 1.0
    """Number of times each row occurs in an epoch, as in dataset.weight."""

    cel_rules = (_SPLIT_RULE,)


_EVAL_SOURCE = "(has(self.evalSource) ? self.evalSource : self.source)"
_EVAL_SPLIT = "(has(self.evalSplit) ? self.evalSplit : 'train')"


class DatasetSpec(ApiModel):
    """The rows to train and to evaluate on."""

    source: Source
    """Location of the training rows: hf://ORG/NAME, azureml://datastores/DATASTORE/paths/PATH,
    pvc://CLAIM/PATH, or file://PATH of a .jsonl, .json or .csv file, optionally
    compressed (.gz, .zst), of a .parquet file, or of a folder with such files."""
    format: DataFormat = DataFormat.CHAT
    """Format of the rows: chat (messages, conversations, or prompt and completion), instruction
    (instruction, input, output) or text."""
    split: SplitName = "train"
    """Split of a hub data set to train on; a file has only train."""
    weight: Weight = 1.0
    """Number of times each row of source occurs in an epoch. With 0.25, each epoch has the next
    quarter of the rows, so four epochs see every row once."""
    also: Annotated[list[DatasetPart], Field(max_length=32)] = Field([])
    """Additional data sets to train on, with the same format and columns, mixed with source by
    weight."""
    eval_source: Source | None = None
    """Location of the held-out rows; absent means evalSplit or evalShare of source, or no
    evaluation."""
    eval_split: SplitName | None = None
    """Split to evaluate on, of evalSource if set, else of source."""
    eval_share: EvalShare | None = None
    """Share of the rows of source and also that is held out for evaluation, at most 0.5. A hash of
    the row decides, so equal rows are on one side, and appended rows move none."""
    columns: DatasetColumns = DatasetColumns()
    """Column names that differ from the default names."""
    long_rows: LongRows = LongRows.TRUNCATE
    """Treatment of rows longer than training.maxSeqLength: truncate cuts them, split makes several
    sequences of them. Both are counted and reported."""
    allow_special_tokens: bool = False
    """Interpret special tokens in the text of a row, such as </s>. By default they are plain text,
    so that no row can forge a turn. In format text, set this if the rows were rendered with a chat
    template. Tokens of model.addTokens are always special."""

    cel_rules = (
        *(_columns_of(format_, names) for format_, names in _COLUMNS_OF_FORMAT),
        Rule(
            "!has(self.columns) || !has(self.columns.messages) || "
            "!(has(self.columns.prompt) || has(self.columns.completion))",
            "cannot be combined with prompt and completion, because a row has one or the other; "
            "remove messages, or prompt and completion",
            field="columns.messages",
        ),
        _SPLIT_RULE,
        Rule(
            f"!has(self.evalSplit) || {_EVAL_SOURCE}.startsWith('hf://')",
            "has an effect only with an hf:// source; remove it, or set evalSource to a file",
            field="evalSplit",
        ),
        Rule(
            "!has(self.evalSplit) || has(self.evalSource) || self.evalSplit != self.split",
            "is also the split to train on; use another split",
            field="evalSplit",
        ),
        Rule(
            "!has(self.evalShare) || !(has(self.evalSource) || has(self.evalSplit))",
            "cannot be combined with evalSource or evalSplit, which name the held-out rows; remove "
            "evalShare, or the others",
            field="evalShare",
        ),
        Rule(
            "!has(self.also) || !(has(self.evalSource) || has(self.evalSplit)) || "
            f"!self.also.exists(one, one.source == {_EVAL_SOURCE} && one.split == {_EVAL_SPLIT})",
            "contains the rows to evaluate on; remove that entry, or evaluate on other rows",
            field="also",
        ),
    )
