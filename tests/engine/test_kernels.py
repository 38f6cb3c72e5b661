"""The compiled kernels against what torch computes; whole models: test_llama, test_model_runner."""

import ctypes
import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import KernelChoice
from engine.errors import KernelsError, WeightFormatError
from engine.kv_pool import KVLayout, KVPool
from engine.model.attention import attend, plan_attention
from engine.model.linear import WeightFormat
from engine.model_runner import Runner, load_model_runner
from engine.native import library as native
from engine.native.library import CShape, CStep, Runtime, load_library
from engine.native.linear import Arena, NativeLinear, PanelFormat
from model_files import resolve_model
from tests.engine.builders import StepOf, TestBatch, batch_of, save_tiny_model
from tests.engine.native_build import require_kernels


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    require_kernels()


@pytest.fixture(params=[1, 2, 3])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return Runtime(load_library(), request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_outputs", [16, 40, 112, 130])
def test_a_product_is_what_torch_computes(runtime: Runtime, num_outputs: int) -> None:
    weight, bias = random(num_outputs, 72), random(num_outputs, seed=1)
    linear = NativeLinear(runtime, Arena(), weight, bias, "fp32")
    for num_rows in (1, 2, 3, 4, 7, 13, 100, 200):
        rows = random(num_rows, 72, seed=2)
        torch.testing.assert_close(linear(rows), rows @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_float16_weights_are_rounded_once_and_multiplied_in_float32(runtime: Runtime) -> None:
    weight, rows = random(48, 64), random(9, 64, seed=1)
    linear = NativeLinear(runtime, Arena(), weight, None, "fp16w")
    torch.testing.assert_close(linear(rows), rows @ weight.half().float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["fp32", "fp16w"])
def test_a_row_of_a_product_has_the_same_bits_among_any_others(weight_format: WeightFormat) -> None:
    one, three = Runtime(load_library(), 1), Runtime(load_library(), 3)
    weight, rows = random(100, 64), random(120, 64, seed=1)
    alone = NativeLinear(one, Arena(), weight, None, weight_format)
    together = NativeLinear(three, Arena(), weight, None, weight_format)
    expected = torch.cat([alone(row[None]) for row in rows])
    for num_rows in (2, 3, 5, 6, 11, 12, 13, 64, 97, 120):
        assert together(rows[:num_rows]).equal(expected[:num_rows]), num_rows


def grouped(num_outputs: int, num_inputs: int, *, codes: tuple[int, int], has_offset: bool) -> torch.Tensor:
    """Weights as a checkpoint with groups of 32 gives them: codes from low up to high, float16 scales."""
    generator = torch.Generator().manual_seed(5)
    shape = (num_outputs, num_inputs // 32)
    values = torch.randint(*codes, (*shape, 32), generator=generator).float()
    values[..., 0], values[..., -1] = codes[0], codes[1] - 1  # as quantisers do: the range is used
    scales = (torch.randn(*shape, 1, generator=generator) * 0.01).half().float()
    offsets = (torch.randn(*shape, 1, generator=generator) * 0.1).half().float() if has_offset else 0.0
    return (values * scales + offsets).reshape(num_outputs, num_inputs)


@pytest.mark.parametrize(
    ("weight", "panel_format"),
    [
        (grouped(40, 96, codes=(0, 16), has_offset=True), PanelFormat.INT4),
        (grouped(40, 96, codes=(-8, 8), has_offset=False), PanelFormat.INT4),
        (grouped(40, 96, codes=(2, 11), has_offset=True), PanelFormat.INT4),
        (grouped(40, 96, codes=(-127, 128), has_offset=False), PanelFormat.INT8),
        (torch.zeros(40, 96), PanelFormat.INT4),
        (random(40, 96), PanelFormat.FLOAT16),
        (random(40, 80), PanelFormat.FLOAT16),
    ],
    ids=["Q4_1", "Q4_0", "part of the codes", "Q8_0", "zeros", "no groups", "no whole groups"],
)
def test_weights_in_groups_are_kept_as_they_were_stored(
    weight: torch.Tensor, panel_format: PanelFormat
) -> None:
    runtime, rows = Runtime(load_library(), 2), random(30, weight.shape[1], seed=1)
    packed, exact = (NativeLinear(runtime, Arena(), weight, None, name) for name in ("q4", "fp32"))
    assert packed.format is panel_format
    if panel_format is not PanelFormat.FLOAT16:
        for num_rows in (1, 2, 3, 5, 12, 13, 30):
            assert packed(rows[:num_rows]).equal(exact(rows[:num_rows])), num_rows


def test_a_model_without_weights_in_groups_is_not_made_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    with pytest.raises(WeightFormatError, match=r"none are made; start with --dtype fp16w"):
        load(tmp_path, "native", "q4")
    with pytest.raises(WeightFormatError, match="needs the native kernels"):
        load(tmp_path, "torch", "q4")


def test_a_weight_too_large_for_float16_names_the_option() -> None:
    runtime = Runtime(load_library(), 1)
    with pytest.raises(WeightFormatError, match="--dtype fp32"):
        NativeLinear(runtime, Arena(), torch.full((16, 8), 1e5), None, "fp16w")


def attend_natively(
    runtime: Runtime, batch: TestBatch, pool: KVPool, qkv: torch.Tensor, num_heads: int, window: int | None
) -> torch.Tensor:
    """Attention of layer 1 over what the pool holds."""
    layout = pool.layout
    shape = CShape(num_layers=layout.num_layers, num_heads=num_heads, num_kv_heads=layout.num_kv_heads)
    shape.head_dim, shape.block_size, shape.sliding_window = layout.head_dim, layout.block_size, window or 0
    step = CStep(
        num_tokens=batch.token_ids.size,
        num_sequences=batch.seqlens_q.size,
        table_width=batch.block_tables.shape[1],
        seqlens_q=batch.seqlens_q.ctypes.data,
        seqlens_k=batch.seqlens_k.ctypes.data,
        block_tables=batch.block_tables.ctypes.data,
        pool=pool.address,
    )
    output = torch.empty(batch.token_ids.size, num_heads * layout.head_dim)
    runtime.library.attend(
        runtime.handle,
        ctypes.addressof(shape),
        ctypes.addressof(step),
        1,
        qkv.data_ptr(),
        output.data_ptr(),
    )
    return output


@pytest.mark.parametrize("window", [None, 1, 7, 33])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 40), (8, 1, 8)])
def test_attention_is_what_torch_computes(
    runtime: Runtime, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    block_size = 48 if head_dim == 40 else 16
    layout = KVLayout(2, block_size, num_kv_heads, head_dim)
    pool = KVPool(layout, num_blocks=40)
    pool.tensor.copy_(random(*pool.tensor.shape))
    ends = [(70, 0), (90, 89), (1, 0), (100, 60), (33, 32), (50, 47)]
    tables = [list(range(1 + 6 * i, 7 + 6 * i))[::-1] for i in range(len(ends))]
    tables = [[*table, *table][:8] if block_size == 16 else table for table in tables]
    batch = batch_of(
        *(StepOf(range(end), start, table) for (end, start), table in zip(ends, tables, strict=True)),
        block_size=block_size,
    )
    plan = plan_attention(
        layout,
        slot_mapping=batch.slot_mapping,
        seqlens_q=batch.seqlens_q,
        seqlens_k=batch.seqlens_k,
        block_tables=batch.block_tables,
        sliding_window=window,
    )
    qkv = random(batch.token_ids.size, (num_heads + 2 * num_kv_heads) * head_dim, seed=3)
    expected = attend(plan, pool, 1, qkv, num_heads)  # stores the new keys and values too
    given = attend_natively(runtime, batch, pool, qkv, num_heads, window)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["fp32", "fp16w"])
