"""Drafts in the engine's loop: proposed when a step's results are in, counted when they were verified."""

from engine.drafters import DraftContext, Drafter
from engine.step_executor import StepOutcome
from shared_scheduler import Scheduler, SchedulerOutputs, SequenceStatus


class Speculation:
    """One engine's drafts. The scheduler decides how many of those proposed are worth verifying."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter) -> None:
        self._scheduler = scheduler
        self._drafter = drafter
        self._num_tokens = scheduler.config.max_num_draft_tokens
        self.num_drafted = 0
        """Drafts that were verified."""
        self.num_accepted = 0

    def after_step(
        self, outputs: SchedulerOutputs, outcome: StepOutcome, in_flight: SchedulerOutputs | None
    ) -> None:
        """A step's results are in the ledgers: count, and draft what comes next.

        `in_flight`: the step launched since, whose results are not back.
        """
        if outputs.is_empty:
            return
        if not outputs.prompt_run:
            self._scheduler.observe_decode(outputs, outcome.forward_s, outcome.sampler_s)
        if outcome.verified is not None:
            num_drafted = int(outputs.seqlens_q.sum()) - len(outputs.sequences)
            self.num_drafted += num_drafted
            self.num_accepted += num_drafted - int(outcome.verified.num_rejected.sum())
        contexts = self._contexts(outputs, in_flight)
        for context, drafts in zip(contexts, self._drafter.propose(contexts, self._num_tokens), strict=True):
            self._scheduler.set_drafts(context.sequence, drafts.token_ids, drafts.confidences)

    def _contexts(self, outputs: SchedulerOutputs, in_flight: SchedulerOutputs | None) -> list[DraftContext]:
        going_on = [s for s in outputs.sequences if s.status is SequenceStatus.RUNNING]
        if in_flight is None:
            return [DraftContext(sequence) for sequence in going_on]
        drafts = drafts_of(in_flight)
        return [DraftContext(s, drafts.get(s.request_id)) for s in going_on]


def drafts_of(outputs: SchedulerOutputs) -> dict[str, tuple[int, ...]]:
    """The drafts that a launched decode step verifies, by request id."""
    batch = outputs.batch
    if batch is None or batch.is_prompt:
        return {}
    ends = batch.seqlens_q.cumsum().tolist()
    spans = zip(ends, batch.seqlens_q.tolist(), strict=True)
    drafts = [tuple(batch.token_ids[end - num + 1 : end].tolist()) for end, num in spans]
    return {s.request_id: ids for s, ids in zip(outputs.sequences, drafts, strict=True)}
