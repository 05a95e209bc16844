"""Print the shape of a job's model as one JSON object, for `ftctl plan` and `init`.

`python -m finetune_trainer.memory.print_base CONFIG` reads the model's `config.json` from a folder,
the cache or the hub, but no weights. An error is printed as {"error": sentence}.
"""

import json
import sys
from pathlib import Path

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.sizing.base_shape import BaseShape


def main(path: str) -> int:
    """Print the shape; return the exit code."""
    try:
        shape = _read(TrainConfig.read(Path(path)))
    except TrainerError as error:
        print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
        return int(error.exit_code)
    print(shape.model_dump_json(), flush=True)
    return 0


def _read(config: TrainConfig) -> BaseShape:
    import torch

    from finetune_trainer.memory.read_base import read_base_of
    from finetune_trainer.model.identity import pinned
    from finetune_trainer.world import World

    return read_base_of(pinned(config, World(0, 0, 1, torch.device("cpu")), None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
