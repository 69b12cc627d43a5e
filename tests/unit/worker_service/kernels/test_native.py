"""The compiled kernels against decoders written from the definition, and against themselves cut differently."""

import ctypes
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.plain_decoder import VOCAB, PlainDecoder, Server, Shape, random_tokens, variant
from worker_service.kernels import abi
from worker_service.kernels.layout import DTYPES, pack_linear
from worker_service.kernels.native import BatchTables, Decoder, Pool, linear

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
# Of a result that is rounded once.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
BASE = Shape()
SHAPES = {
    "plain": BASE,
    "biases": variant(BASE, biases=True),
    "qwen3": variant(BASE, head_norms=True, rotary_half=4, block_size=32),
    "gemma": variant(
        BASE, post_norms=True, head_norms=True, windows=(20, None), softcap=3.0, activation="gelu_tanh",
        embedding_scale=6.0, logit_softcap=5.0,
    ),
    "olmo2": variant(BASE, pre_norms=False, post_norms=True, whole_norms=True),
    "wide heads": variant(BASE, heads=4, kv_heads=1, head_dim=80, rotary_half=40),
    "every head its own": variant(BASE, heads=3, kv_heads=3, head_dim=64, rotary_half=32, windows=(70,)),
    "int8 cache": variant(BASE, stored=torch.int8, head_dim=80, windows=(70, None), softcap=3.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40, 300])
