"""Show the first rows as the trainer will see them.

`ftctl preview` runs `python -m finetune_trainer.preview CONFIG [--rows N]` and reads its output:
one JSON object per row, in the order of the data set, then one object with the reports. An error is
reported as {"error": sentence} and the trainer's exit code.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_trainer.config import TrainConfig
from finetune_trainer.data.encoding import Encoded, RowEncoder
from finetune_trainer.data.formats import unread_columns
from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.sequences import Sequence, fit, prepare
from finetune_trainer.data.share import Side
from finetune_trainer.data.source import open_rows
from finetune_trainer.data.special import common_length
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.model.load import load_tokenizer
from finetune_trainer.model.vocabulary import refuse_unknown_tokens
from finetune_trainer.schedule import few_steps_warning
from finetune_trainer.unused_packages import hide_torch


def main(arguments: list[str] | None = None) -> int:
    """Print the preview; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.preview")
    parser.add_argument("config", type=Path, help="the TrainConfig as a JSON file")
    parser.add_argument("--rows", type=int, default=5, help="rows to show (default 5)")
    options = parser.parse_args(arguments)
    try:
        for line in preview(_read(options.config), options.rows):
            print(json.dumps(line, ensure_ascii=False), flush=True)
    except TrainerError as error:
        print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
        return int(error.exit_code)
    return 0


def preview(config: TrainConfig, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield one dictionary for each of the first `num_rows` training rows, then the summary.

    A row has `index` (from 0), `where` (file and line), `pieces` (for each sequence its consecutive
    [text, is_label] pairs), `tokens`, `label_tokens`, `row_tokens` (before cutting), `is_cut`
    (`row_tokens` is only a lower bound), `truncated`, `sequences` (more than 1 if the row was split
    or its turns become separate rows; 0 if it has no label token and is skipped). The summary has
    `report` and `eval_report`, DataReport as JSON, `total_steps`, `max_seq_len`, `warnings` about
    the run, and `unread_columns`, the columns of these rows that the format does not read. The
    whole data set is tokenised, into the cache that the run will use.

    Raises:
        TrainerError: the error that the run itself would stop with.
    """
    tokenizer = load_tokenizer(config.model)
    data = config.data
    encoder = RowEncoder(data, tokenizer)
    rows = open_rows(data.train, name="train", cache_dir=Path(data.cache_dir))
    training = Side(rows, data.eval_share, is_held_out=False)
    first = [row for _, row in islice(training, num_rows)]
    for index, (row, encoded) in enumerate(zip(first, encoder.encode(first), strict=True)):
        pieces = [
            piece for part in encoded.parts for piece in fit(part, data.max_seq_len, data.long_rows)
        ]
        lengths = [len(part.tokens) for part in encoded.parts]
        shown: list[Sequence] | list[Encoded] = pieces or list(encoded.parts)
        yield {
            "index": index,
            "where": row.where,
            "pieces": [list(_decode(part, tokenizer)) for part in shown],
            "tokens": sum(len(piece.tokens) for piece in pieces),
            "label_tokens": sum(int(piece.is_label.sum()) for piece in pieces),
            "row_tokens": sum(lengths),
            "is_cut": encoded.is_cut,
            "truncated": max(lengths) > data.max_seq_len and data.long_rows == "truncate",
            "sequences": len(pieces),
        }
    dataset = prepare(data, data.sources, tokenizer, name="train")
    held_out = prepare(data, data.held_out, tokenizer, name="eval") if data.held_out else None
    refuse_unknown_tokens(config.model, tokenizer, dataset, held_out)
    plan = DataPlan.of(dataset, config)
    few_steps = few_steps_warning(config.training, plan.total_steps)
    summary: dict[str, Any] = {
        "report": plan.report(dataset.report).model_dump(mode="json", by_alias=True),
        "total_steps": plan.total_steps,
        "max_seq_len": data.max_seq_len,
        "warnings": [few_steps] if few_steps else [],
        "unread_columns": list(
            dict.fromkeys(
                name for row in first for name in unread_columns(row, data.format, data.columns)
            )
        ),
    }
    if held_out is not None:
        summary["eval_report"] = held_out.report.model_dump(mode="json", by_alias=True)
    yield summary


def _decode(part: Sequence | Encoded, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of tokens that are, or are not, labels.

    A run is decoded together with the preceding ones: many tokenizers drop a leading space.
    """
    tokens: list[int] = []
    shown = ""
    pairs = zip(part.tokens, part.is_label, strict=True)
    for is_label, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        tokens += [int(token) for token, _ in run]
        text = str(
            tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        # If a character is split between runs, the replacement for its first part changes.
        same = common_length(shown, text)
        yield text[same:], is_label
        shown = text


def _read(path: Path) -> TrainConfig:
    try:
        return TrainConfig.read(path)
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is not a TrainConfig: {error}") from error


if __name__ == "__main__":
    hide_torch()
    sys.exit(main())
