"""llama.cpp, all sequences of a question in one batch. Runs in the llamacpp peer's environment; see peer_loop.py.

Its own batched benchmark does the same: prompts in batches of 2,048 tokens, then one token of each sequence a step,
the most likely one taken from the logits, which lie in memory already.
"""

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
from peer_loop import Answer, Generate, run

_BATCH_TOKENS = 2048


class Engine:
    """A model, and a context that fits the question."""

    def __init__(self, options: dict[str, Any]) -> None:
        # Kept, because llama.cpp calls it as long as it lives.
        self._silence = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = options["threads"]
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(options["model"].encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {options['model']}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._shape = (0, 0)
        self._context: Any = None
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int, _stream: bool) -> Answer:
        """Greedy continuations of prompts of one length."""
        self._fit(len(prompts), len(prompts[0]) + max_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for step in range(max_tokens):
            if step:
                entries = [(s[-1], len(prompts[0]) + step - 1, i, True) for i, s in enumerate(tokens)]
            else:
                last = len(prompts[0]) - 1
                entries = [
                    (token, at, i, at == last) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)
                ]
            for index, token in self._decode(entries):
                tokens[index].append(token)
                times[index].append(time.perf_counter() - begin)
        return tokens, times

    def _fit(self, num_sequences: int, length: int) -> None:
        """Makes the context anew when the question has another shape; each sequence has its own cache."""
        if self._shape == (num_sequences, length):
            return
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * (-(-length // 256) * 256)
        parameters.n_seq_max = num_sequences
        parameters.n_batch = _BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._shape = (num_sequences, length)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Computes (token, position, sequence, wants logits); answers (sequence, its next token)."""
        answers = []
        for start in range(0, len(entries), _BATCH_TOKENS):
            part = entries[start : start + _BATCH_TOKENS]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wants) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = wants
            if llama_cpp.llama_decode(self._context, batch) != 0:
                raise SystemExit("llama_decode failed")
            answers += [(sequence, self._best(i)) for i, (_, _, sequence, wants) in enumerate(part) if wants]
        return answers

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def make(options: dict[str, Any]) -> Generate:
    """The model, loaded."""
    return Engine(options).generate


if __name__ == "__main__":
    run(make)
