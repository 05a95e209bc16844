"""The logs of Azure ML: lines of a rank's node, last words, and URLs that nobody sees."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from finetune_operator.backends.azureml.run_logs import read_details, read_end, read_log
from finetune_operator.backends.redaction import without_secrets
from finetune_operator.errors import BackendError, NoSuchRankError, TransientError
from finetune_trainer.config import ExitCode, FailureClass
from support.api.builders import job
from support.azureml.azureml_looks import words
from support.azureml.scripted_workspace import SIGNATURE, ScriptedRun, ScriptedWorkspace
from support.kernel.virtual_time import run

STD = "user_logs/std_log.txt"
SAVED = words(ExitCode.PREEMPTED, FailureClass.PREEMPTED, "saved at step 7")
BROKEN = words(ExitCode.ERROR, FailureClass.ERROR, "it broke")


def log(*lines: str) -> bytes:
    """Return the content of a log."""
    return "".join(f"{line}\n" for line in lines).encode()


def node(number: int) -> str:
    """Return the path of a node's log."""
    return f"user_logs/std_log_process_{number}.txt"


def made(
    files: Mapping[str, bytes], state: str = "Running"
) -> tuple[ScriptedWorkspace, ScriptedRun]:
    """Return a workspace with one run that has a log."""
    workspace = ScriptedWorkspace()
    one = workspace.add("tiny-1", state)
    one.logs = dict(files)
    return workspace, one


def lines(workspace: ScriptedWorkspace, rank: int = 0, **topology: int) -> list[str]:
    """Return the log of a rank as it is now."""
    spec = job(topology={"nodes": 1, "gpusPerNode": 0, "processesPerNode": 1, **topology}).spec
    ref = replace(workspace.ref("tiny-1"), spec=spec)

    async def read() -> list[str]:
        return [line async for line in read_log(workspace, ref, rank, follow=False)]

    return run(read())


def test_the_lines_of_a_log_are_read_in_parts() -> None:
    long = "a" * (2**20 - 1) + "ö"  # the first part ends in it
    workspace, _ = made({STD: f"{long}\r\n\nohne Ende".encode()})
    assert lines(workspace) == [long, "", "ohne Ende"]
    assert len(workspace.times("log")) == 2


def test_a_log_that_is_not_text_is_shown_all_the_same() -> None:
    workspace, _ = made({STD: b"a\xff\nb\n"})
    assert lines(workspace) == ["a\ufffd", "b"]


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_the_log_of_a_rank_is_its_nodes(rank: int, expected: int) -> None:
    workspace, _ = made({node(one): log(f"node {one}") for one in (0, 1)})
    assert lines(workspace, rank, nodes=2, processesPerNode=2) == [f"node {expected}"]


def test_a_rank_that_does_not_exist_is_named_with_those_that_do() -> None:
    workspace, _ = made({STD: log("a")})
    with pytest.raises(NoSuchRankError, match=r"rank 1 does not exist; .* has rank 0 alone"):
        lines(workspace, 1)
    with pytest.raises(NoSuchRankError, match="ranks 0 to 3"):
        lines(workspace, 4, nodes=2, processesPerNode=2)
    assert not workspace.requests


def test_where_there_is_no_log_yet_a_sentence_says_so() -> None:
    workspace, _ = made({}, "Queued")
    (said,) = lines(workspace)
    assert said == "rank 0 of tiny-1 has no log yet; Azure ML shows the job as Queued"


def test_the_newest_start_of_a_run_is_the_one_that_counts() -> None:
    workspace, _ = made(
        {
            f"user_logs/retry-002/{node(0).removeprefix('user_logs/')}": log("second"),
            f"retry-010/{node(0)}": log("tenth"),
            node(0): log("first"),
            "system_logs/std_log.txt.gz": log("not it"),
        }
    )
    assert lines(workspace) == ["tenth"]


def test_following_goes_on_through_a_new_start_to_the_end_of_the_run() -> None:
    workspace, one = made({}, "Queued")
    ref = replace(workspace.ref("tiny-1"), spec=job().spec)

    async def live() -> None:
        await asyncio.sleep(20)
        one.set_state("Running")
        for text in (b"one\nt", b"wo\n", b"cut off"):
            one.logs[STD] = one.logs.get(STD, b"") + text
            await asyncio.sleep(20)
        one.logs[f"retry-001/{STD}"] = b"again\n"
        await asyncio.sleep(60)
        one.logs[f"retry-001/{STD}"] += b"end"
        one.set_state("Completed")

    async def follow() -> list[str]:
        living = asyncio.create_task(live())
        found = [line async for line in read_log(workspace, ref, 0, follow=True)]
        await living
        return found

    assert run(follow()) == ["one", "two", "cut off", "again", "end"]
    assert min(b - a for a, b in pairwise(workspace.times("log"))) >= 5.0
    assert len(workspace.times("details")) <= 4 + 160 / 15 + 2


def test_following_goes_on_after_errors_and_waits_as_it_is_asked_to() -> None:
    workspace, one = made({STD: b"one\ntw"})
    ref = replace(workspace.ref("tiny-1"), spec=job().spec)

    async def live() -> None:
        await asyncio.sleep(1)
        workspace.errors["log"] = TransientError("the log's URL returned 403")
        await asyncio.sleep(60)
        workspace.errors = {"details": TransientError("busy", 70.0)}
        await asyncio.sleep(100)
        workspace.errors = {}
        one.logs[STD] += b"o\nthree\n"
        one.set_state("Completed")

    async def follow() -> list[str]:
        living = asyncio.create_task(live())
        found = [line async for line in read_log(workspace, ref, 0, follow=True)]
        await living
        return found

    assert run(follow()) == ["one", "two", "three"]
    asked = workspace.times("details")
    assert max(b - a for a, b in pairwise(asked)) == pytest.approx(70.0)


