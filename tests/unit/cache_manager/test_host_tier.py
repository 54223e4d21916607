"""The second level: what is kept, in place of what, and that no copy is lost or told twice."""

from services.cache_manager.host_tier import MAX_PENDING_COPIES, HostTier

NUM_BLOCKS = 10


def filled(num_host_blocks: int, *keys: str) -> HostTier:
    """A tier that has stored blocks 0, 1, … under these keys, of which the scheduler has heard."""
    tier = HostTier(NUM_BLOCKS, num_host_blocks)
    for block, key in enumerate(keys):
        tier.store(key, block)
    tier.hear(len(tier.copies))
    return tier


def test_copies_are_repeated_until_they_are_heard_of() -> None:
    tier = HostTier(NUM_BLOCKS, 4, num_copies=7)
    tier.store("a", 1)
    tier.store("b", 2)
    assert (tier.copies, tier.num_heard) == (((1, 10), (2, 11)), 7)
    tier.hear(8)
    assert (tier.copies, tier.num_heard) == (((2, 11),), 8)
    tier.hear(7)
    assert (tier.copies, tier.num_heard) == (((2, 11),), 8)


def test_the_least_recently_used_content_makes_room() -> None:
    tier = filled(2, "a", "b")
    assert tier.find(["a"]) == ["a"]
    tier.store("c", 5)
    assert (tier.copies, tier.find(["b"]), tier.find(["a"]), tier.find(["c"])) == (((5, 11),), [], ["a"], ["c"])


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    tier = filled(3, "a", "b", "c")
    tier.find(["a", "b", "c"])
    tier.store("d", 5)
    assert tier.find(["a", "b", "c"]) == ["a", "b"]


def test_what_was_just_found_is_not_given_up_for_what_is_evicted() -> None:
    tier = filled(2, "a", "b")
    found = tier.find(["a", "b"])
    tier.store("c", 5, spared=found)
    assert (tier.copies, tier.find(["c"])) == ((), [])


def test_content_that_is_held_already_is_not_copied_again() -> None:
    tier = filled(2, "a", "b")
    tier.store("a", 7)
    assert tier.copies == ()
    tier.store("c", 8)  # in place of b, which was used before
    assert tier.find(["a"]) == ["a"]


def test_without_host_blocks_nothing_is_kept() -> None:
    tier = filled(0, "a")
    assert (tier.copies, tier.find(["a"]), tier.num_used) == ((), [], 0)


def test_a_reply_holds_a_bounded_number_of_copies() -> None:
    tier = HostTier(NUM_BLOCKS, 2 * MAX_PENDING_COPIES)
    keys = [str(number) for number in range(MAX_PENDING_COPIES)]
    for key in [*keys, "too much"]:
        tier.store(key, 0)
    assert len(tier.copies) == MAX_PENDING_COPIES
    assert tier.find(keys) == []
    tier.hear(MAX_PENDING_COPIES)
    assert tier.find([*keys, "too much"]) == keys
