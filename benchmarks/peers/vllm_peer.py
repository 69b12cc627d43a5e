"""vLLM's CPU engine, offline. Runs in the vLLM peer's environment; see peer_loop.py."""

import itertools
import time
from typing import Any

from peer_loop import Answer, Generate, run


def make(options: dict[str, Any]) -> Generate:
    """The engine, loaded."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        disable_log_stats=True,
    ).llm_engine
    numbers = itertools.count()

    def generate(prompts: list[list[int]], max_tokens: int, stream: bool) -> Answer:
        # As LLM.generate asks: nothing is put together before a sequence has ended.
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=kind
        )
        tokens: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            name = str(next(numbers))
            tokens[name], times[name] = [], []
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = list(output.outputs[0].token_ids)
                tokens[output.request_id] += new
                times[output.request_id] += [time.perf_counter() - begin] * len(new)
        return list(tokens.values()), list(times.values())

    return generate


# vLLM starts its engine with multiprocessing's "spawn", which imports this file again.
if __name__ == "__main__":
    run(make)
