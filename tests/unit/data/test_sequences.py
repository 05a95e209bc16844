"""Tokenising a data set: the cache, long rows, and the report that hides nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.config import DataConfig, DatasetSource, LongRows
from finetune_trainer.data.encoding import Encoded
from finetune_trainer.data.sequences import TokenDataset, fit, prepare
from finetune_trainer.errors import DataError, OutputNotWritableError
from support.data.text_fixtures import family_tokenizer, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class CountingTokenizer:
    """The tokenizer, counting how often it is asked for tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self._tokenizer(*args, **options)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, **changes: Any) -> DataConfig:
    source = DatasetSource(path=str(path))
    return DataConfig(train=source, cache_dir=str(path.parent / "cache"), **changes)


def prepared(made: DataConfig, tokenizer: Any, name: str = "train") -> TokenDataset:
    return prepare(made, made.sources, tokenizer, name=name)


DIALOGUES = [{"prompt": f"Question {n}?", "completion": "word " * n} for n in range(1, 20)]


def test_rows_become_sequences_in_their_order(tmp_path: Path, tokenizer: Any) -> None:
    dataset = prepared(config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES)), tokenizer)
    sequence = dataset.row(2)
    assert tokenizer.decode(sequence.tokens) == (
        "<|im_start|>user\nQuestion 3?<|im_end|>\n"
        "<|im_start|>assistant\nword word word <|im_end|>\n"
    )
    assert tokenizer.decode(sequence.tokens[sequence.is_label]) == "word word word <|im_end|>"
    rows = [dataset.row(index) for index in range(len(dataset))]
    assert dataset.lengths.tolist() == [len(row.tokens) for row in rows]
    assert dataset.label_counts.tolist() == [row.is_label.sum() for row in rows]
    assert (dataset.report.rows, dataset.report.sequences) == (19, 19)
    assert dataset.report.tokens == dataset.lengths.sum()
    assert dataset.report.label_tokens == dataset.label_counts.sum()
    assert dataset.report.warnings == ()


def test_the_second_time_nothing_is_tokenised(tmp_path: Path, tokenizer: Any) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    first = prepared(made, tokenizer)
    counting = CountingTokenizer(tokenizer)
    counting.__class__.__name__ = type(tokenizer).__name__
    again = prepared(made, counting)
    assert counting.calls == 0
    assert (again.fingerprint, again.report) == (first.fingerprint, first.report)
    assert np.array_equal(again.row(5).tokens, first.row(5).tokens)


def test_the_same_content_under_another_name_is_the_same_data(
    tmp_path: Path, tokenizer: Any
) -> None:
    one = config(write_rows(tmp_path / "one.jsonl", *DIALOGUES))
    two = config(write_rows(tmp_path / "two.jsonl", *DIALOGUES))
    assert prepared(one, tokenizer).fingerprint == prepared(two, tokenizer).fingerprint
    assert len(committed(tmp_path)) == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda made, tokenizer: {"max_seq_len": 20}, id="length limit"),
        pytest.param(lambda made, tokenizer: {"columns": {"system": "prompt"}}, id="columns"),
        pytest.param(lambda made, tokenizer: {"format": "text"}, id="format"),
    ],
)
def test_a_setting_that_changes_tokens_is_a_cache_of_its_own(
    tmp_path: Path, tokenizer: Any, change: Callable[..., dict[str, Any]]
) -> None:
    rows = [{**row, "text": "Some text"} for row in DIALOGUES]
    made = config(write_rows(tmp_path / "rows.jsonl", *rows))
    changed = DataConfig.model_validate(made.model_dump() | change(made, tokenizer))
    assert prepared(made, tokenizer).fingerprint != prepared(changed, tokenizer).fingerprint


def test_another_template_is_a_cache_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    other = tiny_tokenizer(tmp_path / "other", template="Hello. " + tokenizer.chat_template)
    assert prepared(made, tokenizer).fingerprint != prepared(made, other).fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: os.truncate(path, path.stat().st_size - 4), id="cut off"),
        pytest.param(
            lambda path: path.write_bytes(
                bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
            ),
            id="a flipped bit",
        ),
        pytest.param(lambda path: path.unlink(), id="deleted"),
    ],
)
@pytest.mark.parametrize("file", ["tokens.bin", "lengths.bin", "manifest.json"])
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, tokenizer: Any, file: str, damage: Callable[[Path], None]
) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    first = prepared(made, tokenizer)
    expected = [first.row(index).tokens.tolist() for index in range(len(first))]
    [folder] = committed(tmp_path)
    damage(folder / file)
    again = prepared(made, tokenizer)
    assert [again.row(index).tokens.tolist() for index in range(len(again))] == expected
    assert again.fingerprint == first.fingerprint


