"""Adapters on the runner, in plain torch and in the compiled kernels, against weights that they were merged into."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loader.adapters.adapter import open_adapter
from loader.adapters.load import load_adapter
from loader.adapters.merge import merge_adapter
from loader.adapters.targets import trained_modules
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import Linear, parameters
from loader.quantised.load import load_rank
from loader.quantised.packed import flatten, take_packed
from loader.quantised.roundings import ROUNDINGS, Rounding
from loader.quantised.settle import settle
from loader.shares import RankPlace
from tests.support.rank_threads import rank_settings, rank_threads
from tests.support.tiny_adapter import EMBEDDING, PREFIX, adapter_tensors, layer_modules, write_adapter
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_quantised_models import ROUNDED_INPUTS, WEIGHT_ONLY, make_tiny_quantised
from tests.support.tiny_runner import CPU, Driven, Driver
from worker_service.kernels import native
from worker_service.kernels.quantised import make_quantised_linear
from worker_service.models.layers import ColumnParallelLinear
from worker_service.models.lora import Factors, RowAdapters
from worker_service.models.native import computes
from worker_service.runtime.engine import Engine, TorchEngine
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.loading import LoadJob
from worker_service.runtime.model_adapters import ModelAdapters, adapter_problem, slot_bytes
from worker_service.runtime.native import NativeEngine
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling

NUM_OUTPUTS = 12
SAMPLING = Sampling(logprobs=20)
ALL_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = SimpleNamespace(adapter_slots=4, max_adapter_rank=16, adapter_host_bytes=1 << 24)
DENSE = [name for name in TINY_FAMILIES if "moe" not in name and name != "mixtral"]
OF_EACH_KIND = ("gptq", "gptq_ordered", "packed_asymmetric", "int8_weights", "fp8_weights_in_blocks")
needs_kernels = pytest.mark.skipif(native.load() is None, reason="the kernels cannot be compiled here")


@pytest.fixture(scope="module")
def pool() -> Iterator[native.Pool | None]:
    library = native.load()
    if library is None:
        yield None
        return
    with native.Pool(library, 2) as pool:
        yield pool


Answer = tuple[list[int], list[float]]
"""Tokens, and the log-probabilities of the likeliest at each of their positions."""
Answers = dict[tuple[int, int], Answer]
"""By adapter, -1 for none, and prompt."""


def answer_of(driven: Driven) -> Answer:
    values = [value for each in driven.logprobs[:NUM_OUTPUTS] for _, value in each.top]
    return driven.output[:NUM_OUTPUTS], values


class Served:
    """A tiny model on an engine, with the adapters `paths`, by their place in the list.

    With `is_whole` weights that are quantised, or that `rounding` quantises, are made whole first; those that the
    adapter `merged` changes have to be.
    """

    def __init__(
        self,
        base: Checkpoint,
        paths: Sequence[Path] = (),
        *,
        pool: native.Pool | None = None,
        merged: Path | None = None,
        is_whole: bool = False,
        rounding: Rounding | None = None,
        dtype: torch.dtype = torch.float32,
        settings: Any = SETTINGS,
    ) -> None:
        place = RankPlace()
        tensors = load_rank(
            base, place, dtype=dtype, rounding=rounding, progress=lambda _: None, cancelled=lambda: False
        )
        if is_whole:
            base = make_whole(base, tensors)
        job = LoadJob(base, place, dtype, CPU, None if is_whole else rounding)
        if merged is not None:
            merge_adapter(tensors, load_adapter(open_adapter(merged, base.config), job.place))
        self.engine: Engine = (
            TorchEngine(base.config, job.place, dtype, CPU) if pool is None else NativeEngine(base.config, dtype, pool)
        )
        self.engine.attach(self.engine.pack(tensors))
        self.adapters = ModelAdapters(settings, job, self.engine)
        self.fingerprints = [self.adapters.table.add(self.adapters.reader().read(path)).fingerprint for path in paths]

    def driver(self, seed: int = 0) -> Driver:
        executor: Any = self.engine.executor(128, 16, 256)
        return Driver(ModelRunner(executor, max_model_len=256, adapters=self.adapters.table), executor, seed)

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Without any adapter, all at once."""
        driver = self.driver()
        for number, prompt in enumerate(prompts):
            driver.add(number, prompt, SAMPLING)
        driver.run(NUM_OUTPUTS)
        return [answer_of(driven) for driven in driver.sequences.values()]


