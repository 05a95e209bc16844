"""A backend plugin that measures how late the event loop of the operator's process is.

`silent_workspace.py` has the operator load it in place of the ConfigMap backend of the tests.
"""

import asyncio
import json
from pathlib import Path

from finetune_operator.backends.base import BackendContext, Services
from support.kernel.configmap_backend import ConfigMapBackend

ENV_FILE = "LOOP_LAG_FILE"
TICK_SECONDS = 0.01


class ProbedBackend(ConfigMapBackend):
    """Backend `configmap`; when it is closed it writes when each tick was due and how late it was.

    The times are those of the system's monotonic clock, which all processes share.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._file = Path(context.environ[ENV_FILE])
        self._ticks: list[tuple[float, float]] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, services: Services) -> None:
        """Begin to measure."""
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Tell what was measured."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._file.write_text(json.dumps(self._ticks))

    async def _tick(self) -> None:
        """Tick by the clock: what was due while the loop was held up counts, too."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += TICK_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._ticks.append((due, loop.time() - due))