def test_what_a_killed_process_left_behind_is_cleared_away(tmp_path: Path, tokenizer: Any) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    prepared(made, tokenizer)
    [folder] = committed(tmp_path)
    draft = folder.with_name(f"{folder.name}.{os.uname().nodename}.tmp")
    folder.rename(draft)
    (draft / "tokens.bin").write_bytes(b"half of it")
    prepared(made, tokenizer)
    assert committed(tmp_path) == [folder]
    assert not draft.exists()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, tokenizer: Any) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(OutputNotWritableError, match=r"cache/tokens cannot be written"):
        prepared(made, tokenizer)


encoded_rows = st.lists(st.booleans(), min_size=1, max_size=80).map(
    lambda labels: Encoded(list(range(len(labels))), labels)
)


@given(encoded=encoded_rows, max_seq_len=st.integers(8, 20))
def test_splitting_predicts_every_label_token_exactly_once(
    encoded: Encoded, max_seq_len: int
) -> None:
    pieces = fit(encoded, max_seq_len, LongRows.SPLIT)
    predicted = [int(token) for piece in pieces for token in piece.tokens[piece.is_label]]
    # Nothing stands before the first token of a row, so nothing can predict it.
    assert predicted == [token for token in encoded.tokens[1:] if encoded.is_label[token]]
    assert all(2 <= len(piece.tokens) <= max_seq_len for piece in pieces)
    assert not any(piece.is_label[0] for piece in pieces)


@given(encoded=encoded_rows, max_seq_len=st.integers(8, 20))
def test_truncating_keeps_the_head(encoded: Encoded, max_seq_len: int) -> None:
    pieces = fit(encoded, max_seq_len, LongRows.TRUNCATE)
    head = encoded.is_label[1:max_seq_len]
    assert [piece.tokens.tolist() for piece in pieces] == (
        [encoded.tokens[:max_seq_len]] if any(head) else []
    )


def test_long_rows_are_cut_counted_and_told(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *DIALOGUES)
    report = prepared(config(path, max_seq_len=24), tokenizer).report
    whole = prepared(config(path), tokenizer)
    assert report.truncated_rows == (whole.lengths > 24).sum() > 0
    assert report.split_rows == 0
    assert report.warnings == (
        f"spec.dataset.source {path}: {report.truncated_rows} of 19 rows were cut to 24 tokens; "
        "raise spec.training.maxSeqLength, or set spec.dataset.longRows to split",
    )


def test_split_rows_lose_no_label(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *DIALOGUES)
    report = prepared(config(path, max_seq_len=24, long_rows="split"), tokenizer).report
    whole = prepared(config(path), tokenizer).report
    assert report.label_tokens == whole.label_tokens
    assert report.sequences > report.rows == 19
    assert (report.truncated_rows, report.warnings) == (0, ())
    assert report.split_rows > 0


def test_rows_without_labels_are_left_out_counted_and_told(tmp_path: Path, tokenizer: Any) -> None:
    mute = {"messages": [{"role": "user", "content": "Anyone?"}]}
    path = write_rows(tmp_path / "rows.jsonl", *DIALOGUES, mute)
    report = prepared(config(path), tokenizer).report
    assert (report.rows, report.sequences, report.rows_without_labels) == (20, 19, 1)
    assert report.warnings == (
        f"spec.dataset.source {path}: 1 of 20 rows (5.0 %) have no label token and are left out",
    )


def test_a_row_with_an_empty_answer_is_one_without_labels(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\nHi?,Yes.\nHo?,\n")
    report = prepared(config(path), tokenizer).report
    assert (report.rows, report.sequences, report.rows_without_labels) == (2, 1, 1)
    assert report.warnings == (
        f"spec.dataset.source {path}: 1 of 2 rows (50.0 %) have no label token and are left out",
    )


def test_one_row_in_two_hundred_without_labels_is_counted_without_a_warning(
    tmp_path: Path, tokenizer: Any
) -> None:
    mute = {"messages": [{"role": "user", "content": "Anyone?"}]}
    path = write_rows(tmp_path / "rows.jsonl", *(DIALOGUES * 11)[:199], mute)
    report = prepared(config(path), tokenizer).report
    assert (report.rows_without_labels, report.warnings) == (1, ())


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        pytest.param([], "{path} holds no rows; give a data set with some", id="empty file"),
        pytest.param(
            [{"messages": [{"role": "user", "content": "Anyone?"}]}] * 3,
            "{path}: none of the 3 rows has a label token, so no token is learned",
            id="no answers",
        ),
        pytest.param(
            [{"prompt": "word " * 500, "completion": "Yes."}],
            "{path}: none of the 1 rows has a label token, so no token is learned",
            id="every answer cut away",
        ),
    ],
)
def test_a_data_set_with_nothing_to_learn_is_an_error(
    tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], sentence: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError) as error:
        prepared(config(path, max_seq_len=64), tokenizer, name="eval")
    assert str(error.value).startswith("spec.dataset.evalSource " + sentence.format(path=path))
    assert committed(tmp_path) == []


