"""The stub behaves as an API server does, also when it is told to misbehave."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.k8s.api_stub import ApiStub

LABELS = {"app": "x", "role": "prompt"}
PODS = "/api/v1/namespaces/default/pods"


# To read certificates, which nobody needs here, takes longer than a test. No connection outlives its answer.
http = httpx.Client(verify=False, timeout=5.0, limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture
def api() -> Iterator[ApiStub]:
    with ApiStub() as api:
        yield api


def listed(api: ApiStub, **query: str) -> tuple[list[str], str]:
    """Names, and the version of the list."""
    answer = http.get(api.url + PODS, params=query).raise_for_status().json()
    return [item["metadata"]["name"] for item in answer["items"]], answer["metadata"]["resourceVersion"]


@contextmanager
def watching(api: ApiStub, **query: str) -> Iterator[Iterator[dict[str, Any]]]:
    with http.stream("GET", api.url + PODS, params={"watch": "1", **query}) as answer:
        answer.raise_for_status()
        yield (json.loads(line) for line in answer.iter_lines())


def seen(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"].get("name", "")


def test_a_watch_goes_on_where_the_list_ended(api: ApiStub) -> None:
    api.put_pod("a", "10.0.0.1", LABELS)
    names, version = listed(api, labelSelector="app=x,role in (prompt,completion)")
    assert names == ["a"]
    api.put_pod("b", "10.0.0.2", LABELS)
    with watching(api, resourceVersion=version) as events:
        assert seen(next(events)) == ("ADDED", "b")
        api.set_pod("a", is_ready=False)
        assert seen(next(events)) == ("MODIFIED", "a")
        api.delete("pods", "a")
        terminating = next(events)
        assert seen(terminating) == ("MODIFIED", "a")
        assert terminating["object"]["metadata"]["deletionGracePeriodSeconds"] == 30
        api.delete("pods", "a", grace_s=0)
        assert seen(next(events)) == ("DELETED", "a")


@pytest.mark.parametrize("truth", ["1", "true", "True"])
def test_truth_values_are_read_as_kubernetes_reads_them(api: ApiStub, truth: str) -> None:
    api.put_pod("a", "10.0.0.1", LABELS)
    with watching(api, watch=truth) as events:
        assert seen(next(events)) == ("ADDED", "a")


def test_an_object_that_stops_matching_is_deleted_for_the_watch(api: ApiStub) -> None:
    api.put_pod("a", "10.0.0.1", LABELS)
    with watching(api, labelSelector="role=prompt") as events:
        assert seen(next(events)) == ("ADDED", "a")
        api.set_pod("a", labels={"app": "x", "role": "other"})
        assert seen(next(events)) == ("DELETED", "a")
        api.set_pod("a", labels=LABELS)
        assert seen(next(events)) == ("ADDED", "a")


def test_forgotten_history_is_an_error_event_for_old_versions(api: ApiStub) -> None:
    _, old = listed(api)
    with watching(api, resourceVersion=old) as running:
        api.wait_for_watches("pods", 1)
        api.faults.forget_history()
        assert next(running)["object"]["code"] == 410
        assert next(running, None) is None
    with watching(api, resourceVersion=old) as late:
        assert next(late)["object"]["reason"] == "Expired"
    _, new = listed(api)
    api.put_pod("a", "10.0.0.1", LABELS)
    with watching(api, resourceVersion=new) as events:
        assert seen(next(events)) == ("ADDED", "a")


@pytest.mark.parametrize("how", ["abruptly", "in_event"])
def test_a_cut_stream_ends_in_the_middle(api: ApiStub, how: Any) -> None:
    with watching(api) as events:
        api.wait_for_watches("pods", 1)
        api.faults.cut_watches("pods", how)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    api.wait_for_watches("pods", 0)


def test_a_time_out_ends_a_stream_cleanly_with_a_bookmark(api: ApiStub) -> None:
    _, version = listed(api)
    query = {"resourceVersion": version, "timeoutSeconds": "0.01", "allowWatchBookmarks": "true"}
    with watching(api, **query) as events:
        (bookmark,) = events
    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["metadata"] == {"resourceVersion": version}


def test_a_lost_event_is_told_by_lists_only(api: ApiStub) -> None:
    api.put_pod("a", "10.0.0.1", LABELS)
    api.put_pod("b", "10.0.0.2", LABELS)
    _, version = listed(api)
    api.faults.lose("pods", "DELETED")
    with watching(api, resourceVersion=version) as events:
        api.delete("pods", "a", grace_s=0)
        api.delete("pods", "b", grace_s=0)
        assert seen(next(events)) == ("DELETED", "b")
    assert listed(api)[0] == []


def test_a_silent_watch_stays_open(api: ApiStub) -> None:
    with watching(api) as events:
        api.faults.silence("pods", True)
        api.put_pod("a", "10.0.0.1", LABELS)
        api.wait_for_watches("pods", 1)
        api.faults.silence("pods", False)
        assert seen(next(events)) == ("ADDED", "a")


def test_planned_failures_come_as_often_as_planned(api: ApiStub) -> None:
    api.faults.fail("list", "pods", 504, times=2)
    answers = [http.get(api.url + PODS) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [504, 504, 200]
    assert answers[0].json()["reason"] == "Timeout"
    assert api.count("list", "pods") == 3


def test_a_stopped_server_comes_back_at_its_port_with_what_it_knew(api: ApiStub) -> None:
    api.put_pod("a", "10.0.0.1", LABELS)
    with watching(api) as events:
        assert seen(next(events)) == ("ADDED", "a")
        api.stop()
        with pytest.raises(httpx.TransportError):
            next(events)
    with pytest.raises(httpx.ConnectError):
        http.get(api.url + PODS)
    api.start()
    assert listed(api)[0] == ["a"]


def test_an_account_may_do_what_its_role_says(api: ApiStub) -> None:
    api.put(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "reader"},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}],
        }
    )
    subject = {"kind": "ServiceAccount", "name": "proxy", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    api.put({**binding, "metadata": {"name": "reader"}, "roleRef": role, "subjects": [subject]})
    account = {"authorization": "Bearer system:serviceaccount:default:proxy"}
    assert http.get(api.url + PODS, headers=account).status_code == 200
    for path in (
        PODS + "?watch=1",
        "/api/v1/namespaces/kube-system/pods",
        "/api/v1/namespaces/default/secrets",
    ):
        answer = http.get(api.url + path, headers=account)
        assert (answer.status_code, answer.json()["reason"]) == (403, "Forbidden")


def test_an_unknown_field_is_refused(api: ApiStub) -> None:
    body = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}, "datum": {}}
    answer = http.post(api.url + "/api/v1/namespaces/default/configmaps", json=body)
    assert answer.status_code == 422
    assert "datum" in answer.json()["message"]


def applied(api: ApiStub, manager: str, data: dict[str, str], **query: str) -> httpx.Response:
    body = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}, "data": data}
    return http.patch(
        api.url + "/api/v1/namespaces/default/configmaps/c",
        params={"fieldManager": manager, **query},
        headers={"content-type": "application/apply-patch+yaml"},
        content=json.dumps(body),
    )


def test_a_workload_that_would_not_find_its_own_pods_is_refused(api: ApiStub) -> None:
    pod = {"containers": [{"name": "a", "image": "b"}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {
            "selector": {"matchLabels": {"app": "x"}},
            "template": {"metadata": {"labels": {"app": "y"}}, "spec": pod},
        },
    }
    answer = http.post(f"{api.url}/apis/apps/v1/namespaces/default/deployments", json=deployment)
    assert answer.status_code == 422
    assert "does not match template" in answer.json()["message"]


def test_apply_takes_out_what_its_manager_no_longer_applies(api: ApiStub) -> None:
    applied(api, "one", {"a": "1", "b": "1"})
    applied(api, "two", {"c": "2"})
    assert applied(api, "one", {"b": "1"}).json()["data"] == {"b": "1", "c": "2"}


def test_apply_does_not_overwrite_what_others_own_unless_forced(api: ApiStub) -> None:
    applied(api, "one", {"a": "1"})
    refused = applied(api, "two", {"a": "2"})
    assert refused.status_code == 409
    assert 'conflict with "one": .data.a' in refused.json()["message"]
    assert applied(api, "two", {"a": "2"}, force="true").json()["data"] == {"a": "2"}
    assert applied(api, "one", {}).json()["data"] == {"a": "2"}