def test_answers_have_the_same_bits_alone_together_and_in_chunks(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    save_tiny_model(tmp_path, "Mistral", sliding_window=20)
    tokens = np.random.default_rng(0).integers(3, 128, 60).tolist()
    runner = load(tmp_path, "native", weight_format)
    tables = [list(range(1 + 20 * i, 21 + 20 * i)) for i in range(5)]
    steps = [StepOf(tokens[i : 50 + i], 0, table) for i, table in enumerate(tables)]
    alone = torch.cat([runner.forward(batch_of(step, block_size=4)) for step in steps])
    kept = runner.kv_pool.tensor.clone()
    runner.kv_pool.zero()
    assert runner.forward(batch_of(*steps, block_size=4)).equal(alone)
    assert runner.kv_pool.tensor.equal(kept)
    runner.kv_pool.zero()
    for start, end in ((0, 7), (7, 8), (8, 40), (40, 49)):
        parts = [StepOf(step.token_ids[:end], start, step.block_table) for step in steps]
        runner.forward(batch_of(*parts, block_size=4))
    last = [StepOf(step.token_ids, 49, step.block_table) for step in steps]
    assert runner.forward(batch_of(*last, block_size=4)).equal(alone)
    assert runner.kv_pool.tensor.equal(kept)


def load(path: Path, kernels: KernelChoice, weight_format: WeightFormat = "fp32") -> Runner:
    return load_model_runner(
        resolve_model(str(path)),
        weight_format=weight_format,
        block_size=4,
        kv_bytes=1 << 22,
        kernels=kernels,
        num_threads=2,
    )


def test_a_row_with_extreme_numbers_stays_finite(tmp_path: Path) -> None:
    """Scores lie hundreds apart; the exponential is bounded on both sides."""
    save_tiny_model(tmp_path, "Llama", initializer_range=1.0)
    batch = batch_of(StepOf(list(range(3, 30)), 0, list(range(1, 8))), block_size=4)
    given, expected = (load(tmp_path, kernels).forward(batch) for kernels in ("native", "torch"))
    assert torch.isfinite(given).all()
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installation without a compiler."""
    load_library.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "library.py"))
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_the_library_auto_takes_torch_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "Llama")
    with caplog.at_level(logging.INFO):
        assert load(tmp_path, "auto").kernels == "torch"
    assert [r.message for r in caplog.records if "kernels" in r.message] == [
        "torch computes the model, not the native kernels: they were not built, for want of a C++ compiler "
        "when Tandem was installed"
    ]


@pytest.mark.usefixtures("no_library")
def test_without_the_library_native_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    with pytest.raises(KernelsError, match=r"--kernels native cannot be had: .*not built.*--kernels torch"):
        load(tmp_path, "native")


def test_the_choice_is_obeyed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    assert [load(tmp_path, choice).kernels for choice in ("auto", "native", "torch")] == [
        *("native", "native", "torch")
    ]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A checkout with its library."""
    shutil.copy(native.library_path(), tmp_path)
    shutil.copytree(Path(native.__file__).parent / "src", tmp_path / "src")
    load_library.cache_clear()
    monkeypatch.setattr(native, "__file__", str(tmp_path / "library.py"))
    yield tmp_path
    load_library.cache_clear()


def test_the_library_of_another_python_is_let_alone(copied: Path) -> None:
    (copied / "_kernels.cpython-300-x86_64-linux-gnu.so").write_text("not ours")
    load_library()


def test_a_library_built_from_other_sources_is_refused(copied: Path) -> None:
    with (copied / "src" / "team.h").open("a") as source:
        source.write("// newer\n")
    with pytest.raises(KernelsError, match="was built from other sources than lie here"):
        load_library()


@contextmanager
def few_threads() -> Iterator[None]:
    """Address space for the stacks of some."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (80 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_threads_that_cannot_be_started_leave_the_model_to_torch(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = resolve_model(str(tmp_path)).config()
    load_library()
    with few_threads():
        with pytest.raises(KernelsError, match="their 256 threads cannot be started; lower --num-threads"):
            native.choose_runtime("native", config, 256)
        assert native.choose_runtime("auto", config, 256) is None
        assert native.choose_runtime("auto", config, 1) is not None


def test_a_processor_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_library.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(KernelsError, match="AVX2"):
        load_library()


def test_a_shape_that_the_kernels_do_not_compute_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama", head_dim=12)
    with pytest.raises(KernelsError, match="not 12"):
        load(tmp_path, "native")
    assert load(tmp_path, "auto").kernels == "torch"