def test_linear(pool: Pool, dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    draws = torch.Generator().manual_seed(rows)
    weight = (torch.randn(70, 48, generator=draws) / 7).to(dtype)
    bias = torch.randn(70, generator=draws) if with_bias else None
    x = torch.randn(rows, 48, generator=draws).to(dtype)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = linear(pool, x, pack_linear(weight), 70, bias)
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_is_the_same_in_any_company_and_with_any_threads(
    library: ctypes.CDLL, pool: Pool, dtype: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(0)
    # Rows this wide are taken in several parts.
    weight, x = torch.randn(64, 12288, generator=draws).to(dtype), torch.randn(29, 12288, generator=draws).to(dtype)
    packed = pack_linear(weight)
    together = linear(pool, x, packed, 64)
    with Pool(library, 1) as alone:
        for row in (0, 11, 28):
            assert torch.equal(linear(alone, x[row : row + 1], packed, 64)[0], together[row])
        assert torch.equal(linear(alone, x[3:20], packed, 64), together[3:20])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_prompts_in_pieces_and_decoding_equal_the_definition(pool: Pool, name: str, dtype: torch.dtype) -> None:
    plain = PlainDecoder(variant(SHAPES[name], dtype=dtype))
    server = Server(pool, plain)
    long, short = random_tokens(130, 1), random_tokens(9, 2)
    steps = [
        {"long": long[:77]},
        {"long": long[77:80], "short": short[:6]},
        {"long": long[80:129], "short": short[6:7]},
    ]
    steps += [{"short": short[7:8], "long": long[129:]}, {"short": short[8:]}]
    got: dict[str, list[torch.Tensor]] = {"long": [], "short": []}
    for step in steps:
        for sequence, logits in server.step(step).items():
            got[sequence].append(logits)
    for sequence, tokens in (("long", long), ("short", short)):
        exact, logits = plain.logits(tokens), torch.cat(got[sequence]).double()
        # A value near the middle of two codes may be rounded to either.
        tolerance = max(TOLERANCE[dtype], 0.0 if plain.shape.stored is None else 2e-3)
        assert (logits - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "gemma", "every head its own", "int8 cache"])
def test_results_do_not_depend_on_batch_cut_or_threads(
    library: ctypes.CDLL, pool: Pool, name: str, dtype: torch.dtype
) -> None:
    plain = PlainDecoder(variant(SHAPES[name], dtype=dtype))
    tokens = random_tokens(190, 3)
    with Pool(library, 1) as alone:
        one_by_one = Server(alone, plain, seed=1)
        expected = torch.cat([one_by_one.step({"it": tokens[i : i + 1]})["it"] for i in range(len(tokens))])
        whole = Server(alone, plain).step({"it": tokens})["it"]
    mixed = Server(pool, plain)
    # Three hundred tokens of others, so that the batch is cut into chunks that begin in its midst.
    others = {"first": random_tokens(150, 4), "second": random_tokens(150, 5)}
    parts = [mixed.step({**others, "it": tokens[:131]})["it"]]
    parts += [mixed.step({"it": tokens[131:132], "third": random_tokens(7, 6)})["it"]]
    parts += [mixed.step({"fourth": random_tokens(33, 7), "it": tokens[132:]})["it"]]
    assert torch.equal(whole, expected)
    assert torch.equal(torch.cat(parts), expected)


def test_threads_that_come_late_to_their_work_change_nothing(library: ctypes.CDLL) -> None:
    plain = PlainDecoder(variant(SHAPES["gemma"], dtype=torch.bfloat16))
    tokens = random_tokens(45, 3)
    with Pool(library, 1) as alone:
        expected = _decoded(Server(alone, plain), tokens)
    # More threads than any core has time for: most miss most of what they were called for.
    with Pool(library, 24, spin_us=0) as crowd:
        got = _decoded(Server(crowd, plain), tokens)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def _decoded(server: Server, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each token, the first few at once."""
    return [server.step({"it": part})["it"] for part in (tokens[:5], *tokens[5:].split(1))]


@pytest.mark.parametrize("wanted", [[], [299], [0, 1, 2, 149, 150, 256, 299], list(range(100, 280)), list(range(300))])
@pytest.mark.parametrize("name", ["gemma", "every head its own"])
def test_hidden_states_of_some_rows_are_those_of_all(pool: Pool, name: str, wanted: list[int]) -> None:
    plain = PlainDecoder(variant(SHAPES[name], dtype=torch.bfloat16))
    tokens, counts = random_tokens(300, 1), {"first": 150, "second": 150}
    whole, part = Server(pool, plain), Server(pool, plain)
    hidden = whole.decoder.embed(tokens)
    whole.decoder.run(hidden, whole.batch(counts))
    got = part.decoder.hidden_states(tokens, part.batch(counts), torch.tensor(wanted, dtype=torch.int64))
    assert torch.equal(got, hidden[wanted])
    # Keys and values are there for all.
    following = {name: random_tokens(1, 2) for name in counts}
    for sequence, logits in part.step(following).items():
        assert torch.equal(logits, whole.step({sequence: following[sequence]})[sequence])


def test_a_sequence_reads_blocks_that_another_one_fills_in_the_same_call(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    tokens = random_tokens(33, 1)
    server = Server(pool, plain)
    both = server.batch({"first": 32, "second": 1})
    tables = both.block_tables.copy()
    tables[1, :2] = tables[0, :2]
    batch = BatchTables(both.query_start, np.array([0, 32], np.int32), tables)
    got = server.decoder.forward(tokens, batch, torch.tensor([32]))
    torch.testing.assert_close(got[0].double(), plain.logits(tokens)[32], rtol=1e-4, atol=1e-4)


def test_halves_make_up_a_layer(pool: Pool) -> None:
    for name in ("plain", "gemma"):
        plain = PlainDecoder(SHAPES[name])
        whole, halves = Server(pool, plain), Server(pool, plain)
        tokens = random_tokens(280, 1) if name == "plain" else random_tokens(40, 1)
        counts = {"a": 180, "b": 100} if name == "plain" else {"a": 25, "b": 15}
        hidden = whole.decoder.embed(tokens)
        torch.testing.assert_close(hidden, plain.embedding[tokens] * plain.shape.embedding_scale)
        expected = hidden.clone()
        whole.decoder.run(expected, whole.batch(counts))
        batch = halves.batch(counts)
        for layer in range(plain.shape.num_layers):
            halves.decoder.add_branch(layer, "attention", hidden, halves.decoder.attention_half(layer, hidden, batch))
            halves.decoder.add_branch(layer, "mlp", hidden, halves.decoder.mlp_half(layer, hidden, batch))
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_small_branches_are_not_lost_in_large_hidden_states(pool: Pool) -> None:
    plain = PlainDecoder(variant(BASE, dtype=torch.bfloat16))
    hidden = torch.full((3, BASE.hidden), 1000.0)
    for _ in range(4):
        Server(pool, plain).decoder.add_branch(0, "mlp", hidden, torch.full_like(hidden, 0.25).bfloat16())
    assert (hidden == 1001).all()


def test_operators_are_timed_while_asked_for(pool: Pool) -> None:
    server = Server(pool, PlainDecoder(SHAPES["gemma"]))
    began = time.perf_counter_ns()
    with server.decoder.timed() as operators:
        server.step({"it": random_tokens(60)})
    whole = time.perf_counter_ns() - began
    assert tuple(operators) == abi.OPERATORS and all(operators.values())
    assert sum(operators.values()) <= whole
    timed = dict(operators)
    server.step({"it": random_tokens(1)})
    assert operators == timed


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_the_first_of_the_largest_logits(pool: Pool, dtype: torch.dtype) -> None:
    plain = PlainDecoder(variant(BASE, dtype=dtype))
    plain.head[77] = plain.head[5]
    server = Server(pool, plain)
    tokens, rows = random_tokens(300, 1), torch.arange(299, -1, -1)
    hidden = server.decoder.embed(tokens)
    hidden[7] = plain.head[5]
    logits = server.decoder.logits(hidden, rows)
    token_ids, finite = server.decoder.greedy(hidden, rows)
    assert torch.equal(token_ids, logits.argmax(-1)) and bool(finite.all())
    assert token_ids[292] == 5
    hidden[3, 1] = torch.inf
    assert server.decoder.greedy(hidden, rows)[1].logical_not().nonzero().tolist() == [[296]]


def test_one_weight_that_is_no_number_shows(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    plain.head[VOCAB - 1, 3] = torch.nan
    server = Server(pool, plain)
    _, finite = server.decoder.greedy(server.decoder.embed(random_tokens(2)), torch.tensor([0, 1]))
    assert not finite.any()


def test_greedy_of_a_whole_step_equals_its_logits(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    tokens, rows = random_tokens(20), torch.tensor([4, 19])
    one, other = Server(pool, plain), Server(pool, plain)
    logits = one.decoder.forward(tokens, one.batch({"it": 20}), rows)
    token_ids, _ = other.decoder.forward_greedy(tokens, other.batch({"it": 20}), rows)
    assert torch.equal(token_ids, logits.argmax(-1))


def test_bad_arguments_are_named(pool: Pool) -> None:
    server = Server(pool, PlainDecoder(BASE))
    decoder, batch = server.decoder, server.batch({"it": 4})
    hidden = torch.zeros(4, 48)
    for call, name in (
        (lambda: decoder.run(hidden[:, :32], batch), "hidden"),
        (lambda: decoder.run(torch.zeros(3, 48), batch), "hidden"),
        (lambda: decoder.run(hidden.bfloat16(), batch), "hidden"),
        (lambda: decoder.run(torch.zeros(48, 4).T, batch), "hidden must be contiguous"),
        (lambda: decoder.run(hidden, batch, 0, 3), "layers"),
        (lambda: decoder.logits(hidden, torch.tensor([4])), "rows"),
        (lambda: decoder.mlp_half(2, hidden, batch), "layer 2"),
        (lambda: BatchTables(batch.query_start[1:], batch.computed, batch.block_tables), "query_start"),
        (lambda: BatchTables(batch.query_start, batch.computed.astype(np.int64), batch.block_tables), "computed"),
        (lambda: decoder.run(hidden, BatchTables(batch.query_start, batch.computed + 197, batch.block_tables)), "rope"),
        (lambda: linear(pool, hidden, torch.zeros(1, 48, 32, 1), 40), "packed"),
        (lambda: Pool(pool.library, 0), "threads"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    decoder.close()
    with pytest.raises(ValueError, match="closed"):
        decoder.run(hidden, batch)


def test_a_decoder_that_does_not_fit_is_refused(pool: Pool) -> None:
    plain = PlainDecoder(BASE)
    server, spec = Server(pool, plain), plain.spec()
    with pytest.raises(ValueError, match="another decoder"):
        Decoder(pool, PlainDecoder(variant(BASE, num_layers=1)).spec(), server.layout, server.cache)
    with pytest.raises(ValueError, match="cache"):
        Decoder(pool, spec, server.layout, server.cache[:-1])


def test_want_of_memory_is_an_error_and_no_end(library: ctypes.CDLL, pool: Pool) -> None:
    decoder = Server(pool, PlainDecoder(BASE)).decoder
    head = abi.Head(num_rows=2**50, token_ids=1)
    with pytest.raises(MemoryError, match="sw_forward"):
        library.sw_forward(decoder._handle, abi.Batch(), None, None, 0, 0, head)


# In a process of its own: other threads of this one would want memory, too.
_NO_THREADS = """
import mmap, resource
from pathlib import Path
from worker_service.kernels import native

library = native.load()
held = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20), resource.RLIM_INFINITY))
try:
    native.Pool(library, 1000)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with native.Pool(library, 3) as pool:
    print(pool.handle is not None)
"""


@pytest.mark.usefixtures("library")
def test_threads_that_cannot_be_had_are_an_error_and_no_end() -> None:
    """Also after some could be had."""
    done = subprocess.run([sys.executable, "-c", _NO_THREADS], capture_output=True, text=True, timeout=120, check=True)
    refused, after = done.stdout.splitlines()
    assert "sw_pool_create" in refused
    assert after == "True"
