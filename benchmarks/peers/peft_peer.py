"""What PEFT answers with each adapter, greedily, in float32. Runs in the hf peer's environment.

Standard input is {"model": path, "adapters": {name: path}, "prompts": {name: [[ids]]}, "max_tokens": n, "threads": n}
as JSON; standard output is {name: [[ids]]}, the tokens that each prompt is continued with.
"""

import json
import os
import sys
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answers one question. What libraries print goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.loads(sys.stdin.read())
    torch.set_num_threads(question["threads"])
    base = AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32).eval()
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    model: Any = None
    answers = {}
    for name, path in question["adapters"].items():
        if model is None:
            model = PeftModel.from_pretrained(base, path, adapter_name=name).eval()
        else:
            model.load_adapter(path, adapter_name=name)
        model.set_adapter(name)
        answers[name] = [_continue(model, prompt, question["max_tokens"]) for prompt in question["prompts"][name]]
    print(json.dumps(answers), file=output, flush=True)


def _continue(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    batch = torch.tensor([prompt])
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_tokens, do_sample=False
        )
    made: list[int] = tokens[0, len(prompt) :].tolist()
    return made


if __name__ == "__main__":
    main()
