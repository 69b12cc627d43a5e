"""The block manager: tables, promised blocks and shared prefixes of sequences."""

import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.kv_blocks import BlockManager
from scheduler_service.core.request import Request, Sequence

BLOCK = 4


def manager(num_blocks: int = 16, *, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(SchedulerConfig(num_blocks, BLOCK, 8, 64, prefix_caching=prefix_caching))


def sequence_of(blocks: BlockManager, token_ids: list[int], **fields: str) -> Sequence:
    request = Request("r", token_ids, 8, **fields)  # type: ignore[arg-type]
    return Sequence(1, 0, request, 0.0, list(token_ids), len(token_ids) + 7, blocks.key_chain(request))


def run(blocks: BlockManager, token_ids: list[int], **fields: str) -> Sequence:
    """A sequence whose prompt is computed and published."""
    sequence = sequence_of(blocks, token_ids, **fields)
    blocks.start(sequence, blocks.find_prefix(sequence))
    num = len(token_ids) - sequence.computed
    blocks.grow(sequence, blocks.num_missing(sequence, num))
    blocks.advance(sequence, num)
    return sequence


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_fill_blocks_the_last_perhaps_in_part(tokens: int, expected: int) -> None:
    assert manager().num_blocks_for(tokens) == expected


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 4), (7, 4), (8, 8)])
def test_siblings_share_full_prompt_blocks(length: int, expected: int) -> None:
    request = Request("r", list(range(length)), 1, n=2)
    assert manager().num_leading_tokens(request) == expected
    assert manager(prefix_caching=False).num_leading_tokens(request) == 0


def test_a_started_sequence_is_promised_the_blocks_of_all_its_tokens() -> None:
    blocks = manager(4)
    sequence = sequence_of(blocks, list(range(9)))
    blocks.start(sequence, [])
    assert (blocks.num_promised, blocks.num_owed(sequence), blocks.num_free) == (3, 3, 4)
    added = blocks.grow(sequence, 2)
    assert sequence.block_ids == added
    assert (blocks.num_promised, blocks.num_free) == (1, 2)


def test_promised_blocks_are_not_free_for_another() -> None:
    blocks = manager(4)
    blocks.start(first := sequence_of(blocks, list(range(9))), [])
    other = sequence_of(blocks, list(range(100, 108)))
    assert blocks.num_lacking(other, []) == 1
    blocks.release(first)
    assert blocks.num_promised == 0
    assert blocks.num_lacking(other, []) == 0


def test_blocks_beyond_the_promise_are_owed_to_nobody() -> None:
    blocks = manager(4)
    sequence = run(blocks, list(range(4)))
    blocks.grow(sequence, 1)
    assert blocks.num_owed(sequence) == 0
    blocks.check_integrity([sequence])
    blocks.release(sequence)
    assert (blocks.num_promised, blocks.num_free) == (0, 4)


