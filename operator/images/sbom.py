"""What is in an image, as a CycloneDX document: Python's and Debian's packages.

It is read from the image's files, so it tells of what is there, however it came. The same image
gives the same document.
"""

import json
import re
import uuid
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any
from urllib.parse import quote

from oci_archive import Image

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA$")
_DEBIAN = "var/lib/dpkg/status"
_RELEASES = ("etc/os-release", "usr/lib/os-release")

Component = dict[str, Any]


def document(image: Image, created: str) -> str:
    """Return the document of an image.

    Args:
        image: The image, whose name has a tag.
        created: When its sources were, as in `2026-01-31T12:00:00Z`.
    """
    name, _, version = image.name.rpartition(":")
    about: Component = {
        "type": "container",
        "bom-ref": image.digest,
        "name": name,
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": image.digest.removeprefix("sha256:")}],
    }
    # Some packages carry a copy of another one, with its metadata.
    found = {str(one["purl"]): one for one in _components(image)}
    made = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, image.digest)}",
        "version": 1,
        "metadata": {"timestamp": created, "component": about},
        "components": [found[one] for one in sorted(found)],
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _components(image: Image) -> Iterator[Component]:
    files = image.files()
    wanted = {path: one for path, one in files.items() if _METADATA.search(path)}
    system = [
        path for path in (_DEBIAN, *_RELEASES) if path in files and files[path].member.isfile()
    ]
    read = image.read(wanted | {path: files[path] for path in system})
    parser = BytesHeaderParser()
    for path in wanted:
        yield _python(parser.parsebytes(read[path]))
    if _DEBIAN in read:
        release = next((read[path].decode() for path in _RELEASES if path in read), "")
        for paragraph in read[_DEBIAN].strip().split(b"\n\n"):
            about = parser.parsebytes(paragraph)
            if "installed" in str(about["Status"]).split():
                yield _debian(about, _release(release))


def _python(about: Message) -> Component:
    name = re.sub(r"[-_.]+", "-", str(about["Name"])).lower()
    made = _component(name, str(about["Version"]), f"pkg:pypi/{name}@{quote(about['Version'])}")
    if licence := about["License-Expression"]:
        made["licenses"] = [{"expression": str(licence)}]
    elif (licence := about["License"]) and len(licence) < 80:  # some have the whole text there
        made["licenses"] = [{"license": {"name": str(licence)}}]
    return made


def _debian(about: Message, release: str) -> Component:
    name, version, kind = (str(about[one]) for one in ("Package", "Version", "Architecture"))
    purl = f"pkg:deb/{release.partition('-')[0]}/{quote(name)}@{quote(version)}?arch={kind}"
    return _component(name, version, f"{purl}&distro={release}")


def _release(text: str) -> str:
    found = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]+)"?$', text, flags=re.MULTILINE))
    return f"{found.get('ID', 'debian')}-{found.get('VERSION_ID', '0')}"


def _component(name: str, version: str, purl: str) -> Component:
    about = {"type": "library", "name": name, "version": version}
    return {**about, "purl": purl, "bom-ref": purl}
