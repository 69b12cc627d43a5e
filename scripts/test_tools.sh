#!/usr/bin/env bash
# The tools beyond Python and its locked packages that some tests need. `report` says which tests are skipped for want
# of them; `install` installs them (system packages only as root).
set -euo pipefail
cd "$(dirname "$0")/.."

have_node_modules() { [[ -d tests/node/node_modules/@grpc/grpc-js && -d tests/node/node_modules/@grpc/proto-loader ]]; }
have_triton() { python -c "import triton" 2>/dev/null; }
have_chromium() { command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; }
have_ray() { python -c "import ray" 2>/dev/null; }

report() {
    local missing=0
    missing() {
        missing=1
        echo "skipped: $1"
    }
    if ! command -v node >/dev/null; then
        missing "the Node client (node is not installed)"
    elif ! have_node_modules; then
        missing "the Node client (tests/node/node_modules is not installed)"
    fi
    have_triton || missing "Triton kernels (the package triton is not installed)"
    have_chromium || missing "pages in a browser (chromium is not installed)"
    command -v promtool >/dev/null || missing "Prometheus' own checks (promtool is not installed)"
    have_ray || missing "workers on a Ray cluster (Ray is not installed)"
    if [[ $missing == 1 ]]; then echo "\`make test-full\` installs these tools and runs those tests"; fi
}

install() {
    if command -v npm >/dev/null && ! have_node_modules; then
        npm --prefix tests/node ci --no-audit --no-fund || echo "npm could not install the Node client"
    fi
    have_ray || python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements/ray.txt ||
        echo "pip could not install Ray"
    # torch for a CPU brings none. Its interpreter, which the tests use, wants one that knows numpy 2.
    have_triton || python -m pip install -qq --disable-pip-version-check --no-deps triton==3.9.0 || echo "pip could not install triton"
    local wanted=()
    have_chromium || wanted+=(chromium)
    command -v promtool >/dev/null || wanted+=(prometheus)
    if [[ ${#wanted[@]} -gt 0 && $EUID == 0 ]] && command -v apt-get >/dev/null; then
        # Services that the packages bring are not to be started. What cannot be had is reported below.
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
            apt-get install -y -qq --no-install-recommends "${wanted[@]}"; } || echo "apt-get could not install ${wanted[*]}"
    fi
    report
}

case "${1:-}" in
report | install) "$1" ;;
*)
    echo "usage: $0 report|install" >&2
    exit 2
    ;;
esac
