"""The format of a data set is detected, or the user is asked; never guessed."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from pyarrow import Table, parquet

from finetune_trainer.config import DatasetSource
from finetune_trainer.data.detection import Detected, detect
from finetune_trainer.data.doubts import UnclearDataError
from finetune_trainer.data.formats import read_example
from finetune_trainer.data.shapes import Reading, reading_of
from finetune_trainer.data.source import Row, open_rows
from finetune_trainer.errors import DataError
from support.data.row_shapes import ASKED, DETECTED, LONG, QUESTION, RESPONSE, TURNS

REFUSED = [
    pytest.param({"messages": json.dumps(TURNS)}, "holds text, not a list of messages",
        id="JSON text"),
    pytest.param({"question": QUESTION, "answer": 5}, 'holds int 5, not text',
        id="a number"),
    pytest.param({"dialog": ["hello", "hi"]}, "no column that is known", id="turns without roles"),
    pytest.param({"conversations": [["hello", "hi"]]}, "not an object with role",
        id="pairs of turns"),
    pytest.param({"messages": TURNS[:1]}, "none of the 3 rows has", id="no turn of the assistant"),
    pytest.param({"messages": [{"role": "narrator", "content": LONG}]}, "'narrator'", id="a role"),
    pytest.param(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
        "only text can be trained on",
        id="parts that are images",
    ),
]  # fmt: skip


def chat(number: int) -> dict[str, Any]:
    return {"prompt": f"{QUESTION} ({number})", "completion": RESPONSE}


def detected(folder: Path, rows: list[dict[str, Any]], chosen: Reading | None = None) -> Detected:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSource(path=str(file))
    found = open_rows(source, name="train", cache_dir=folder)
    got = detect(found, name="rows.jsonl", chosen=chosen)
    for row in found:  # a run reads what was detected
        read_example(row, got.reading.format, got.reading.columns)
    return got


@pytest.mark.parametrize(("rows", "shape", "columns", "unread"), DETECTED)
def test_a_shape_of_rows_is_detected(
    tmp_path: Path, rows: list[dict[str, Any]], shape: str, columns: str, unread: str
) -> None:
    got = detected(tmp_path, rows)
    named = {name: value for name, value in got.reading.columns if value is not None}
    wanted = dict(pair.split("=") for pair in columns.split(",") if pair)
    assert (got.reading.format, named) == (shape, wanted)
    assert (got.rows, got.rows_without_labels, got.unread) == (3, 0, tuple(unread.split()))


@pytest.mark.parametrize(("rows", "reason", "options"), ASKED)
def test_rows_that_are_unclear_lead_to_a_question(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str, options: tuple[str, ...]
) -> None:
    with pytest.raises(UnclearDataError) as caught:
        detected(tmp_path, rows)
    message = str(caught.value)
    assert message.startswith("rows.jsonl: ")
    assert reason in message
    assert caught.value.options == options
    for option in options:
        assert f"--columns {option}" in message
    if options:  # each column is shown with a value
        for name, value in rows[0].items():
            assert f"  {name}" in message
            assert json.dumps(value, ensure_ascii=False)[:59] in message


@pytest.mark.parametrize(("rows", "reason", "options"), ASKED)
def test_an_offered_option_decides(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str, options: tuple[str, ...]
) -> None:
    for option in options:
        chosen = dict(pair.split("=") for pair in option.split(","))
        got = detected(tmp_path, rows, reading_of(**chosen))
        assert dict(got.reading.named) == chosen


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_rows_that_no_run_reads_get_the_reason(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        detected(tmp_path, [row] * 3)
    assert reason in str(caught.value)


def test_a_file_of_every_kind_is_detected(tmp_path: Path) -> None:
    rows = [{"question": f"Why {n}?", "answer": f"Because, of {n}."} for n in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = "question,answer\n" + "".join('{question},"{answer}"\n'.format(**row) for row in rows)
    files = {
        "bom.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
        "array.json": json.dumps(rows).encode(),
        "bom.csv": b"\xef\xbb\xbf" + table.encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(
        Table.from_pylist([*rows, {"question": "?", "answer": None}][:5]), tmp_path / "rows.parquet"
    )
    for name in (*files, "rows.parquet"):
        found = open_rows(
            DatasetSource(path=str(tmp_path / name)), name="train", cache_dir=tmp_path
        )
        got = detect(found, name=name)
        assert (got.reading.option, got.rows) == ("prompt=question,completion=answer", 5), name
        assert got.prompts[0] == "Why 0?"


@pytest.mark.parametrize("others", [49, 200], ids=["among the first rows", "later"])
def test_a_row_of_another_shape_is_named(tmp_path: Path, others: int) -> None:
    rows = [chat(number) for number in range(others)]
    with pytest.raises(UnclearDataError) as caught:
        detected(tmp_path, [*rows, {"text": LONG}])
    assert str(caught.value) == (
        f"{tmp_path}/rows.jsonl line {others + 1} has no column prompt and completion; it has text."
        f"\n{others} of {others + 1} rows are chat (prompt and completion). Correct the row, or "
        "leave it out"
    )


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        pytest.param({"prompt": QUESTION, "completion": 3}, "holds int 3, not text", id="a number"),
        pytest.param({**chat(0), "images": ["a.png"]}, "column images. Only text", id="an image"),
        pytest.param({**chat(0), "thinking": LONG}, "thinking would not be read", id="thoughts"),
    ],
)
def test_a_later_row_with_something_else_is_named(
    tmp_path: Path, late: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"line 101.*{reason}"):
        detected(tmp_path, [*map(chat, range(100)), late])


def test_rows_without_labels_are_counted(tmp_path: Path) -> None:
    got = detected(tmp_path, [{"messages": TURNS}, {"messages": []}, {"messages": TURNS * 3}])
    assert (got.rows, got.rows_without_labels, got.turns) == (3, 1, (0, 6))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl holds no rows"):
        detected(tmp_path, [])


def test_named_columns_must_have_an_effect(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, **chat(0)}]
    with pytest.raises(DataError, match="prompt=prompt,completion=completion has no effect"):
        detected(tmp_path, rows, reading_of(prompt="prompt", completion="completion"))
    with pytest.raises(DataError, match="messages, text belong to several formats"):
        reading_of(messages="a", text="b")


def test_rows_are_streamed() -> None:
    alive: list[ref[Row]] = []

    def rows() -> Iterator[Row]:
        for number in range(2_000):
            row = Row(f"line {number}", chat(number))
            alive.append(ref(row))
            yield row
            assert number < 200 or sum(one() is not None for one in alive[-200:]) < 100

    assert detect(rows(), name="rows").rows == 2_000
    assert not any(one() for one in alive[100:-1])
