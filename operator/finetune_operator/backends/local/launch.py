"""Write the record of a node's main process, then become that process.

`start` runs it as `python -P -m ...launch RECORD DIRECTORY COMMAND...`. The process writes its own
record, because its parent may be killed at any moment.
"""

import json
import os
import sys

from finetune_operator.backends.local import proc


def main(arguments: list[str]) -> None:
    """Write the record, then replace this program by COMMAND; pid and start time stay the same."""
    record, directory, *command = arguments
    me = proc.look_up(os.getpid())
    assert me is not None, "this process is alive"
    text = json.dumps(
        {"pid": me.pid, "startTime": me.start_time, "bootId": me.boot_id, "uid": os.getuid()}
    )
    with open(f"{record}.tmp", "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{record}.tmp", record)
    os.chdir(directory)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
