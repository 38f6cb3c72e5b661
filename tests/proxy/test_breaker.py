from proxy.breaker import CLOSED, FIRST_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, TRIAL_S, Breaker


def ejected(now_s: float = 0.0) -> Breaker:
    breaker = CLOSED
    for _ in range(MAX_FAILURES):
        breaker = breaker.on_failure(now_s)
    return breaker


def test_failures_in_a_row_eject_and_fewer_do_not() -> None:
    breaker = CLOSED
    for _ in range(MAX_FAILURES - 1):
        breaker = breaker.on_failure(0.0)
    assert breaker.lets_through(0.0)
    assert not breaker.on_failure(0.0).lets_through(0.0)


def test_a_success_starts_the_count_anew() -> None:
    breaker = CLOSED
    for _ in range(3 * MAX_FAILURES):
        breaker = breaker.on_failure(0.0).on_success()
    assert breaker is CLOSED


def test_after_the_pause_one_request_tries() -> None:
    breaker = ejected()
    assert not breaker.lets_through(FIRST_PAUSE_S * 0.99)
    assert breaker.lets_through(FIRST_PAUSE_S)
    trying = breaker.on_request(FIRST_PAUSE_S)
    assert not trying.lets_through(FIRST_PAUSE_S)
    assert trying.on_success() is CLOSED
    assert trying.lets_through(FIRST_PAUSE_S + TRIAL_S), "a trial whose client left ends without a verdict"


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now_s, pauses = ejected(), 0.0, []
    for _ in range(8):
        assert breaker.open_until_s is not None
        pauses.append(breaker.open_until_s - now_s)
        now_s = breaker.open_until_s
        breaker = breaker.on_request(now_s).on_failure(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


def test_stragglers_of_an_open_breaker_change_nothing() -> None:
    breaker = ejected()
    assert breaker.on_failure(0.5) is breaker
