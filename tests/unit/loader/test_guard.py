from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loader.errors import CheckpointError
from loader.guard import refuse_failures


def guarded(error: BaseException) -> None:
    with refuse_failures(Path("a"), "is broken", "replace it"):
        raise error


class PanicException(BaseException):
    """Stands for the library's own, which has this name and cannot be imported."""


@pytest.mark.parametrize("error", [Exception("why"), ValueError("why"), PanicException("why")])
def test_what_the_library_raises_is_refused(error: BaseException) -> None:
    with pytest.raises(CheckpointError, match="a is broken: why; replace it") as caught:
        guarded(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), CheckpointError("unsupported", "b", "c")])
def test_what_is_no_fault_of_the_file_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        guarded(error)
    assert caught.value is error


def test_a_real_failure_of_the_library() -> None:
    with pytest.raises(CheckpointError), refuse_failures(Path("a"), "is broken", "replace it"):
        Tokenizer.from_str("{}")
