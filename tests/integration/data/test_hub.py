"""Models and data sets of a hub, by a stand-in hub over HTTP."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.data.source import _foreign_file
from support.data.hub_server import HubServer, hub_of
from support.data.text_fixtures import tiny_model

CARD = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
LOCAL, PUBLIC = '{"text": "a secret of this machine"}\n', '{"text": "public"}\n'
READ = """
import json, sys
from pathlib import Path
from finetune_trainer.config import DatasetSource
from finetune_trainer.data.source import open_rows
from finetune_trainer.errors import DataError

for line in sys.stdin:
    name, split = line.split()
    source = DatasetSource(path=name, split=split, is_hub=True)
    try:
        rows = open_rows(source, name="train", cache_dir=Path(sys.argv[1]), patience_seconds=1)
        print(json.dumps([[row.values for row in rows], rows.fingerprint()]))
    except DataError as error:
        print(json.dumps([str(error), ""]))
"""


FIND = """
import json, os, sys
from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.snapshot import folder_with_weights, model_folder

for line in sys.stdin:
    name, kind = line.split()
    find = folder_with_weights if kind == "all" else model_folder
    try:
        folder = find(ModelConfig(path=name), patience_seconds=1)
        found = sorted(path.name for path in folder.rglob("*") if path.is_file())
        print(json.dumps([folder.is_absolute(), found]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_of(tmp_path / "hub") as server:
        yield server


def environment(hub: HubServer, folder: Path) -> dict[str, str]:
    environ = {name: text for name, text in os.environ.items() if name != "HF_HUB_OFFLINE"}
    caches = {"HF_HOME": str(folder / "copies"), "XDG_CACHE_HOME": str(folder / "cache")}
    return environ | caches | {"HF_ENDPOINT": hub.url}


@contextmanager
def locked_by_a_process_that_does_nothing(*locks: Path) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            lock.parent.mkdir(parents=True)
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield


def dataset(hub: HubServer, name: str, **files: str) -> None:
    folder = hub.folder / "datasets" / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)


def test_rows_come_from_the_named_repository_and_from_no_file_of_this_machine(
    hub: HubServer, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "org" / "same").mkdir(parents=True)
    for file in ("rows.jsonl", "rows.json", "org/same/train.jsonl"):
        (work / file).write_text(LOCAL)
    second = '{"text": "second"}\n'
    dataset(hub, "org/two", train__jsonl=PUBLIC, validation__jsonl=second)
    dataset(hub, "org/same", train__jsonl=PUBLIC)
    cards = {
        "org/absolute": str(work / "rows.jsonl"),
        "org/upward": "../two/train.jsonl",
        "org/by-url": f"file://{work}/rows.jsonl",
        "org/web": f"{hub.url}/datasets/org/two/resolve/main/train.jsonl",
    }
    for name, files in cards.items():
        dataset(hub, name, train__jsonl=PUBLIC, README__md=CARD.format(files))
    asked = ["org/two train", "org/two validation", "org/two test", "org/two train"]
    asked += ["org/same train", "json train", *(f"{name} train" for name in cards)]
    with locked_by_a_process_that_does_nothing(tmp_path / "rows/datasets/org--same.lock"):
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "rows")],
            cwd=work,
            env=environment(hub, tmp_path),
            input="\n".join(asked),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    found: list[tuple[Any, str]] = [json.loads(line) for line in done.stdout.splitlines()]
    first, other, unknown, again, same, packaged, *hostile = found

    assert [first[0], other[0], same[0]] == [[{"text": t}] for t in ("public", "second", "public")]
    assert first == again
    assert list((tmp_path / "rows/datasets.2").rglob("*.arrow")), "a folder of its own"
    assert len({first[1], other[1], same[1]}) == 3, "fingerprints"
    assert unknown[0].startswith("spec.dataset.source org/two split 'test' cannot be loaded: ")
    assert packaged[0] == (
        "spec.dataset.source json is not on the hub; name a data set as hf://ORG/NAME, or local "
        "files as file://"
    )
    for name, (error, _) in zip(cards, hostile, strict=True):
        assert isinstance(error, str), (name, error)
        assert error.startswith(f"spec.dataset.source {name} split 'train' cannot be loaded: ")


