"""Who asks: a throw-away certificate authority, the token endpoint, and signed URLs."""

import base64
import hmac
import ipaddress
import json
import secrets
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from azureml_service.answers import Answer, Json, RefusalError

TENANT = "11111111-1111-1111-1111-111111111111"
CLIENT = "33333333-3333-3333-3333-333333333333"
"""The identity that a process has by itself."""
ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


def make_certificates(folder: Path) -> ssl.SSLContext:
    """Write `ca.pem` and what the server needs, and return the server's context."""
    authority_key, authority = _certificate("Stand-in authority", None)
    key, certificate = _certificate("localhost", (authority_key, authority))
    (folder / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    chain = folder / "server.pem"
    chain.touch(mode=0o600)
    chain.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context


def _certificate(
    name: str, issuer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_key, issuer_name = (issuer[0], issuer[1].subject) if issuer else (key, subject)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(issuer_name, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if issuer is None:
        builder = builder.add_extension(_CA_USAGE, critical=True)
    return key, builder.sign(issuer_key, hashes.SHA256())


_CA_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Grant:
    """What a token allows.

    Attributes:
        client: Who got it; of a run's own token, the name of the run.
        is_of_run: Whether it is good for nothing but that run's history.
    """

    client: str
    expires_at: float
    is_of_run: bool = False


class Tokens:
    """Gives tokens and knows who has which.

    Args:
        folder: Where the file of the federated token is written.
    """

    def __init__(self, folder: Path) -> None:
        self.lifetime = 3600.0
        self.file = folder / "federated-token"
        self._assertion = secrets.token_urlsafe(24)
        self.file.touch(mode=0o600)
        self.file.write_text(self._assertion)
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._key = secrets.token_bytes(16)

    def exchange(self, tenant: str, form: dict[str, str]) -> Json:
        """Answer a request of a workload identity for a token.

        Raises:
            RefusalError: the form is not of such a request, or the assertion is not the file's.
        """
        if tenant != TENANT:
            raise OAuthRefusalError(
                400, "invalid_request", f"AADSTS90002: Tenant '{tenant}' not found."
            )
        if (form.get("grant_type"), form.get("client_assertion_type")) != (
            "client_credentials",
            ASSERTION_TYPE,
        ):
            raise OAuthRefusalError(
                400, "unsupported_grant_type", "AADSTS70003: unsupported grant type."
            )
        if not form.get("scope", "").endswith("/.default") or not form.get("client_id"):
            raise OAuthRefusalError(
                400, "invalid_scope", "AADSTS70011: scope or client is not valid."
            )
        if not hmac.compare_digest(form.get("client_assertion", ""), self._assertion):
            raise OAuthRefusalError(
                401, "invalid_client", "AADSTS700027: the assertion is not valid."
            )
        lifetime = self.lifetime
        token = self.give(form["client_id"], lifetime)
        seconds = int(lifetime)
        return {"token_type": "Bearer", "expires_in": seconds, "access_token": token}

    def give(self, client: str, lifetime: float, *, is_of_run: bool = False) -> str:
        """Return a new token, which looks like any other."""
        now = time.time()
        claims = {"tid": TENANT, "appid": client, "iat": int(now), "exp": int(now + lifetime)}
        parts = [_encoded({"alg": "HS256", "typ": "JWT"}), _encoded(claims)]
        token = ".".join([*parts, secrets.token_urlsafe(24)])
        with self._lock:
            self._grants[token] = Grant(client, time.monotonic() + lifetime, is_of_run)
        return token

    def revoke_all(self) -> None:
        """Let all tokens that were given have ended."""
        with self._lock:
            self._grants.clear()

    def check(self, authorization: str | None) -> Grant:
        """Return what a request may do.

        Raises:
            RefusalError: it has no token, or one that is not known or has ended.
        """
        scheme, _, token = (authorization or "").partition(" ")
        with self._lock:
            grant = self._grants.get(token)
        if scheme != "Bearer" or grant is None or grant.expires_at <= time.monotonic():
            code = "AuthenticationFailed" if not token else "ExpiredAuthenticationToken"
            challenge = {"WWW-Authenticate": f'Bearer error="invalid_token", tenant="{TENANT}"'}
            raise RefusalError(
                401, code, "The access token is missing or expired.", headers=challenge
            )
        return grant

    def sign(self, path: str) -> str:
        """Return the signature that lets anybody read a path."""
        return hmac.new(self._key, path.encode(), "sha256").hexdigest()


def _encoded(part: Json) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


class OAuthRefusalError(RefusalError):
    """The token endpoint refuses a request."""

    def answer(self) -> Answer:
        """Return it as that endpoint says it."""
        return Answer({"error": self.code, "error_description": str(self)}, self.status)
