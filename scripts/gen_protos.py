"""Generates stepwire/v1 from protos/. Usage: gen_protos.py [--check].

With --check, generates into a temporary folder and fails when the committed files differ.
"""

import filecmp
import os
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("stepwire/v1")


def generate(output: Path) -> None:
    """Writes messages, services and their type stubs below `output`."""
    protos = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    includes = [ROOT / "protos", Path(protoc.__file__).parent / "_proto"]
    services = [path for path in protos if "\nservice " in (ROOT / "protos" / path).read_text()]
    # Where the plugins are, also when the environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    common = ["protoc", *(f"-I{path}" for path in includes)]
    runs = [
        [*common, f"--python_out={output}", f"--mypy_out=quiet:{output}", *map(str, protos)],
        [*common, f"--grpc_python_out={output}", f"--mypy_grpc_out=quiet:{output}", *map(str, services)],
    ]
    for run in runs:
        if protoc.main(run) != 0:
            sys.exit("protoc failed")


def check() -> None:
    """Exits with 1 when the committed files are not what the protos generate."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path for path in (Path(folder) / PACKAGE).iterdir()}
        held = {path.name: path for path in (ROOT / PACKAGE).glob("*_pb2*")}
        stale = sorted(
            name
            for name in fresh.keys() | held.keys()
            if name not in fresh or name not in held or not filecmp.cmp(fresh[name], held[name], shallow=False)
        )
    if stale:
        sys.exit(f"stepwire/v1 is not what protos/ generates: {', '.join(stale)}; run `make protos`")


def main() -> None:
    """Generates, or checks."""
    if "--check" in sys.argv[1:]:
        check()
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        for path in (Path(folder) / PACKAGE).iterdir():
            shutil.copy(path, ROOT / PACKAGE / path.name)


if __name__ == "__main__":
    main()
