"""Why it cannot be found out where engines are.

DiscoveryError
├── DiscoverySetupError   it never will; the message names the option
└── ClusterRefused        the cluster's API did not give what it was asked for; another try may help
    └── ListingExpired    what it told last is too old to go on from (410)
"""


class DiscoveryError(Exception):
    """Base of all errors of this package."""


class DiscoverySetupError(DiscoveryError):
    """Settings or surroundings do not fit."""


class ClusterRefused(DiscoveryError):
    """`reason` is a word for metrics: `forbidden`, `unreachable`, `cut`, `http_504`, `unexpected`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ListingExpired(ClusterRefused):
    def __init__(self) -> None:
        super().__init__("expired", "the resource version is too old")
