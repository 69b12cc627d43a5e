"""Adapters in the compiled kernels against weights that they were added to, and against themselves in other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.plain_decoder import PlainDecoder, Server, Shape, random_tokens, variant
from worker_service.kernels.adapters import MODULES, AdapterRun, AdapterWeights, PackedFactors, pack_factors
from worker_service.kernels.layout import DTYPES
from worker_service.kernels.native import BatchTables, Pool

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 6e-3}
BASE = Shape()
SHAPES = {
    "plain": BASE,
    "biases": variant(BASE, biases=True),
    "gemma": variant(BASE, post_norms=True, head_norms=True, softcap=3.0, activation="gelu_tanh"),
    "odd panels": variant(BASE, heads=3, kv_heads=1, hidden=80, inner=112),
}  # fmt: skip
Factors = dict[str, tuple[torch.Tensor, torch.Tensor, float]]


def sizes_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each module."""
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q": (heads, shape.hidden),
        "k": (kv_heads, shape.hidden),
        "v": (kv_heads, shape.hidden),
        "o": (shape.hidden, heads),
        "gate": (shape.inner, shape.hidden),
        "up": (shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }


def random_adapter(shape: Shape, seed: int, ranks: dict[str, int]) -> list[Factors]:
    """Factors of each layer, large enough to change every token."""
    draws = torch.Generator().manual_seed(seed)
    layers: list[Factors] = []
    for _ in range(shape.num_layers):
        layer: Factors = {}
        for name, rank in ranks.items():
            out, depth = sizes_of(shape)[name]
            a = torch.randn(rank, depth, generator=draws) / depth**0.5
            b = torch.randn(out, rank, generator=draws) / rank**0.5
            layer[name] = (a.to(shape.dtype), b.to(shape.dtype), 0.5 + 0.25 * seed)
        layers.append(layer)
    return layers


def weights_of(adapter: list[Factors]) -> AdapterWeights:
    return AdapterWeights([{name: pack_factors(*factors) for name, factors in layer.items()} for layer in adapter])


def merged(plain: PlainDecoder, adapter: list[Factors]) -> PlainDecoder:
    """The decoder with the products added to its weights, in float64."""
    layers = []
    for layer, factors in zip(plain.layers, adapter, strict=True):
        changed = {name: value.double() if value.ndim == 2 else value for name, value in layer.items()}
        deltas = {name: s * (b.double() @ a.double()) for name, (a, b, s) in factors.items()}
        sizes = sizes_of(plain.shape)
        changed["qkv"] += torch.cat([deltas.get(name, torch.zeros(sizes[name])) for name in "qkv"])
        for name, ours in (("o", "output"), ("gate", "gate"), ("up", "up"), ("down", "down")):
            if name in deltas:
                changed[ours] += deltas[name]
        layers.append(changed)
    other = PlainDecoder(plain.shape, plain.seed)
    other.layers = layers
    return other


