"""What the peers' scripts have in common: options from the command line, then one JSON line a question.

Runs in the peers' own environments: standard library only.

A question is {"prompts": [[ids]], "max_tokens": n, "stream": bool}; its answer is {"tokens": [[ids]], "times": [[s]]},
where times count from the moment at which the engine was given the prompts, one for each token. An engine may give
all tokens of a sequence the time of the last one unless the question says "stream". Standard output carries answers
and nothing else; what libraries print there goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = tuple[list[list[int]], list[list[float]]]
Generate = Callable[[list[list[int]], int, bool], Answer]


def run(make: Callable[[dict[str, Any]], Generate]) -> None:
    """Makes the engine with the options of the command line, then answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = make(json.loads(sys.argv[1]))
    for line in sys.stdin:
        question = json.loads(line)
        tokens, times = generate(question["prompts"], question["max_tokens"], question["stream"])
        print(json.dumps({"tokens": tokens, "times": times}), file=answers, flush=True)
