"""Rows from files and the hub: the same rows from each, and a sentence for each fault."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DatasetSource
from finetune_trainer.data.source import Rows, open_rows
from finetune_trainer.errors import ConfigError, DataError, TrainerError

ROWS = [
    {"prompt": "What is 1.10?", "completion": "3.10"},
    {"prompt": 'Say "é, 😀"\nplease', "completion": "NA"},
]


def opened(path: Path, *, name: str = "train", **source: Any) -> Rows:
    return open_rows(
        DatasetSource(path=str(path), **source), name=name, cache_dir=path.parent / "cache"
    )


def values(path: Path, **source: Any) -> list[dict[str, Any]]:
    return [row.values for row in opened(path, **source)]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def pack(path: Path) -> Path:
    """Compress a file, in two parts, as its new name asks for; the plain one is gone."""
    content = path.with_suffix("").read_bytes()
    path.with_suffix("").unlink()
    halves = content[:20], content[20:]
    if path.suffix == ".gz":
        path.write_bytes(b"".join(map(gzip.compress, halves)))
    else:
        import pyarrow

        codec = pyarrow.Codec("zstd")
        path.write_bytes(b"".join(codec.compress(half, asbytes=True) for half in halves))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_jsonl),
        ("lines.json", write_jsonl),
        ("rows.json", write_json),
        ("rows.csv", write_csv),
    ],
)
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_compressed_file_gives_the_rows_of_the_plain_one(
    tmp_path: Path, name: str, write: Any, packed: str
) -> None:
    write(tmp_path / name)
    path = pack(tmp_path / f"{name}{packed}")
    assert values(path) == ROWS
    assert values(tmp_path) == ROWS, "in a folder as well"


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-9], id="cut off"),
        pytest.param(lambda content: b"no such thing", id="another kind"),
        pytest.param(
            lambda content: content[:22] + bytes(8) + content[30:], id="changed in the middle"
        ),
    ],
)
def test_a_damaged_compressed_file_is_a_sentence(tmp_path: Path, packed: str, damage: Any) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS * 20)
    path = pack(tmp_path / f"rows.jsonl{packed}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as error:
        list(opened(path))
    said = str(error.value)
    assert said.startswith(f"spec.dataset.source {path} cannot be unpacked (")
    assert said.endswith("); pack it again, or unpack it yourself")


def test_hidden_files_of_a_folder_are_no_rows(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl")
    (folder / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07 of a Mac")
    assert values(folder) == ROWS


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_jsonl),
        ("lines.json", write_jsonl),
        ("rows.json", write_json),
        ("rows.csv", write_csv),
        ("rows.parquet", write_parquet),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, write: Any) -> None:
    assert values(write(tmp_path / name)) == ROWS


def test_nulls_that_parquet_adds_for_fields_of_other_rows_are_left_out(tmp_path: Path) -> None:
    calls = [{"name": "weather", "arguments": {"city": "Bern"}}, {"name": "now", "arguments": {}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls]
    assert values(write_parquet(tmp_path / "rows.parquet", rows)) == rows


def test_nested_messages_come_out_of_parquet_as_they_went_in(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert values(write_parquet(tmp_path / "rows.parquet", rows)) == rows


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", ROWS[1:])
    write_jsonl(folder / "a.jsonl", ROWS[:1])
    (folder / "README.md").write_text("not rows")
    assert values(folder) == ROWS


def test_rows_can_be_read_more_than_once(tmp_path: Path) -> None:
    rows = opened(write_jsonl(tmp_path / "rows.jsonl"))
    assert list(rows) == list(rows)


def test_blank_lines_are_passed_over_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\n{"text": "b", "note": null}\n')
    rows = list(opened(path))
    assert [(row.where, row.values) for row in rows] == [
        (f"{path} line 1", {"text": "a"}),
        (f"{path} line 3", {"text": "b"}),
    ]


def test_a_character_that_is_escaped_in_two_halves_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hi \\ud83d\\ude00"}\n')
    assert values(path) == [{"text": "hi 😀"}]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    before = opened(path).fingerprint()
    write_jsonl(path, ROWS[:1])
    assert opened(path).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n{"text": }\n',
            "line 2 is not JSON: Expecting value at column 10; correct or delete the line",
            id="malformed line",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n{"text": \n{"text": "c"}\n',
            "line 2 is not JSON: Expecting value at column 9; correct or delete the line",
            id="a line that breaks off",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n[1, 2]\n',
            "line 2 is a JSON list; a row must be an object with named columns",
            id="a line that is no object",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}\n',
            "line 2 is not UTF-8 text; convert the file",
            id="another encoding",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n{"text": ["hi \\ud83d"]}\n',
            "line 2 holds half of a character (\\ud83d); correct or delete the row",
            id="half of a character",
        ),
        pytest.param(
            "rows.json",
            b'[{"text": "a"}, {"text": "hi \\ud83d"}]',
            "row 2 holds half of a character (\\ud83d); correct or delete the row",
            id="half of a character in an array",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n' + b"[" * 100_000,
            "line 2 cannot be read: nested too deeply; correct or delete it",
            id="a line of brackets",
        ),
        pytest.param(
            "rows.json",
            b"[" * 100_000,
            "line 1 cannot be read: nested too deeply; correct or delete it",
            id="a file of brackets",
        ),
        pytest.param(
            "rows.jsonl",
            b'{"text": "a"}\n{"n": ' + b"9" * 5000 + b"}",
            "line 2 cannot be read: Exceeds the limit (4300 digits) for integer string conversion",
            id="a number of 5000 digits",
        ),
        pytest.param(
            "rows.json",
            b'[{"text": "a"},\n {"text": ]\n',
            "line 2 is not JSON: Expecting value at column 11; correct or delete the line",
            id="malformed array",
        ),
        pytest.param(
            "rows.json",
            b'[{"text": "a"}, 5]',
            "row 2 is a JSON int; a row must be an object with named columns",
            id="an array of other things",
        ),
        pytest.param(
            "rows.parquet", b"no parquet", "is not a readable Parquet file:", id="no Parquet"
        ),
        pytest.param(
            "rows.csv",
            b"text,note\none,two\nthree, four,five\n",
            "line 3 has more values than the header has columns; quote values that hold a comma",
            id="a comma without quotes",
        ),
        pytest.param(
            "rows.csv",
            b'text\n"open\n',
            "line 2 is not CSV: unexpected end of data; correct the file",
            id="an open quote",
        ),
        pytest.param(
            "rows.csv",
            b"text\n\xff\n",
            "is not UTF-8 text; convert the file",
            id="another encoding of CSV",
        ),
        pytest.param(
            "rows.txt",
            b"text",
            "is not a .jsonl, .json, .parquet, .csv file; convert it to one of them",
            id="another kind",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        list(opened(path))
    assert str(error.value).startswith(f"spec.dataset.source {path} {sentence}")


def test_a_missing_file_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError) as error:
        opened(path, name="eval")
    assert str(error.value) == f"spec.dataset.evalSource {path} does not exist; check the path"


def test_a_folder_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match=r"rows holds no \.jsonl, \.json, \.parquet, \.csv file"):
        opened(tmp_path / "rows")


def test_a_split_of_a_file_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^spec\.dataset\.evalSplit 'test': the file .* only"):
        opened(write_jsonl(tmp_path / "rows.jsonl"), name="eval", split="test")


def test_a_hub_that_cannot_be_reached_is_not_the_datas_fault(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"no-one/no-rows: the hub cannot") as error:
        open_rows(
            DatasetSource(path="no-one/no-rows", is_hub=True), name="train", cache_dir=tmp_path
        )
    assert not isinstance(error.value, DataError)