def test_following_ends_after_minutes_without_an_answer() -> None:
    workspace, _ = made({STD: b"one\n"})
    ref = replace(workspace.ref("tiny-1"), spec=job().spec)

    async def follow() -> tuple[list[str], float]:
        following, now = read_log(workspace, ref, 0, follow=True), asyncio.get_running_loop().time
        found, began = [await anext(following)], now()
        workspace.errors["*"] = TransientError("not now")
        with pytest.raises(TransientError, match="not now"):
            await anext(following)
        return found, now() - began

    found, seconds = run(follow())
    assert found == ["one"]
    assert 120.0 < seconds < 600.0


def test_last_words_are_the_last_of_a_nodes_last_lines_that_are_some() -> None:
    workspace, _ = made(
        {
            node(0): log("x" * 20_000, SAVED.model_dump_json(by_alias=True), "", ""),
            node(1): log(
                SAVED.model_dump_json(by_alias=True),
                BROKEN.model_dump_json(by_alias=True),
                *["WARNING of a library", "{}"] * 5,
            ),
            node(2): b"",
            node(3): log(BROKEN.model_dump_json(by_alias=True), *["it starts again"] * 30),
            node(10): log(BROKEN.model_dump_json(by_alias=True)).rstrip(),
        },
        "Failed",
    )
    _, _, said = run(read_end(workspace, "tiny-1", is_last_try=False))
    assert said == {0: SAVED, 1: BROKEN, 10: BROKEN}


def test_a_log_that_cannot_be_read_is_tried_again_and_left_out_at_last() -> None:
    workspace, _ = made({STD: log(SAVED.model_dump_json(by_alias=True))}, "Failed")
    workspace.errors["log"] = TransientError("not now")
    with pytest.raises(TransientError):
        run(read_end(workspace, "tiny-1", is_last_try=False))
    assert run(read_end(workspace, "tiny-1", is_last_try=True))[2] == {}


def test_why_a_run_ended_is_read_from_its_history() -> None:
    workspace, one = made({}, "Failed")
    one.details = {
        "error": {"error": {"code": "UserError", "message": " it broke ", "details": []}},
        "createdBy": {"userObjectId": "1", "userName": "operator"},
        "lastModifiedBy": {"userObjectId": "2", "userName": "Ada", "upn": None},
        "cancelationReason": "enough",
        "jobCost": {"chargedGpuSeconds": 1.0},
    }
    end = run(read_details(workspace, "tiny-1")).end
    assert (end.code, end.text, end.cancelled_by, end.cancel_reason) == (
        "UserError",
        "it broke",
        "Ada",
        "enough",
    )
    one.details |= {"error": None, "lastModifiedBy": one.details["createdBy"]}
    end = run(read_details(workspace, "tiny-1")).end
    assert (end.code, end.text, end.cancelled_by) == ("", "", "")


def test_a_signed_url_is_in_no_text() -> None:
    workspace, one = made({STD: log("a")}, "Failed")
    url = f"https://blob.test/tiny-1/{STD}?se=1&{SIGNATURE}"
    one.details = {"error": {"error": {"code": "UserError", "message": f"cannot read '{url}' !"}}}
    details = run(read_details(workspace, "tiny-1"))
    assert details.log_files[STD].value.endswith(SIGNATURE)
    assert details.end.text == f"cannot read 'https://blob.test/tiny-1/{STD}' !"
    assert SIGNATURE not in repr(details)
    assert SIGNATURE not in str(details.log_files)
    one.details = {"status": {"not": "a string"}}
    with pytest.raises(BackendError) as unreadable:
        run(read_details(workspace, "tiny-1"))
    chain = (unreadable.value, unreadable.value.__cause__, unreadable.value.__context__)
    assert unreadable.value.__suppress_context__
    assert SIGNATURE not in str(chain[0])
    assert chain[1] is None


def test_a_signature_is_in_no_part_of_why_a_run_ended() -> None:
    workspace, one = made({}, "Failed")
    one.details = {
        "error": {"error": {"code": f"Error {SIGNATURE}", "message": f"with {SIGNATURE}"}},
        "lastModifiedBy": {"userName": f"Ada {SIGNATURE}"},
        "cancelationReason": f"as {SIGNATURE}",
    }
    details = run(read_details(workspace, "tiny-1"))
    assert details.end.cancelled_by == "Ada sig=…"
    assert SIGNATURE not in repr(details.end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see HTTPS://a.test/b?sig=1 now", "see HTTPS://a.test/b now"),
        ('"https://a.test/b?x=1&sig=2">', '"https://a.test/b">'),
        ("no address? none", "no address? none"),
        ("it failed.\nPreemptionError: x\n", "it failed. PreemptionError: x"),
        (r'{"url":"https:\/\/a.test\/b?sv=1&sig=2"}', r'{"url":"https:\/\/a.test\/b"}'),
        ("sas is sv=1&SIG=a%2Fb'; access_token=3", "sas is sv=1&SIG=…'; access_token=…"),
        (r"se=1\u0026sig=2 and use=3, response=4", r"se=1\u0026sig=… and use=3, response=4"),
        ("x" * 2000, f"{'x' * 1000}…"),
    ],
)
def test_texts_of_others_lose_what_signs_an_address(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
