"""Which engines there are and how they are: one background task per engine asks it every second.

An engine is routable from the moment `/info` and `/health/ready` both answered 200 until it says it is not
ready, refuses connections, or fails to answer MAX_FAILED_PROBES times in a row; one slow answer under load
ejects nobody. What it answers to requests counts too (`breaker`). Addresses come from `discovery`: an engine
that is not listed any more gets nothing new, and is asked until it has gone, so that nobody waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx
import msgspec

from proxy.breaker import CLOSED, Breaker
from proxy.discovery.endpoints import Endpoint
from proxy.fleet import Engine, FleetSnapshot
from wire.services import EngineInfo, EngineRole

logger = logging.getLogger(__name__)

MAX_FAILED_PROBES = 3
PROBE_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 0.9
"""A host that is gone answers no connection either, which says so sooner than three silent probes."""
PROBE_TIMEOUTS = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
RETRY_S = 1.0
"""An engine that has not answered is asked again so soon, however seldom the others are."""
STANDSTILL_S = 0.25
"""A time-out that comes so late says that this process stood still, and nothing about the engine."""
MAX_UNLISTED_S = 600.0
"""An engine that is not listed any more and refuses connections may still be ending streams so long."""


@dataclass(slots=True)
class _Watched:
    """One engine and what its probing task keeps between rounds."""

    engine: Engine
    instance: str = ""
    """As discovery has it."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_failed_probes: int = 0
    has_answered: bool = False
    """The latest probe."""
    stood_still: bool = False
    """The latest probe ran out of time while this process did nothing: once in a row that does not count."""
    is_doubted: bool = False
    """Since the last probe that went well."""
    breaker: Breaker = CLOSED
    unlisted_since_s: float | None = None
    has_gone: bool = False
    """It was unlisted, and is not there any more."""
    task: asyncio.Task[None] | None = None


