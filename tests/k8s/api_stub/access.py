"""Who may do what: Roles and RoleBindings of the store, as Kubernetes reads them."""

from tests.k8s.api_stub.resources import BY_PLURAL, Resource
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import ApiError, Store

ADMIN = "system:admin"


def user_of(authorization: str) -> str:
    """The caller's name: what follows `Bearer`, or the admin where nothing does."""
    return authorization.removeprefix("Bearer ").strip() or ADMIN


def check_access(
    store: Store, user: str, verb: str, resource: Resource, subresource: str, namespace: str, name: str
) -> None:
    """Raises the 403 that Kubernetes answers."""
    target = resource.plural + (f"/{subresource}" if subresource else "")
    if user == ADMIN or _is_allowed(store, user, verb, resource.group, target, namespace, name):
        return
    place = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
    raise ApiError(
        403,
        "Forbidden",
        f'{target} is forbidden: User "{user}" cannot {verb} resource "{target}" in API group'
        f' "{resource.group}"{place}',
    )


def _is_allowed(
    store: Store, user: str, verb: str, group: str, target: str, namespace: str, name: str
) -> bool:
    if not namespace:
        return False
    bindings, _ = store.find(BY_PLURAL["rolebindings"], namespace)
    return any(
        _rule_allows(rule, verb, group, target, name)
        for binding in bindings
        if any(_is_subject(subject, user, namespace) for subject in binding.get("subjects") or [])
        for rule in _rules(store, binding, namespace)
    )


def _is_subject(subject: Manifest, user: str, namespace: str) -> bool:
    account = f"system:serviceaccount:{subject.get('namespace', namespace)}:{subject['name']}"
    return subject["kind"] == "ServiceAccount" and account == user


def _rules(store: Store, binding: Manifest, namespace: str) -> list[Manifest]:
    try:
        role = store.get(BY_PLURAL["roles"], namespace, binding["roleRef"]["name"])
    except ApiError:
        return []
    return list(role.get("rules") or [])


def _rule_allows(rule: Manifest, verb: str, group: str, target: str, name: str) -> bool:
    names = rule.get("resourceNames")
    return (
        any(allowed in ("*", verb) for allowed in rule["verbs"])
        and any(allowed in ("*", group) for allowed in rule.get("apiGroups", []))
        and any(allowed in ("*", target) for allowed in rule.get("resources", []))
        and (not names or name in names)
    )
