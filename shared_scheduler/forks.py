"""A second sequence that starts from what another one has computed."""

from collections.abc import Sequence as TokenSequence

import numpy as np

from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.errors import RequestError
from shared_scheduler.holdings import Holdings
from shared_scheduler.queues import Queues
from shared_scheduler.sequence import FORK_MARK, Sequence
from wire.sampling import SamplingParams


class Forks:
    """Makes children that share their parent's blocks and slot until one of the two writes."""

    def __init__(self, config: SchedulerConfig, queues: Queues, holdings: Holdings) -> None:
        self._config = config
        self._queues = queues
        self._holdings = holdings

    def fork(
        self,
        parent: Sequence,
        request_id: str,
        sampling: SamplingParams | None,
        output_token_ids: TokenSequence[int] | None,
        now_s: float,
    ) -> Sequence:
        """The child's tokens are the parent's prompt and `output_token_ids` (None: the parent's outputs).

        With everything but its last token cached it goes to `prompted`, otherwise to the head of `waiting`.
        """
        if parent.is_finished or not parent.holds_blocks or parent.request_id in self._queues.remote:
            raise RequestError(f"cannot fork {parent!r}: it holds no computed blocks")
        child = self._copy(parent, request_id, sampling, output_token_ids)
        num_cached = self._num_shareable(parent, child)
        if num_cached == 0:
            raise RequestError(f"cannot fork {parent!r}: nothing of it is computed that the child could use")
        is_ready = num_cached == child.num_tokens - 1 and self._config.engine_type is not EngineType.PROMPT
        if self._config.engine_type is EngineType.COMPLETION and not is_ready:
            raise RequestError(f"cannot fork {parent!r}: a completion engine cannot compute the rest")
        self._queues.register(child)
        child.arrival_s = now_s
        child.cache.hit_tokens = num_cached
        self._holdings.share(parent, child, num_cached)
        if is_ready:
            self._queues.prompted.append(child)
            self._queues.expects_first_tokens |= child.num_output_tokens == 0
        else:
            self._queues.waiting.appendleft(child)
        return child

    def _copy(
        self,
        parent: Sequence,
        request_id: str,
        sampling: SamplingParams | None,
        output_token_ids: TokenSequence[int] | None,
    ) -> Sequence:
        tokens = parent.token_array()
        outputs = tokens[parent.num_prompt_tokens :]
        child = Sequence(
            request_id,
            tokens[: parent.num_prompt_tokens],
            sampling or parent.sampling,
            block_size=parent.cache.block_size,
            branch_id=FORK_MARK + parent.schedule.branch_id.removeprefix(FORK_MARK),
            cache_salt=parent.cache_salt,
        )
        child.structured.started = parent.structured.started
        child.structured.grammar = parent.structured.grammar
        child.store_tokens(outputs if output_token_ids is None else np.array(output_token_ids, np.int32))
        return child

    def _num_shareable(self, parent: Sequence, child: Sequence) -> int:
        """Leading tokens whose KV the child can take over; its last token is always computed by itself."""
        ours, theirs = child.token_array(), parent.token_array()
        length = min(ours.size - 1, parent.cache.num_tokens)
        differs = np.flatnonzero(ours[:length] != theirs[:length])
        num_shared = int(differs[0]) if differs.size else length
        if self._holdings.states is not None and (
            num_shared != parent.cache.num_tokens or parent.is_in_flight
        ):
            raise RequestError(
                f"cannot fork {parent!r} at {num_shared} tokens: its state covers"
                f" {parent.cache.num_tokens} and cannot be wound back"
            )
        return num_shared
