"""Builds an engine from its configuration: the one place that knows model, pool, scheduler and role."""

import logging
import os
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from engine.activity import make_activity_log
from engine.before_ready import check_transfers, warm_up
from engine.choices import Choices
from engine.completion_role import ArrivalLimits, CompletionHandover
from engine.config import EngineConfig
from engine.device_runner import DEVICE_DTYPE, choose_device, load_device_runner
from engine.device_sampler import DeviceSampler
from engine.draft_loading import load_draft_model
from engine.drafters import Drafter, PromptLookup
from engine.errors import DeviceError, EngineError, EngineStartError
from engine.grammars import Grammars
from engine.group import EngineGroup
from engine.handover_role import HandoverRole, NoHandover
from engine.ipc import Ready
from engine.kv_pool import KVLayout
from engine.lending import Lender
from engine.llm_engine import LLMEngine
from engine.model.linear import check_weight_format
from engine.model_runner import Runner, load_model_runner
from engine.prompt_logprobs import max_scored_tokens
from engine.prompt_role import PromptHandover
from engine.pull_back import PullBack, PullBackLimits
from engine.rendezvous import GroupPlace, join_group
from engine.sampler import Sampler
from engine.tensor_parallel.ranks import RankProcesses
from engine.tensor_parallel.runner import RankOptions, load_tensor_parallel_runner
from kv_transfer.errors import TransferError
from kv_transfer.layout import Identity, Region
from kv_transfer.messages import PROTOCOL_VERSION
from kv_transfer.settings import TransferSettings
from kv_transfer.sink import HandoverSink
from kv_transfer.source import HandoverSource
from kv_transfer.transports import check_rdma, make_transport
from model_files.errors import ModelFilesError
from model_files.interface import ModelFiles
from model_files.resolve import resolve_model
from processes.heap import keep_freed_memory
from shared_scheduler import ConfigError, EngineType, Scheduler, SchedulerConfig, WaitingPolicy

logger = logging.getLogger(__name__)

ReportProgress = Callable[[str, float], None]

_ENGINE_TYPES = {
    "prompt": EngineType.PROMPT,
    "completion": EngineType.COMPLETION,
    "normal": EngineType.NORMAL,
}


def build_engine(
    config: EngineConfig, wake: Callable[[], None], report: ReportProgress
) -> tuple[LLMEngine, Ready]:
    """An engine that can take requests; `EngineStartError` says in one line what stands in the way."""
    keep_freed_memory()
    torch.set_num_threads(config.num_threads)
    ranks: RankProcesses | None = None
    try:
        report("reading the model", 0.3)
        files = resolve_model(config.model)
        report("loading weights", 0.4)
        device = choose_device(config.device, config.dtype)
        runner, ranks = load_runner(config, files, wake, device)
        settings = scheduler_config(config, runner)
        group = build_group(config, settings, files, wake, report)
        scheduler = Scheduler(settings, group=group)
        drafter = build_drafter(config, files, runner, scheduler, report)
        report("starting transfers", 0.9)
        identity = Identity(config.engine_id, config.epoch, compatibility(config, files, runner))
        choices = Choices(scheduler)
        role, transport, control_address = build_role(config, identity, runner, scheduler, choices, wake)
        report("warming up", 0.95)
        sampler = DeviceSampler(device) if device.type == "cuda" else Sampler()
        warm_up(runner, settings, sampler)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
        if isinstance(error, ModelFilesError | EngineError | TransferError | ConfigError):
            raise EngineStartError(str(error)) from error
        raise
    activity_log = make_activity_log(runner.config, config.peak_gflops)
    engine = LLMEngine(
        scheduler,
        runner,
        sampler,
        role,
        choices=choices,
        group=group,
        overlap=config.overlap,
        drafter=drafter,
        grammars=Grammars(files.tokenizer, runner.config.vocab_size, runner.config.eos_token_ids, wake),
        activity_log=activity_log,
        ranks=ranks,
    )
    ready = Ready(
        model=files.name,
        compatibility_hash=identity.compatibility_hash,
        compatibility=dict(identity.compatibility),
        control_address=control_address,
        transport=transport,
        kernels=runner.kernels,
        max_model_len=scheduler.config.max_model_len,
        vocab_size=runner.config.vocab_size,
        stats=engine.stats(),
    )
    return engine, ready


