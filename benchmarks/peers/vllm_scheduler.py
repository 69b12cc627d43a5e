"""Runs inside the vLLM peer's environment: vLLM's own V1 scheduler over a trace, with the model stubbed.

Reads a trace (JSON, see benchmarks/scheduler_vs_vllm.py) from the file named first, prints one line of JSON.
Two steps are in flight, as in vLLM's default asynchronous scheduling.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def make_scheduler(trace: dict[str, Any], folder: Path) -> Any:
    """vLLM's asynchronous scheduler with the trace's limits, on a model that exists as a config only."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "vocab_size": trace["vocab_size"],
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
        "eos_token_id": trace["stop_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    scheduler_config = SchedulerConfig(
        max_num_seqs=trace["max_running"],
        max_num_batched_tokens=trace["max_step_tokens"],
        max_model_len=8192,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=True,
    )
    model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")
    cache_config = CacheConfig(block_size=trace["block_size"], enable_prefix_caching=True)
    vllm_config = VllmConfig(scheduler_config=scheduler_config, model_config=model_config, cache_config=cache_config)
    spec = FullAttentionSpec(block_size=trace["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=trace["num_blocks"] + 1,  # one is vLLM's null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    cache_config.num_gpu_blocks = trace["num_blocks"] + 1
    return AsyncScheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=trace["block_size"],
        log_stats=True,
    )


def make_requests(trace: dict[str, Any]) -> list[Any]:
    """The trace's requests as vLLM's own, with its default block hashing."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(trace["block_size"], sha256)
    requests = []
    for index, row in enumerate(trace["requests"]):
        sampling = SamplingParams(max_tokens=row["max_tokens"], temperature=0.0)
        sampling.update_from_generation_config({}, trace["stop_token_id"])
        requests.append(
            Request(
                request_id=str(index),
                prompt_token_ids=row["prompt"],
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    return requests


def answer(plan: Any, trace: dict[str, Any], sampled: dict[str, int]) -> Any:
    """What a model runner would answer to a step, with tokens that follow from the trace."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(plan.num_scheduled_tokens)
    computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    cached = plan.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    tokens: list[list[int]] = []
    for request_id in ids:
        row, done = trace["requests"][int(request_id)], sampled.get(request_id, 0)
        if computed[request_id] + plan.num_scheduled_tokens[request_id] == len(row["prompt"]) + done:
            sampled[request_id] = done + 1
            is_last = done + 1 == row["stop_at"]
            tokens.append([trace["stop_token_id"] if is_last else 3 + (int(request_id) * 31 + done) % 1000])
        else:
            tokens.append([])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def main() -> None:
    """Drives the scheduler until every request has ended."""
    trace = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(trace, Path(folder))
    add_us: list[float] = []
    requests = make_requests(trace)
    for request in requests:
        began = time.perf_counter_ns()
        scheduler.add_request(request)
        add_us.append((time.perf_counter_ns() - began) / 1e3)
    sampled: dict[str, int] = {}
    samples: list[list[float]] = []
    blocks: list[int] = []
    hits = queries = num_steps = 0
    in_flight: deque[tuple[Any, Any, float]] = deque()
    while scheduler.has_unfinished_requests() or in_flight:
        if scheduler.has_unfinished_requests():
            began = time.perf_counter_ns()
            plan = scheduler.schedule()
            schedule_us = (time.perf_counter_ns() - began) / 1e3
            num_steps += 1
            blocks.append(trace["num_blocks"] - scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
            in_flight.append((plan, answer(plan, trace, sampled), schedule_us))
            if len(in_flight) < 2:
                continue
        plan, output, schedule_us = in_flight.popleft()
        began = time.perf_counter_ns()
        results = scheduler.update_from_output(plan, output)
        update_us = (time.perf_counter_ns() - began) / 1e3
        if len(plan.num_scheduled_tokens) == trace["max_running"]:
            samples.append([schedule_us, update_us])
        for result in results.values():
            stats = result.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                hits += stats.prefix_cache_stats.hits
                queries += stats.prefix_cache_stats.queries
    print(
        json.dumps(
            {
                "schedule_us": statistics.median(s[0] for s in samples),
                "apply_us": statistics.median(s[1] for s in samples),
                "step_us": statistics.median(sum(s) for s in samples),
                "add_us": statistics.median(add_us),
                "full_steps": len(samples),
                "steps": num_steps,
                "hit_rate": hits / queries,
                "peak_blocks": max(blocks),
                "mean_blocks": statistics.mean(blocks),
            }
        )
    )


if __name__ == "__main__":
    main()
