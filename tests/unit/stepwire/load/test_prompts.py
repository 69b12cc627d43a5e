from stepwire.load.prompts import PromptMaker
from stepwire.simulation.arrivals import Arrival


def test_prompts_have_their_length_and_their_ids() -> None:
    maker = PromptMaker(50_000, seed=1)
    prompt = maker.make(0, Arrival(0.0, 1000, 1))
    assert len(prompt) == 1000
    assert min(prompt) >= 256
    assert max(prompt) < 50_000
    assert set(PromptMaker(100, seed=1).make(0, Arrival(0.0, 5000, 1))) == set(range(100))


def test_shared_prefixes_are_shared_and_nothing_else() -> None:
    maker = PromptMaker(50_000, seed=1)
    shared = [maker.make(i, Arrival(0.0, 100, 1, prefix=i % 2, num_prefix_tokens=60)) for i in range(4)]
    assert shared[0][:60] == shared[2][:60] != shared[1][:60] == shared[3][:60]
    assert shared[0][60:] != shared[2][60:]
    assert {len(prompt) for prompt in shared} == {100}


def test_prompts_are_repeatable_by_their_seed() -> None:
    arrival = Arrival(0.0, 20, 1)
    assert PromptMaker(500, 1).make(3, arrival) == PromptMaker(500, 1).make(3, arrival)
    assert PromptMaker(500, 1).make(3, arrival) != PromptMaker(500, 2).make(3, arrival)
