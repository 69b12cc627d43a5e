"""Groups of ranks: their tokens are those of one rank, and what becomes of a group that loses one."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.shares import RankPlace
from tests.support.mixture import NUM_OUTPUTS, mixed_prompts, run_mixture
from tests.support.rank_threads import TIMEOUT_S, RankThreads, rank_settings, rank_threads
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_runner import Driver, one_thread
from worker_service.kernels.native import load as load_kernels
from worker_service.models.native import LAYOUT
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import Meeting, Phase
from worker_service.runtime.step import Sampling
from worker_service.runtime.worker import WorkerRuntime

LENGTHS = (1, 5, 17, 31)
NEEDS_KERNELS = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "odd": {"hidden_size": 96, "heads": 6, "kv_heads": 3, "intermediate_size": 126, "vocab_size": 325},
    "in threes": {"hidden_size": 96, "heads": 6, "kv_heads": 3, "intermediate_size": 144, "vocab_size": 325},
    "padded and tied": {"vocab_size": 321, "tie": True, "num_layers": 3},
    "mixtral": {"config_overrides": TINY_FAMILIES["mixtral"]},
    "qwen3_moe": {"config_overrides": TINY_FAMILIES["qwen3_moe"], "num_layers": 3},
    "olmo2": {"config_overrides": TINY_FAMILIES["olmo2"]},
    "gemma3": {"config_overrides": TINY_FAMILIES["gemma3"], "num_layers": 4},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_tiny_llama(tmp_path_factory.mktemp("group") / "model", **options) for name, options in MODELS.items()
    }


def mixture(path: Path, tp: int, pp: int, *, native: bool = False, dtype: str = "float32") -> list[list[int]]:
    with rank_threads(tp, pp, rank_settings(native_kernels=native)) as ranks:
        ranks.start(path, dtype=dtype, **({"num_blocks": 64, "block_size": 16} if native else {}))
        assert all((r._need_model().engine.layout == LAYOUT) is native for r in ranks.runtimes)
        # Without the kernels, gloo.
        assert all((r.group._shared is not None) is (native and tp > 1) for r in ranks.runtimes)
        return run_mixture(ranks, ranks, mixed_prompts(320, LENGTHS))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def of_one(paths: dict[str, Path]) -> Callable[..., list[list[int]]]:
    """What one rank says of a model, computed once."""
    return functools.cache(lambda model, native=False: mixture(paths[model], 1, 1, native=native))


@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        ("llama", 2, 1),
        ("llama", 4, 1),  # two key-value heads: each is on two ranks
        ("llama", 1, 2),
        ("odd", 3, 1),
        ("padded and tied", 2, 2),
        ("padded and tied", 1, 3),
        ("mixtral", 2, 1),
        ("qwen3_moe", 2, 2),
        ("olmo2", 2, 1),
        ("gemma3", 2, 2),
    ],
)
def test_a_group_says_what_one_rank_says(
    paths: dict[str, Path], of_one: Callable[..., list[list[int]]], model: str, tp: int, pp: int
) -> None:
    """Chunked prefill, shared prefixes and preemption among it; in float32."""
    assert mixture(paths[model], tp, pp) == of_one(model)


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        ("llama", 4, 1),
        ("in threes", 3, 1),
        ("padded and tied", 1, 3),
        ("padded and tied", 2, 2),
        ("gemma3", 2, 2),
    ],
)
def test_a_group_on_the_compiled_kernels_says_what_one_rank_says(
    paths: dict[str, Path], of_one: Callable[..., list[list[int]]], model: str, tp: int, pp: int
) -> None:
    assert mixture(paths[model], tp, pp, native=True) == of_one(model, native=True)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=NEEDS_KERNELS)])
def test_a_group_computes_in_bfloat16(paths: dict[str, Path], *, native: bool) -> None:
    outputs = mixture(paths["llama"], 2, 2, native=native, dtype="bfloat16")
    assert all(len(output) == NUM_OUTPUTS for output in outputs)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_random_tokens_are_those_of_one_rank(paths: dict[str, Path], tp: int, pp: int) -> None:
    def drawn(tp: int, pp: int) -> list[list[int]]:
        with rank_threads(tp, pp) as ranks:
            ranks.start(paths["llama"])
            driver = Driver(ranks, ranks)  # type: ignore[arg-type]
            for number, prompt in enumerate(mixed_prompts(320, LENGTHS)):
                sampling = Sampling(temperature=1.0, seed=number, top_p=0.9, repetition_penalty=1.2, logprobs=2)
                driver.add(number, prompt, sampling)
            driver.run(12)
            assert all(len(s.logprobs) == 12 for s in driver.sequences.values())
            return [s.output for s in driver.sequences.values()]

    assert drawn(tp, pp) == drawn(1, 1)


def test_a_sequence_that_goes_while_its_token_is_on_its_way_leaves_no_trace(paths: dict[str, Path]) -> None:
    """Its row is taken by another one, of which the first stage then must not think that the token is its own."""
    prompts = mixed_prompts(320, (9, 9))

    def outputs(pp: int) -> list[int]:
        with rank_threads(1, pp) as ranks:
            ranks.start(paths["llama"])
            driver = Driver(ranks, ranks)  # type: ignore[arg-type]
            driver.add(0, prompts[0])
            driver.step({0: 100})
            driver.finish(0)
            other = driver.add(1, prompts[1])
            driver.run(6)
            return other.output

    assert outputs(2) == outputs(1)


def peer_lost(call: Any) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        call()
    assert caught.value.code == "peer_lost"
    return str(caught.value)


def test_ranks_that_wait_for_one_that_leaves_fail_at_once_and_meet_again_in_a_new_epoch(
    paths: dict[str, Path],
) -> None:
    with rank_threads(2) as ranks:
        ranks.start(paths["llama"])
        driver = Driver(ranks, ranks)  # type: ignore[arg-type]
        driver.add(0, [1, 2, 3])
        step = driver.plan({0: 3})
        waiting = ranks.begin(0, lambda r: r.execute(step))
        begin = time.monotonic()
        ranks.begin(1, lambda r: r.leave_group()).result(TIMEOUT_S)
        assert "lost" in peer_lost(lambda: waiting.result(TIMEOUT_S))
        assert time.monotonic() - begin < rank_settings().collective_timeout / 2
        driver.add(1, [1, 2, 3])
        later = driver.plan({1: 3})
        peer_lost(lambda: ranks.begin(0, lambda r: r.execute(later)).result(TIMEOUT_S))

        # One of them is another process now; the other has kept its weights.
        ranks.runtimes[1] = WorkerRuntime(rank_settings())
        ranks.each(lambda r: r.reset(Phase.LOADED))
        ranks.meet()
        held = ranks.each(lambda r: r.load_model(paths["llama"], "float32", lambda *_: None, lambda: False))
        assert [summary.already_loaded for summary in held] == [True, False]
        ranks.each(lambda r: r.initialize_cache(256, 4, 256))
        again = Driver(ranks, ranks)  # type: ignore[arg-type]
        sequence = again.add(0, [1, 2, 3])
        again.run(4)
        assert len(sequence.output) == 4


def test_a_rank_that_fails_by_itself_lets_the_others_go(paths: dict[str, Path]) -> None:
    with rank_threads(2) as ranks:
        ranks.start(paths["llama"])

        def out_of_memory(*_: object) -> None:
            raise MemoryError

        model = ranks.runtimes[1]._need_executor()._model  # type: ignore[attr-defined]
        model.forward = out_of_memory
        driver = Driver(ranks, ranks)  # type: ignore[arg-type]
        driver.add(0, [1, 2, 3])
        step = driver.plan({0: 3})
        first, second = (ranks.begin(rank, lambda r: r.execute(step)) for rank in range(2))
        with pytest.raises(RuntimeFailure) as caught:
            second.result(TIMEOUT_S)
        assert caught.value.code == "out_of_memory"
        peer_lost(lambda: first.result(TIMEOUT_S))


@NEEDS_KERNELS
def test_ranks_that_share_memory_fail_at_once_with_one_that_leaves() -> None:
    with rank_threads(2, settings=rank_settings(native_kernels=True)) as ranks:
        ranks.meet()
        waiting = ranks.begin(0, lambda r: r.group.all_reduce(torch.ones(2)))
        ranks.begin(1, lambda r: r.leave_group()).result(TIMEOUT_S)
        assert "it has left the group" in peer_lost(lambda: waiting.result(TIMEOUT_S))
        # What shared memory has no sums of goes the other way.
        ranks.meet()
        summed = ranks.each(lambda r: r.group.all_reduce(torch.ones(2, dtype=torch.float64)))
        assert all((made == 2).all() for made in summed)


def test_a_rank_that_does_not_come_is_told_of(paths: dict[str, Path]) -> None:
    """vllm #58290, #17167: ranks waited for each other for ever."""
    del paths
    settings = rank_settings(collective_timeout=0.5)
    with rank_threads(2, settings=settings) as ranks:
        place = RankPlace(0, 2)
        address = ranks.begin(0, lambda r: r.init_device(place, Meeting(1))).result(TIMEOUT_S).rendezvous
        assert address.startswith("127.0.0.1:")
        with pytest.raises(RuntimeFailure) as caught:
            ranks.begin(0, lambda r: r.init_device(place, Meeting(1, address))).result(TIMEOUT_S)
        assert (caught.value.code, caught.value.metadata["rendezvous"]) == ("rendezvous_failed", address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", ":5", "a:b", "x" * 400 + ":1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        WorkerRuntime(rank_settings()).init_device(RankPlace(1, 2), Meeting(1, address))
    assert caught.value.code == "invalid"


def test_an_interface_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(RuntimeFailure, match=r"collective_interface to one of .*lo"):
        WorkerRuntime(rank_settings(collective_interface="nope0")).init_device(RankPlace(0, 2), Meeting(1))


def test_a_launcher_says_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = WorkerRuntime(rank_settings(rendezvous="env://"))
    with pytest.raises(RuntimeFailure, match="MASTER_ADDR"):
        runtime.init_device(RankPlace(0, 2), Meeting(1))
    with rank_threads(2, settings=rank_settings(rendezvous="env://")) as ranks:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "0")
        assert ranks.meet().startswith("127.0.0.1:")


def test_what_collectives_cost_is_counted() -> None:
    with rank_threads(2) as ranks:
        ranks.meet()
        summed = ranks.each(lambda r: r.group.all_reduce(torch.ones(3, 5)))
        assert all(torch.equal(tensor, torch.full((3, 5), 2.0)) for tensor in summed)
        agreed = [ranks.begin(rank, lambda r, n=rank: r.group.agree(np.array([n, 7]))) for rank in range(2)]  # type: ignore[misc]
        assert [future.result(TIMEOUT_S).tolist() for future in agreed] == [[0, 7], [0, 7]]
        cost = ranks.runtimes[0].group.cost
        assert (cost.num_calls, cost.num_bytes) == (2, 60 + 16)
        assert cost.duration_ns > 0


def test_a_group_of_one_meets_nowhere(paths: dict[str, Path]) -> None:
    ranks = RankThreads(1)
    try:
        assert ranks.meet() == ""
        ranks.start(paths["llama"])
    finally:
        ranks.close()
