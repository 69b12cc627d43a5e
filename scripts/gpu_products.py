"""Products with quantised weights on a CUDA device, for `make gpu-check`: against references, and what they read a
second."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_models import (
    BLOCK_SIZE,
    CPU,
    DEVICE,
    LENGTHS,
    ON_CUDA,
    SMALL,
    Quantise,
    bandwidth,
    continued,
    greedy_tokens,
    median_seconds,
    serve,
    share_equal,
)

from loader.quantised.activations import Activation
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid, flatten
from loader.quantised.rounding import rounded_weight
from loader.quantised.roundings import Rounding
from worker_service.kernels.linear import LinearKernel
from worker_service.kernels.quantised import make_quantised_linear
from worker_service.kernels.torch_products.choose import KINDS, TOLERANCES, largest_error
from worker_service.kernels.torch_products.product import ProductKind, Target, packed_bytes
from worker_service.runtime.decode_graphs import CudaRecorder
from worker_service.runtime.dummy import num_blocks_of
from worker_service.runtime.runner import ModelRunner

TARGET = Target(DEVICE.type, torch.cuda.get_device_capability() if ON_CUDA else (9, 0), torch.bfloat16)
# Of projections, of one rank's share of them, and of sizes that must be filled up.
SHAPES = [(6144, 4096), (4096, 14_336), (1024, 1792), (2050, 4080)] if ON_CUDA else [(64, 256), (50, 70)]
# More than the caches of a device hold.
TIMED_SHAPE = (28_672, 8192) if ON_CUDA else (128, 256)
TIMED_ROWS = (1, 16, 256, 2048) if ON_CUDA else (1, 300)
_CALLS = 4
MODELS = ("w8a8", "fp8", "int8 weights", "int4") if ON_CUDA else ("w8a8", "int4")
NUM_DECODES = 24 if ON_CUDA else 3


def check_products() -> dict[str, Any]:
    """Torch's products: which are right, on which shapes, and what they reach of the device's bandwidth."""
    found: dict[str, Any] = {}
    wrong = []
    for name in _forms():
        errors = {}
        for shape in SHAPES:
            weight = drawn(name, shape)
            kind = kind_of(weight)
            refusal = kind.refusal(weight, TARGET)
            try:
                error = refusal or largest_error(kind.make(weight, None), weight, torch.bfloat16)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"[:200]
            errors[f"{shape[0]}x{shape[1]}"] = error
            is_known = refusal is not None or (not ON_CUDA and isinstance(error, str))
            wrong += [] if is_known or (isinstance(error, float) and error <= TOLERANCES[torch.bfloat16]) else [name]
        found[name] = {"product": kind.name, "largest_error": errors}
    assert not wrong, f"{wrong}: {found}"
    peak = bandwidth()
    for name, entry in found.items():
        entry["speed"] = _speed(drawn(name, TIMED_SHAPE), peak)
    found["int8 by _weight_int8pack_mm"] = _int8pack_speed(peak)
    return found


def _speed(weight: Packed, peak: float) -> dict[str, Any]:
    """For numbers of rows: microseconds, and bytes of the weight read a second; beside them making it whole."""
    kind, num_bytes = kind_of(weight), packed_bytes(weight)
    found: dict[str, Any] = {}
    try:
        kernels: dict[str, LinearKernel] = {"product": kind.make(weight, None), "whole": make_quantised_linear(weight)}
        for rows in TIMED_ROWS:
            x = torch.randn(rows, weight.shape[1], device=DEVICE).bfloat16()
            found[f"{rows} rows"] = {
                name: _figures(partial(kernel, x), num_bytes, peak) for name, kernel in kernels.items()
            }
    except AssertionError:
        raise
    except Exception as failure:
        found["reason"] = f"{type(failure).__name__}: {failure}"[:200]
    return found


def _figures(work: Callable[[], torch.Tensor], num_bytes: int, peak: float) -> dict[str, float]:
    """Of one call, several being recorded as one graph: so that it is the device that is measured, and recording."""

    def several() -> torch.Tensor:
        for _ in range(_CALLS - 1):
            work()
        return work()

    call: Callable[[], object] = several
    if ON_CUDA:
        expected, recorded = work(), CudaRecorder(DEVICE).record(several)
        recorded.replay()
        error = float((recorded.result.float() - expected.float()).abs().max())
        assert error <= 2e-2 * float(expected.float().abs().max()), "recorded it answers something else"
        call = recorded.replay
    took = median_seconds(call, 5) / _CALLS
    rate = num_bytes / took
    return {
        "microseconds": round(took * 1e6, 1),
        "gigabytes_per_s": float(f"{rate / 1e9:.4g}"),
        "of_bandwidth": round(rate / peak, 3),
    }


def _int8pack_speed(peak: float) -> dict[str, Any]:
    """Torch's operator for int8 weights alone, which is not used: is it faster than widening by now?"""
    weight = drawn("int8 weights", TIMED_SHAPE)
    assert isinstance(weight, ScaledGrid)
    scales = weight.scales[:, 0].contiguous()
    found: dict[str, Any] = {}
    for rows in TIMED_ROWS[:2]:
        x = torch.randn(rows, weight.shape[1], device=DEVICE).bfloat16()
        try:
            work = partial(torch._weight_int8pack_mm, x, weight.values, scales if ON_CUDA else scales.bfloat16())
            found[f"{rows} rows"] = _figures(work, packed_bytes(weight), peak)
        except Exception as failure:
            found[f"{rows} rows"] = f"{type(failure).__name__}: {failure}"[:200]
    return found


