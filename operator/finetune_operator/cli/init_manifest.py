"""Write the manifest of `ftctl init`, with a comment for each choice. Pure."""

import json
import re
from dataclasses import dataclass

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1 import API_VERSION, KIND
from finetune_operator.api.v1alpha1.method import MethodType
from finetune_operator.cli.init_numbers import LEARNING_RATES, Counts, Schedule, splits_rows
from finetune_trainer.config import DataFormat, Inspection

COMMENT_COLUMN = 28
FEW_ROWS = 200
SHOWN_COLUMNS = 6
SAMPLE_PROMPTS = 1
_PLAIN = re.compile(r"(?:[a-z]+://)?[A-Za-z_./~][\w./~+-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"}  # of YAML


@dataclass(frozen=True)
class Draft:
    """All facts of a manifest.

    Attributes:
        name: `metadata.name`.
        data: Name of the data set for comments.
        model: URI of the model.
        model_name: Its name for comments.
        source: URI of the rows to train on.
        eval_source: URI of the held-out rows.
        found: The data set.
        length: `maxSeqLength`.
        counts: Rows and packs with that length.
        schedule: Epochs, batch size and warm-up.
        method_reason: Why the method was chosen, or its size.
        gpus_reason: Where the number of GPUs comes from, and the memory of a step.
        notes: Sentences about what is not known.
    """

    name: str
    data: str
    model: str
    model_name: str
    source: str
    eval_source: str | None
    found: Inspection
    length: int
    counts: Counts
    schedule: Schedule
    method: MethodType
    method_reason: str
    gpus: int
    gpus_reason: str
    notes: tuple[str, ...] = ()


def manifest_text(draft: Draft) -> str:
    """Return the manifest as YAML; equal drafts give equal text."""
    lines = [(f"# {sentence}", "") for sentence in _header(draft)]
    lines += [
        (f"apiVersion: {API_VERSION}", ""),
        (f"kind: {KIND}", ""),
        (f"metadata: {{name: {draft.name}}}", ""),
        ("spec:", ""),
        ("  model:", ""),
        (f"    source: {scalar(draft.model)}", ""),
        *_dataset(draft),
        ("  method:", ""),
        (f"    type: {draft.method.value}", draft.method_reason),
        *_training(draft),
        ("  topology:", ""),
        (f"    gpusPerNode: {draft.gpus}", draft.gpus_reason),
    ]
    if prompts := draft.found.prompts[:SAMPLE_PROMPTS]:
        lines.append(("  observability:", ""))
        lines.append(("    samplePrompts:", "completed before and after training"))
        lines += [(f"      - {scalar(prompt)}", "") for prompt in prompts]
    return "".join(f"{_commented(text, comment)}\n" for text, comment in lines)


def scalar(text: str) -> str:
    """Return a text as YAML, quoted if it could be read as something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=False)


def _commented(text: str, comment: str) -> str:
    plain = " ".join(comment.split())
    return f"{text:<{COMMENT_COLUMN - 1}} # {plain}" if plain else text


def _header(draft: Draft) -> list[str]:
    found, lengths = draft.found, draft.found.lengths
    rows = show_count(found.rows, "row")
    if not found.is_complete:
        rows = f"the first {found.rows:,} of about {show_count(found.total_rows, 'row')}"
    columns = f"column{'s' * (len(found.names) > 1)} {', '.join(found.names)}"
    turns = ""
    if found.turns[1] > 2:
        least, most = found.turns
        turns = f", {least} to {most} turns" if least < most else f", {most} turns"
    how = f"tokenizer of {draft.model_name}"
    if lengths.is_estimate:
        how = "estimated from the size of the text"
    elif lengths.is_sample:
        how += ", a sample of the rows"
    middle, most, last = (lengths.percentiles[place] for place in (50, 95, 100))
    at_least = "more than " if lengths.is_at_least else ""
    sentences = [
        f"Written by ftctl init from {draft.data}: {rows}, format {found.format} ({columns})"
        f"{turns}.",
        f"Tokens per row ({how}): median {middle:,}, 95 % at most {most:,}, longest "
        f"{at_least}{last:,}.",
    ]
    if found.total_rows < FEW_ROWS:
        sentences.append(
            f"{show_count(found.rows, 'row')} are few: expect the tone and the format of the "
            "responses to change, not new knowledge."
        )
    return [" ".join(sentence.split()) for sentence in (*sentences, *draft.notes)]


def _dataset(draft: Draft) -> list[tuple[str, str]]:
    found = draft.found
    learned = {
        DataFormat.CHAT: "assistant turns are trained",
        DataFormat.INSTRUCTION: "the response is trained",
        DataFormat.TEXT: "every token is trained",
    }[found.format]
    if found.unread:
        more = len(found.unread) - SHOWN_COLUMNS
        names = ", ".join(found.unread[:SHOWN_COLUMNS]) + (f" and {more} more" if more > 0 else "")
        one = len(found.unread) == 1
        learned += f"; column{'s' * (not one)} {names} {'is' if one else 'are'} not read"
    lines = [
        ("  dataset:", ""),
        (f"    source: {scalar(draft.source)}", ""),
        (f"    format: {found.format.value}", learned),
    ]
    columns = {field: column for field, column in found.columns if column is not None}
    if columns:
        named = ", ".join(f"{field}: {scalar(column)}" for field, column in columns.items())
        lines.append((f"    columns: {{{named}}}", ""))
    if found.allows_special_tokens:
        lines.append(
            ("    allowSpecialTokens: true", "the texts write special tokens of the model")
        )
    if splits_rows(found, draft.length):
        long = f"{show_count(draft.counts.long_rows, 'row')} longer than maxSeqLength"
        lines.append(("    longRows: split", _about(draft, long)))
    if draft.eval_source is not None:
        lines.append((f"    evalSource: {scalar(draft.eval_source)}", "measures the loss"))
    elif found.eval_share is not None:
        rows = show_count(draft.counts.held_out, "row")
        held_out = _about(draft, f"{rows} held out to measure the loss")
        lines.append((f"    evalShare: {found.eval_share:g}", held_out))
    return lines


def _training(draft: Draft) -> list[tuple[str, str]]:
    counts, schedule, found = draft.counts, draft.schedule, draft.found
    length = f"holds {show_count(counts.rows // counts.packs, 'row')} per pack"
    if counts.rows // counts.packs < 2:
        length = "99 % of the rows fit"
    if draft.length == found.context:
        length = "the longest sequence of the model"
    if counts.long_rows and not splits_rows(found, draft.length):
        cut = _about(draft, f"{show_count(counts.long_rows, 'row')} longer and truncated")
        length += f"; {cut}; dataset.longRows: split keeps them"
    per_epoch = _about(draft, show_count(-(-counts.packs // schedule.batch), "step"))
    return [
        ("  training:", ""),
        (f"    maxSeqLength: {draft.length}", length),
        (
            f"    globalBatchSize: {schedule.batch}",
            f"packs of {draft.length:,} tokens per step: {per_epoch} per epoch",
        ),
        (f"    epochs: {schedule.epochs}", _about(draft, show_count(schedule.steps, "step"))),
        (f"    learningRate: {LEARNING_RATES[draft.method]}", f"usual for {draft.method.value}"),
        (f"    warmup: {schedule.warmup:g}", "share of the steps"),
    ]


def _about(draft: Draft, text: str) -> str:
    return text if draft.counts.is_exact else f"about {text}"
