"""How an expired id-token is refreshed, at a real HTTPS issuer on loopback."""

import asyncio
import base64
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.api_errors import UnauthorizedError
from finetune_operator.kube.config import load_access
from support.cluster.issuer import Issuer, make_certificate

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not on the PATH"
)

Write = Callable[..., Path]


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    with Issuer(tmp_path) as issuer:
        yield issuer


@pytest.fixture
def write(tmp_path: Path, issuer: Issuer) -> Write:
    """Write a kubeconfig of a user whose id-token has expired."""

    def write(**changes: Any) -> Path:
        config = {
            "client-id": "operator",
            "client-secret": "secret",
            "idp-issuer-url": issuer.address,
            "id-token": issuer.token("old@example.com", seconds=-60),
            "refresh-token": "first",
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        user = {"auth-provider": {"name": "oidc", "config": config}}
        file = tmp_path / "config"
        content = {
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": {"server": "https://a:6443"}}],
            "users": [{"name": "b", "user": {"token": "other"}}, {"name": "a", "user": user}],
        }
        file.write_text(yaml.safe_dump(content))
        return file

    return write


def email_after_login(file: Path) -> str:
    """Return the email in the token that a new process sends."""

    async def header() -> str:
        return (await (await load_access(str(file))).headers())["Authorization"]

    payload = asyncio.run(header()).split(".")[1]
    claims = yaml.safe_load(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(claims["email"])


def saved(file: Path) -> dict[str, str]:
    users = yaml.safe_load(file.read_text())["users"]
    config: dict[str, str] = users[1]["user"]["auth-provider"]["config"]
    return config


def authority(folder: Path, is_data: bool) -> dict[str, str]:
    if not is_data:
        return {"idp_certificate_authority": "issuer.crt"}
    data = base64.b64encode((folder / "issuer.crt").read_bytes()).decode()
    return {"idp_certificate_authority_data": data}


def test_an_issuer_with_an_unknown_certificate_receives_no_request(
    write: Write, issuer: Issuer
) -> None:
    file = write()
    before = file.read_bytes()
    with pytest.raises(UnauthorizedError) as raised:
        email_after_login(file)
    assert str(raised.value) == (
        f"there is no token now (user a of {file}: the certificate of the OIDC issuer "
        f"{issuer.address} cannot be verified (self-signed certificate), so no token or secret was "
        "sent; set idp-certificate-authority to the certificate authority of the issuer)"
    )
    assert (issuer.requests, file.read_bytes()) == ([], before)


def test_an_issuer_of_another_authority_receives_no_request(
    write: Write, issuer: Issuer, tmp_path: Path
) -> None:
    make_certificate(tmp_path, "other", authority=None)
    with pytest.raises(UnauthorizedError, match="cannot be verified"):
        email_after_login(write(idp_certificate_authority=str(tmp_path / "other.crt")))
    assert issuer.requests == []


@pytest.mark.parametrize("is_data", [False, True], ids=["file", "data"])
def test_an_issuer_of_the_given_authority_renews_the_token(
    write: Write, issuer: Issuer, tmp_path: Path, is_data: bool
) -> None:
    file = write(**authority(tmp_path, is_data))
    assert email_after_login(file) == "new@example.com"
    assert issuer.renewed == ["first"]


def test_renewed_tokens_are_saved_and_used_by_the_next_process(
    write: Write, issuer: Issuer, tmp_path: Path
) -> None:
    file = write(**authority(tmp_path, True))
    file.chmod(0o640)
    before = yaml.safe_load(file.read_text())
    issuer.lifetime = -60
    email_after_login(file)
    expired = saved(file)["id-token"]
    issuer.lifetime = 3600
    assert email_after_login(file) == "new@example.com"
    assert issuer.renewed == ["first", "refresh-1"]  # each is accepted once
    assert saved(file)["refresh-token"] == "refresh-2"
    assert saved(file)["id-token"] != expired
    num_requests = len(issuer.requests)
    assert email_after_login(file) == "new@example.com"
    assert len(issuer.requests) == num_requests
    after = yaml.safe_load(file.read_text())
    for content in (before, after):
        del content["users"][1]["user"]["auth-provider"]["config"]
    assert after == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config",
        "issuer.crt",
        "issuer.key",
    ]


def test_a_linked_kubeconfig_stays_a_link(write: Write, tmp_path: Path) -> None:
    file = write(**authority(tmp_path, True))
    link = tmp_path / "link"
    link.symlink_to(file)
    email_after_login(link)
    assert link.is_symlink()
    assert saved(file)["refresh-token"] == "refresh-1"


def test_a_token_that_has_not_expired_makes_no_request(write: Write, issuer: Issuer) -> None:
    # With characters that differ between base64 and base64url.
    file = write(id_token=issuer.token("valid~~~???@example.com"))
    assert email_after_login(file) == "valid~~~???@example.com"
    assert issuer.requests == []


def test_requests_of_one_process_share_a_refresh(
    write: Write, issuer: Issuer, tmp_path: Path
) -> None:
    file = write(**authority(tmp_path, True))

    async def renew() -> None:
        access = await load_access(str(file))
        file.write_text(file.read_text().replace(saved(file)["id-token"], "expired"))
        await asyncio.gather(access.renew(), access.renew())

    asyncio.run(renew())
    assert issuer.renewed == ["first", "refresh-1"]


def test_tokens_that_cannot_be_saved_serve_the_process(
    write: Write, issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # No longer name fits beside it, so that no temporary file can be created, even by root.
    file = write(**authority(tmp_path, True)).rename(tmp_path / ("c" * 255))
    issuer.lifetime = -60

    async def renew_twice() -> None:
        access = await load_access(str(file))
        await access.renew()

    asyncio.run(renew_twice())
    assert issuer.renewed == ["first", "refresh-1"]
    assert saved(file)["refresh-token"] == "first"
    assert f"cannot be saved in {file} ([Errno 36] File name too long" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"refresh_token": ""},
            "the id-token has expired, and there is no refresh-token; log in again",
            id="no refresh token",
        ),
        pytest.param(
            {"idp_issuer_url": "http://127.0.0.1:9"},
            r"http://127\.0\.0\.1:9/.* of the OIDC issuer must begin with https://",
            id="plain http",
        ),
        pytest.param(
            {"idp_issuer_url": "https://127.0.0.1:9"},
            r"the OIDC issuer https://127\.0\.0\.1:9 cannot be reached",
            id="no server",
        ),
        pytest.param(
            {"idp_certificate_authority_data": "?"},
            "is not valid base64",
            id="no base64",
        ),
        pytest.param(
            {"idp_certificate_authority": "absent.crt"},
            r"the certificate authority .*absent\.crt of the kubeconfig cannot be used",
            id="a CA that does not exist",
        ),
    ],
)
def test_a_refresh_that_cannot_succeed_is_explained(
    write: Write, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(UnauthorizedError, match=message):
        email_after_login(write(**changes))


def test_a_refused_refresh_token_asks_for_a_login(
    write: Write, issuer: Issuer, tmp_path: Path
) -> None:
    issuer.renewed.append("first")
    with pytest.raises(UnauthorizedError, match="/token returned HTTP status 400; log in again"):
        email_after_login(write(**authority(tmp_path, True)))


def test_a_client_without_a_secret_is_named_in_the_form(
    write: Write, issuer: Issuer, tmp_path: Path
) -> None:
    issuer.authorization = None
    assert email_after_login(write(client_secret="", **authority(tmp_path, True))) == (
        "new@example.com"
    )
    assert issuer.clients == ["operator"]
