"""Who says who somebody is: certificates by openssl, and an issuer of OIDC tokens on loopback."""

import base64
import json
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs


def make_certificate(folder: Path, name: str, authority: str | None) -> None:
    """Write NAME.key and NAME.crt, signed by another pair in the folder, or by itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1"]
    if authority is not None:
        options += ["-CA", str(folder / f"{authority}.crt"), "-CAkey"]
        options += [str(folder / f"{authority}.key"), "-addext", "basicConstraints=CA:FALSE"]
        options += ["-addext", "extendedKeyUsage=clientAuth"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *options, *files], check=True, capture_output=True)


class Issuer:
    """Signs tokens, and renews them with single-use refresh tokens; a context manager.

    Attributes:
        address: Its URL, which API servers and clients ask.
        authorization: The client's header, which a refresh must have.
        lifetime: Seconds until a renewed token expires.
        requests: Paths of the requests that were received.
        renewed: The refresh tokens that were used.
        clients: Names of the clients in these forms; a client with a secret is in the header.
    """

    def __init__(self, folder: Path) -> None:
        make_certificate(folder, "issuer", authority=None)
        self._key = folder / "issuer.key"
        self.authorization: str | None = f"Basic {base64.b64encode(b'operator:secret').decode()}"
        self.lifetime = 3600.0
        self.requests: list[str] = []
        self.renewed: list[str] = []
        self.clients: list[str] = []
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = {
                    "/.well-known/openid-configuration": issuer._about,
                    "/keys": issuer._keys,
                }
                issuer.requests.append(self.path)
                self._answer(known[self.path]())

            def do_POST(self) -> None:
                issuer.requests.append(self.path)
                length = int(self.headers["Content-Length"])
                form = parse_qs(self.rfile.read(length).decode())
                assert form["grant_type"] == ["refresh_token"]
                assert self.headers["Authorization"] == issuer.authorization
                (used,) = form["refresh_token"]
                if used in issuer.renewed:
                    self._answer({"error": "invalid_grant"}, 400)
                    return
                issuer.renewed.append(used)
                issuer.clients += form.get("client_id", [])
                token = issuer.token("new@example.com", issuer.lifetime)
                rotated = f"refresh-{len(issuer.renewed)}"
                self._answer({"id_token": token, "refresh_token": rotated})

            def _answer(self, value: object, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "issuer.crt", self._key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def token(self, email: str, seconds: float = 3600) -> str:
        """Return a signed token of somebody, which expires after so long."""
        now = time.time()
        claims = {"iss": self.address, "aud": "operator", "sub": email, "email": email}
        valid = {"iat": int(now) - 120, "exp": int(now + seconds), "email_verified": True}
        parts = [{"alg": "RS256", "kid": "1", "typ": "JWT"}, {**claims, **valid}]
        said = ".".join(_encoded(json.dumps(one).encode()) for one in parts)
        sign = ["openssl", "dgst", "-sha256", "-sign", str(self._key)]
        made = subprocess.run(sign, input=said.encode(), check=True, capture_output=True)
        return f"{said}.{_encoded(made.stdout)}"

    def _about(self) -> object:
        return {
            "issuer": self.address,
            "jwks_uri": f"{self.address}/keys",
            "token_endpoint": f"{self.address}/token",
            "authorization_endpoint": f"{self.address}/authorize",
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    def _keys(self) -> object:
        command = ["openssl", "rsa", "-in", str(self._key), "-noout", "-modulus"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        modulus = bytes.fromhex(said.strip().removeprefix("Modulus="))
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "1"}
        return {"keys": [{**key, "n": _encoded(modulus), "e": "AQAB"}]}


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