class EngineDirectory:
    """Keeps the snapshot fresh; `run` until cancelled."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        urls: Mapping[EngineRole, Sequence[str]] | None = None,
        *,
        model: str,
        refresh_s: float,
        on_silent: Callable[[Engine], None] = lambda engine: None,
        on_ejected: Callable[[Engine], None] = lambda engine: None,
    ) -> None:
        """`urls`: engines known from the start; `place` tells of others.

        `on_silent` is called when an engine has stopped answering, so that nobody waits for it.
        """
        self._http = http
        self._on_silent = on_silent
        self._on_ejected = on_ejected
        self._model = model
        self._refresh_s = refresh_s
        self._watched: dict[tuple[EngineRole, str], _Watched] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._seen: FleetSnapshot | None = None
        """What all see until something changes; None where it depends on the time."""
        for role, role_urls in (urls or {}).items():
            self.place(role, [Endpoint(role, url) for url in role_urls])

    def snapshot(self) -> FleetSnapshot:
        if self._seen is not None:
            return self._seen
        now_s, all_watched = time.monotonic(), self._watched.values()
        fleet = FleetSnapshot(tuple([_as_seen(watched, now_s) for watched in all_watched]))
        if all(watched.breaker is CLOSED for watched in all_watched):
            self._seen = fleet
        return fleet

    def is_routable(self, engine: Engine) -> bool:
        """Does this start of the engine take requests now?"""
        if self._seen is not None and engine in self._seen.engines:
            return engine.is_routable
        watched = self._find(engine)
        if watched is None:
            return False
        now = _as_seen(watched, time.monotonic())
        return now.is_routable and now.start == engine.start

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for watched in self._watched.values():
                watched.task = self._tasks.create_task(self._watch(watched))
            await asyncio.Event().wait()

    def place(self, role: EngineRole, endpoints: Iterable[Endpoint]) -> None:
        """All engines of the role that may get requests from now on.

        Another engine at an old address is a new one: whoever waits for the old one is told.
        """
        listed = {endpoint.url: endpoint for endpoint in endpoints}
        for watched in [each for each in self._watched.values() if each.engine.role == role]:
            endpoint = listed.get(watched.engine.url)
            if endpoint is None:
                self._unlist(watched)
            elif endpoint.instance != watched.instance:
                self._forget(watched)
            else:
                watched.unlisted_since_s = None
                del listed[endpoint.url]
        for endpoint in listed.values():
            self._add(endpoint)
        self._notify()

    def _add(self, endpoint: Endpoint) -> None:
        watched = _Watched(Engine(url=endpoint.url, role=endpoint.role), endpoint.instance)
        self._watched[endpoint.role, endpoint.url] = watched
        if self._tasks is not None:
            watched.task = self._tasks.create_task(self._watch(watched))

    def _unlist(self, watched: _Watched) -> None:
        if watched.unlisted_since_s is None:
            watched.unlisted_since_s = time.monotonic()
            logger.info("%s engine %s is not listed any more", watched.engine.role, watched.engine.url)
            watched.wake.set()

    def _forget(self, watched: _Watched) -> None:
        """It is not there any more, and neither is what was sent there."""
        engine = watched.engine
        del self._watched[engine.role, engine.url]
        if watched.task is not None and watched.task is not asyncio.current_task():
            watched.task.cancel()
        logger.info("%s engine %s has left", engine.role, engine.url)
        self._on_silent(engine)
        self._notify()

    def _find(self, engine: Engine) -> _Watched | None:
        """None where it has gone since."""
        return self._watched.get((engine.role, engine.url))

    async def wait_for_change(self) -> None:
        """Return after the next change of any engine's state."""
        await self._changed.wait()

    def assigned(self, engine: Engine) -> None:
        """A request is on its way to this engine."""
        if self._seen is not None:
            return  # nobody fails
        watched = self._find(engine)
        if watched is not None and watched.breaker is not CLOSED:
            watched.breaker = watched.breaker.on_request(time.monotonic())

    def answered(self, engine: Engine) -> None:
        """The engine has given a token, or said no for the request's own fault."""
        if self._seen is not None:
            return  # nobody has failed
        watched = self._find(engine)
        if watched is not None and watched.breaker is not CLOSED:
            watched.breaker = CLOSED
            self._notify()

    def suspect(self, engine: Engine) -> None:
        """A leg failed on this engine: ask it again now rather than at the next round."""
        watched = self._find(engine)
        if watched is not None:
            watched.wake.set()

    def failed(self, engine: Engine) -> None:
        """A leg failed on this engine, and not for the request's own fault."""
        watched, now_s = self._find(engine), time.monotonic()
        if watched is None:
            return
        before, watched.breaker = watched.breaker, watched.breaker.on_failure(now_s)
        self._seen = None
        open_until_s = watched.breaker.open_until_s
        if open_until_s is not None and open_until_s != before.open_until_s:
            pause_s = open_until_s - now_s
            logger.warning("%s engine %s fails: ejected for %g s", engine.role, engine.url, pause_s)
            self._on_ejected(engine)
            asyncio.get_running_loop().call_later(pause_s, self._notify)

    def leaves(self, url: str, leaves_in_s: float) -> None:
        """The engine has said that it drains."""
        for watched in self._watched.values():
            if watched.engine.url == url:
                self._set(watched, _leaving(watched.engine, leaves_in_s))

    def doubted(self, engine: Engine) -> None:
        """A connection to the engine did not come about in time: a probe that fares alike makes it lost.

        One such connection is no proof: under load a queue of connections is full for a moment.
        """
        watched = self._find(engine)
        if watched is not None:
            watched.is_doubted = True
            watched.wake.set()

    def lost(self, engine: Engine) -> None:
        """The engine refuses connections: nothing is sent there until it has answered a probe."""
        watched = self._find(engine)
        if watched is not None:
            self._set(watched, replace(watched.engine, is_ready=False, problem="connection refused"))
            watched.wake.set()

    async def _watch(self, watched: _Watched) -> None:
        while True:
            watched.wake.clear()
            before = watched.engine
            seen = await self._probe(watched)
            if watched.engine is before:
                self._set(watched, seen)
            else:
                watched.wake.set()  # something else was told meanwhile, which may be newer
            if self._has_gone(watched):
                self._forget(watched)
                return
            try:
                async with asyncio.timeout(
                    self._refresh_s if watched.has_answered else min(self._refresh_s, RETRY_S)
                ):
                    await watched.wake.wait()
            except TimeoutError:
                pass

    async def _probe(self, watched: _Watched) -> Engine:
        engine, was_doubted = watched.engine, watched.is_doubted
        watched.has_answered = False
        loop = asyncio.get_running_loop()
        asked_s = began_s = loop.time()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                ready = await self._http.get(f"{engine.url}/health/ready", timeout=PROBE_TIMEOUTS)
                if ready.status_code != 200:
                    _succeeded(watched, was_doubted)
                    return _as_it_says(engine, ready)
                asked_s = loop.time()
                answer = await self._http.get(f"{engine.url}/info", timeout=PROBE_TIMEOUTS)
                answer.raise_for_status()
            info = _info_decoder.decode(answer.content)
        except httpx.ConnectError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError | None):
                # No host says so: nobody may answer any more.
                self._after_failed_probe(watched, error, was_doubted)
            problem = f"cannot connect ({error})"
            return replace(engine, is_ready=False, info=None, problem=problem, leaves_at_s=None)
        except httpx.ConnectTimeout as error:
            if _stood_still(watched, loop.time() - asked_s - CONNECT_TIMEOUT_S):
                return engine
            engine = self._after_failed_probe(watched, error, was_doubted)
            return replace(engine, is_ready=engine.is_ready and watched.num_failed_probes < 2)
        except TimeoutError as error:
            if _stood_still(watched, loop.time() - began_s - PROBE_TIMEOUT_S):
                return engine
            return self._after_failed_probe(watched, error, was_doubted)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            return self._after_failed_probe(watched, error, was_doubted)
        _succeeded(watched, was_doubted)
        if engine.info is not None and engine.info.epoch != info.epoch:
            watched.breaker = CLOSED
            watched.has_gone = watched.unlisted_since_s is not None
        problem = self._mismatch(engine, info)
        return replace(engine, info=info, is_ready=not problem, problem=problem, leaves_at_s=None)

    def _after_failed_probe(self, watched: _Watched, error: Exception, was_doubted: bool) -> Engine:
        watched.num_failed_probes += 1
        problem = f"{type(error).__name__}: {error}".removesuffix(": ")
        if watched.num_failed_probes < MAX_FAILED_PROBES:
            is_ready = watched.engine.is_ready and not was_doubted
            return replace(watched.engine, is_ready=is_ready, problem=problem)
        self._on_silent(watched.engine)
        return replace(watched.engine, is_ready=False, problem=problem)

    def _has_gone(self, watched: _Watched) -> bool:
        """An engine that was unlisted is not there any more, or it is another one."""
        if watched.unlisted_since_s is None:
            return False
        is_silent = watched.num_failed_probes >= MAX_FAILED_PROBES
        has_had_its_time = time.monotonic() - watched.unlisted_since_s > MAX_UNLISTED_S
        return watched.has_gone or is_silent or (watched.engine.info is None and has_had_its_time)

    def _mismatch(self, engine: Engine, info: EngineInfo) -> str:
        if info.role != engine.role:
            return f"is a {info.role} engine, configured as --{engine.role}-url"
        if info.model != self._model:
            return f"serves model {info.model!r}, this proxy serves {self._model!r}"
        if info.role == "prompt" and info.control_address is None:
            return "has no control address for hand-overs"
        return ""

    def _set(self, watched: _Watched, engine: Engine) -> None:
        before = watched.engine
        if before == engine:
            return
        watched.engine = engine
        if (before.is_ready, before.problem) != (engine.is_ready, engine.problem):
            if engine.is_ready:
                logger.info("%s engine %s is ready", engine.role, engine.url)
            else:
                # An engine that is still starting is nothing to worry about.
                level = logging.INFO if before.info is engine.info is None else logging.WARNING
                logger.log(level, "%s engine %s: %s", engine.role, engine.url, engine.problem)
        self._notify()

    def _notify(self) -> None:
        self._seen = None
        self._changed.set()
        self._changed = asyncio.Event()


