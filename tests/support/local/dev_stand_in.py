"""`ftctl dev FOLDER` whose jobs run the stand-in trainer; `FINETUNE_STAND_IN` says what they do."""

import asyncio
import sys
from pathlib import Path

from finetune_operator.cli.dev_folder import DevFolder
from finetune_operator.cli.dev_server import serve
from finetune_operator.kernel.logs import set_up
from finetune_operator.kernel.settings import LogFormat, LogLevel
from support.local.local_runs import STAND_IN

if __name__ == "__main__":
    set_up(LogFormat.TEXT, LogLevel.INFO)
    asyncio.run(serve(DevFolder(Path(sys.argv[1])), 0, command=STAND_IN))
