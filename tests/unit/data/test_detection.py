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

QUESTION = "How do I reset my password?"
RESPONSE = "Open Settings, choose Security, and press Reset."
LONG = "The router has a blue light that blinks twice when the line is down."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": RESPONSE}]
SHARED = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": RESPONSE}]
TOOL = {"name": "find", "description": "Find a page.", "parameters": {"type": "object"}}
TEMPLATED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{RESPONSE}<|im_end|>"
CHAT, INSTRUCTION, TEXT = "chat", "instruction", "text"


def read(row: dict[str, Any], shape: str, columns: str = "", unread: str = "") -> Any:
    """A row, the format, `field=column` for other names, and the columns that are not read."""
    return pytest.param([row] * 3, shape, columns, unread, id=" ".join(row)[:60])


DETECTED = [
    read({"messages": TURNS}, CHAT),
    read({"messages": TURNS, "id": 7, "source": "forum", "topic": "login"}, CHAT, "",
        "id source topic"),
    read({"conversations": SHARED, "id": "a-1"}, CHAT, "", "id"),
    read({"conversations": SHARED, "system": "Be brief.", "tools": json.dumps([TOOL])}, CHAT),
    read({"messages": TURNS, "tools": [TOOL]}, CHAT),
    read({"prompt": QUESTION, "messages": TURNS, "prompt_id": "f3"}, CHAT, "", "prompt prompt_id"),
    read({"conversation": TURNS}, CHAT, "messages=conversation"),
    read({"dialogue": SHARED, "turns": 2}, CHAT, "messages=dialogue", "turns"),
    read({"messages": TURNS, "score": 3.5, "metadata": {"lang": "en"}}, CHAT, "", "score metadata"),
    read({"messages": TURNS, "system_message": "Be brief."}, CHAT, "system=system_message"),
    read({"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "label": "faq"}, CHAT,
        "", "label"),
    read({"prompt": QUESTION, "completion": RESPONSE}, CHAT),
    read({"prompt": TURNS[:1], "completion": TURNS[1:]}, CHAT),
    read({"prompt": QUESTION, "response": RESPONSE}, CHAT, "completion=response"),
    read({"question": QUESTION, "answer": RESPONSE}, CHAT, "prompt=question,completion=answer"),
    read({"question": QUESTION, "answer": "42", "source": "https://a.example/b"}, CHAT,
         "prompt=question,completion=answer", "source"),
    read({"query": QUESTION, "response": RESPONSE}, CHAT, "prompt=query,completion=response"),
    read({"input": QUESTION, "output": RESPONSE}, CHAT, "prompt=input,completion=output"),
    read({"problem": QUESTION, "solution": RESPONSE}, CHAT, "prompt=problem,completion=solution"),
    read({"system": "Be brief.", "user": QUESTION, "assistant": RESPONSE}, CHAT,
         "prompt=user,completion=assistant"),
    read({"user": "u123", "prompt": QUESTION, "completion": RESPONSE}, CHAT, "", "user"),
    read({"Question": QUESTION, "Answer": RESPONSE}, CHAT, "prompt=Question,completion=Answer"),
    read({"question": "怎么重置密码", "answer": "打开设置。"}, CHAT,
         "prompt=question,completion=answer"),
    read({"prompt": QUESTION, "completion": RESPONSE, "train": 1}, CHAT),
    read({"instruction": QUESTION, "input": "", "output": RESPONSE}, INSTRUCTION),
    read({"instruction": QUESTION, "input": LONG, "output": RESPONSE,
          "text": f"Below is a task.\n\n{QUESTION}\n{LONG}\n{RESPONSE}"}, INSTRUCTION, "", "text"),
    read({"instruction": QUESTION, "context": LONG, "response": RESPONSE, "category": "closed_qa"},
         INSTRUCTION, "input=context,output=response", "category"),
    read({"instruction": QUESTION, "output": RESPONSE, "system": "Be brief.",
          "history": [["Hello there", "Hello"]]}, INSTRUCTION),
    read({"instruction": QUESTION, "response": RESPONSE}, INSTRUCTION, "output=response"),
    read({"question": QUESTION, "context": LONG, "answer": RESPONSE}, INSTRUCTION,
         "instruction=question,input=context,output=answer"),
    read({"text": LONG}, TEXT),
    read({"text": LONG, "url": "https://a.example", "timestamp": "2026-01-01", "score": 0.9}, TEXT,
         "", "url timestamp score"),
    read({"text": LONG, "meta": {"set": "books"}}, TEXT, "", "meta"),
    read({"title": "Router lights", "content": LONG}, TEXT, "text=content", "title"),
]  # fmt: skip


def ask(row: dict[str, Any], reason: str, *options: str) -> Any:
    """A row, a part of the question, and the readings that it offers."""
    return pytest.param([row] * 3, reason, options, id=" ".join(row)[:60])


ASKED = [
    ask({"question": QUESTION, "answer": RESPONSE, "query": "password reset", "response": LONG},
        "the columns allow 2 readings: question and ",
        "prompt=question,completion=answer", "prompt=query,completion=response"),
    ask({"problem": QUESTION, "solution": LONG, "answer": "42"}, "2 readings: problem and",
        "prompt=problem,completion=answer", "prompt=problem,completion=solution"),
    ask({"prompt": QUESTION, "completion": RESPONSE, "response": LONG}, "2 readings",
        "prompt=prompt,completion=completion", "prompt=prompt,completion=response"),
    ask({"instruction": "Reply as a doctor would.", "question": QUESTION, "answer": RESPONSE},
        "2 readings", "instruction=instruction,output=answer", "prompt=question,completion=answer"),
    ask({"messages": TURNS, "conversations": SHARED}, "2 readings", "messages=messages",
        "messages=conversations"),
    ask({"text": LONG, "content": LONG[:30]}, "2 readings", "text=text", "text=content"),
    ask({"prompt": QUESTION, "chosen": RESPONSE, "rejected": "No."},
        "preference data (chosen, rejected)",
        "prompt=prompt,completion=chosen"),
    ask({"chosen": TURNS, "rejected": TURNS}, "preference data", "messages=chosen"),
    ask({"prompt": QUESTION, "chosen": TURNS, "rejected": TURNS, "messages": TURNS},
        "preference data", "messages=chosen"),
    ask({"chosen": f"\n\nHuman: {QUESTION}", "rejected": "No."}, "preference data", "text=chosen"),
    ask({"prompt": QUESTION, "completion": RESPONSE, "label": False}, "preference data (label)",
        "prompt=prompt,completion=completion"),
    ask({"messages": TURNS, "images": ["a.png"]}, "column images. Only text"),
    ask({"image": "a.png", "text": LONG}, "column image. Only text"),
    ask({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [1, 2, 3]}, "token ids"),
    ask({"text": LONG, "input_ids": [1, 2, 3]}, "token ids", "text=text"),
    ask({"role": "user", "content": QUESTION}, "a single turn (role, content)", "text=content"),
    ask({"text": TEMPLATED}, "chat template (<|im_start|>)", "text=text"),
    ask({"text": f"<s>[INST] {QUESTION} [/INST] {RESPONSE}</s>"}, "chat template ([INST])",
        "text=text"),
    ask({"text": f"### Instruction:\n{QUESTION}\n\n### Response:\n{RESPONSE}"}, "chat template",
        "text=text"),
    ask({"text": LONG, "label": 1}, "label would not be read", "text=text"),
    ask({"text": LONG, "sentiment": "positive"}, "sentiment would not be read", "text=text"),
    ask({"text": LONG, "summary": "The light blinks twice if the line is down."},
        "summary would not be read", "text=text"),
    ask({"question": QUESTION, "choices": ["yes", "no"], "answer": "A"},
        "choices would not be read",
        "prompt=question,completion=answer"),
    ask({"question": QUESTION, "passage": LONG, "answer": RESPONSE}, "passage would not be read",
        "prompt=question,completion=answer", "instruction=question,input=passage,output=answer"),
    ask({"text": LONG, "question": QUESTION, "answer": RESPONSE}, "text would not be read",
        "prompt=question,completion=answer", "instruction=question,input=text,output=answer"),
    ask({"question": QUESTION, "thinking": LONG, "answer": RESPONSE}, "thinking would not be read",
        "prompt=question,completion=answer", "instruction=question,input=thinking,output=answer"),
    ask({"query": QUESTION, "response": RESPONSE, "history": [["Hello", "Hello"]]},
        "history would not be read", "prompt=query,completion=response"),
    ask({"source": "The house is small.", "target": "Das Haus ist klein."},
        "no column that is known",
        "prompt=source,completion=target", "text=source"),
    ask({"quote": LONG, "number": 3}, "no column that is known", "text=quote"),
    ask({"translation": {"en": "house", "de": "Haus"}}, "no column that is known"),
    ask({"prompt": QUESTION}, "a prompt (prompt), but no response", "text=prompt"),
    ask({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, "no column that is known"),
    ask({"sentence": LONG, "label": 1}, "no column that is known", "text=sentence"),
]  # fmt: skip

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
