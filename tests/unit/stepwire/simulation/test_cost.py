import math

import pytest

from stepwire.simulation.cost import HARDWARE, CostModel, Hardware, ModelShape, StepLoad
from stepwire.simulation.shapes import SHAPES

SHAPE = ModelShape(
    name="toy",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    head_dim=4,
    vocab_size=10,
    layer_parameters=1000,
    head_parameters=80,
    weight_bytes=2160,
    kv_bytes_per_token=32,
)


def hardware(**changes: float) -> Hardware:
    return Hardware(
        "toy",
        **{"compute_flops": 0.0, "bandwidth_bytes": 0.0, "latency_s": 0.0, "memory_bytes": 10_000, **changes},  # type: ignore[arg-type]
    )


def test_the_load_of_decodes_counts_each_context_once() -> None:
    assert StepLoad.of([1, 1, 1], [4, 9, 0]) == StepLoad(
        num_tokens=3, num_sequences=3, num_sampled=3, num_pairs=5 + 10 + 1, num_context_tokens=16
    )


def test_the_load_of_a_chunk_counts_what_each_token_attends_to() -> None:
    pairs = sum(7 + 1 + j for j in range(5)) + (3 + 1)
    assert StepLoad.of([5, 1], [7, 3], 1) == StepLoad(6, 2, 1, pairs, 12 + 4)


def test_arithmetic_bound_steps_take_their_flops() -> None:
    load = StepLoad.of([5, 1], [7, 3], 1)
    flops = 2 * 6 * 1000 + 2 * 1 * 80 + 4 * 2 * 8 * load.num_pairs
    assert CostModel(SHAPE, hardware(compute_flops=1e6)).step_seconds(load) == pytest.approx(flops / 1e6)


def test_memory_bound_steps_take_their_bytes() -> None:
    load = StepLoad.of([1, 1], [7, 3])
    moved = 2160 + (8 + 4 + 2) * 32
    assert CostModel(SHAPE, hardware(bandwidth_bytes=1e6)).step_seconds(load) == pytest.approx(moved / 1e6)


def test_the_slower_side_counts_and_latencies_are_added() -> None:
    load = StepLoad.of([1, 1], [7, 3])
    device = hardware(compute_flops=1e3, bandwidth_bytes=1e9, latency_s=0.5, sequence_latency_s=0.25)
    alone = CostModel(SHAPE, hardware(compute_flops=1e3)).step_seconds(load)
    assert CostModel(SHAPE, device).step_seconds(load) == pytest.approx(alone + 0.5 + 2 * 0.25)


def test_zero_everywhere_is_no_time_and_an_empty_step_is_free() -> None:
    assert CostModel(SHAPE, hardware()).step_seconds(StepLoad.of([1000], [0])) == 0.0
    assert CostModel(SHAPE, hardware(latency_s=1.0)).step_seconds(StepLoad.of([], [])) == 0.0


@pytest.mark.parametrize(
    "device", [HARDWARE["h100"], HARDWARE["cpu"], hardware(compute_flops=1e5, bandwidth_bytes=1e5)]
)
@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (7, 2), (300, 400), (64, 3000)])
def test_the_latency_of_a_lone_request_is_the_sum_of_its_steps(device: Hardware, prompt: int, output: int) -> None:
    for shape in (SHAPE, SHAPES["smollm2-135m"]):
        cost = CostModel(shape, device)
        chunks = [(start, min(64, prompt - start)) for start in range(0, prompt, 64)]
        total = sum(cost.step_seconds(StepLoad.of([n], [start], int(start + n == prompt))) for start, n in chunks)
        total += sum(cost.step_seconds(StepLoad.of([1], [prompt + i])) for i in range(output - 1))
        assert cost.unloaded_seconds(prompt, output, 64) == pytest.approx(total, rel=1e-9)


def test_blocks_are_what_the_weights_leave() -> None:
    assert CostModel(SHAPE, hardware()).num_blocks(4, memory_fraction=0.5) == (5000 - 2160) // (4 * 32)
    assert CostModel(SHAPE, hardware(memory_bytes=100)).num_blocks(4) < 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_hardware_refuses_numbers_without_sense(value: float) -> None:
    with pytest.raises(ValueError, match="latency_s"):
        hardware(latency_s=value)


def test_a_shape_refuses_numbers_without_sense() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        ModelShape("toy", 0, 1, 1, 1, 1, 1, 1, 1, 1)
