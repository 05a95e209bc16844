"""Credentials do not reach statuses, Events, annotations and termination messages."""

import json
from pathlib import Path

import pytest

from finetune_operator.kube.resources import EVENTS
from finetune_trainer.config import ExitCode, FailureClass, Termination, redact
from finetune_trainer.launch.termination_message import write_termination
from support.kernel.kernel_world import World
from support.kernel.virtual_time import run

HEX = "0123456789abcdef0123456789abcdef01234567"
KEY = "Ab1+/" * 17 + "x=="
SECRETS = {
    "a password in an address": ("mongodb://me:s3cr3t@db.test/a", "mongodb://…@db.test/a"),
    "a token as user": ("https://ghx@git.test/a.git", "https://…@git.test/a.git"),
    "an escaped address": (r"https:\/\/me:pw@a.test\/b", r"https:\/\/…@a.test\/b"),
    "a signed address": ("get https://a.test/b?sv=1&sig=c%2Fd: 403", "get https://a.test/b 403"),
    "an address signed for S3": (
        "https://s3.test/a?X-Amz-Date=1&X-Amz-Signature=2 failed",
        "https://s3.test/a failed",
    ),
    "a SAS token": ("sv=2022&sig=abc%3D&se=1", "sv=2022&sig=…&se=1"),
    "a hub token": ("token hf_abcdefghijklmnopqrstuvwx is invalid", "token … is invalid"),
    "a token after an escaped line end": (r"'a\nhf_abcdefghijklmnopqrstuvwx'", r"'a\n…'"),
    "a name after an escaped line end": (r"'a\npassword=b'", r"'a\npassword=…'"),
    "a bearer token": ("Bearer abcdefghijklmnop.qrst-uv", "Bearer …"),
    "a header": ("{'Authorization': 'Basic bWU6cGFzc3dvcmQ='}", "{'Authorization': 'Basic …'}"),
    "a JSON Web Token": ("got eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln", "got …"),
    "an Azure account key": (
        f"DefaultEndpoints;AccountKey={KEY};E=1",
        "DefaultEndpoints;AccountKey=…;E=1",
    ),
    "an account key alone": (f"with {KEY} no", "with … no"),
    "an AWS key id": ("AKIAABCDEFGHIJKLMNOP is unknown", "… is unknown"),
    "an AWS secret": ("aws_secret_access_key=a/b+c", "aws_secret_access_key=…"),
    "AWS in JSON": ('{"SecretAccessKey": "a/b+c"}', '{"SecretAccessKey": "…"}'),
    "a W&B key": (f"WANDB_API_KEY={HEX} is wrong", "WANDB_API_KEY=… is wrong"),
    "a W&B key in netrc": (f"login user password {HEX}", "login user password …"),
    "a GitHub token": ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "…"),
    "a private key": (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx",
        "…\nx",
    ),
    "a client secret": ("client_secret=abc&x=1", "client_secret=…&x=1"),
}
HARMLESS = [
    f"model org/name at commit {HEX}",
    "abfss://container@account.dfs.core.windows.net/a",
    "registry.test:5000/a@sha256:" + HEX,
    "https://ml.azure.com/runs/a?wsid=/subscriptions/b&tid=c",
    "pad_token='<pad>' and eos_token=</s>, max_tokens=512",
    "the Secret hub has no key token; create it",
    "design=2, use=3, response=4",
    "Bearer authentication failed",
    "pvc://data/a@b:c/d",
]


@pytest.mark.parametrize(("text", "expected"), SECRETS.values(), ids=SECRETS)
def test_a_credential_is_replaced(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


def test_credentials_in_an_obstacle_reach_neither_status_nor_event() -> None:
    async def work() -> None:
        for text, expected in SECRETS.values():
            world = World()
            await world.apply()
            await world.settle()
            words = {"phase": "Pending", "reason": "Unschedulable", "message": f"no: {text}"}
            await world.play(1, **words)
            await world.settle()
            assert world.condition("ResourcesReady")["message"] == f"no: {expected}"
            writes = world.writes
            await world.settle()  # the same obstacle is not written again
            assert world.writes == writes
            await world.play(1, phase="Failed", code="78", gone="yes", message=f"bad: {text}")
            await world.settle()
            published = json.dumps([world.job["status"], world.api.objects(EVENTS)])
            assert json.dumps(text)[1:-1] not in published

    run(work())


def test_a_termination_message_holds_no_credential(tmp_path: Path) -> None:
    for text, expected in SECRETS.values():
        end = Termination(
            failure_class=FailureClass.CONFIG_ERROR, exit_code=ExitCode.CONFIG, message=text
        )
        write_termination(tmp_path / "log", end)
        assert json.loads((tmp_path / "log").read_text())["message"] == expected
