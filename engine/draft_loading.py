"""Loads the model of `--draft-model` beside the one that it drafts for."""

import logging
from contextlib import suppress

from engine.config import EngineConfig
from engine.draft_model import DraftModel
from engine.errors import EngineStartError, WeightFormatError
from engine.model_runner import Runner, load_model_runner
from model_files import ModelConfig
from model_files.interface import ModelFiles
from model_files.resolve import resolve_model
from shared_scheduler import Scheduler

logger = logging.getLogger(__name__)


def load_draft_model(
    config: EngineConfig, name: str, files: ModelFiles, target: ModelConfig, scheduler: Scheduler
) -> DraftModel:
    """`EngineStartError` where the model cannot draft for the target."""
    draft_files = resolve_model(name)
    own, other = (some.tokenizer().get_vocab() for some in (files, draft_files))
    if own != other:
        odd = sorted(set(own.items()) ^ set(other.items()), key=lambda item: item[1])[0]
        raise EngineStartError(
            f"--draft-model {name} has another tokenizer than {files.name}, such as at token {odd[1]} "
            f"({odd[0]!r}); a draft model needs the same one"
        )
    settings = scheduler.config
    num_positions = draft_files.config().max_position_embeddings
    max_len = min(num_positions, settings.max_model_len + 2 * settings.max_num_draft_tokens)
    runner = load_draft_runner(config, draft_files, max_len)
    if runner.states is not None:
        raise EngineStartError(
            f"--draft-model {name} keeps a state per sequence, which cannot be wound back over wrong drafts; "
            "take a model that keeps keys and values only"
        )
    return DraftModel(
        runner,
        scheduler,
        num_slots=settings.num_draft_slots,
        vocab_size=target.vocab_size,
        max_len=min(max_len, runner.kv_pool.num_blocks * config.block_size),
    )


def load_draft_runner(config: EngineConfig, files: ModelFiles, max_len: int) -> Runner:
    """By the options of the target, but a checkpoint without 4-bit weights is kept in float16."""

    def load(weight_format: str) -> Runner:
        return load_model_runner(
            files,
            weight_format=weight_format,
            block_size=config.block_size,
            kv_bytes=config.draft_kv_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_len,
            num_threads=config.num_threads,
            kernels=config.kernels,
        )

    if config.dtype != "q4":
        return load(config.dtype)
    with suppress(WeightFormatError):
        return load("q4")
    logger.info("the draft model %s cannot be kept as q4 and is as fp16w", files.name)
    return load("fp16w")
