"""The Triton kernels against the reference, as Triton's interpreter runs them, and compiled for a GPU."""

import importlib
import json
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize(
    ("cases", "bound"),
    [
        (("split",), 1e-5),
        pytest.param(("float32", "large heads", "int8"), 1e-5, marks=pytest.mark.full),
        pytest.param(("odd sizes", "int8 in float16"), 3e-3, marks=pytest.mark.full),
    ],
)
def test_they_compute_what_the_reference_does(cases: tuple[str, ...], bound: float) -> None:
    command = [sys.executable, "-m", "tests.support.triton_interpreted", *cases]
    done = subprocess.run(command, check=True, timeout=240, stdout=subprocess.PIPE, text=True)
    errors = json.loads(done.stdout)
    assert set(errors) == set(cases)
    assert max(errors.values()) < bound


def test_a_decode_is_split_by_how_long_contexts_are_served() -> None:
    from worker_service.kernels.paged.triton_paged import num_splits

    assert [num_splits(longest) for longest in (1, 256, 257, 1100, 100_000)] == [1, 1, 2, 8, 16]


@pytest.mark.full
@pytest.mark.parametrize(
    ("stored", "largest"), [("bf16", 0.0), ("i8", 127.0), ("fp8e4nv", 448.0)], ids=["bfloat16", "int8", "fp8"]
)
def test_the_kernels_compile_for_a_gpu(stored: str, largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    kernels = importlib.import_module("worker_service.kernels.paged.triton_kernels")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    source = importlib.import_module("triton.compiler").ASTSource
    scales = "*fp32" if largest else f"*{stored}"
    pages = {"keys": f"*{stored}", "values": f"*{stored}", "key_scales": scales, "value_scales": scales}

    def compiled(kernel: object, types: dict[str, str], sizes: dict[str, object]) -> str:
        names = kernel.arg_names  # type: ignore[attr-defined]
        signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
        made = triton.compile(source(kernel, signature, constexprs=sizes), target=target)
        return str(made.asm["ptx"])

    shape = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "DIMS": 128}
    types = pages | dict.fromkeys(("key", "value"), "*bf16") | {"slots": "*i64"}
    ptx = compiled(kernels.store, types, shape | {"LARGEST": largest, "IS_INTEGER": stored == "i8"})
    # Rounding by adding and taking away 1.5 * 2^23 must not be folded into nothing.
    assert ("0f4B400000" in ptx and "0fCB400000" in ptx) == (stored == "i8")
    types = pages | dict.fromkeys(("tables", "query_start", "lengths"), "*i32") | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("query", "output"), "*bf16") | dict.fromkeys(("partial_sums", "partial_stats"), "*fp32")
    sizes = shape | {"HAS_SOFTCAP": False, "IS_ROUNDED": largest > 0, "SHARE": 4, "NUM_HEADS": 32}
    for tokens, splits in ((1, 16), (16, 1)):
        tile = {"TOKENS": tokens, "ROWS": max(16, 4 * tokens), "KEYS": 64, "SPLITS": splits}
        assert "mma" in compiled(kernels.attend, types, sizes | tile)
    types = {"partial_sums": "*fp32", "partial_stats": "*fp32", "output": "*bf16"}
    compiled(kernels.combine, types, {"HEAD_DIM": 128, "DIMS": 128, "SPLITS": 16})
