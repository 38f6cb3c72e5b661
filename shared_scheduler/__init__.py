"""Decides what runs in every step: which sequences, how many tokens of each, in which blocks.

Decisions only: no torch, no sockets, and no clock but the times it is handed.
"""

from shared_scheduler.batch import Batch
from shared_scheduler.block_manager import AllocStatus, BlockManager
from shared_scheduler.budgets import AdmissionResult
from shared_scheduler.cohort import Cohort
from shared_scheduler.config import EngineType, SchedulerConfig, WaitingPolicy
from shared_scheduler.copies import Copies
from shared_scheduler.drafts import REJECTED
from shared_scheduler.errors import ConfigError, CorruptionError, GroupError, RequestError, SchedulerError
from shared_scheduler.flops import FlopsEstimator, ModelShape, StepFlops
from shared_scheduler.loans import Import, Loan
from shared_scheduler.outputs import FirstToken, SchedulerOutputs, StepResults
from shared_scheduler.prefix_cache import PrefixCache
from shared_scheduler.radix_tree import RadixTree, Watch
from shared_scheduler.reuse import CacheStats
from shared_scheduler.scheduler import Scheduler
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus
from shared_scheduler.voting import GroupVote, SingleRank, ThreadGroup

__all__ = [
    "REJECTED", "AdmissionResult", "AllocStatus", "Batch", "BlockManager", "CacheStats", "Cohort",
    "ConfigError", "Copies", "CorruptionError", "EngineType", "FirstToken", "FlopsEstimator",
    "GroupError", "GroupVote", "Import", "Loan", "ModelShape", "PrefixCache", "RadixTree",
    "RequestError", "Scheduler", "SchedulerConfig", "SchedulerError", "SchedulerOutputs", "Sequence",
    "SequenceStatus", "SingleRank", "StepFlops", "StepResults", "ThreadGroup", "WaitingPolicy", "Watch",
]  # fmt: skip