def load_runner(
    config: EngineConfig, files: ModelFiles, wake: Callable[[], None], device: torch.device
) -> tuple[Runner, RankProcesses | None]:
    """The runner, and the processes of the other ranks where it has some."""
    if config.dtype == DEVICE_DTYPE:
        if config.tp > 1:
            raise DeviceError(f"--dtype {DEVICE_DTYPE} runs in one process; start it with --tp 1")
        if config.draft_model is not None:
            raise DeviceError(f"--dtype {DEVICE_DTYPE} has no --draft-model; start with --speculative ngram")
        if config.kernels == "native":
            raise DeviceError(
                f"--kernels native do not compute --dtype {DEVICE_DTYPE}; start with --kernels auto, or with "
                "--dtype fp16w"
            )
        runner, attention = load_device_runner(
            files,
            device,
            block_size=config.block_size,
            kv_bytes=config.kv_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
        logger.info("the model runs on %s; attention: %s", device, attention)
        return runner, None
    if config.tp == 1:
        alone = load_model_runner(
            files,
            weight_format=config.dtype,
            block_size=config.block_size,
            kv_bytes=config.kv_bytes,
            state_bytes=config.state_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_threads=config.num_threads,
            kernels=config.kernels,
        )
        return alone, None
    options = RankOptions(
        model=config.model,
        size=config.tp,
        weight_format=check_weight_format(config.dtype),
        kernels=config.kernels,
        block_size=config.block_size,
        kv_bytes=config.kv_bytes,
        max_model_len=config.max_model_len,
        num_threads=config.num_threads,
        timeout_s=config.tp_timeout_s,
        log_level=config.log_level,
        directory=os.path.dirname(config.command_endpoint.removeprefix("ipc://")) or None,
    )
    shared = load_tensor_parallel_runner(files, options, wake)
    return shared, shared.ranks


def scheduler_config(config: EngineConfig, runner: Runner) -> SchedulerConfig:
    """The scheduler's configuration; `EngineStartError` when the pool cannot hold the promised length."""
    pool, model = runner.kv_pool, runner.config
    if runner.states is not None and config.max_num_draft_tokens:
        raise EngineStartError(
            f"--speculative {config.speculative}: this model keeps a state per sequence, which cannot be "
            "wound back over wrong drafts; start with --speculative off"
        )
    num_pool_tokens = (pool.num_blocks - 1) * config.block_size
    max_model_len = config.max_model_len or min(model.max_position_embeddings, num_pool_tokens)
    if max_model_len > model.max_position_embeddings:
        raise EngineStartError(
            f"--max-model-len {max_model_len} is more than the {model.max_position_embeddings} positions "
            "of the model"
        )
    if max_model_len > num_pool_tokens:
        raise EngineStartError(
            f"--max-model-len {max_model_len} does not fit --kv-bytes {config.kv_bytes}, which holds "
            f"{num_pool_tokens} tokens"
        )
    return SchedulerConfig(
        engine_type=_ENGINE_TYPES[config.role],
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        num_state_slots=None if runner.states is None else runner.states.num_slots,
        sliding_window=runner.sliding_window,
        stop_preempted_request=config.stop_preempted_request,
        prefill_attempt_interval=config.prefill_attempt_interval,
        prefill_any_attempt_interval=config.prefill_any_attempt_interval,
        waiting_policy=WaitingPolicy(config.waiting_policy),
        waiting_age_limit=config.waiting_age_limit,
        max_chunk_tokens=config.max_chunk_tokens,
        max_scored_tokens=max_scored_tokens(model.vocab_size),
        retract_cheapest=config.retract_cheapest,
        test_retract_interval=config.test_retract_interval,
        admission_estimate=config.has_admission_estimate,
        eos_token_ids=model.eos_token_ids,
        max_num_draft_tokens=config.max_num_draft_tokens,
        partial_pulls=config.role == "completion",
        prefix_cache=config.prefix_cache,
        cache_events=config.prefix_cache,
    )


def build_drafter(
    config: EngineConfig, files: ModelFiles, runner: Runner, scheduler: Scheduler, report: ReportProgress
) -> Drafter | None:
    settings = scheduler.config
    if not settings.num_draft_slots:
        return None
    if config.draft_model is None:
        return PromptLookup(settings.num_draft_slots)
    report("loading the draft model", 0.8)
    return load_draft_model(config, config.draft_model, files, runner.config, scheduler)


def build_group(
    config: EngineConfig,
    settings: SchedulerConfig,
    files: ModelFiles,
    wake: Callable[[], None],
    report: ReportProgress,
) -> EngineGroup | None:
    """The ranks this engine steps with, once they are all here; None for an engine alone."""
    if config.dp_size == 1:
        return None
    assert config.dp_address is not None, "EngineConfig.check() requires it"
    host, _, port = config.dp_address.rpartition(":")
    place = GroupPlace(
        rank=config.dp_rank,
        size=config.dp_size,
        host=host.strip("[]"),
        port=int(port),
        step_timeout_s=config.dp_step_timeout_s,
    )
    return join_group(place, shared_options(config, settings, files), wake=wake, report=report)


def shared_options(config: EngineConfig, settings: SchedulerConfig, files: ModelFiles) -> dict[str, str]:
    """What must be equal on all ranks of a group, by the name of its flag where it has one."""
    flags = {field.name for field in fields(EngineConfig)}
    options = {
        "dp_size": str(config.dp_size),
        "model": files.name,
        "revision of the model": files.revision,
        "dtype": config.dtype,
        **settings.digest_fields(),
    }
    return {"--" + name.replace("_", "-") if name in flags else name: text for name, text in options.items()}


def compatibility(config: EngineConfig, files: ModelFiles, runner: Runner) -> dict[str, str]:
    """What must be equal on both ends of a hand-over."""
    return {
        "protocol": str(PROTOCOL_VERSION),
        "model": files.name,
        "revision": files.revision,
        "weights": config.dtype,
        "kv_layout": str(whole_layout(runner)),
        "block_size": str(config.block_size),
        "state": "none" if runner.states is None else str(runner.states.layout),
    }


def whole_layout(runner: Runner) -> KVLayout:
    """Of all heads, however many ranks share them out: engines of unequal --tp may be paired."""
    layout = runner.kv_pool.layout
    if len(runner.kv_shards) == 1:
        return layout
    return replace(layout, num_kv_heads=runner.config.num_kv_heads)


def build_role(
    config: EngineConfig,
    identity: Identity,
    runner: Runner,
    scheduler: Scheduler,
    choices: Choices,
    wake: Callable[[], None],
) -> tuple[HandoverRole, str | None, str | None]:
    """The engine's role, the transport it uses and the address peers reach it at."""
    if config.role == "normal":
        return NoHandover(scheduler), None, None
    if config.require_rdma:
        check_rdma(config.transport)
    # A model with states cannot be continued from blocks alone.
    exchanges_cache = config.pull_back and scheduler.cache is not None and runner.states is None
    source, sink, name = build_ends(config, identity, runner, wake, both=exchanges_cache)
    address = None if source is None else source.control_address
    if config.role == "prompt":
        assert source is not None
        fetching = PullBackLimits(config.pull_back_min_tokens, config.pull_back_wait_s)
        pull_back = None if sink is None else PullBack(scheduler, sink, fetching)
        prompt_role = PromptHandover(
            scheduler, source, choices, announces_chunks=config.chunk_handover, pull_back=pull_back
        )
        return prompt_role, name, address
    assert sink is not None
    limits = ArrivalLimits(config.handover_wait_s, config.room_wait_s, config.arrival_share)
    lender = None if source is None else Lender(scheduler, source)
    completion_role = CompletionHandover(
        scheduler, sink, choices, limits, lender, vocab_size=runner.config.vocab_size
    )
    return completion_role, name, address


def build_ends(
    config: EngineConfig, identity: Identity, runner: Runner, wake: Callable[[], None], *, both: bool
) -> tuple[HandoverSource | None, HandoverSink | None, str]:
    """The end of hand-overs that the role needs, or both: engines that read from each other's caches.

    Third the transport's name; each end has a transport of its own.
    """
    settings = TransferSettings(
        lease_s=config.lease_s,
        advertise_host=config.control_advertise_host,
        allowed_networks=tuple(config.control_allow.split(",")) if config.control_allow else (),
        require_rdma=config.require_rdma,
        verify_kv=config.verify_kv,
        min_self_test_bytes_per_s=config.min_self_test_rate,
    )
    regions = regions_of(runner)
    transport = transport_for(config, regions)
    served, reading = (make_transport(transport, config.nixl_backend) for _ in range(2))
    source = sink = None
    if both or config.role == "prompt":
        source = HandoverSource(identity, regions, served, config.control_bind, settings, wake)
    if both or config.role == "completion":
        sink = HandoverSink(identity, regions, reading, settings, wake)
    check = [make_transport(transport, config.nixl_backend) for _ in range(2)]
    try:
        check_transfers(identity, regions, source, check)
    except EngineError:
        for end in (source, sink):
            if end is not None:
                end.close()
        raise
    return source, sink, reading.name


def transport_for(config: EngineConfig, regions: list[Region]) -> str:
    """`--transport`, which for a GPU's memory can only be NIXL."""
    if all(region.device_id is None for region in regions):
        return config.transport
    if config.transport not in ("auto", "nixl"):
        raise DeviceError(f"--transport {config.transport} cannot read a GPU's memory; choose nixl")
    if config.verify_kv:
        raise DeviceError("--verify-kv cannot look into a GPU's memory; start with --no-verify-kv")
    return "nixl"


def regions_of(runner: Runner) -> list[Region]:
    """The memory that a hand-over moves: blocks, and a row of the state pool where there is one."""
    states, num_heads = runner.states, whole_layout(runner).num_kv_heads
    regions = [
        Region(
            "kv",
            pool.address,
            pool.block_bytes,
            pool.num_blocks,
            num_parts=pool.layout.num_layers,
            num_heads=num_heads,
            device_id=pool.device_id,
        )
        for pool in runner.kv_shards
    ]
    if states is not None:
        regions.append(Region("state", states.address, states.row_bytes, states.num_slots))
    return regions
