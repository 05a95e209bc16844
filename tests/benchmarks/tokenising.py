"""How fast rows become tokens, here and at an earlier commit, on one core and on two.

    python tests/benchmarks/tokenising.py [--rows N] [--repeats N] [--turns N ...] [--before COMMIT]

Both tokenise the same file into an empty cache, by turns, each in a process bound to its cores;
what they write is compared. It prints the rows of the table in docs/decisions/0072.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
BEFORE = "10624c1"


def tokenise(folder: Path, turns: int) -> None:
    """Tokenise one file, in a process of its own, and print what it came to."""
    from transformers import AutoTokenizer

    from finetune_trainer.config import DataConfig, DatasetSource
    from finetune_trainer.data.sequences import prepare

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    source = DatasetSource(path=str(folder / f"{turns}.jsonl"))
    with tempfile.TemporaryDirectory() as cache:
        config = DataConfig(train=source, cache_dir=cache, max_seq_len=8192)
        began = time.perf_counter()
        made = prepare(config, config.sources, tokenizer)
        seconds = time.perf_counter() - began
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        computed = [one.ru_utime + one.ru_stime for one in used]
        print(json.dumps([int(made.lengths.sum()), seconds, made.fingerprint, computed]))


def write_rows(path: Path, turns: int, count: int) -> None:
    words, choose = " ".join(topics.values()).split(), random.Random(0)

    def text(length: int) -> str:
        at = choose.randrange(len(words) - length)
        return " ".join(words[at : at + length])

    with path.open("w") as file:
        for _ in range(count // turns):
            said = [
                {"role": role, "content": text(length)}
                for _ in range(turns)
                for role, length in (("user", 20), ("assistant", 60))
            ]
            file.write(json.dumps({"messages": said}) + "\n")


def measure(trainer: Path, folder: Path, turns: int, cores: list[int]) -> list[Any]:
    environ = os.environ | {"PYTHONPATH": str(trainer), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--one", str(folder), str(turns)]
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env=environ,
        check=True,
        stdout=subprocess.PIPE,
    )
    made: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def compare(folder: Path, repeats: int, every: list[int]) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    ways = {
        "before, 1 core": (folder / "before/trainer", cores[:1]),
        "now, 1 core": (ROOT / "trainer", cores[:1]),
        "now, 2 cores": (ROOT / "trainer", cores),
    }
    for turns in every:
        rates: dict[str, list[float]] = {name: [] for name in ways}
        made = set()
        for _ in range(repeats):
            for name, (trainer, bound) in ways.items():
                tokens, seconds, fingerprint, computed = measure(trainer, folder, turns, bound)
                rates[name].append(tokens / seconds)
                made.add((tokens, fingerprint))
                said = f"{turns} turns, {name}: {tokens / seconds:,.0f} tokens/s"
                print(f"{said}, CPU seconds {computed}", file=sys.stderr)
        assert len(made) == 1, f"they made other tokens: {made}"
        before, one, two = (median(rates[name]) for name in ways)
        print(
            f"| {turns} | {made.pop()[0]:,} | {before:,.0f} | {one:,.0f} | {one / before:.2f} x "
            f"| {two:,.0f} | {two / one:.2f} x |"
        )


def main() -> None:
    """Compare, or be one of the processes."""
    if sys.argv[1:2] == ["--one"]:
        tokenise(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="answers of each file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from text_fixtures import tiny_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "before").mkdir()
        archive = ["git", "-C", str(ROOT), "archive", options.before, "trainer"]
        packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], input=packed, check=True)
        tiny_tokenizer(folder / "model")
        for turns in options.turns:
            write_rows(folder / f"{turns}.jsonl", turns, options.rows)
        compare(folder, options.repeats, options.turns)


if __name__ == "__main__":
    main()
