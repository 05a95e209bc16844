"""Tokenise a data set once, and read it back memory-mapped.

Every rank calls `prepare`. One process per machine tokenises while the others wait at a file lock;
machines wait for each other in `waiting`, so no rank runs into the timeout of a collective.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune_trainer.cache_locks import PATIENCE_SECONDS
from finetune_trainer.config import DataConfig, DataReport, DatasetSource
from finetune_trainer.data.cores import usable_cores
from finetune_trainer.data.crew import Crew
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.piecework import SPECIAL_TEXT, UNREAD, BatchEncoder, batches, fit
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.share import EmptySideError, Side
from finetune_trainer.data.source import open_rows
from finetune_trainer.data.token_store import Sequence, StoredTokens, TokenStore
from finetune_trainer.errors import DataError, TrainerError
from finetune_trainer.failpoints import failpoint

__all__ = ["Sequence", "TokenDataset", "fit", "prepare"]

FEW_ROWS_WITHOUT_LABELS = 0.01
# A data set tokenised within this time needs no processes, which take as long to start.
SECONDS_ALONE = 1.0
_TOKENS_AT_ONCE = 1 << 22
# Limit, because a single process reads the rows; each process takes 150 MB.
MAX_PROCESSES = 16


class TokenDataset:
    """The sequences of all sources in order, and of each source in the order of its rows.

    Attributes:
        fingerprint: Hash of all tokens, labels and weights; names the data in a plan and a
            checkpoint.
        lengths: (N,) int32, tokens of each sequence.
        label_counts: (N,) int32, predicted tokens of each sequence; at least 1.
        weights: (N,) float64, number of times that an epoch contains each sequence.
        report: Report on the rows of all sources.
        stops: How many learned turns each special token ends, in all sources.
    """

    def __init__(
        self,
        parts: list[tuple[StoredTokens, float]],
        fields: tuple[str, ...] = ("spec.dataset.source",),
    ) -> None:
        """Join the sources, given as pairs of tokens and weight.

        `fields` are the fields of the manifest that name the sources, for messages.
        """
        stored = [part for part, _ in parts]
        self._fields = fields
        self._arrays = [part.arrays for part in stored]
        self.fingerprint = _fingerprint(parts)
        self.lengths: npt.NDArray[np.int32] = self._join("lengths")
        self.label_counts: npt.NDArray[np.int32] = self._join("label_counts")
        self.weights: npt.NDArray[np.float64] = np.concatenate(
            [np.full(len(part.arrays["lengths"]), weight) for part, weight in parts]
        )
        self.report = _sum_up([part.report for part in stored])
        self.stops = sum((Counter(part.stops or {}) for part in stored), Counter[int]())
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        # Index at which the tokens of each source begin; the files themselves are never joined.
        self._begins = np.cumsum([0, *(len(arrays["tokens"]) for arrays in self._arrays[:-1])])
        self._first = np.cumsum([0, *(len(arrays["rows"]) for arrays in self._arrays[:-1])])
        self._rows: npt.NDArray[np.int64] = self._join("rows")

    def __len__(self) -> int:
        """Return N, the number of sequences."""
        return len(self.lengths)

    @property
    def ordered_stops(self) -> tuple[int, ...]:
        """The special tokens that end learned turns, the most frequent one first."""
        return tuple(token for token, _ in self.stops.most_common())

    def row(self, index: int) -> Sequence:
        """Return a sequence; its arrays are read-only views of the file."""
        end = int(self._ends[index])
        start = end - int(self.lengths[index])
        source = int(np.searchsorted(self._begins, start, side="right")) - 1
        arrays, begin = self._arrays[source], int(self._begins[source])
        here = slice(start - begin, end - begin)
        return Sequence(arrays["tokens"][here], arrays["is_label"][here], int(self._rows[index]))

    def origin(self, index: int) -> str:
        """Return row and data set of a sequence for messages."""
        source = int(np.searchsorted(self._first, index, side="right")) - 1
        return f"row {self._rows[index]} of {self._fields[source]}"

    def find(self, tokens: Collection[int]) -> tuple[int, int] | None:
        """Return the first sequence with any of these tokens, and the token; None if absent."""
        wanted = np.fromiter(tokens, np.int64, len(tokens))
        for arrays, begin in zip(self._arrays, self._begins, strict=True):
            for start in range(0, len(arrays["tokens"]), _TOKENS_AT_ONCE):
                piece = arrays["tokens"][start : start + _TOKENS_AT_ONCE]
                places = np.flatnonzero(np.isin(piece, wanted))
                if len(places):
                    place = int(begin) + start + int(places[0])
                    index = int(np.searchsorted(self._ends, place, side="right"))
                    return index, int(piece[places[0]])
        return None

    def _join(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([arrays[name] for arrays in self._arrays])


def _fingerprint(parts: list[tuple[StoredTokens, float]]) -> str:
    named = [(part.fingerprint, weight) for part, weight in parts]
    if len(named) == 1 and named[0][1] == 1:
        return named[0][0]  # a single source of weight 1 is identified by its content alone
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _sum_up(reports: list[DataReport]) -> DataReport:
    counts = [name for name, field in DataReport.model_fields.items() if field.annotation is int]
    sums = {name: sum(getattr(report, name) for report in reports) for name in counts}
    return DataReport(**sums, warnings=tuple(text for one in reports for text in one.warnings))


def prepare(
    config: DataConfig,
    sources: tuple[DatasetSource, ...],
    tokenizer: Any,
    *,
    name: str = "train",
    rules: Rules = Rules.CURRENT,
    patience_seconds: float = PATIENCE_SECONDS,
) -> TokenDataset:
    """Return the tokens of all sources; tokenise sources that the cache lacks.

    The name of a cache entry is a hash of the bytes of the rows, the tokenizer, its template and
    every setting that changes a token, so an outdated entry is never read. A damaged entry is
    rebuilt.

    `sources` are `config.sources` or `config.held_out`. `name` is `train` or `eval` and selects the
    side of `evalShare` and the field that messages name. `rules` is the version by which rows are
    read. With `evalShare` a source without held-out rows is left out if another has some. A
    process that shows no activity for `patience_seconds` is not waited for.

    Raises:
        DataError: the rows are missing or malformed, or no row has a label token.
        EmptySideError: `evalShare` leaves no row on this side.
        ConfigError: the format needs a chat template that the model does not have.
        OutputNotWritableError: the cache folder cannot be written.
        TrainerError: the disk is full, or fails.
    """
    first = name if config.eval_share is None else "train"
    names = [first, *(f"also[{place}]" for place in range(len(sources) - 1))]
    is_held_out = name == "eval"
    parts: list[tuple[StoredTokens, float]] = []
    fields: list[str] = []
    empty: EmptySideError | None = None
    for place, source in zip(names, sources, strict=True):
        try:
            rows = open_rows(
                source,
                name=place,
                cache_dir=Path(config.cache_dir),
                rules=rules,
                patience_seconds=patience_seconds,
            )
            side = Side(rows, config.eval_share, is_held_out)
            stored = _prepare_source(config, side, tokenizer, rules, patience_seconds)
        except EmptySideError as error:
            if not is_held_out:
                raise
            empty = empty or error
        else:
            parts.append((stored, source.weight))
            fields.append(rows.field)
    if empty is not None and not parts:
        raise empty
    return TokenDataset(parts, tuple(fields))


def _prepare_source(
    config: DataConfig, rows: Side, tokenizer: Any, rules: Rules, patience_seconds: float
) -> StoredTokens:
    """Return the tokens of one source."""
    store = TokenStore(Path(config.cache_dir), _cache_key(config, rows, tokenizer, rules))
    stored = store.open()
    if stored is None:
        with store.lock(patience_seconds):
            stored = store.open()  # another process may have written it while this process waited
            if stored is None:
                stored = _tokenize(config, rows, tokenizer, store, rules)
    if stored.stops is None:
        ends = RowEncoder(config, tokenizer, rules).ends
        stored = replace(stored, stops=_count_stops(stored.arrays, ends))
    return stored


def _count_stops(arrays: Mapping[str, npt.NDArray[Any]], ends: Collection[int]) -> dict[int, int]:
    """Count the last tokens of learned turns in a cache entry that does not have the counts."""
    counts: Counter[int] = Counter()
    tokens, is_label = arrays["tokens"], arrays["is_label"]
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        labels = is_label[start : start + _TOKENS_AT_ONCE + 1]
        last = labels.copy()
        last[:-1] &= ~labels[1:]
        last = last[:_TOKENS_AT_ONCE]
        found = tokens[start : start + _TOKENS_AT_ONCE][last]
        counts.update(found[np.isin(found, [*ends])].tolist())
    return dict(counts)


def _report(tally: Counter[str], config: DataConfig, rows: Side) -> DataReport:
    """Return the report on the rows.

    Raises:
        DataError: there are no rows, or no row has a label token.
    """
    what = rows.name
    if not tally["rows"]:
        raise rows.empty()
    if not tally["sequences"]:
        kind = EmptySideError if rows.share is not None else DataError
        raise kind(
            f"{what}: none of the {tally['rows']} rows has a label token, so no token is learned; "
            "each row needs an assistant turn, completion, output or text that "
            f"begins within spec.training.maxSeqLength ({config.max_seq_len}) tokens"
        )
    warnings = []
    special_text = tally.pop(SPECIAL_TEXT, 0)
    left_out, cut = tally["rows_without_labels"], tally["truncated_rows"]
    if left_out > FEW_ROWS_WITHOUT_LABELS * tally["rows"]:
        warnings.append(
            f"{what}: {left_out} of {tally['rows']} rows ({100 * left_out / tally['rows']:.1f} %) "
            "have no label token and are left out"
        )
    if cut:
        warnings.append(
            f"{what}: {cut} of {tally['rows']} rows were cut to {config.max_seq_len} tokens; raise "
            "spec.training.maxSeqLength, or set spec.dataset.longRows to split"
        )
    if special_text:
        warnings.append(
            f"{what}: {special_text} of {tally['rows']} rows write out special tokens of the "
            "model, which are read as text; if they are meant as special tokens, set "
            "spec.dataset.allowSpecialTokens"
        )
    unread = sorted(name for name in tally if name.startswith(UNREAD))
    if unread:
        counts = (
            f"{name.removeprefix(UNREAD)} in {tally.pop(name)} of {tally['rows']} rows is not read"
            for name in unread
        )
        warnings.append(
            f"{what}: {', '.join(counts)}; move to messages, tools or train what the model should "
            "learn from, or delete it"
        )
    return DataReport(**tally, warnings=tuple(warnings))


def _tokenize(
    config: DataConfig, rows: Side, tokenizer: Any, store: TokenStore, rules: Rules
) -> StoredTokens:
    tally, stops = Counter[str](), Counter[int]()
    encoder = BatchEncoder(config, tokenizer, rules)
    start = partial(_crew, config, tokenizer, rules)
    try:
        with closing(_encoded(encoder, rows, tally, stops, start)) as encoded:
            store.write(encoded)
        failpoint("storing-tokens")
        store.commit(_report(tally, config, rows), stops)
    except OSError as error:
        raise TrainerError(
            f"the token cache in {config.cache_dir} cannot be written: {error.strerror or error}; "
            "make room there, or choose another folder"
        ) from error
    stored = store.open()
    if stored is None:
        raise TrainerError(
            f"the token cache in {config.cache_dir} does not read back as it was written; "
            "check the disk, or choose another folder"
        )
    return stored


def _encoded(
    encoder: BatchEncoder,
    rows: Side,
    tally: Counter[str],
    stops: Counter[int],
    start: Callable[[], Crew | None],
) -> Generator[Mapping[str, bytes]]:
    """Yield the arrays of all batches, and add the counts of their rows to `tally` and `stops`.

    The first batches are encoded in this process, the others in a crew once it is ready.
    """
    waiting, began = batches(rows), monotonic()
    crew, is_alone = None, False
    with ExitStack() as stack:
        for batch in waiting:
            encoded = encoder.encode(batch)
            tally.update(encoded.tally)
            stops.update(encoded.stops)
            yield encoded.arrays
            if crew is None and not is_alone and monotonic() - began > SECONDS_ALONE:
                crew = start()
                is_alone = crew is None
                stack.enter_context(crew or nullcontext())
            try:
                if crew is not None and crew.is_ready():
                    break
            except TrainerError as error:
                print(f"one process tokenises the rows: {error}", file=sys.stderr)
                crew, is_alone = None, True
        if crew is not None:
            for encoded in crew.encode(waiting):
                tally.update(encoded.tally)
                stops.update(encoded.stops)
                yield encoded.arrays


def _crew(config: DataConfig, tokenizer: Any, rules: Rules) -> Crew | None:
    """Start a process per core; None if there is a single core, or a process cannot be started."""
    count = min(usable_cores(), MAX_PROCESSES)
    # Code that a model brings along cannot be imported by other processes.
    if count == 1 or not type(tokenizer).__module__.startswith("transformers."):
        return None
    try:
        return Crew(config, tokenizer, count, rules)
    except OSError as error:
        print(f"one process tokenises the rows: others cannot be started: {error}", file=sys.stderr)
        return None


def _cache_key(config: DataConfig, rows: Side, tokenizer: Any, rules: Rules) -> str:
    settings = config.model_dump(
        mode="json",
        include={
            *("format", "columns", "max_seq_len", "long_rows"),
            *("special_tokens", "allow_special_tokens"),
        },
    )
    parts = [int(rules), rows.fingerprint(), _tokenizer_content(tokenizer), settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_content(tokenizer: Any) -> list[Any]:
    """Return everything that determines the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, vocabulary, specials, tokenizer.chat_template]
