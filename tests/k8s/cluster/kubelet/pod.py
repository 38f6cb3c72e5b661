"""One pod from its binding to its end.

1. begun     an address and a namespace, volumes, a hosts file
2. init      initContainers one after the other, each until it succeeds
3. running   containers, each on its own thread; every change goes into the pod's status
4. ending    containers leave within the grace, or are killed; then the pod's object goes, its address is free
"""

import subprocess
import threading
from http.client import HTTPException
from pathlib import Path

from tests.k8s.cluster.api import STRATEGIC, ApiFailure, ClusterApi, Json
from tests.k8s.cluster.kubelet import addresses
from tests.k8s.cluster.kubelet.container import ContainerRunner, Start
from tests.k8s.cluster.kubelet.node import NodeSettings, now
from tests.k8s.cluster.kubelet.surroundings import (
    PodPlace,
    enter_command,
    environment,
    hosts_file,
    make_volumes,
)
from tests.k8s.cluster.network import NODE_IP, PodNetwork


class PodRunner(threading.Thread):
    def __init__(self, settings: NodeSettings, api: ClusterApi, pod: Json) -> None:
        super().__init__(name=pod["metadata"]["name"], daemon=True)
        self._settings = settings
        self._api = api
        self._number = addresses.take()
        self._network = PodNetwork(self._number)
        folder = Path(settings.folder) / "pods" / f"{pod['metadata']['name']}-{pod['metadata']['uid'][:8]}"
        self._place = PodPlace(pod, self._network.ip, self._network.name, folder)
        self._containers: list[ContainerRunner] = []
        self._started_at = now()
        self._grace_s: float | None = None
        self._told = threading.Event()
        self._changed = threading.Event()
        self._published: Json = {}

    def end(self, grace_s: float) -> None:
        """May be called again with a shorter grace; it counts for what has not been asked to leave."""
        self._grace_s = grace_s if self._grace_s is None else min(self._grace_s, grace_s)
        self._told.set()
        self._changed.set()

    def kill(self) -> None:
        """The node goes: nothing is told any more."""
        for container in self._containers:
            container.kill()
        self._network.down()

    def run(self) -> None:
        try:
            self._begin()
            while not self._told.is_set():
                self._publish()
                self._changed.wait(5.0)
                self._changed.clear()
        except (OSError, subprocess.SubprocessError, ApiFailure, HTTPException, LookupError) as error:
            print(f"{self.name}: {error!r}", flush=True)
            self._told.wait()
        self._finish()

    def _begin(self) -> None:
        place, spec = self._place, self._place.pod["spec"]
        place.folder.mkdir(parents=True)
        self._network.up()
        services = self._api.items("/api/v1/services")
        (place.folder / "hosts").write_text(hosts_file(place.namespace, services))
        volumes = make_volumes(place, self._settings, self._api)
        for container in spec.get("initContainers") or ():
            self._run_init(container, volumes)
        for container in spec["containers"]:
            runner = ContainerRunner(place, container, self._start_of(container, volumes), self._changed.set)
            self._containers.append(runner)
            threading.Thread(target=runner.run, name=f"{self.name}/{container['name']}", daemon=True).start()

    def _run_init(self, container: Json, volumes: dict[str, Path]) -> None:
        start = self._start_of(container, volumes)
        while not self._told.is_set():
            with (self._place.folder / f"{container['name']}.log").open("ab") as log:
                done = subprocess.run(start.command, env=dict(start.values), stdout=log, stderr=log)
            if done.returncode == 0:
                return
            self._told.wait(1.0)

    def _start_of(self, container: Json, volumes: dict[str, Path]) -> Start:
        values = environment(self._place, container, self._settings, self._api)
        workdir = container.get("workingDir") or self._settings.working_directory
        return Start(enter_command(self._place, container, volumes, values, workdir), values)

    def _finish(self) -> None:
        """The pod's status goes on being told while it ends: a terminating pod may still be ready."""
        enders = [
            threading.Thread(target=container.end, args=(self._grace_s or 0.0,), daemon=True)
            for container in self._containers
        ]
        for ender in enders:
            ender.start()
        while any(ender.is_alive() for ender in enders):
            self._changed.wait(0.1)
            self._changed.clear()
            self._publish()
        self._publish()
        self._network.down()
        addresses.give_back(self._number)
        path = f"/api/v1/namespaces/{self._place.namespace}/pods/{self._place.name}"
        while True:
            try:
                self._api.delete(path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self._place.uid}})
                return
            except ApiFailure as error:
                if error.status in (404, 409):
                    return
                print(f"{self.name}: {error}", flush=True)
            except (OSError, HTTPException) as error:
                print(f"{self.name}: {error!r}", flush=True)
            threading.Event().wait(1.0)

    def _publish(self) -> None:
        """Where the API cannot be reached, the next round tells."""
        status = self._status()
        if status == self._published:
            return
        path = f"/api/v1/namespaces/{self._place.namespace}/pods/{self._place.name}/status"
        try:
            self._api.patch(path, {"metadata": {"uid": self._place.uid}, "status": status}, STRATEGIC)
            self._published = status
        except ApiFailure as error:
            if error.status not in (404, 409):
                print(f"{self.name}: {error}", flush=True)
        except (OSError, HTTPException) as error:
            print(f"{self.name}: {error!r}", flush=True)

    def _status(self) -> Json:
        statuses = [container.status() for container in self._containers]
        is_ready = all(container.is_ready for container in self._containers) and bool(self._containers)
        conditions = {
            "Initialized": bool(statuses),
            "PodScheduled": True,
            "ContainersReady": is_ready,
            "Ready": is_ready,
        }
        return {
            "phase": self._phase(),
            "podIP": self._place.ip,
            "podIPs": [{"ip": self._place.ip}],
            "hostIP": NODE_IP,
            "startTime": self._started_at,
            "containerStatuses": statuses,
            "conditions": [
                {"type": name, "status": "True" if value else "False"} for name, value in conditions.items()
            ],
        }

    def _phase(self) -> str:
        if not self._containers:
            return "Pending"
        if all(container.is_done for container in self._containers):
            codes = [container.exit_code for container in self._containers]
            return "Succeeded" if not any(codes) else "Failed"
        return "Running"