def committed(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.suffix == ""]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_several_sources_are_one_data_set_in_their_order(tmp_path: Path, tokenizer: Any) -> None:
    one = config(write_rows(tmp_path / "one.jsonl", *DIALOGUES))
    two = config(write_rows(tmp_path / "two.jsonl", *DIALOGUES[:3]))
    alone, further = prepared(one, tokenizer), prepared(two, tokenizer)
    source = DatasetSource(path=two.train.path, weight=0.5)
    both = prepared(one.model_copy(update={"also": (source,)}), tokenizer)
    expected = [part.row(index) for part in (alone, further) for index in range(len(part))]
    for index, sequence in enumerate(expected):
        assert np.array_equal(both.row(index).tokens, sequence.tokens)
        assert np.array_equal(both.row(index).is_label, sequence.is_label)
    assert both.lengths.tolist() == [*alone.lengths, *further.lengths]
    assert both.label_counts.tolist() == [*alone.label_counts, *further.label_counts]
    assert both.weights.tolist() == [1.0] * 19 + [0.5] * 3
    assert (both.report.rows, both.report.tokens) == (22, both.lengths.sum())
    assert len(committed(tmp_path)) == 2  # each source has a cache entry of its own
    assert both.origin(18) == "row 19 of spec.dataset.source"
    assert both.origin(19) == "row 1 of spec.dataset.also[0].source"


def test_a_sequence_is_told_by_its_row_where_others_were_split_or_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    silent = {"prompt": "Say nothing.", "completion": ""}
    long = {"prompt": "Count.", "completion": " ".join(map(str, range(60)))}
    short = {"prompt": "Hello.", "completion": "Hello."}
    made = config(
        write_rows(tmp_path / "rows.jsonl", silent, long, short),
        max_seq_len=64,
        long_rows=LongRows.SPLIT,
    )
    dataset = prepared(made, tokenizer)
    told = [dataset.origin(index) for index in range(len(dataset))]
    assert set(told[:-1]) == {"row 2 of spec.dataset.source"}
    assert len(told) > 2
    assert told[-1] == "row 3 of spec.dataset.source"


def test_the_weight_of_a_source_is_part_of_what_names_the_data(
    tmp_path: Path, tokenizer: Any
) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    twice = made.model_copy(update={"train": DatasetSource(path=made.train.path, weight=2)})
    assert prepared(made, tokenizer).fingerprint != prepared(twice, tokenizer).fingerprint


def test_a_further_source_that_is_missing_is_named_by_its_field(
    tmp_path: Path, tokenizer: Any
) -> None:
    made = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    missing = made.model_copy(update={"also": (made.train, DatasetSource(path="/no.jsonl"))})
    with pytest.raises(DataError, match=r"^spec\.dataset\.also\[1\]\.source /no\.jsonl does not"):
        prepared(missing, tokenizer)


def test_a_weight_of_held_out_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight of held-out rows has no effect"):
        config(tmp_path / "rows.jsonl", eval=DatasetSource(path="rows.jsonl", weight=2))


def test_the_tokens_that_end_learned_turns_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    first, second = (
        write_rows(tmp_path / name, *rows)
        for name, rows in (("a.jsonl", DIALOGUES), ("b.jsonl", DIALOGUES[:4]))
    )
    also = (DatasetSource(path=str(second)),)
    dataset = prepared(config(first, also=also), tokenizer)
    assert dict(dataset.stops) == {tokenizer.eos_token_id: len(DIALOGUES) + 4}


def test_a_token_that_only_ends_earlier_turns_is_not_a_stop(tmp_path: Path) -> None:
    """gpt-oss would stop after its reasoning."""
    harmony = family_tokenizer("harmony", "bytes")
    user = {"role": "user", "content": "Two and two?"}
    reply = {"role": "assistant", "content": "Four."}
    row = {"messages": [user, reply, user, reply | {"thinking": "Easy."}]}
    dataset = prepared(config(write_rows(tmp_path / "rows.jsonl", row)), harmony)
    assert harmony.convert_ids_to_tokens(list(dataset.ordered_stops)) == ["<|return|>"]


def test_a_cache_entry_of_release_0_1_0_gets_its_counts(tmp_path: Path, tokenizer: Any) -> None:
    of_rows = config(write_rows(tmp_path / "rows.jsonl", *DIALOGUES))
    counted = prepared(of_rows, tokenizer).stops
    [manifest] = (tmp_path / "cache").glob("tokens/*/manifest.json")
    values = json.loads(manifest.read_text())
    del values["stops"]
    manifest.write_text(json.dumps(values))
    assert prepared(of_rows, tokenizer).stops == counted
