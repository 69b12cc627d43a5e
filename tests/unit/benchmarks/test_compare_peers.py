"""Which part of the comparison the command line asks for, and what it refuses."""

import pytest

from benchmarks.compare_peers import check_counts, parse
from benchmarks.peers.rates import Answer
from benchmarks.peers.rows import ROWS


def test_all_of_it_by_default() -> None:
    found = parse([])
    assert (found.rows, found.peers, found.starts, found.quick) == (ROWS, ("vllm", "llamacpp", "hf"), True, False)


def test_a_part_of_it() -> None:
    found = parse(["--rows", "b8,start", "--peers=hf,vllm", "--quick", "--serve-flag=--threads=1"])
    assert [row.key for row in found.rows] == ["b8"]
    assert (found.peers, found.starts, found.quick) == (("vllm", "hf"), True, True)
    assert found.serve_flags == ("--threads=1",)


@pytest.mark.parametrize("arguments", [["--rows=b9"], ["--peers=sglang"]])
def test_what_there_is_not_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "there is no" in capsys.readouterr().err


def test_a_system_that_ends_early_does_not_count_as_fast() -> None:
    check_counts("hf", Answer([[1, 2]], [[0.1, 0.2]]), 1, 2)
    for answer in (Answer([[1]], [[0.1]]), Answer([[1, 2]], [[0.1]]), Answer([], [])):
        with pytest.raises(SystemExit, match="hf made"):
            check_counts("hf", answer, 1, 2)
