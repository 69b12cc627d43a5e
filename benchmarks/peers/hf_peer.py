"""transformers' `generate` on a static batch. Runs in the hf peer's environment; see peer_loop.py."""

import time
from typing import Any

import torch
from peer_loop import Answer, Generate, run
from transformers import AutoModelForCausalLM, StoppingCriteria


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Called after each token."""
        self.times.append(time.perf_counter() - self.begin)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make(options: dict[str, Any]) -> Generate:
    """The model, loaded."""
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], max_tokens: int, _stream: bool) -> Answer:
        clock = Clock()
        batch = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=[clock],
            )
        return output[:, batch.shape[1] :].tolist(), [clock.times] * len(prompts)

    return generate


if __name__ == "__main__":
    run(make)
