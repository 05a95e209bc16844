"""Forked processes have what they are forked for: a module that is missed slows all tests down."""

import sys

from support.launch.warm_processes import IMPORTED, Forks, beside_deepspeed, forkserver

SECONDS = 120.0


def is_imported(*names: str) -> None:
    """Exit with 1 if a module is not."""
    sys.exit(not sys.modules.keys() >= {*names})


def exit_code(*names: str, context: Forks) -> int | None:
    process = context.Process(target=is_imported, args=names)
    process.start()
    process.join(SECONDS)
    return process.exitcode


def all_and_deepspeed(context: Forks) -> int | None:
    return exit_code(*IMPORTED, "deepspeed", context=context)


def test_a_forked_process_has_all_but_deepspeed() -> None:
    assert exit_code(*IMPORTED, context=forkserver()) == 0
    assert exit_code("deepspeed", context=forkserver()) == 1


def test_beside_deepspeed_a_process_has_that_as_well() -> None:
    assert beside_deepspeed(all_and_deepspeed) == 0
