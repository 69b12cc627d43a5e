"""The files that llama.cpp is measured on when weights are quantised: of the same weights, by its own quantiser."""

import subprocess
from pathlib import Path
from typing import Literal

from benchmarks.peers.models import Model
from benchmarks.peers.processes import PEERS, PeerFailed

Kind = Literal["Q8_0", "Q4_1"]


def quantised_gguf(model: Model, kind: Kind) -> Path:
    """The model's bfloat16 GGUF as `kind`, beside it, made unless it is there. Raises PeerFailed.

    Q4_1 is what llama-quantize makes of that name: an output layer, also one that is the embedding, is larger.
    """
    target = model.gguf.with_name(f"{kind}.gguf")
    if target.exists():
        return target
    python = PEERS / "llamacpp/bin/python"
    if not python.exists():
        raise PeerFailed("llamacpp is not built: run `make peers`")
    partial = target.with_suffix(".partial")
    script = Path(__file__).with_name("llamacpp_quantise.py")
    done = subprocess.run(
        [str(python), str(script), str(model.gguf), str(partial), kind], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PeerFailed(f"llama.cpp cannot write {target}: {done.stderr.strip()[-300:]}")
    return partial.rename(target)
