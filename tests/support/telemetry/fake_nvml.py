"""A driver's library with two GPUs that exist only in `fake_nvml.c`, compiled when a test asks."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_nvml.c")
NAME = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class FakeNvml:
    """A compiled library, and the file that says what happens to its GPUs."""

    folder: Path
    control: Path

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to find this library in the place of NVIDIA's."""
        return {"LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML": str(self.control)}

    def set(self, *words: str) -> None:
        """Say what happens from now on: `no-driver`, `hang`, `lost`, `xid`, or nothing."""
        made = self.control.with_suffix(".new")
        made.write_text(" ".join(words))
        made.replace(self.control)


def compiler() -> str | None:
    """Return the path of this machine's C compiler, if it has one."""
    return shutil.which("cc")


def compile_fake_nvml(folder: Path, *, is_bare: bool = False) -> FakeNvml:
    """Compile the library into a folder; a bare one lacks what only newer drivers have."""
    cc = compiler()
    assert cc is not None, "tests that need a compiler are skipped without one"
    flags = ["-shared", "-fPIC", "-o", str(folder / NAME), *(["-DBARE"] if is_bare else [])]
    subprocess.run([cc, *flags, str(_SOURCE)], check=True)
    fake = FakeNvml(folder, folder / "happens")
    fake.set()
    return fake
