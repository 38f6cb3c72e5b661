"""Names of blocks, as engines publish them and routers compute them."""

from wire.cache import prompt_block_names


def test_only_full_blocks_have_a_name() -> None:
    assert len(prompt_block_names(range(11), 4)) == 2


def test_a_name_stands_for_everything_before_its_block() -> None:
    names = prompt_block_names([1, 2, 3, 4, 5, 6], 2)
    other = prompt_block_names([1, 2, 9, 4, 5, 6], 2)
    assert names[0] == other[0]
    assert not set(names[1:]) & set(other[1:])


def test_salts_part_the_names_of_equal_prompts() -> None:
    assert not set(prompt_block_names(range(8), 4, "a")) & set(prompt_block_names(range(8), 4, "b"))


def test_names_are_the_same_in_every_process() -> None:
    """A literal: proxies and engines of one deployment compute them apart."""
    assert prompt_block_names([1, 2, 3, 4], 2) == ["a9097987996403c7", "83bfd4633813a6c6"]
