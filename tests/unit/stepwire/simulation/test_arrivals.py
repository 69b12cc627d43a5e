import itertools
import random
import statistics
from pathlib import Path

import pytest

from stepwire.simulation.arrivals import Arrival, Mix, parse_lengths, poisson_arrivals, read_trace, speed_up


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("fixed:3", 3, 3), ("uniform:2:5", 2, 5)])
def test_lengths_lie_where_they_should(text: str, low: int, high: int) -> None:
    rng = random.Random(1)
    drawn = {parse_lengths(text).draw(rng) for _ in range(200)}
    assert drawn == set(range(low, high + 1))


def test_lognormal_lengths_have_their_median_and_largest() -> None:
    rng = random.Random(1)
    drawn = [parse_lengths("lognormal:100:1:500").draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1)
    assert max(drawn) == 500
    assert min(parse_lengths("lognormal:1:3").draw(rng) for _ in range(200)) == 1


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "fixed:0", "uniform:5:2", "uniform:5", "lognormal:5", "fixed:nan", "fixed:inf", "fixed:"],
)
def test_what_is_no_distribution_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="uniform:LOW:HIGH"):
        parse_lengths(text)


def test_poisson_arrivals_have_their_rate_and_are_repeatable() -> None:
    def some(seed: int) -> list[Arrival]:
        rng = random.Random(seed)
        return list(itertools.islice(poisson_arrivals(5.0, parse_lengths("10"), parse_lengths("2"), rng), 5000))

    arrivals = some(1)
    gaps = [after.time_s - before.time_s for before, after in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    # Of exponential gaps the deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert some(1) == arrivals != some(2)
    with pytest.raises(ValueError, match="rate"):
        next(poisson_arrivals(0.0, parse_lengths("1"), parse_lengths("1"), random.Random(1)))


def test_a_trace_begins_at_zero_and_is_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9000000,374,44\n"
        "2023-11-17 00:00:01.1500001,10,0\n"
        "2023-11-17 00:00:00.4000000,0,3\n"
    )
    assert [(round(a.time_s, 6), a.num_prompt_tokens, a.num_output_tokens) for a in read_trace(path)] == [
        (0.0, 374, 44),
        (0.5, 1, 3),
        (1.25, 10, 1),
    ]
    assert len(read_trace(path, max_requests=2)) == 2
    assert [round(a.time_s, 6) for a in speed_up(read_trace(path), 2.0)] == [0.0, 0.25, 0.625]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no arrivals"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,x\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\nnever,2,3\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_mix_gives_shares_and_longer_prompts() -> None:
    plain = [Arrival(float(i), 10, 5) for i in range(4000)]
    mix = Mix(high_share=0.2, deadline_s=3.0, prefix_share=0.5, num_prefixes=3, num_prefix_tokens=100)
    mixed = list(mix.apply(plain, random.Random(1)))
    assert statistics.mean(a.priority for a in mixed) == pytest.approx(0.2, abs=0.03)
    shared = [a for a in mixed if a.num_prefix_tokens]
    assert len(shared) == pytest.approx(2000, rel=0.1)
    assert {a.prefix for a in shared} == {0, 1, 2}
    assert {(a.num_prompt_tokens, a.num_prefix_tokens) for a in mixed} == {(10, 0), (110, 100)}
    assert {a.deadline_s for a in mixed} == {3.0}
    assert list(Mix().apply(plain, random.Random(1))) == plain


@pytest.mark.parametrize("wrong", [{"high_share": 1.5}, {"prefix_share": -0.1}, {"prefix_share": 0.5}])
def test_a_mix_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Mix(**wrong)  # type: ignore[arg-type]


def test_the_traces_of_azure_can_be_read() -> None:
    folder = Path(__file__).resolve().parents[5] / "shared/data/azure-llm-trace-2023"
    if not folder.is_dir():
        pytest.skip(f"the traces are not at {folder}")
    arrivals = read_trace(folder / "code.csv")
    assert len(arrivals) == 8819
    assert 3000 < arrivals[-1].time_s < 3700
    assert (arrivals[0].num_prompt_tokens, arrivals[0].num_output_tokens) == (4808, 10)
