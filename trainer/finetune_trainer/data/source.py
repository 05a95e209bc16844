"""Read rows from a file, a folder of files or the hub, each with its place for messages.

Called by `sequences` and the preview. Files are read here, so that a message can name the line; the
hub is read through `datasets`. Rows are streamed; only a `.json` file with a single array is held
in memory.
"""

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from finetune_trainer.cache_locks import (
    PATIENCE_SECONDS,
    hub_locks_broken,
    numbered,
    patient_lock,
)
from finetune_trainer.config import (
    COMPRESSIONS,
    DATA_SUFFIXES,
    DatasetSource,
    data_suffix,
)
from finetune_trainer.data.folder import files_of
from finetune_trainer.data.rules import Rules
from finetune_trainer.errors import ConfigError, DataError, TrainerError
from finetune_trainer.links import leads_back
from finetune_trainer.unused_packages import without_mark

FIELDS = {
    "train": ("spec.dataset.source", "spec.dataset.split"),
    "eval": ("spec.dataset.evalSource", "spec.dataset.evalSplit"),
}


@dataclass(frozen=True)
class Row:
    """A row of a data set.

    Attributes:
        where: Place for messages, such as `train.jsonl line 12`.
        values: Values by column name, without columns that are null.
    """

    where: str
    values: dict[str, Any]


def open_rows(
    source: DatasetSource,
    *,
    name: str,
    cache_dir: Path,
    rules: Rules = Rules.CURRENT,
    patience_seconds: float = PATIENCE_SECONDS,
) -> "Rows":
    """Find the rows that `source` names.

    `name` is `train`, `eval` or `also[N]`, the field of the manifest that messages begin with.
    `datasets` stores its downloads in `cache_dir`. A process that shows no activity for
    `patience_seconds` is not waited for.

    Raises:
        DataError: the file does not exist, has an unsupported suffix, or the folder mixes
            sets of rows (`folder.files_of`).
        ConfigError: a split is requested of a file.
        TrainerError: the hub cannot be reached.
    """
    further = (f"spec.dataset.{name}.source", f"spec.dataset.{name}.split")
    field, split_field = FIELDS.get(name, further)
    if source.is_hub:
        return HubRows(source, field, cache_dir, patience_seconds)
    if source.split != "train":
        raise ConfigError(
            f"{split_field} {source.split!r}: the file {source.path} has only the split 'train'; "
            "give each split a file of its own"
        )
    path = Path(source.path)
    if leads_back(path):
        raise DataError(f"{field} {path} is a symbolic link that leads back to itself; remove it")
    if not path.exists():
        raise DataError(f"{field} {path} does not exist; check the path")
    if path.is_dir():
        return FileRows(str(path), field, tuple(files_of(path, field, rules)))
    if data_suffix(path.name) is None:
        kinds = ", ".join(DATA_SUFFIXES)
        raise DataError(f"{field} {path} is not a {kinds} file; convert it to one of them")
    return FileRows(str(path), field, (path,))


class _MalformedError(Exception):
    """A file is malformed; the message begins with the place."""


