"""What is printed where it cannot be written, and what becomes of a job that is followed then."""

import asyncio
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from finetune_operator.cli.output import Outlet, OutputLostError
from finetune_operator.cli.unread_output import until_unread


@contextmanager
def full_disk() -> Iterator[None]:
    """Standard output on a disk without room; no fixture, as pytest sets its own before a test."""
    number = os.open("/dev/full", os.O_WRONLY)
    before, made = sys.stdout, Outlet(number, is_last=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(made), write_through=True)
    try:
        yield
    finally:
        sys.stdout = before
        made.drop()
        os.close(number)


async def print_for_ever() -> None:
    while True:
        print("step", flush=True)
        await asyncio.sleep(0.01)


def test_a_job_that_nobody_can_follow_is_left_running_and_the_sentence_says_so() -> None:
    followed = until_unread(
        print_for_ever(), is_stopping=lambda: False, name="tiny", again="ftctl run job.yaml"
    )

    with full_disk(), pytest.raises(OutputLostError) as lost:
        asyncio.run(followed)

    assert lost.value.code == 1
    assert str(lost.value) == (
        "standard output cannot be written (No space left on device), so ftctl ends; job tiny "
        "continues, but is not restarted if it fails. To follow it again, or to stop it there with "
        "Ctrl-C: ftctl run job.yaml"
    )


def test_a_job_that_the_user_is_stopping_is_followed_to_its_end_on_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopping = False

    async def stop() -> str:
        nonlocal stopping
        print("lost", flush=True)
        stopping = True  # Ctrl-C, which ended the reader before it came here
        print("stopping", flush=True)
        await asyncio.sleep(0.6)  # longer than Ctrl-C is waited for
        return "stopped"

    work = until_unread(stop(), is_stopping=lambda: stopping, name="tiny", again="x")
    with full_disk():
        ended = asyncio.run(work)
        print("told", flush=True)

    assert ended == "stopped"
    assert capfd.readouterr().err == "stopping\ntold\n"


def test_an_error_of_the_work_is_its_own() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with full_disk(), pytest.raises(ValueError, match="mine"):
        asyncio.run(until_unread(fail(), is_stopping=lambda: False, name="tiny", again="x"))


def test_a_pipe_that_another_program_made_not_to_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    more = b"x" * 300_000  # a pipe holds 64 KiB
    outlet = io.BufferedWriter(Outlet(write, is_last=False))

    async def both() -> bytes:
        def send() -> None:
            outlet.write(more)
            outlet.flush()
            os.close(write)

        def receive() -> bytes:
            with open(read, "rb") as source:
                return source.read()

        _, got = await asyncio.gather(asyncio.to_thread(send), asyncio.to_thread(receive))
        return got

    assert asyncio.run(both()) == more
