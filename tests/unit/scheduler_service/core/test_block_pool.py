"""Reference counts, eviction order and the prefix index of the block pool."""

import pytest

from scheduler_service.core.block_pool import BlockPool

KEYS = [bytes([i]) * 32 for i in range(8)]


def publish_all(pool: BlockPool, block_ids: list[int]) -> None:
    for block_id, key in zip(block_ids, KEYS, strict=False):
        pool.publish(block_id, key)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)
    assert BlockPool(1).num_free == 1


def test_every_block_is_given_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    publish_all(pool, held)
    pool.hold(held)
    assert pool.count(held[0]) == 2
    pool.release(held)
    assert (pool.count(held[0]), pool.num_free) == (1, 1)
    pool.release(held)
    assert (pool.count(held[0]), pool.num_free) == (0, 2)


def test_releasing_what_nobody_holds_is_refused() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(ValueError, match=f"block {held[0]} is not held"):
        pool.release(held)
    pool.check_integrity([])


def test_blank_blocks_are_given_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    publish_all(pool, held)
    pool.release(held)
    assert set(pool.allocate(2)).isdisjoint(held)
    assert pool.find(KEYS[:2]) == held


def test_cached_blocks_are_evicted_least_recently_freed_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    publish_all(pool, [first, second, third])
    for block_id in (second, third, first):
        pool.release([block_id])
    assert [pool.allocate(1)[0] for _ in range(3)] == [second, third, first]


def test_holding_a_cached_block_makes_it_the_most_recent() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    publish_all(pool, [first, second])
    pool.release([first])
    pool.release([second])
    pool.hold([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_a_table_is_released_tail_first_so_its_prefix_survives_longest() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    publish_all(pool, table)
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.find(KEYS[:3]) == table[:2]
    assert pool.allocate(1) == [table[1]]


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(1)
    held = pool.allocate(1)
    pool.publish(held[0], KEYS[0])
    pool.release(held)
    assert pool.num_cached == 1
    pool.allocate(1)
    assert pool.find(KEYS[:1]) == []
    assert pool.num_cached == 0


def test_a_block_that_was_reused_takes_a_new_key() -> None:
    pool = BlockPool(1)
    held = pool.allocate(1)
    pool.publish(held[0], KEYS[0])
    pool.release(held)
    pool.publish(pool.allocate(1)[0], KEYS[1])
    assert pool.find(KEYS[:1]) == []
    assert pool.find(KEYS[1:2]) == held


def test_a_published_block_is_found_while_held() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    assert pool.find(KEYS[:1]) == []
    pool.publish(held[0], KEYS[0])
    assert pool.find(KEYS[:1]) == held
    assert pool.num_cached == 0


def test_finding_stops_at_the_first_unknown_key() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    publish_all(pool, table)
    assert pool.find([KEYS[0], KEYS[1], KEYS[7], KEYS[2]]) == table[:2]
    assert pool.find([KEYS[7], KEYS[0]]) == []


def test_publishing_a_known_key_keeps_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, KEYS[0])
    pool.publish(second, KEYS[0])
    assert pool.find(KEYS[:1]) == [first]
    pool.release([second])
    assert pool.num_cached == 0
    pool.check_integrity([[first]])


def test_publishing_a_block_twice_keeps_its_first_key() -> None:
    pool = BlockPool(1)
    held = pool.allocate(1)
    pool.publish(held[0], KEYS[0])
    pool.publish(held[0], KEYS[1])
    assert pool.find(KEYS[:1]) == held
    assert pool.find(KEYS[1:2]) == []
    pool.check_integrity([held])


def test_only_free_blocks_count_as_revived() -> None:
    pool = BlockPool(3)
    free, held = pool.allocate(2)
    publish_all(pool, [free, held])
    pool.release([free])
    assert pool.num_revived([free, held]) == 1
    pool.hold([free, held])
    assert (pool.num_free, pool.count(held)) == (1, 2)


def test_unpublishing_a_free_block_makes_it_blank() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.publish(held[0], KEYS[0])
    pool.release(held)
    assert pool.unpublish(held[0]) is True
    assert pool.unpublish(held[0]) is False
    assert (pool.num_cached, pool.num_free) == (0, 2)
    pool.check_integrity([])


def test_unpublishing_a_held_block_leaves_it_held() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.publish(held[0], KEYS[0])
    assert pool.unpublish(held[0])
    assert pool.find(KEYS[:1]) == []
    pool.check_integrity([held])


def test_forgetting_all_leaves_holders_and_free_blocks() -> None:
    pool = BlockPool(4)
    held, freed = pool.allocate(1), pool.allocate(2)
    publish_all(pool, held + freed)
    pool.release(freed)
    pool.forget_all()
    assert pool.find(KEYS[:1]) == []
    assert (pool.num_cached, pool.num_free) == (0, 3)
    pool.check_integrity([held])


def test_the_check_finds_a_leak() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(RuntimeError, match=rf"counted wrong .*\[{held[1]}\]"):
        pool.check_integrity([held[:1]])


def test_the_check_finds_a_table_that_names_a_block_twice() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    with pytest.raises(RuntimeError, match="names a block twice"):
        pool.check_integrity([held * 2])
