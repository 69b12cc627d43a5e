"""Runs the Triton kernels in Triton's interpreter, in a process of its own: all of Triton must be imported for it.

Prints the largest error of each case that is named, against the reference, as JSON.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from worker_service.kernels.paged import triton_paged
from worker_service.kernels.paged.choose import Trial, largest_error
from worker_service.kernels.paged.problem import Rule
from worker_service.models.scores import Scores

CPU = torch.device("cpu")
PLAIN, CAPPED = Rule(Scores(0.1)), Rule(Scores(0.1, 2.0), 9)

# The interpreter multiplies no bfloat16, and rounds to float8 wrongly where a carry goes into the exponent.
CASES = {
    "float32": Trial(6, 2, 64, 16, torch.float32, CPU, None, (PLAIN, CAPPED)),
    "odd sizes": Trial(3, 1, 80, 4, torch.float16, CPU, None, (PLAIN,)),
    "large heads": Trial(4, 4, 256, 16, torch.float32, CPU, None, (CAPPED,)),
    "int8": Trial(6, 2, 128, 16, torch.float32, CPU, torch.int8, (PLAIN, CAPPED)),
    "int8 in float16": Trial(2, 1, 96, 32, torch.float16, CPU, torch.int8, (PLAIN,)),
    # Parts of 16 positions, of which sequences leave some without any, and the window skips some.
    "split": Trial(4, 2, 32, 64, torch.float32, CPU, None, (PLAIN, Rule(Scores(0.2), 40))),
}


def main() -> None:
    """Computes the cases."""
    torch.set_num_threads(1)
    errors = {}
    for name in sys.argv[1:]:
        triton_paged._SPLIT_POSITIONS = 16 if name == "split" else 256
        errors[name] = largest_error(triton_paged.TritonKernel(), CASES[name])
    print(json.dumps(errors))  # noqa: T201 - a process's answer


if __name__ == "__main__":
    main()