def test_a_model_is_a_snapshot_of_the_files_that_are_read(hub: HubServer, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    plain = {"config.json": "", "tokenizer.json": "", "README.md": "", "code.py": ""}
    pickles = {"pytorch_model.bin": "", "tf_model.h5": "", "onnx/model.onnx": ""}
    shards = {"model-1.safetensors": "", "model-2.safetensors": "", "other.safetensors": ""}
    upward = {"weight_map": {"a": "../../secret.safetensors"}}
    named = "model.safetensors.index.json"
    models = {
        "org/whole": {**plain, **pickles, "model.safetensors": "", "consolidated.safetensors": ""},
        "org/shards": {**plain, **pickles, **shards, named: json.dumps(index)},
        "org/pickles": {**plain, **pickles},
        "org/adapter": {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
        "org/upward": {**plain, named: json.dumps(upward)},
    }
    for name, files in models.items():
        for file, text in files.items():
            path = hub.folder / "models" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text or f"{name}/{file}")
    for name in ("org/whole", "org/absent"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "model.safetensors").write_text("of this machine")
    asked = ["org/whole some", "org/whole all", "org/shards all", "org/shards all"]
    asked += ["org/pickles all", "org/adapter all", "org/upward all", "org/absent all"]
    etag = hashlib.sha1(b"org/whole/model.safetensors").hexdigest()
    lock = tmp_path / f"copies/hub/.locks/models--org--whole/{etag}.lock"
    with locked_by_a_process_that_does_nothing(lock):
        done = subprocess.run(
            [sys.executable, "-c", FIND],
            cwd=tmp_path / "work",
            env=environment(hub, tmp_path),
            input="\n".join(asked),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    some, whole, first, again, *refused = map(json.loads, done.stdout.splitlines())
    assert some == [True, ["config.json", "tokenizer.json"]]
    assert whole == [True, ["config.json", "model.safetensors", "tokenizer.json"]]
    read = ["config.json", "model-1.safetensors", "model-2.safetensors", named, "tokenizer.json"]
    assert first == again == [True, read]
    sent = [name for name in hub.downloads if name.startswith("org/shards/")]
    assert sorted(sent) == [f"org/shards/{name}" for name in read], "each once"
    field = "spec.model.source"
    for sentence, part in zip(
        refused,
        (
            f"{field} org/pickles has no model.safetensors at revision main; name a revision",
            f"{field} org/adapter: it holds an adapter and no model; use the base model",
            "names ../../secret.safetensors, which is not a file below this folder",
            f"{field}: the model of org/absent cannot be loaded (",
        ),
        strict=True,
    ):
        assert part in sentence


@pytest.mark.parametrize(
    ("file", "is_foreign"),
    [
        ("hf://datasets/org/x@c0/train.jsonl", False),
        ("hf://datasets/org/x@c1/train.jsonl", True),
        ("hf://datasets/org/x@c0/../y@c0/train.jsonl", True),
        ("zip://a.jsonl::hf://datasets/org/x@c0/a.zip", True),
        ("/data/rows.jsonl", True),
        ("https://example.com/rows.jsonl", True),
    ],
)
def test_a_file_of_a_card_must_lie_in_its_repository_at_its_commit(
    file: str, is_foreign: bool
) -> None:
    own = "hf://datasets/org/x@c0/a.jsonl"
    assert _foreign_file("org/x", "c0", [own, file]) == (file if is_foreign else None)


@pytest.mark.full
def test_a_model_and_rows_of_a_hub_become_an_adapter(hub: HubServer, tmp_path: Path) -> None:
    model = tiny_model(hub.folder / "models" / "org" / "tiny")
    read = {file.name for file in model.iterdir()}
    (model / "onnx").mkdir()
    for unread in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"):
        (model / unread).write_bytes(b"never read")
    rows = [{"question": f"What is {n} plus {n}?", "reply": f"{2 * n}."} for n in range(50)]
    dataset(hub, "org/sums", train__jsonl="".join(json.dumps(row) + "\n" for row in rows))
    for command in (
        "init --model hf://org/tiny --data hf://org/sums -o job.yaml",
        "preview job.yaml",
        "run job.yaml",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "finetune_operator", *command.split()],
            cwd=tmp_path,
            env=environment(hub, tmp_path),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    files = [f"org/tiny/{name}" for name in read] + ["org/sums/train.jsonl"]
    assert sorted(hub.downloads) == sorted(files), "each file that is read, once"
    [adapter] = (tmp_path / "runs").rglob("adapter_config.json")
    recorded = json.loads(adapter.read_text())
    assert recorded["base_model_name_or_path"] == "org/tiny"