def _as_seen(watched: _Watched, now_s: float) -> Engine:
    engine = watched.engine
    if watched.unlisted_since_s is not None:
        return replace(engine, is_unlisted=True, problem=engine.problem or "not listed any more")
    if watched.breaker is CLOSED or not engine.is_ready or watched.breaker.lets_through(now_s):
        return engine
    problem = f"failed {watched.breaker.num_failures} requests in a row"
    return replace(engine, is_ejected=True, problem=problem)


def _succeeded(watched: _Watched, was_doubted: bool) -> None:
    """A probe went well; `was_doubted` when it began, for one that was under way proves nothing."""
    watched.has_answered = True
    watched.stood_still = False
    watched.num_failed_probes = 0
    watched.is_doubted = watched.is_doubted and not was_doubted


def _stood_still(watched: _Watched, late_s: float) -> bool:
    """Was this process, not the engine, silent until a time-out that came so late? Then it is asked again."""
    watched.stood_still = late_s > STANDSTILL_S and not watched.stood_still
    if watched.stood_still:
        watched.wake.set()
    return watched.stood_still


def _as_it_says(engine: Engine, answer: httpx.Response) -> Engine:
    """An engine whose service is not ready, by what that says of itself, such as `loading` or `draining`."""
    try:
        state = _state_decoder.decode(answer.content)
    except msgspec.MsgspecError:
        return replace(engine, is_ready=False, problem="not ready")
    if state.grace_left_s is not None:
        return _leaving(engine, state.grace_left_s)
    return replace(engine, is_ready=False, problem=state.status, leaves_at_s=None)


def _leaving(engine: Engine, leaves_in_s: float) -> Engine:
    # Said again and again, always a little later: only the first time is a change.
    leaves_at_s = engine.leaves_at_s or time.monotonic() + leaves_in_s
    return replace(engine, is_ready=False, problem="draining", leaves_at_s=leaves_at_s)


class _ServiceState(msgspec.Struct):
    status: str
    grace_left_s: float | None = None


_state_decoder = msgspec.json.Decoder(_ServiceState)

_info_decoder = msgspec.json.Decoder(EngineInfo)
