"""The pool: exclusive ownership, order of reuse, all or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ResourceError
from deepinfer.runtime.block_pool import BlockPool


def test_unit_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.capacity == pool.num_free == 4
    assert pool.allocate(4) == (1, 2, 3, 4)
    assert pool.num_free == 0


def test_freed_units_go_to_the_tail_in_the_order_given() -> None:
    pool = BlockPool(9)
    pool.allocate(8)
    pool.free([7, 2])
    assert pool.allocate(2) == (7, 2)
    pool.free([3])
    pool.free([1])
    assert pool.allocate(1) == (3,)


def test_too_large_a_wish_takes_nothing() -> None:
    pool = BlockPool(4, "state slot")
    pool.allocate(1)
    with pytest.raises(ResourceError, match="3 state slots wanted, 2 of 3 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == ()


@pytest.mark.parametrize("unit", [0, 1, 99])
def test_freeing_what_is_not_owned_is_a_mistake(unit: int) -> None:
    pool = BlockPool(4)
    pool.free(pool.allocate(1))
    with pytest.raises(AssertionError, match="not owned"):
        pool.free([unit])


def test_integrity_check_sees_double_and_lost_units() -> None:
    twice, lost, both, foreign = BlockPool(4), BlockPool(4), BlockPool(4), BlockPool(4)
    twice._free.append(2)
    lost._free.remove(2)
    both._owners[2] = 1
    foreign.allocate(1)
    for pool, owned in ((twice, []), (lost, []), (both, [2]), (foreign, []), (foreign, [1, 1])):
        with pytest.raises(AssertionError):
            pool.check_integrity(owned)


def test_shared_unit_is_free_when_its_last_owner_is_gone() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.share(ids[:1])
    pool.check_integrity([*ids, ids[0]])
    pool.free(ids)
    assert pool.num_free == 2 and pool.num_used == 1
    pool.free(ids[:1])
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="not owned"):
        pool.share([1])


@given(st.lists(st.integers(0, 6), max_size=60), st.randoms(use_true_random=False))
def test_random_use_keeps_the_partition(wishes: list[int], random) -> None:  # noqa: ANN001
    pool, held = BlockPool(12), []
    for wish in wishes:
        if wish <= pool.num_free and random.random() < 0.7:
            held.append(pool.allocate(wish))
        elif held:
            pool.free(held.pop(random.randrange(len(held))))
        pool.check_integrity(unit for ids in held for unit in ids)
        owned = [unit for ids in held for unit in ids]
        assert len(owned) == len(set(owned)) == pool.capacity - pool.num_free
    pool.reset()
    pool.check_integrity([])
    assert pool.num_free == pool.capacity
