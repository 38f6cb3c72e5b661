import numpy as np
import torch

from engine.kv_pool import KVLayout
from engine.model.attention import AttentionPlan, plan_attention
from tests.engine.builders import StepOf, batch_of

LAYOUT = KVLayout(num_layers=3, block_size=4, num_kv_heads=1, head_dim=2)


def plan_of(*steps: StepOf, layout: KVLayout = LAYOUT, window: int | None = None) -> AttentionPlan:
    batch = batch_of(*steps, block_size=layout.block_size)
    return plan_attention(
        layout,
        slot_mapping=batch.slot_mapping,
        seqlens_q=batch.seqlens_q,
        seqlens_k=batch.seqlens_k,
        block_tables=batch.block_tables,
        sliding_window=window,
    )


def tokens(count: int) -> list[int]:
    return list(range(count))


def visible(mask: torch.Tensor) -> list[list[int]]:
    return [np.flatnonzero(row == 0).tolist() for row in mask.reshape(-1, mask.shape[-1]).numpy()]


def test_each_layer_writes_its_own_rows_of_the_block() -> None:
    plan = plan_of(StepOf(tokens(6), 3, [5, 2]))
    assert plan.write_rows.tolist() == [
        [(5 * 3 + layer) * 4 + 3, (2 * 3 + layer) * 4, (2 * 3 + layer) * 4 + 1] for layer in range(3)
    ]


def test_the_beginning_of_a_prompt_reads_nothing_back() -> None:
    plan = plan_of(StepOf(tokens(6), 0, [5, 2]))
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.end, chunk.num_keys) == (0, 6, 6)
    assert chunk.block_rows is None
    assert chunk.mask is None
    assert plan.is_one_part


def test_a_later_chunk_reads_all_blocks_and_sees_nothing_after_itself() -> None:
    (chunk,) = plan_of(StepOf(tokens(6), 4, [5, 2, 9])).chunks
    assert chunk.block_rows is not None
    assert chunk.block_rows.tolist() == [[15, 6], [16, 7], [17, 8]]
    assert chunk.mask is not None
    assert visible(chunk.mask) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_decodes_of_different_lengths_are_padded_with_the_null_block() -> None:
    plan = plan_of(StepOf(tokens(6), 5, [5, 2]), StepOf(tokens(3), 2, [7]))
    (group,) = plan.decodes
    assert group.rows.tolist() == [0, 1]
    assert group.block_rows[0].tolist() == [15, 6, 21, 0]
    assert visible(group.mask) == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]
    assert plan.is_one_part


def test_a_sliding_window_hides_what_lies_before_it() -> None:
    plan = plan_of(StepOf(tokens(6), 5, [1, 2]), StepOf(tokens(5), 3, [3, 4]), window=3)
    assert visible(plan.decodes[0].mask) == [[3, 4, 5]]
    assert plan.chunks[0].mask is not None
    assert visible(plan.chunks[0].mask) == [[1, 2, 3], [2, 3, 4]]
    (longer,) = plan_of(StepOf(tokens(5), 0, [3, 4]), window=3).chunks
    assert longer.mask is not None
    assert visible(longer.mask) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_a_mixed_step_keeps_rows_in_step_order() -> None:
    plan = plan_of(
        StepOf(tokens(3), 2, [1]),
        StepOf(tokens(5), 2, [2, 3]),
        StepOf(tokens(4), 3, [4]),
        StepOf(tokens(2), 0, [5]),
    )
    assert [group.rows.tolist() for group in plan.decodes] == [[0, 4]]
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(1, 4), (5, 7)]
    assert not plan.is_one_part


def test_a_sequence_much_shorter_than_the_longest_gets_its_own_group() -> None:
    layout = KVLayout(num_layers=1, block_size=32, num_kv_heads=1, head_dim=2)
    lengths = [40, 3200, 60, 3100, 70]
    steps = [StepOf(tokens(n), n - 1, list(range(1, 2 + n // 32))) for n in lengths]
    groups = plan_of(*steps, layout=layout).decodes
    assert [group.rows.tolist() for group in groups] == [[1, 3], [0, 2, 4]]
