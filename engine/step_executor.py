"""Runs the model on scheduled steps: in the engine thread, or in a worker thread beside it.

A step goes through
1. launch    the engine thread hands over what the scheduler decided
2. copies    clones and zeroes of pool rows that the step relies on
3. inputs    tokens that the step before it has sampled take their places in the batch
4. forward, sample
5. result    the engine thread takes the sampled tokens, or the exception that ended the step

Steps run one after the other in launch order, so a step sees everything that earlier ones wrote.
"""

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from engine.choices import NO_DRAWS, FirstDraws
from engine.copies import StateRows, execute_copies
from engine.model_runner import Int32Array, ModelRunner
from engine.sampler import NO_LOGPROBS, SampledTokens, Sampler, SamplingRows
from shared_scheduler import SchedulerOutputs
from wire.sampling import SamplingParams

NOTHING_SAMPLED = SampledTokens(np.empty(0, np.int64), None)


class ModelStep:
    """Stages 2 to 4 for one model and its pools."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, states: StateRows | None = None) -> None:
        self._runner = runner
        self._sampler = sampler
        self._states = states

    def run(
        self, outputs: SchedulerOutputs, draws: FirstDraws, previous: SampledTokens | None
    ) -> SampledTokens:
        """One token per sequence, and behind them those of `draws`.

        `previous`: what the last step that had a batch has sampled, if this batch may need it.
        """
        execute_copies(outputs.copies, self._runner.kv_pool, self._states)
        batch = outputs.batch
        if batch is None:
            return NOTHING_SAMPLED
        if (batch.input_from_previous >= 0).any():
            assert previous is not None
            batch = batch.resolve_inputs(previous.token_ids)
        logits = self._runner.forward(batch)
        params, output_indices = [s.sampling for s in outputs.sequences], batch.output_indices
        if draws.sampling:
            logits = torch.cat((logits, logits[torch.from_numpy(draws.logit_rows)]))
            params += draws.sampling
            output_indices = np.append(output_indices, np.zeros(len(draws.sampling), np.int32))
        return self._sampler.sample(logits, sampling_rows(params, output_indices))


class StepExecutor(Protocol):
    """Takes steps in order; called by the engine thread only."""

    @property
    def num_ahead(self) -> int:
        """Launched steps that may run on while the next one is scheduled."""

    def launch(self, outputs: SchedulerOutputs, draws: FirstDraws = NO_DRAWS) -> Future[SampledTokens]:
        """The future's `result()` waits for the step and raises what the step raised."""

    def close(self) -> None:
        """Wait for the step that runs; drop those behind it."""


class SynchronousExecutor:
    """A step has run when `launch` returns."""

    num_ahead = 0

    def __init__(self, step: ModelStep) -> None:
        self._step = step

    def launch(self, outputs: SchedulerOutputs, draws: FirstDraws = NO_DRAWS) -> Future[SampledTokens]:
        done: Future[SampledTokens] = Future()
        done.set_result(self._step.run(outputs, draws, None))
        return done

    def close(self) -> None:
        pass


class OverlappedExecutor:
    """Steps run in one worker thread; results are processed one step late."""

    num_ahead = 1

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._previous: Future[SampledTokens] | None = None
        """The last launched step that has a batch."""

    def launch(self, outputs: SchedulerOutputs, draws: FirstDraws = NO_DRAWS) -> Future[SampledTokens]:
        future = self._worker.submit(self._run, outputs, draws, self._previous)
        if outputs.batch is not None:
            self._previous = future
        return future

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _run(
        self, outputs: SchedulerOutputs, draws: FirstDraws, previous: Future[SampledTokens] | None
    ) -> SampledTokens:
        """A step behind one that failed fails in the same way: its inputs do not exist."""
        return self._step.run(outputs, draws, None if previous is None else previous.result())


def sampling_rows(params: Items[SamplingParams], output_indices: Int32Array) -> SamplingRows:
    """How to draw one token per entry of `params`."""
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.int64),
        output_index=output_indices,
        num_logprobs=np.array([NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params], np.int32),
    )