def _forms() -> list[str]:
    groups = [f"int4 in groups of {size}" for size in (32, 64, 128, 256)]
    return ["w8a8", "w8a8 static", "fp8", "fp8 static", "int8 weights", *groups, "int4 in any order"]


def drawn(name: str, shape: tuple[int, int]) -> Packed:
    """A random weight of a form, on the device."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    num_outputs, num_inputs = shape
    if not name.startswith("int4"):
        plain = torch.randint(-100, 101, shape, generator=generator, device=DEVICE)
        values = plain.to(torch.int8) if "8a8" in name or "int8" in name else (plain / 16).to(torch.float8_e4m3fn)
        scales = torch.rand((num_outputs, 1), generator=generator, device=DEVICE).add_(0.5).mul_(1e-3)
        kind = None if name == "int8 weights" else Activation("fp8" if "fp8" in name else "int8", "static" in name)
        input_scale = torch.tensor(0.03, device=DEVICE) if "static" in name else None
        return ScaledGrid(values, scales, input_scale, 1, num_inputs, activation=kind)
    size = 128 if name == "int4 in any order" else int(name.split()[-1])
    groups = (num_outputs, -(-num_inputs // size))
    row_bytes = -(-num_inputs // 2)
    words = torch.randint(0, 256, (num_outputs, row_bytes), generator=generator, device=DEVICE).to(torch.uint8)
    scales = torch.rand(groups, generator=generator, device=DEVICE).add_(0.5).mul_(1e-2).half()
    zeros = torch.randint(0, 16, groups, generator=generator, device=DEVICE).to(torch.uint8)
    group_of = None
    if name == "int4 in any order":
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        group_of = (order // size).int()
    return GroupedInts(words, scales, zeros, group_of, 4, num_inputs, size)


def kind_of(weight: Packed) -> ProductKind:
    """The kind of product that a weight may have."""
    return next(kind for kind in KINDS if kind.is_for(weight))


def check_quantised_models() -> dict[str, Any]:
    """Small models with quantised projections: recorded decodes answer what launched ones do, and what they do after
    a sleep; rounded integers, in float32, what the CPU does."""
    found: dict[str, Any] = {}
    for name in MODELS:
        found[name] = _served(partial(_quantised, name))
    expected, got = (
        greedy_tokens(device, NUM_DECODES, quantise=partial(_quantised, "w8a8")) for device in (CPU, DEVICE)
    )
    found["w8a8 as on the CPU"] = share_equal(expected, got)
    # A value near the middle of two integers may be rounded to either, and what follows may differ then.
    assert found["w8a8 as on the CPU"] >= 0.8, found
    return found


def _served(quantise: Quantise) -> dict[str, Any]:
    tokens: list[list[int]] = []
    found: dict[str, Any] = {}
    for records in (False, True):
        num_blocks = num_blocks_of(LENGTHS, BLOCK_SIZE, NUM_DECODES)
        served = serve(
            SMALL,
            torch.bfloat16,
            DEVICE,
            num_blocks=num_blocks,
            max_model_len=1024,
            records=records,
            quantise=quantise,
        )
        tokens.append(continued(served.runner, NUM_DECODES))
    engine, found["weight_bytes"] = served.engine, served.weight_bytes
    found["recorded as launched"] = share_equal(*tokens)
    if ON_CUDA:
        del served
        engine.move_weights(CPU)
        engine.move_weights(DEVICE)
        executor = engine.executor(num_blocks, BLOCK_SIZE, 1024)
        executor.prepare_decodes(64)
        woken = continued(ModelRunner(executor, max_model_len=1024), NUM_DECODES)
        found["after a sleep as before"] = share_equal(tokens[1], woken)
        assert found["after a sleep as before"] >= 0.95, found
    assert found["recorded as launched"] >= 0.95, found
    return found


def _quantised(name: str, module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rounding: Rounding = "int4" if name == "int4" else "fp8" if name == "fp8" else "int8"
    packed = rounded_weight(weight.cpu(), rounding)
    if isinstance(packed, ScaledGrid) and name in ("w8a8", "fp8"):
        packed = dataclasses.replace(packed, activation=Activation("fp8" if name == "fp8" else "int8"))
    return flatten(module, packed)