@dataclass(frozen=True)
class FileRows:
    """The rows of files in order; each iteration starts at the first row.

    Attributes:
        name: Configured path.
        field: Field of the manifest that holds the path; messages begin with it.
        files: Files in order.
    """

    name: str
    field: str
    files: tuple[Path, ...]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            DataError: a file cannot be read, or a line is not a JSON object.
        """
        for file in self.files:
            try:
                yield from _read(file)
            except _MalformedError as error:
                raise DataError(f"{self.field} {error}") from error
            except OSError as error:
                reason = error.strerror or error
                raise DataError(f"{self.field} {file} cannot be read: {reason}") from error

    def count(self) -> int:
        """Return the number of rows, for CSV and JSON from the number of lines.

        Raises:
            DataError: a file cannot be read.
        """
        try:
            return sum(_count(file) for file in self.files)
        except _MalformedError as error:
            raise DataError(f"{self.field} {error}") from error

    def fingerprint(self) -> str:
        """Return a hash of the bytes of all files."""
        digest = hashlib.sha256()
        for file in self.files:
            try:
                with file.open("rb") as content:
                    part = hashlib.file_digest(content, "sha256").digest()
            except OSError as error:
                raise DataError(f"{self.field} {file} cannot be read: {error.strerror}") from error
            digest.update((data_suffix(file.name) or "").encode() + part)
        return digest.hexdigest()


class HubRows:
    """A split of a data set on the hub, downloaded once by `datasets`; used like `FileRows`."""

    def __init__(
        self, source: DatasetSource, field: str, cache_dir: Path, patience_seconds: float
    ) -> None:
        self.name = source.path
        self.field = field
        self._split = source.split
        import datasets  # half a second

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        try:
            with without_mark(), hub_locks_broken("dataset", source.path, patience_seconds):
                self._rows = self._load(source, cache_dir, patience_seconds)
        except DataError:
            raise
        except ConnectionError as error:
            raise TrainerError(
                f"{field} {source.path}: the hub cannot be reached ({_first_line(error)}); "
                "check the network, or give a local file"
            ) from error
        # `datasets` raises many classes here: unknown name or split, no access, bad content.
        except Exception as error:
            raise DataError(
                f"{field} {source.path} split {source.split!r} cannot be loaded: "
                f"{_first_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of the split."""
        for number, values in enumerate(self._rows, start=1):
            where = f"{self.name} split {self._split} row {number}"
            yield _row(where, _without_nulls(values))

    def count(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def fingerprint(self) -> str:
        """Return the fingerprint that `datasets` gives this split."""
        return f"hub:{self._rows._fingerprint}"

    def _load(self, source: DatasetSource, cache_dir: Path, patience_seconds: float) -> Any:
        """Download and prepare the split.

        Raises:
            DataError: the name is not a repository on the hub.
        """
        folder = cache_dir / "datasets"
        builder = self._builder(source, folder)
        with patient_lock(folder / source.path.replace("/", "--"), patience_seconds) as number:
            if number > 1:
                # A stopped process holds a lock of `datasets`, and its draft has a fixed name.
                builder = self._builder(source, cache_dir / numbered("datasets", number))
            builder.download_and_prepare()
        return builder.as_dataset(split=source.split)

    def _builder(self, source: DatasetSource, folder: Path) -> Any:
        """Return the builder of the data set, which prepares it in a folder."""
        import datasets

        # With this prefix no local folder of the same name is read.
        builder = datasets.load_dataset_builder(
            f"hf://datasets/{source.path}", cache_dir=str(folder)
        )
        # The name of a format, such as `json`, would load the files of the current folder.
        if builder.repo_id != source.path:
            raise DataError(
                f"{self.field} {source.path} is not on the hub; name a data set as hf://ORG/NAME, "
                "or local files as file://"
            )
        files = (builder.config.data_files or {}).values()
        if foreign := _foreign_file(source.path, str(builder.hash), chain.from_iterable(files)):
            raise DataError(
                f"{self.field} {source.path} names the file {foreign}, which is not in this "
                "repository; correct data_files in its card"
            )
        return builder


Rows = FileRows | HubRows


def _foreign_file(name: str, commit: str, files: Iterable[str]) -> str | None:
    """Return a file that a repository's card names and this commit of it does not contain.

    `datasets` checks it, too. A later version may accept local paths again.
    """
    root = f"hf://datasets/{name}@{commit}/"
    return next((one for one in files if not one.startswith(root) or ".." in one.split("/")), None)


def _read(file: Path) -> Iterator[Row]:
    kind = data_suffix(file.name) or ""
    if kind == ".parquet":
        return _parquet_rows(file)
    if kind.startswith(".csv"):
        return _csv_rows(file)
    if kind.startswith(".json") and not kind.startswith(".jsonl") and _is_array(file):
        return _array_rows(file)
    return _line_rows(file)


def _count(file: Path) -> int:
    """Return the number of rows of a Parquet file, or of lines of another file."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
    with _opened(file) as content:
        return sum(piece.count(b"\n") for piece in iter(lambda: content.read(1 << 20), b""))


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its suffix names a compression."""
    try:
        with ExitStack() as stack:
            content: Any
            if file.suffix == ".gz":
                content = stack.enter_context(gzip.open(file))
            elif file.suffix == ".zst":
                import pyarrow

                stack.enter_context(file.open("rb"))  # its errors are more precise than pyarrow's
                packed = stack.enter_context(pyarrow.input_stream(str(file), compression="zstd"))
                content = stack.enter_context(io.BufferedReader(packed))
            else:
                content = stack.enter_context(file.open("rb"))
            yield content
    except (EOFError, zlib.error) as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if file.suffix not in COMPRESSIONS or error.strerror:
            raise
        raise _damaged(file, error) from error  # both libraries raise OSError for a damaged file


def _damaged(file: Path, error: Exception) -> _MalformedError:
    return _MalformedError(
        f"{file} cannot be unpacked ({_first_line(error)}); pack it again, or unpack it yourself"
    )


def _line_rows(file: Path) -> Iterator[Row]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(f"{file} line {number}", _parse(line.rstrip(), file, number))


def _array_rows(file: Path) -> Iterator[Row]:
    with _opened(file) as content:
        text = content.read()
    for number, values in enumerate(_parse(text, file, 1), start=1):
        yield _json_row(f"{file} row {number}", values)


def _parse(text: bytes, file: Path, first_line: int) -> Any:
    """Parse JSON that begins in this line of the file, possibly with a byte order mark."""
    where = f"{file} line {first_line}"
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _MalformedError(f"{where} is not UTF-8 text; convert the file") from error
    except json.JSONDecodeError as error:
        raise _MalformedError(
            f"{file} line {first_line + error.lineno - 1} is not JSON: {error.msg} at column "
            f"{error.colno}; correct or delete the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, error) from error


def _json_row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise _MalformedError(
            f"{where} is a JSON {type(values).__name__}; a row must be an object with named columns"
        )
    try:
        # An escape such as \\ud83d alone is half of a character, which tokenizers reject.
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise _MalformedError(
            f"{where} holds half of a character ({half}); correct or delete the row"
        ) from error
    except RecursionError as error:
        raise _unreadable(where, error) from error
    return _row(where, values)


def _unreadable(where: str, error: Exception) -> _MalformedError:
    """Return the error for text that may be JSON but that the parser refuses."""
    reason = "nested too deeply" if isinstance(error, RecursionError) else _first_line(error)
    return _MalformedError(f"{where} cannot be read: {reason}; correct or delete it")


def _is_array(file: Path) -> bool:
    with _opened(file) as content:
        return content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _csv_rows(file: Path) -> Iterator[Row]:
    # Values stay text: a reader that infers types turns 3.10 into 3.1.
    csv.field_size_limit(sys.maxsize)  # the default refuses values over 128 KiB
    try:
        with (
            _opened(file) as content,
            io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as lines,
        ):
            reader = csv.DictReader(lines, strict=True)
            for values in reader:
                where = f"{file} line {reader.line_num}"
                if None in values:
                    raise _MalformedError(
                        f"{where} has more values than the header has columns; quote values that "
                        "hold a comma"
                    )
                yield _row(where, values)
    except UnicodeDecodeError as error:
        raise _MalformedError(f"{file} is not UTF-8 text; convert the file") from error
    except csv.Error as error:
        raise _MalformedError(
            f"{file} line {reader.reader.line_num} is not CSV: {error}; correct the file"
        ) from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches()
        rows = (values for batch in batches for values in batch.to_pylist())
        for number, values in enumerate(rows, start=1):
            yield _row(f"{file} row {number}", _without_nulls(values))
    except pyarrow.ArrowException as error:
        raise _MalformedError(
            f"{file} is not a readable Parquet file: {_first_line(error)}; write it again"
        ) from error


def _row(where: str, values: dict[str, Any]) -> Row:
    return Row(where, {key: value for key, value in values.items() if value is not None})


def _without_nulls(value: Any) -> Any:
    """Drop the nulls that Arrow adds within a value for fields that only other rows have."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
