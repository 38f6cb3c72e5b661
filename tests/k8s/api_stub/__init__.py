"""A Kubernetes API server in a thread, enough for real helm and kubectl and for clients that list and watch.

    with ApiStub() as api:
        api.put_pod("p-0", ip="10.0.0.1", labels={...}, is_ready=True)   # also set_pod, delete, put
        api.url                                                          # http://127.0.0.1:PORT, no TLS
        api.kubeconfig(path)                                             # a file for helm and kubectl
        api.faults.…                                                     # see faults.py

Callers without a token are admins; the token `system:serviceaccount:NAMESPACE:NAME` is that account, held to
the Roles and RoleBindings in the store. What is written is checked against Kubernetes' strict schemas
(`version`). Objects have versions, generations and uids; events are kept until `faults.forget_history()`;
server-side apply knows field managers, conflicts and the fields that a manager no longer applies. No
controllers are there but one that says of workloads and pods of hooks that they are done (`run_workloads`).
"""

from tests.k8s.api_stub.faults import Faults
from tests.k8s.api_stub.server import ApiStub, Call
from tests.k8s.api_stub.store import ApiError

__all__ = ["ApiError", "ApiStub", "Call", "Faults"]