def step(
    server: Server, tokens: dict[str, torch.Tensor], adapters: dict[str, AdapterWeights]
) -> dict[str, torch.Tensor]:
    """As Server.step, each named sequence with its adapter if it has one."""
    batch = server.batch({name: len(ids) for name, ids in tokens.items()})
    starts = batch.query_start.tolist()
    runs = [
        AdapterRun(adapters[name], starts[i], len(ids))
        for i, (name, ids) in enumerate(tokens.items())
        if name in adapters
    ]
    batch = replace(batch, runs=runs)
    ids = torch.cat(list(tokens.values()))
    logits = server.decoder.forward(ids, batch, torch.arange(len(ids)))
    return dict(zip(tokens, logits.split([len(each) for each in tokens.values()]), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_mixed_batch_equals_merged_weights(pool: Pool, name: str, dtype: torch.dtype) -> None:
    """Adapters of other ranks and modules, and none, in one batch: in chunks, and token by token."""
    plain = PlainDecoder(variant(SHAPES[name], dtype=dtype))
    adapters = {
        "all": random_adapter(plain.shape, 1, dict.fromkeys(MODULES, 16)),
        "few": random_adapter(plain.shape, 2, {"k": 3, "gate": 20, "down": 1}),
    }
    packed = {sequence: weights_of(adapter) for sequence, adapter in adapters.items()}
    prompts = {"all": random_tokens(70, 1), "none": random_tokens(33, 2), "few": random_tokens(170, 3)}
    server = Server(pool, plain)
    got: dict[str, list[torch.Tensor]] = {sequence: [] for sequence in prompts}
    for begin, end in ((0, 30), (30, 31), (31, 33), (33, 64), (64, 170)):
        tokens = {sequence: ids[begin:end] for sequence, ids in prompts.items() if len(ids) > begin}
        for sequence, logits in step(server, tokens, packed).items():
            got[sequence].append(logits)
    for sequence, ids in prompts.items():
        model = merged(plain, adapters[sequence]) if sequence in adapters else plain
        exact, logits = model.logits(ids), torch.cat(got[sequence]).double()
        assert (logits - exact).norm() / exact.norm() < TOLERANCE[dtype], sequence
    assert (plain.logits(prompts["few"]) - exact).norm() / exact.norm() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(pool: Pool, dtype: torch.dtype) -> None:
    plain = PlainDecoder(variant(BASE, dtype=dtype))
    packed = [weights_of(random_adapter(plain.shape, seed, dict.fromkeys(MODULES, 4 + seed))) for seed in range(3)]
    ids = random_tokens(131, 9)
    alone = Server(pool, plain)
    expected = torch.cat([step(alone, {"it": ids[i : i + 1]}, {"it": packed[0]})["it"] for i in range(len(ids))])
    mixed = Server(pool, plain, seed=3)
    adapters = {"it": packed[0], "same": packed[0], "other": packed[1], "wide": packed[2]}
    first = {"wide": random_tokens(150, 1), "it": ids[:77], "none": random_tokens(9, 2), "same": random_tokens(40, 3)}
    second = {"same": random_tokens(1, 4), "it": ids[77:], "other": random_tokens(130, 5), "none": random_tokens(1, 6)}
    parts = [step(mixed, tokens, adapters)["it"] for tokens in (first, second)]
    assert torch.equal(torch.cat(parts), expected)


def test_without_an_adapter_nothing_changes(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    ids, others = random_tokens(40, 1), random_tokens(40, 2)
    expected = Server(pool, plain).step({"it": ids, "other": others})["it"]
    adapter = weights_of(random_adapter(BASE, 1, dict.fromkeys(MODULES, 8)))
    assert torch.equal(step(Server(pool, plain), {"it": ids, "other": others}, {"other": adapter})["it"], expected)


def test_halves_have_their_adapters_too(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    whole, halves = Server(pool, plain), Server(pool, plain)
    counts = {"a": 200, "b": 70}
    runs = [AdapterRun(weights_of(random_adapter(BASE, 1, dict.fromkeys(MODULES, 8))), 100, 170)]
    hidden = whole.decoder.embed(random_tokens(270, 1))
    expected = hidden.clone()
    whole.decoder.run(expected, replace(whole.batch(counts), runs=runs))
    batch = replace(halves.batch(counts), runs=runs)
    for layer in range(BASE.num_layers):
        halves.decoder.add_branch(layer, "attention", hidden, halves.decoder.attention_half(layer, hidden, batch))
        halves.decoder.add_branch(layer, "mlp", hidden, halves.decoder.mlp_half(layer, hidden, batch))
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    server, adapter = Server(pool, plain), weights_of(random_adapter(BASE, 1, {"q": 4}))
    batch, hidden = server.batch({"it": 4}), torch.zeros(4, BASE.hidden)
    for runs, text in (
        ([AdapterRun(adapter, 0, 5)], "ends at 5 of 4"),
        ([AdapterRun(adapter, 2, 1), AdapterRun(adapter, 2, 2)], "follow each other"),
        ([AdapterRun(adapter, 0, 0)], "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            BatchTables(batch.query_start, batch.computed, batch.block_tables, runs)
    wrong_layers = AdapterWeights(adapter_layers(adapter)[:1])
    narrow = AdapterWeights([{"q": pack_factors(torch.zeros(4, 32), torch.zeros(96, 4), 1.0)}, {}])
    rounded = weights_of(random_adapter(variant(BASE, dtype=torch.bfloat16), 1, {"q": 4}))
    for weights, text in ((wrong_layers, "1 layers"), (narrow, "q of layer 0"), (rounded, "bfloat16")):
        with pytest.raises(ValueError, match=text):
            server.decoder.run(hidden, replace(batch, runs=[AdapterRun(weights, 0, 4)]))
    for a, b in ((torch.zeros(4, 24), torch.zeros(8, 4)), (torch.zeros(4, 16), torch.zeros(8, 5))):
        with pytest.raises(ValueError):
            pack_factors(a, b, 1.0)


def adapter_layers(weights: AdapterWeights) -> list[dict[str, PackedFactors]]:
    return weights._layers


def test_packed_factors_lie_as_the_kernels_read_them() -> None:
    a, b = torch.arange(3 * 16.0).view(3, 16).bfloat16(), torch.arange(20 * 3.0).view(20, 3).bfloat16()
    packed = pack_factors(a, b, 2.0)
    assert (packed.a.shape, packed.b.shape, packed.rank) == ((1, 8, 16, 2), (2, 2, 16, 2), 4)
    assert packed.a[0, 5, 2, 1] == a[2, 11] and packed.b[1, 0, 3, 1] == b[19, 1]
    assert not packed.a[0, :, 3:].any() and not packed.b[:, 1, :, 1].any() and not packed.b[1, :, 4:].any()
    np.testing.assert_equal(packed.scaling, 2.0)
