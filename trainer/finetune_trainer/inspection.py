"""Inspect a data set for `ftctl init`.

`ftctl init` runs `python -m finetune_trainer.inspection REQUEST`, an `InspectionRequest`, and reads
one JSON object: the `Inspection`, or {"error": sentence} with the trainer's exit code.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_trainer.config import (
    PERCENT,
    DataConfig,
    DataFormat,
    DatasetSource,
    Inspection,
    InspectionRequest,
    LongRows,
    RowLengths,
)
from finetune_trainer.data.detection import Detected, detect
from finetune_trainer.data.doubts import UnclearDataError
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.folder import split_folder
from finetune_trainer.data.formats import read_example
from finetune_trainer.data.sample import Sample
from finetune_trainer.data.shapes import Reading, reading_of
from finetune_trainer.data.source import Row, open_rows
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.model.load import load_settings, load_tokenizer
from finetune_trainer.unused_packages import hide_torch

MAX_ROWS = 100_000  # rows that are read; 7 s of CPU time
LONGEST = 32_768  # tokens to which the length of a row is measured
BYTES_PER_TOKEN = 4  # of English text; also about right for other scripts in UTF-8
TOKENS_PER_TURN = 6  # of a chat template
PROMPT_CHARACTERS = 200
MAX_PROMPTS = 4


def main(arguments: list[str] | None = None) -> int:
    """Print the inspection; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.inspection")
    parser.add_argument("request", type=Path, help="the InspectionRequest as a JSON file")
    options = parser.parse_args(arguments)
    try:
        found = inspect(_read(options.request))
    except TrainerError as error:
        print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
        return int(error.exit_code)
    print(json.dumps(found.model_dump(mode="json", by_alias=True), ensure_ascii=False), flush=True)
    return 0


def inspect(request: InspectionRequest) -> Inspection:
    """Detect the format of the rows and measure their tokens.

    Raises:
        DataError: the rows cannot be read, or it is unclear how.
        ConfigError: the tokenizer cannot be loaded, or has no chat template.
    """
    train, held_out = request.data, None
    if not request.is_hub and Path(train).is_dir():
        folder, other = split_folder(Path(train), "spec.dataset.source")
        train, held_out = str(folder), None if other is None else str(other)
    source = DatasetSource(path=train, is_hub=request.is_hub)
    rows = open_rows(source, name="train", cache_dir=Path(request.cache_dir))
    named = {name: column for name, column in request.columns if column is not None}
    chosen = reading_of(**named) if named else None
    sample = Sample()
    found = detect(sample.watch(rows, MAX_ROWS), name=train, chosen=chosen)
    lengths, allows = _measured(request, source, sample, found.reading)
    total = sample.count if sample.is_complete else rows.count()
    share = None if held_out is not None else sample.share(total)
    return Inspection(
        train=train,
        held_out=held_out,
        format=found.reading.format,
        columns=found.reading.columns,
        names=tuple(column for _, column in found.reading.named),
        unread=found.unread,
        rows=sample.count,
        is_complete=sample.is_complete,
        total_rows=total,
        rows_without_labels=found.rows_without_labels,
        turns=found.turns,
        characters=sample.characters,
        prompts=_prompts(found),
        lengths=lengths,
        eval_share=share,
        held_out_rows=sample.held_out(share or 0),
        context=_context(request),
        allows_special_tokens=allows,
    )


def _measured(
    request: InspectionRequest, source: DatasetSource, sample: Sample, reading: Reading
) -> tuple[RowLengths, bool]:
    """Return the tokens per row, and whether the rows write special tokens that are meant."""
    if not request.has_model:
        guesses = [_estimate(row, reading) for row in sample.rows]
        return _lengths(guesses, sample, is_estimate=True), False
    tokenizer = load_tokenizer(request.model)
    if tokenizer.chat_template is None and reading.format is DataFormat.CHAT:
        raise _without_template(request.model.path, reading)
    config = DataConfig(
        train=source,
        format=reading.format,
        columns=reading.columns,
        max_seq_len=LONGEST,
        long_rows=LongRows.TRUNCATE,
        cache_dir=request.cache_dir,
    )
    encoded = list(RowEncoder(config, tokenizer).encode(sample.rows))
    num_special = sum(row.has_special_text for row in encoded)
    allows = reading.format is DataFormat.TEXT and 2 * num_special > len(encoded)
    if allows and not reading.is_chosen:
        raise UnclearDataError(
            f"{request.data}: {num_special} of {len(encoded)} texts write special tokens of the "
            "model, like a chat template. Rows with the columns messages, or prompt and "
            "completion, train on the responses alone.\n"
            f"To train on every token: --columns {reading.option}",
            [reading.option],
        )
    if allows:
        config = config.model_copy(update={"allow_special_tokens": True})
        encoded = list(RowEncoder(config, tokenizer).encode(sample.rows))
    tokens = [sum(len(part.tokens) for part in row.parts) for row in encoded]
    return _lengths(tokens, sample, is_at_least=any(row.is_cut for row in encoded)), allows


def _lengths(tokens: Sequence[int], sample: Sample, **facts: bool) -> RowLengths:
    ordered = sorted(tokens)
    last = len(ordered) - 1
    # The smallest length that so many percent of the rows do not exceed.
    places = (max(0, -(-len(ordered) * percent // PERCENT) - 1) for percent in range(PERCENT + 1))
    return RowLengths(
        percentiles=tuple(ordered[min(place, last)] for place in places),
        mean=sum(ordered) / len(ordered),
        is_sample=len(ordered) < sample.count,
        **facts,
    )


def _estimate(row: Row, reading: Reading) -> int:
    example = read_example(row, reading.format, reading.columns)
    texts = [example] if isinstance(example, str) else [one["content"] for one in example.messages]
    size = sum(len(text.encode()) for text in texts)
    return size // BYTES_PER_TOKEN + TOKENS_PER_TURN * len(texts)


def _without_template(model: str, reading: Reading) -> TrainerError:
    named = dict(reading.named)
    paragraphs = ""
    if "prompt" in named and "completion" in named:
        option = f"instruction={named['prompt']},output={named['completion']}"
        paragraphs = f"\nTo train prompts and responses as paragraphs: --columns {option}"
    return ConfigError(
        f"spec.model.source {model} has no chat template, which conversations need; name a model "
        "with a chat template (mostly named Instruct or Chat), or write a manifest with "
        f"spec.model.chatTemplate{paragraphs}"
    )


def _context(request: InspectionRequest) -> int | None:
    if not request.has_model:
        return None
    settings = load_settings(request.model).get_text_config()
    known: Any = getattr(settings, "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def _prompts(found: Detected) -> tuple[str, ...]:
    short = (one for one in found.prompts if len(one) <= PROMPT_CHARACTERS and one.isprintable())
    return tuple(islice(short, MAX_PROMPTS))


def _read(path: Path) -> InspectionRequest:
    try:
        return InspectionRequest.read(path)
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is not an InspectionRequest: {error}") from error


if __name__ == "__main__":
    hide_torch()
    sys.exit(main())
