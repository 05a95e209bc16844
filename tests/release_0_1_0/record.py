"""Record the files of this folder: run the code of the release, and store its files.

    python tests/release_0_1_0/record.py run     # two attempts of the trainer; 20 s
    python tests/release_0_1_0/record.py refused # five killed attempts; 40 s
    python tests/release_0_1_0/record.py jobs    # needs KUBEBUILDER_ASSETS with controllers; 90 s

The release is unpacked from git. A script of this folder, such as `record_run.py`, then runs with
its packages and its test helpers on PYTHONPATH, and uses no other module of this checkout.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def main(arguments: list[str]) -> int:
    """Run one recorder; return its exit code."""
    from support.cluster.last_release import COMMIT, unpack

    if arguments not in (["run"], ["refused"], ["jobs"]):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        release = unpack(Path(folder), with_tests=True)
        if release is None:
            print(f"git does not have commit {COMMIT} here", file=sys.stderr)
            return 2
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(release.source), str(release.tests), str(HERE)]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        script = HERE / f"record_{arguments[0]}.py"
        return subprocess.run(
            [sys.executable, "-P", script, release.source], env=environ
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
