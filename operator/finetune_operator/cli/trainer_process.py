"""Run a module of the trainer that prints JSON lines, for `ftctl preview`, `init` and `plan`.

The trainer's code reads models and rows in a separate process; `ftctl` never imports it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune_operator.backends.base import Attempt
from finetune_operator.backends.local.environment import without_current_folder
from finetune_operator.backends.local.layout import file_path
from finetune_operator.cli.target import Target
from finetune_operator.errors import FineTuneError
from finetune_operator.planner.hardware import NOWHERE
from finetune_operator.planner.train_config import derive_train_config
from finetune_operator.planner.uris import is_on_hub
from finetune_trainer.config import ContractModel, TrainConfig
from finetune_trainer.sizing.base_shape import BaseShape

PREVIEW = "finetune_trainer.preview"
INSPECTION = "finetune_trainer.inspection"
BASE = "finetune_trainer.memory.print_base"

Ask = Callable[..., list[dict[str, Any]]]
"""`trainer_lines`: module, request, environment and arguments; the objects that it prints."""


def config_of(target: Target) -> TrainConfig:
    """Return the trainer's configuration of a job of the local backend."""
    request = target.backend.render(target.plan, Attempt(number=1))
    files = {thing["path"]: thing["content"] for thing in request.objects if "content" in thing}
    [config] = [content for path, content in files.items() if Path(path).name == "config.json"]
    return TrainConfig.model_validate(config)


def trainer_lines(
    module: str, request: ContractModel, environ: Mapping[str, str], *arguments: str
) -> list[dict[str, Any]]:
    """Run a module of the trainer on a request, and return the objects that it prints.

    Warnings of its libraries are dropped; after a crash, its output is printed.

    Raises:
        FineTuneError: the trainer has refused; the message is the trainer's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.json"
        path.write_text(request.to_json(), encoding="utf-8")
        done = subprocess.run(
            # -P prevents the import of a torch.py beside the manifest.
            [sys.executable, "-P", "-m", module, str(path), *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=without_current_folder({**environ, "TOKENIZERS_PARALLELISM": "false"}),
        )
    lines = [json.loads(line) for line in done.stdout.split("\n") if line.startswith("{")]
    for line in lines:
        if "error" in line:
            raise FineTuneError(line["error"])
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        raise FineTuneError(
            f"{module} ended with exit code {done.returncode}; see its output above"
        )
    return lines


def read_base(target: Target, environ: Mapping[str, str], ask: Ask = trainer_lines) -> BaseShape:
    """Return the shape of a job's model, which the trainer's process reads without its weights.

    Raises:
        FineTuneError: The model cannot be read here.
    """
    source, folder = target.job.spec.model.source, target.manifest.directory
    if not is_on_hub(source) and not source.startswith("file:"):
        raise FineTuneError(
            f"spec.model.source {source}: this machine cannot read it; set spec.model.baseName to "
            "the name of the model on the hub"
        )

    def path_of(uri: str) -> str:
        return str(file_path(uri, folder)) if uri.startswith("file:") else uri

    places = replace(NOWHERE, path_of=path_of)
    [line] = ask(BASE, derive_train_config(target.plan, 1, places), environ)
    return BaseShape.model_validate(line)
