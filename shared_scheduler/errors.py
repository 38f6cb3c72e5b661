"""Errors of the scheduler.

SchedulerError
├── ConfigError          a configuration that can never work; raised while building
├── RequestError         one request is malformed for this scheduler; nothing was changed
├── GroupError           ranks that must step alike do not agree, or one stopped answering
└── CorruptionError      our own books contradict each other; raised at the spot, never repaired
"""


class SchedulerError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SchedulerError, ValueError):
    """Two options contradict each other; the message names both values and the option to change."""


class RequestError(SchedulerError, ValueError):
    """A request cannot be taken in this form (duplicate id, empty prompt, fork of a dead parent)."""


class GroupError(SchedulerError, RuntimeError):
    """The group of engines that step alike is broken: configurations differ or a rank is gone."""


class CorruptionError(SchedulerError, RuntimeError):
    """A block freed twice, a table that does not cover a write, a count that does not add up."""