def make_whole(base: Checkpoint, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Dequantises all weights; answers the checkpoint as if it had been stored so."""
    for name in [name.removesuffix(".form") for name in tensors if name.endswith(".form")]:
        packed = take_packed(name, tensors)
        assert packed is not None
        tensors[f"{name}.weight"] = packed.dequantise()
    return replace(base, config=replace(base.config, quantisation=None))


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in (3, 17, 40)]


def make_adapters(folder: Path, base: Checkpoint) -> list[Path]:
    """Two adapters of all products of all layers, of other ranks and factors, and one of the last module only, all
    named as the family names them."""
    modules = {
        name: module.weight_shape
        for name, module in trained_modules(base.config).items()
        if module.is_linear and name.startswith("model.layers.")
    }
    paths = []
    for number, (rank, chosen) in enumerate(((4, list(modules)), (7, list(modules)), (2, list(modules)[-1:]))):
        rng = np.random.default_rng(number)
        tensors = {}
        for name in chosen:
            rows, columns = modules[name]
            tensors[f"{PREFIX}{name}.lora_A.weight"] = rng.standard_normal((rank, columns)).astype(np.float32)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = 0.1 * rng.standard_normal((rows, rank)).astype(np.float32)
        options = {"r": rank, "target_modules": chosen, "use_rslora": number == 1}
        paths.append(write_adapter(folder / str(number), tensors, lora_alpha=6, **options))
    return paths


def run_mixed(served: Served, prompts: Sequence[Sequence[int]], seed: int) -> Answers:
    """Every prompt with every adapter and with none, in chunks of any size, with preemptions."""
    rng, driver = random.Random(seed), served.driver(seed)
    keys = [(adapter, prompt) for adapter in range(-1, len(served.fingerprints)) for prompt in range(len(prompts))]
    rng.shuffle(keys)
    todo = dict(enumerate(keys))
    started: dict[int, tuple[int, int]] = {}
    while todo or any(len(s.output) < NUM_OUTPUTS for s in driver.sequences.values()):
        for _ in range(2 if todo else 0):
            number, (adapter, prompt) = todo.popitem()
            started[number] = (adapter, prompt)
            driver.add(number, prompts[prompt], SAMPLING, adapter=served.fingerprints[adapter] if adapter >= 0 else "")
        waiting = [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]
        victim = rng.choice(waiting) if waiting else None
        if victim is not None and victim.known and rng.random() < 0.3:
            driver.preempt(victim.sequence_id)
        driver.step({s.sequence_id: rng.choice((1, 5, 29)) for s in waiting})
    return {started[number]: answer_of(driven) for number, driven in driver.sequences.items()}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_in_plain_torch_equals_merged_weights(tmp_path: Path, family: str) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES[family]))
    check_family(tmp_path, base, None)


@needs_kernels
@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family_in_the_kernels_equals_merged_weights(
    tmp_path: Path, family: str, pool: native.Pool
) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base", config_overrides=TINY_FAMILIES[family]))
    check_family(tmp_path, base, pool)


def check_family(folder: Path, base: Checkpoint, *pools: native.Pool | None, rounding: Rounding | None = None) -> None:
    paths, prompts = make_adapters(folder, base), prompts_of()
    whole: Any = {"is_whole": True, "rounding": rounding}
    expected = {(-1, i): answer for i, answer in enumerate(Served(base, **whole).answers(prompts))}
    for number, path in enumerate(paths):
        answers = Served(base, merged=path, **whole).answers(prompts)
        expected |= {(number, i): answer for i, answer in enumerate(answers)}
    for pool in pools:
        check_answers(run_mixed(Served(base, paths, pool=pool, rounding=rounding), prompts, 1), expected)
    # Each adapter has said something of its own.
    assert len({tuple(round(value, 2) for value in logprobs) for _, logprobs in expected.values()}) == len(expected)


def check_answers(found: Answers, expected: Answers) -> None:
    assert {key: tokens for key, (tokens, _) in found.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, logprobs) in expected.items():
        assert found[key][1] == pytest.approx(logprobs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.full) for name in WEIGHT_ONLY]
)
def test_every_format_of_weights_equals_those_made_whole_and_merged(
    tmp_path: Path, name: str, pool: native.Pool | None
) -> None:
    base = open_checkpoint(make_tiny_quantised(tmp_path / "base", WEIGHT_ONLY[name]))
    check_family(tmp_path, base, *pools_for(base, pool))


def test_blocks_of_a_gguf_equal_those_made_whole_and_merged(tmp_path: Path, pool: native.Pool | None) -> None:
    types = {"token_embd": "Q8_0", "output.": "Q5_0"}
    base, _ = settle(open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation="Q4_1", types=types)), "auto")
    check_family(tmp_path, base, *pools_for(base, pool))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_what_is_rounded_at_load_equals_that_made_whole_and_merged(
    tmp_path: Path, rounding: Rounding, pool: native.Pool | None
) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    check_family(tmp_path, base, *pools_for(base, pool, rounding), rounding=rounding)


def pools_for(
    base: Checkpoint, pool: native.Pool | None, rounding: Rounding | None = None
) -> Sequence[native.Pool | None]:
    """Plain torch, and the kernels where they compute the model."""
    return [None, *([pool] if pool and computes(base.config, RankPlace(), torch.float32, rounding) else [])]


@pytest.mark.parametrize("name", ROUNDED_INPUTS)
def test_where_inputs_are_rounded_those_of_adapters_are_not(tmp_path: Path, name: str) -> None:
    base = open_checkpoint(make_tiny_quantised(tmp_path, ROUNDED_INPUTS[name]))
    tensors = load_rank(base, RankPlace(), dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
    part = next(part for part in parameters(base.config, RankPlace()) if isinstance(part, Linear))
    x, a, b = (torch.randn(shape, generator=torch.manual_seed(1)) for shape in ((5, 64), (4, 64), (64, 4)))
    packed = take_packed(part.name, tensors)
    assert packed is not None
    expected = make_quantised_linear(packed)(x)
    expected[[1, 3]] += 0.5 * (x[[1, 3]] @ a.T @ b.T)
    linear = ColumnParallelLinear([part])
    linear.place(flatten(part.name, packed))
    which = torch.tensor([-1, 0, -1, 0, -1])
    found = linear(x, RowAdapters([{part.name: Factors(a, b, 0.5)}], which))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_the_kernels_round_inputs_but_those_of_adapters(tmp_path: Path, pool: native.Pool) -> None:
    base = open_checkpoint(make_tiny_quantised(tmp_path / "base", ROUNDED_INPUTS["w8a8"]))
    paths, prompts = make_adapters(tmp_path, base), prompts_of()
    assert computes(base.config, RankPlace(), torch.float32)
    check_answers(run_mixed(Served(base, paths, pool=pool), prompts, 1), run_mixed(Served(base, paths), prompts, 2))


@needs_kernels
def test_in_bfloat16_an_answer_does_not_depend_on_its_batch(tmp_path: Path, pool: native.Pool) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    paths = make_adapters(tmp_path, base)
    served, prompts = Served(base, paths, pool=pool, dtype=torch.bfloat16), prompts_of()
    alone = {}
    for adapter in range(-1, len(paths)):
        for number, prompt in enumerate(prompts):
            driver = served.driver()
            driven = driver.add(0, prompt, SAMPLING, adapter=served.fingerprints[adapter] if adapter >= 0 else "")
            driver.run(NUM_OUTPUTS)
            alone[adapter, number] = answer_of(driven)
            driver.runner.drop_sequences()
    assert [run_mixed(served, prompts, seed) for seed in range(2)] == [alone, alone]


@pytest.mark.parametrize(
    ("native", "tp", "pp", "form"),
    [
        *((False, tp, pp, None) for tp, pp in ((2, 1), (2, 2))),
        *(pytest.param(True, *sizes, None, marks=needs_kernels) for sizes in ((2, 1), (1, 2), (2, 2))),
        pytest.param(True, 2, 1, "gptq_ordered", marks=needs_kernels),
    ],
)
def test_a_group_says_what_one_rank_says(tmp_path: Path, native: bool, tp: int, pp: int, form: str | None) -> None:
    base_path = make_tiny_quantised(tmp_path, WEIGHT_ONLY[form]) if form else make_tiny_llama(tmp_path / "base")
    base, prompts = open_checkpoint(base_path), prompts_of()
    paths = make_adapters(tmp_path, base)
    expected = run_mixed(Served(base, paths), prompts, 1)
    with rank_threads(tp, pp, rank_settings(native_kernels=native, adapter_slots=3)) as ranks:
        ranks.start(base_path, num_blocks=128, block_size=16)
        assert all(isinstance(r._need_model().engine, NativeEngine) is native for r in ranks.runtimes)
        fingerprints = []
        for path in paths:
            # Ranks take adapters in at different times, so that they lie in other slots.
            ranks.each(lambda r, path=path: r.adapters().table.add(r.adapters().reader().read(path)))
            fingerprints.append(load_adapter(open_adapter(path, base.config), RankPlace()).fingerprint)
        last = ranks.runtimes[-1].adapters().table
        last.release(last.take(fingerprints[-1]))
        group = SimpleNamespace(driver=lambda seed: Driver(ranks, ranks, seed), fingerprints=fingerprints)  # type: ignore[arg-type]
        found = run_mixed(group, prompts, 1)  # type: ignore[arg-type]
    assert {key: tokens for key, (tokens, _) in found.items()} == {key: tokens for key, (tokens, _) in expected.items()}


def test_a_sequence_without_its_adapter_fails_alone(tmp_path: Path) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    served = Served(base, make_adapters(tmp_path, base), settings=replace_slots(1))
    driver, prompt = served.driver(), prompts_of()[1]
    for number, adapter in enumerate(("", served.fingerprints[0], served.fingerprints[1], "unknown")):
        driver.add(number, prompt, adapter=adapter)
    output = driver.runner.execute(driver.plan(dict.fromkeys(range(4), 100)))
    assert sorted(output.sequence_ids) == [0, 1]
    assert set(output.errors) == {2, 3}
    assert "all 1 adapter slots" in output.errors[2] and "'unknown' is not on this worker" in output.errors[3]


def replace_slots(count: int) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(SETTINGS), "adapter_slots": count})


def test_what_takes_no_adapters_says_so(tmp_path: Path) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    config = base.config
    for changed, slots, text in (
        (config, 0, "adapter_slots"),
        (replace(config, other=SimpleNamespace()), 2, "transformers' definition"),  # type: ignore[arg-type]
    ):
        problem = adapter_problem(changed, num_slots=slots)
        assert problem is not None and text in problem
    assert adapter_problem(config, num_slots=1) is None
    served = Served(base, settings=replace_slots(0))
    assert (served.adapters.num_slots, served.adapters.device_bytes) == (0, 0)
    with pytest.raises(RuntimeFailure, match="adapter_slots"):
        served.adapters.reader()


def test_what_is_read_fits_into_the_bytes_that_are_set_aside(tmp_path: Path, pool: native.Pool | None) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    modules = layer_modules(base.config, *ALL_KINDS)
    tensors = adapter_tensors(base.config, dict.fromkeys(modules, 16))
    path = write_adapter(tmp_path / "a", tensors, r=16, target_modules=modules)
    for own_pool in (None, pool):
        served = Served(base, [path], pool=own_pool)
        (report,) = served.adapters.table.reports()
        assert report.num_bytes == slot_bytes(base.config, RankPlace(), torch.float32, 16)
        assert served.adapters.device_bytes == 4 * report.num_bytes


def test_adapters_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    base = open_checkpoint(make_tiny_llama(tmp_path / "base"))
    reader = Served(base).adapters.reader()
    high = write_adapter(
        tmp_path / "high", adapter_tensors(base.config, {"model.layers.0.self_attn.q_proj": 17}), r=17,
        target_modules=["layers.0.self_attn.q_proj"],
    )  # fmt: skip
    embedding = write_adapter(
        tmp_path / "e", adapter_tensors(base.config, {EMBEDDING: 4}), target_modules=["embed_tokens"]
    )
    tensors = adapter_tensors(base.config, {"model.layers.0.self_attn.q_proj": 4})
    next(iter(tensors.values()))[1, 2] = float("nan")
    broken = write_adapter(tmp_path / "nan", tensors, target_modules=["layers.0.self_attn.q_proj"])
    for path, text in ((high, "at most 16"), (embedding, "only products of layers"), (broken, "not finite")):
        with pytest.raises(CheckpointError, match=text):
            reader.read(path)
    small = SimpleNamespace(**{**vars(SETTINGS), "adapter_host_bytes": 100})
    with pytest.raises(RuntimeFailure, match="adapter_host_bytes"):
        Served(base, settings=small).adapters.reader().read(make_adapters(tmp_path, base)[0])
