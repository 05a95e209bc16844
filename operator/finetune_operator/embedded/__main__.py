"""`python -m finetune_operator.embedded KUBECONFIG`: serve until a signal, for tests."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.embedded.server import EmbeddedApi


async def serve(kubeconfig: Path) -> None:
    """Write the kubeconfig once the server answers, and serve until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with EmbeddedApi([custom_resource_definition(), profile_definition()]) as api:
        draft = kubeconfig.with_suffix(".new")
        with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump(api.kubeconfig(), file)
        draft.replace(kubeconfig)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
