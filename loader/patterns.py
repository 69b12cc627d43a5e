"""Regular expressions from outside, matched where they can do no harm. Imports no torch."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loader.errors import CheckpointError

TIMEOUT_S = 5.0
_MEMORY_BYTES = 512 << 20
# Reads [expressions, names]; prints, for each expression, the numbers of the names it matches, or why it is none.
_SCRIPT = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY_BYTES}, {_MEMORY_BYTES}))
expressions, names = json.load(sys.stdin)
answers = []
for expression in expressions:
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        answers.append(f"{{type(error).__name__}}: {{error}}"[:200])
        continue
    answers.append([number for number, name in enumerate(names) if compiled.fullmatch(name)])
print(json.dumps(answers))
"""


def full_matches(file: Path, expressions: Sequence[str], names: Sequence[str]) -> list[frozenset[str]]:
    """For each expression the names that it matches as a whole, in the sense of `re.fullmatch`.

    An expression can take longer than anyone waits, and `re` cannot be stopped, so another process matches: it is
    killed after `TIMEOUT_S`. Raises CheckpointError, naming `file`, for one that takes longer or is none.
    """
    if not expressions:
        return []
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    question = json.dumps([list(expressions), list(names)])
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(file, f"an expression that takes more than {TIMEOUT_S:g} s to match", expressions[0]) from error
    if done.returncode != 0:
        raise _refused(file, "an expression that takes too much to match", expressions[0])
    matched = []
    for expression, answer in zip(expressions, json.loads(done.stdout), strict=True):
        if isinstance(answer, str):
            raise _refused(file, f"{expression[:200]!r}, which is no regular expression ({answer})", expression)
        matched.append(frozenset(names[number] for number in answer))
    return matched


def _refused(file: Path, what: str, found: str) -> CheckpointError:
    remedy = "name the modules one by one"
    return CheckpointError("invalid", f"{file} holds {what}", remedy, file=file, expected="module names", found=found)