def test_missing_blocks_count_from_what_is_computed_and_held() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(6)))
    assert [blocks.num_missing(sequence, num) for num in (1, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]


def test_a_hit_leaves_a_token_to_compute() -> None:
    blocks = manager()
    run(blocks, list(range(8)))
    assert len(blocks.find_prefix(sequence_of(blocks, list(range(8))))) == 1
    assert len(blocks.find_prefix(sequence_of(blocks, list(range(9))))) == 2
    assert blocks.find_prefix(sequence_of(blocks, list(range(4)))) == []


def test_a_hit_is_held_counted_as_computed_and_not_owed() -> None:
    blocks = manager()
    first = run(blocks, list(range(10)))
    second = run(blocks, [*range(8), 50])
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.published == 2
    blocks.check_integrity([first, second])


def test_free_hits_are_counted_before_they_are_held() -> None:
    blocks = manager(3)
    blocks.release(run(blocks, list(range(9))))
    hits = blocks.find_prefix(sequence_of(blocks, list(range(9))))
    assert len(hits) == 2
    # The two hits and one more block are the whole pool.
    assert blocks.num_lacking(sequence_of(blocks, list(range(12))), hits) == 0
    assert blocks.num_lacking(sequence_of(blocks, list(range(13))), hits) == 1


def test_hits_that_another_holds_cost_nothing() -> None:
    blocks = manager(4)
    run(blocks, list(range(9)))
    other = sequence_of(blocks, [*range(8), 50])
    assert blocks.num_free == 1
    assert blocks.num_lacking(other, blocks.find_prefix(other)) == 0
    assert blocks.num_lacking(other, []) == 2


@pytest.mark.parametrize("fields", [{"adapter": "a"}, {"cache_salt": "s"}])
def test_adapter_and_salt_keep_prefixes_apart(fields: dict[str, str]) -> None:
    blocks = manager()
    run(blocks, list(range(9)))
    assert blocks.find_prefix(sequence_of(blocks, list(range(9)), **fields)) == []
    run(blocks, list(range(9)), **fields)
    assert len(blocks.find_prefix(sequence_of(blocks, list(range(9)), **fields))) == 2


def test_without_a_prefix_cache_nothing_is_found_or_kept() -> None:
    blocks = manager(prefix_caching=False)
    sequence = run(blocks, list(range(9)))
    assert blocks.find_prefix(sequence_of(blocks, list(range(9)))) == []
    blocks.release(sequence, publish_tokens=9)
    assert blocks.num_cached == 0


def test_a_block_is_found_only_after_its_tokens_are_planned() -> None:
    blocks = manager()
    sequence = sequence_of(blocks, list(range(9)))
    blocks.start(sequence, [])
    blocks.grow(sequence, 3)
    other = sequence_of(blocks, list(range(9)))
    assert blocks.find_prefix(other) == []
    blocks.advance(sequence, 9)
    assert blocks.find_prefix(other) == sequence.block_ids[:2]


def test_a_block_whose_tokens_are_not_all_known_is_not_published() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(7)))
    blocks.advance(sequence, 1)
    assert sequence.published == 1
    sequence.token_ids.append(70)
    blocks.grow(sequence, 1)
    blocks.advance(sequence, 1)
    assert sequence.published == 2


def test_an_ended_sequence_leaves_its_output_in_the_cache() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(6)))
    sequence.token_ids += [60, 70, 80]
    blocks.advance(sequence, 2)
    blocks.release(sequence, publish_tokens=8)
    assert blocks.num_cached == 2
    assert len(blocks.find_prefix(sequence_of(blocks, [*range(6), 60, 70, 80]))) == 2


@pytest.mark.parametrize(("computed", "publish_tokens", "expected"), [(1, 8, 1), (2, 7, 1), (2, 8, 2)])
def test_only_blocks_of_good_and_computed_tokens_are_published_at_the_end(
    computed: int, publish_tokens: int, expected: int
) -> None:
    blocks = manager()
    sequence = run(blocks, list(range(6)))
    sequence.token_ids += [60, 70, 80]
    sequence.computed += computed
    blocks.release(sequence, publish_tokens=publish_tokens)
    assert blocks.num_cached == expected


def test_a_released_sequence_starts_over() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(9)))
    blocks.release(sequence)
    assert (sequence.block_ids, sequence.computed, sequence.published, sequence.target_blocks) == ([], 0, 0, 0)
    assert blocks.num_free == 16
    blocks.check_integrity([])


def test_only_unshared_blocks_are_freed_by_a_release() -> None:
    blocks = manager()
    first, second = run(blocks, list(range(9))), run(blocks, list(range(9)))
    assert (blocks.num_released_by(first), blocks.num_released_by(second)) == (1, 1)
    blocks.release(first)
    assert blocks.num_released_by(second) == 3


def test_spoiled_blocks_are_taken_out_of_the_cache_by_content() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(13)))
    table = list(sequence.block_ids)
    blocks.release(sequence)
    assert blocks.unpublish(sequence, 5) == {table[1], table[2]}
    assert blocks.find_prefix(sequence_of(blocks, list(range(13)))) == table[:1]
    assert blocks.unpublish(sequence, 4) == set()


def test_forgetting_the_content_empties_the_cache() -> None:
    blocks = manager()
    sequence = run(blocks, list(range(9)))
    sequence.token_ids += [1, 2, 3]
    blocks.advance(sequence, 3)
    blocks.release(sequence)
    blocks.forget_content()
    assert blocks.num_cached == 0
    assert blocks.num_cached == 0


def test_the_check_finds_blocks_promised_to_nobody() -> None:
    blocks = manager()
    blocks.start(sequence := sequence_of(blocks, list(range(9))), [])
    with pytest.raises(RuntimeError, match="promised blocks are counted wrong"):
        blocks.check_integrity([])
    sequence.target_blocks -= 1
    with pytest.raises(RuntimeError, match="promised blocks are counted wrong"):
        blocks.check_integrity([sequence])
