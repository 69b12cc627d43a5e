import pytest

from worker_service.runtime.dummy import largest_lengths


@pytest.mark.parametrize(("tokens", "sequences", "longest"), [(512, 64, 512), (5, 64, 100), (512, 4, 100), (1, 1, 1)])
def test_the_largest_step_is_as_large_as_it_may_be(tokens: int, sequences: int, longest: int) -> None:
    lengths = largest_lengths(tokens, sequences, longest)
    assert len(lengths) == min(tokens, sequences)
    assert sum(lengths) == min(tokens, longest * len(lengths))
    assert all(1 <= length <= longest for length in lengths)
