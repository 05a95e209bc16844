"""`evalShare`: the content of a row decides whether it is trained on or held out."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.run_data import RunData, prepare_run
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.errors import DataError
from support.data.text_fixtures import tiny_tokenizer

ROWS = [{"prompt": f"Question {n}?", "completion": f"Result {n}."} for n in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def write_folder(path: Path) -> Path:
    write_jsonl(path / "a.jsonl", ROWS[:20])
    write_jsonl(path / "b.jsonl", ROWS[20:])
    return path


def data(path: Path, share: float | None = 0.2, *also: DatasetSource) -> DataConfig:
    cache = str(path.parent / "cache")
    return DataConfig(
        train=DatasetSource(path=str(path)), also=also, eval_share=share, cache_dir=cache
    )


def prepared(
    config: DataConfig,
    tokenizer: Any,
    recorded: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> RunData:
    return prepare_run(config, lambda rules: tokenizer, recorded, warn)


def texts(dataset: TokenDataset | None, tokenizer: Any) -> list[str]:
    assert dataset is not None
    return [tokenizer.decode(dataset.row(index).tokens) for index in range(len(dataset))]


def sides(config: DataConfig, tokenizer: Any) -> tuple[list[str], list[str]]:
    found = prepared(config, tokenizer)
    return texts(found.train, tokenizer), texts(found.held_out, tokenizer)


def test_every_row_is_on_one_side_and_the_other_rows_keep_their_order_and_number(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    whole = texts(prepared(data(path, None), tokenizer).train, tokenizer)
    found = prepared(data(path), tokenizer)
    train, held_out = texts(found.train, tokenizer), texts(found.held_out, tokenizer)
    assert sorted(train + held_out) == sorted(whole)
    assert [text for text in whole if text in set(train)] == train
    assert 5 <= len(held_out) <= 20
    assert found.held_out is not None
    places = [int(found.train.origin(n).split()[1]) for n in range(len(train))]
    assert [whole[place - 1] for place in places] == train
    assert found.held_out.origin(0).endswith(" of spec.dataset.source")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("rows.csv", write_csv, id="csv"),
        pytest.param("rows.parquet", write_parquet, id="parquet"),
        pytest.param("folder", write_folder, id="folder"),
    ],
)
def test_the_same_rows_are_held_out_of_every_kind_of_file(
    name: str, write: Callable[[Path], Path], tmp_path: Path, tokenizer: Any
) -> None:
    expected = sides(data(write_jsonl(tmp_path / "rows.jsonl")), tokenizer)
    assert sides(data(write(tmp_path / name)), tokenizer) == expected


def test_appended_rows_move_no_row_and_a_larger_share_takes_no_row_back(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:40])
    train, held_out = sides(data(path), tokenizer)
    _, more = sides(data(path, 0.4), tokenizer)
    assert set(held_out) < set(more)
    write_jsonl(path)
    longer_train, longer_held_out = sides(data(path), tokenizer)
    assert longer_train[: len(train)] == train
    assert longer_held_out[: len(held_out)] == held_out
    assert len(longer_train) + len(longer_held_out) == 60


def test_equal_rows_are_on_one_side_of_all_sources_whatever_the_order_of_their_columns(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS + ROWS)
    turned = [{**dict(reversed(row.items())), "system": None} for row in ROWS]
    also = DatasetSource(path=str(write_jsonl(tmp_path / "also.jsonl", turned)), weight=0.5)
    found = prepared(data(path, 0.2, also), tokenizer)
    train, held_out = texts(found.train, tokenizer), texts(found.held_out, tokenizer)
    assert not set(train) & set(held_out)
    assert len(train) == 3 * len(set(train))
    assert len(held_out) == 3 * len(set(held_out))
    assert found.held_out is not None
    assert set(found.held_out.weights) == {1.0}
    assert set(found.train.weights) == {1.0, 0.5}
    assert found.held_out.origin(len(held_out) - 1).endswith(" of spec.dataset.also[0].source")


def test_the_fingerprint_of_held_out_rows_covers_these_rows_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    first = prepared(data(path), tokenizer)
    again = prepared(data(path), tokenizer)
    other = prepared(data(path, 0.4), tokenizer)
    assert first.held_out is not None
    assert again.held_out is not None
    assert other.held_out is not None
    assert first.held_out.fingerprint == again.held_out.fingerprint != other.held_out.fingerprint
    assert first.train.fingerprint == again.train.fingerprint != other.train.fingerprint
    kept = set(texts(first.held_out, tokenizer))
    only = [row for row in ROWS if any(row["completion"] in text for text in kept)]
    train_row = next(row for row in ROWS if row not in only)
    write_jsonl(path, [row for row in ROWS if row != train_row])
    fewer = prepared(data(path), tokenizer)
    assert fewer.held_out is not None
    assert fewer.held_out.fingerprint == first.held_out.fingerprint


def test_a_source_of_a_mix_without_held_out_rows_leaves_them_to_the_others(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    _, held_out = sides(data(path), tokenizer)
    in_training = next(row for row in ROWS if not any(row["completion"] in t for t in held_out))
    small = write_jsonl(tmp_path / "small.jsonl", [in_training])
    found = prepared(data(small, 0.2, DatasetSource(path=str(path))), tokenizer)
    assert texts(found.held_out, tokenizer) == held_out
    assert found.held_out is not None
    assert found.held_out.origin(0).endswith(" of spec.dataset.also[0].source")
    assert found.train.origin(0) == "row 1 of spec.dataset.source"


def test_a_share_that_holds_out_no_row_is_refused_with_a_share_that_does(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:5])
    with pytest.raises(DataError) as caught:
        prepared(data(path, 0.001), tokenizer)
    start, _, end = str(caught.value).partition("raise it to ")
    assert start == (
        f"spec.dataset.evalShare 0.001 holds out none of the 5 rows of spec.dataset.source {path}; "
    )
    proposed, _, rest = end.partition(", ")
    assert rest == "or name held-out rows in spec.dataset.evalSource"
    assert prepared(data(path, float(proposed)), tokenizer).held_out is not None


def test_a_share_that_leaves_no_training_row_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    _, held_out = sides(data(write_jsonl(tmp_path / "rows.jsonl")), tokenizer)
    row = next(row for row in ROWS if row["completion"] in held_out[0])
    path = write_jsonl(tmp_path / "one.jsonl", [row])
    with pytest.raises(DataError, match="leaves no training row in the 1 row of "):
        prepared(data(path), tokenizer)


def test_a_run_with_a_checkpoint_continues_without_held_out_rows(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    first = prepared(data(path), tokenizer)
    held_out = texts(first.held_out, tokenizer)
    write_jsonl(path, [row for row in ROWS if not any(row["completion"] in t for t in held_out)])
    with pytest.raises(DataError, match="holds out none of the"):
        prepared(data(path), tokenizer)
    warnings: list[str] = []
    resumed = prepared(data(path), tokenizer, first.train.fingerprint, warnings.append)
    assert resumed.train.fingerprint == first.train.fingerprint
    assert resumed.held_out is None
    (warning,) = warnings
    assert "holds out none of the" in warning
    assert warning.endswith("a new run would be refused, and this one resumes from its checkpoint")


def test_warnings_name_the_side(tmp_path: Path, tokenizer: Any) -> None:
    long = [{**row, "completion": "word " * 40 + row["completion"]} for row in ROWS]
    config = data(write_jsonl(tmp_path / "rows.jsonl", long))
    found = prepared(config.model_copy(update={"max_seq_len": 32}), tokenizer)
    assert found.held_out is not None
    (train,), (held_out,) = found.train.report.warnings, found.held_out.report.warnings
    total = found.train.report.rows
    assert train.startswith(f"training rows of spec.dataset.source {tmp_path}/rows.jsonl: {total} ")
    assert held_out.startswith("held-out rows of spec.dataset.source ")


def test_dates_and_bytes_of_a_table_are_part_of_a_row(tmp_path: Path, tokenizer: Any) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    dated = [{**row, "at": datetime.datetime(2024, 1, 1), "raw": b"\xff"} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dated), path)
    first = sides(data(path), tokenizer)
    assert first == sides(data(path).model_copy(update={"cache_dir": str(tmp_path)}), tokenizer)


def test_rows_are_held_out_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evalShare cannot be combined with evalSource"):
        DataConfig(
            train=DatasetSource(path="a.jsonl"),
            eval=DatasetSource(path="b.jsonl"),
            eval_share=0.1,
            cache_dir="cache",
        )
