"""llama.cpp's own quantiser, as its tool llama-quantize: SOURCE TARGET Q8_0|Q4_1. Runs in the llamacpp peer's
environment."""

import ctypes
import sys

import llama_cpp

_TYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1}


def main() -> int:
    """Writes the file."""
    source, target, kind = sys.argv[1:]
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = _TYPES[kind]
    llama_cpp.llama_backend_init()
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)))


if __name__ == "__main__":
    sys.exit(main())
