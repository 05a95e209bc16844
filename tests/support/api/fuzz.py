"""Give `ftctl validate` and the trainer random manifests, rows and templates: none may end in a
traceback.

    python fuzz.py SECONDS [--seed N] [--only manifests,rows,templates] [--keep FOLDER]

Most are almost right. What goes wrong is printed with its seed and kept as a file; those that once
did stand in `tests/corpus`, and a test gives them again.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from finetune_operator.cli.app import app
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.source import open_rows
from finetune_trainer.errors import ConfigError, DataError
from support.api import fuzz_inputs
from support.data.published_templates import FAMILIES
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_tokenizer

CORPUS = Path(__file__).parents[2] / "corpus"
ROWS_PER_FILE = 50
KINDS = ("manifests", "rows", "templates")


class Fuzzer:
    """Checks inputs of each kind; `check_*` raise where an input does what none may.

    Attributes:
        counts: How many of each kind were given, and how they ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = tiny_tokenizer(folder / "tokenizer")
        self._originals = fuzz_inputs.read_manifests()
        self.counts: Counter[str] = Counter()

    def inputs(self, kind: str, seed: int) -> bytes:
        """Return the input of a kind that a seed makes."""
        choose = random.Random(f"{kind} {seed}")
        if kind == "manifests":
            return fuzz_inputs.manifest(choose, self._originals)
        if kind == "templates":
            return fuzz_inputs.template(choose, templates()).encode()
        data_format = choose.choice(sorted(fuzz_inputs.ROWS))
        rows = [fuzz_inputs.row(choose, data_format) for _ in range(ROWS_PER_FILE)]
        return b"\n".join([data_format.encode(), *rows])

    def check(self, kind: str, data: bytes) -> None:
        """Give one input.

        Raises:
            Exception: whatever no input may do.
        """
        {"manifests": self._manifest, "rows": self._rows, "templates": self._template}[kind](data)

    def _manifest(self, data: bytes) -> None:
        """`validate` ends with 0 or 1 and says why; what it takes, `render` takes, too."""
        file = self._folder / "job.yaml"
        file.write_bytes(data)
        for command in ("validate", "render"):
            result = CliRunner().invoke(app, [command, str(file)])
            said = isinstance(result.exception, FineTuneError)  # which `main` prints
            if result.exception and not said and not isinstance(result.exception, SystemExit):
                raise result.exception
            assert result.exit_code in (0, 1), result.exit_code
            assert said or result.output.strip(), "nothing is said"
            assert "Traceback" not in result.output, result.output
            self.counts[f"manifests {command} {result.exit_code}"] += 1
            if result.exit_code:
                return

    def _rows(self, data: bytes) -> None:
        """Each row by itself gives tokens that exist, or a sentence that names it."""
        name, *lines = data.split(b"\n")
        encoder = self._encoder(name.decode(), CHATML_TEMPLATE)
        for line in lines:
            self._row(encoder, line)

    def _row(self, encoder: RowEncoder, line: bytes) -> None:
        file = self._folder / "rows.jsonl"
        file.write_bytes(line)
        source, said = DatasetSource(path=str(file)), ""
        try:
            rows = open_rows(source, name="train", cache_dir=self._folder)
            encoded = list(encoder.encode(rows))
        except DataError as error:
            said, encoded = str(error), []
        self.counts["rows encoded" if encoded else "rows refused"] += 1
        assert encoded or "rows.jsonl" in said, f"names no row: {said}"
        for one in (part for row in encoded for part in row.parts):
            assert len(one.tokens) == len(one.is_label)
            assert all(0 <= token < len(self._tokenizer) for token in one.tokens)

    def _template(self, data: bytes) -> None:
        """A template gives tokens for some conversations, or sentences."""
        try:
            encoder = self._encoder("chat", data.decode())
        except ConfigError:
            self.counts["templates refused"] += 1
            return
        for conversation in fuzz_inputs.ROWS["chat"]:
            self._row(encoder, json.dumps(conversation).encode())
        self.counts["templates"] += 1

    def _encoder(self, data_format: str, template: str) -> RowEncoder:
        self._tokenizer.chat_template = template
        source = DatasetSource(path=str(self._folder / "rows.jsonl"))
        config: dict[str, Any] = {"train": source, "format": data_format, "max_seq_len": 512}
        return RowEncoder(
            DataConfig(**config, cache_dir=str(self._folder / "cache")), self._tokenizer
        )


@cache
def templates() -> Sequence[str]:
    """Return the chat templates that are changed."""
    return [CHATML_TEMPLATE, *(family.template for family in FAMILIES.values())]


def corpus() -> Iterator[tuple[str, Path]]:
    """Yield what once went wrong: the kind, and the file."""
    for kind in KINDS:
        for file in sorted((CORPUS / kind).glob("*")):
            yield kind, file


def main(arguments: Sequence[str] | None = None) -> int:
    """Give inputs until the time is over; return 1 if one did what none may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of the first input")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failed"), help="where failures go")
    given = parser.parse_args(arguments)
    kinds = given.only.split(",")
    failed: Counter[str] = Counter()
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        for seed in count(given.seed):
            for kind in kinds:
                data = fuzzer.inputs(kind, seed)
                try:
                    fuzzer.check(kind, data)
                except Exception as error:
                    name = f"{type(error).__name__}-{seed}"
                    failed[f"{kind} {type(error).__name__}"] += 1
                    if failed[f"{kind} {type(error).__name__}"] <= 5:
                        (given.keep / kind).mkdir(parents=True, exist_ok=True)
                        (given.keep / kind / name).write_bytes(data)
                        print(f"{kind} {seed}:", *traceback.format_exception(error)[-4:], sep="\n")
            if time.monotonic() > end:
                break
    print(json.dumps({"seeds": [given.seed, seed], **fuzzer.counts, "failed": failed}, indent=2))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
