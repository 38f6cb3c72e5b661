"""Blocks of 2 tokens; `key("ab cd")` has the blocks "ab" and "cd"."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler.radix_tree import Node, RadixTree, Watch, key_of
from tests.shared_scheduler.histories import examples

BLOCK_SIZE = 2


def key(text: str) -> bytes:
    tokens = np.frombuffer(text.replace(" ", "").encode(), np.uint8).astype(np.int32)
    assert tokens.size % BLOCK_SIZE == 0
    return key_of(tokens, tokens.size // BLOCK_SIZE, BLOCK_SIZE)


class Tree(RadixTree):
    """A tree that names new blocks 1, 2, 3, ... and remembers what its watches said."""

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE)
        self.num_named = 0
        self.said: list[tuple[bytes, int]] = []

    def add(self, text: str, salt: str = "") -> Node | None:
        wanted = key(text)
        place = self.match(wanted, salt)
        num_known = 0 if place is None else place.num_blocks
        num_new = len(wanted) // (4 * BLOCK_SIZE) - num_known
        if not num_new:
            return None
        first = self.num_named + 1
        self.num_named += num_new
        node = self.insert(wanted, salt, place, np.arange(first, first + num_new, dtype=np.int32))
        self.check_invariants()
        return node

    def found(self, text: str, salt: str = "") -> list[int]:
        place = self.match(key(text), salt)
        return [] if place is None else place.block_ids().tolist()

    def follow(self, text: str, salt: str = "") -> Watch:
        return self.watch(key(text), salt, lambda watch: self.said.append((watch.key, watch.num_blocks)))

    def cut(self, leaf: Node, num_blocks: int) -> Node:
        node = self.trim(leaf, num_blocks)
        self.check_invariants()
        return node


def test_a_key_takes_whole_blocks_only() -> None:
    tokens = np.arange(5, dtype=np.int32)
    assert len(key_of(tokens, 2, BLOCK_SIZE)) == 4 * 4


def test_the_longest_common_prefix_is_found() -> None:
    tree = Tree()
    tree.add("ab cd ef")
    tree.add("ab xy")
    assert tree.found("ab cd ef gh") == [1, 2, 3]
    assert tree.found("ab cd xx") == [1, 2]
    assert tree.found("ab xy cd") == [1, 4]
    assert tree.found("zz ab cd") == []


def test_a_prompt_that_differs_in_its_first_token_shares_nothing() -> None:
    tree = Tree()
    tree.add("ab cd ef")
    assert tree.found("xb cd ef") == []


def test_keys_with_different_salts_never_meet() -> None:
    tree = Tree()
    tree.add("ab cd", "mine")
    tree.add("ab cd", "yours")
    assert (tree.found("ab cd", "mine"), tree.found("ab cd", "yours"), tree.found("ab cd")) == (
        [1, 2],
        [3, 4],
        [],
    )


def test_a_node_is_split_where_keys_part_and_its_end_can_be_removed() -> None:
    tree = Tree()
    old = tree.add("ab cd ef gh")
    tree.add("ab cd xy")
    assert old is not None
    assert old.blocks.tolist() == [3, 4]
    assert tree.cut(old, 1) is old
    assert tree.found("ab cd ef gh") == [1, 2, 3]
    above = tree.cut(old, 1)
    assert above.blocks.tolist() == [1, 2]
    assert tree.num_blocks == 3


def test_a_root_without_blocks_or_watches_is_gone() -> None:
    tree = Tree()
    node, watch = tree.add("ab", "salt"), tree.follow("cd", "other")
    assert node is not None
    tree.cut(node, 1)
    tree.unwatch(watch)
    assert not list(tree.roots())


def test_a_watch_grows_when_its_key_is_inserted() -> None:
    tree = Tree()
    watch = tree.follow("ab cd ef")
    tree.add("ab cd xy")
    assert tree.said == [(watch.key, 2)]
    tree.add("ab cd zz")
    assert len(tree.said) == 1, "a neighbour is none of its business"
    tree.add("ab cd ef gh")
    assert (tree.said[-1], watch.num_blocks) == ((watch.key, 3), 3)


def test_a_watch_shrinks_when_its_blocks_are_removed() -> None:
    tree = Tree()
    leaf = tree.add("ab cd ef gh")
    watch, other = tree.follow("ab cd ef xy"), tree.follow("ab")
    assert leaf is not None
    tree.cut(leaf, 1)
    assert (tree.said, watch.num_blocks) == ([], 3)
    tree.cut(leaf, 2)
    assert (tree.said, other.num_blocks) == ([(watch.key, 1)], 1)
    tree.cut(leaf, 1)
    assert (watch.num_blocks, other.num_blocks) == (0, 0)


def test_a_watch_in_a_node_survives_its_split() -> None:
    tree = Tree()
    tree.add("ab cd ef gh")
    above, below = tree.follow("ab cd xx"), tree.follow("ab cd ef gh")
    tree.add("ab cd yy")
    assert not tree.said
    tree.add("ab cd xx")
    assert (above.num_blocks, below.num_blocks) == (3, 4)


def test_an_ended_watch_says_nothing() -> None:
    tree = Tree()
    tree.unwatch(tree.follow("ab cd"))
    tree.add("ab cd")
    assert not tree.said


texts = st.text("ab", min_size=1, max_size=8).map(lambda text: "".join(2 * letter for letter in text))


@examples(60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), texts, st.sampled_from(["", "salt"])),
            st.tuples(st.just("watch"), texts, st.sampled_from(["", "salt"])),
            st.tuples(st.just("unwatch"), st.integers(0, 9)),
            st.tuples(st.just("cut"), st.integers(0, 9), st.integers(1, 4)),
        ),
        max_size=40,
    )
)
def test_any_history_finds_what_a_plain_set_of_prefixes_would(history) -> None:
    """`check_invariants` looks every watch's key up again."""
    tree, known, watches = Tree(), set[tuple[str, str]](), list[Watch]()
    for kind, *rest in history:
        if kind == "add":
            text, salt = rest
            tree.add(text, salt)
            known |= {(salt, text[:end]) for end in range(2, len(text) + 1, 2)}
        elif kind == "watch":
            watches.append(tree.follow(*rest))
        elif kind == "unwatch" and watches:
            tree.unwatch(watches.pop(rest[0] % len(watches)))
        elif kind == "cut":
            leaves = [node for node in tree.nodes() if not node.children]
            if leaves:
                leaf = leaves[rest[0] % len(leaves)]
                gone = min(rest[1], leaf.num_blocks)
                path = text_of(leaf)
                known -= {(leaf.salt, path[: len(path) - 2 * i]) for i in range(gone)}
                tree.cut(leaf, gone)
        tree.check_invariants()
        for salt, text in known:
            assert len(tree.found(text, salt)) == len(text) // 2
        assert tree.num_blocks == len(known)


def text_of(node: Node) -> str:
    above = "" if node.parent is None else text_of(node.parent)
    return above + bytes(np.frombuffer(node.key, np.int32).astype(np.uint8)).decode()
