"""Keys and certificates of a control plane, made with openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.cluster.network import NODE_IP

NAMES = f"subjectAltName=IP:127.0.0.1,IP:{NODE_IP},IP:10.96.0.1,DNS:kubernetes.default.svc,DNS:localhost"


@dataclass(frozen=True, slots=True)
class Certificates:
    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def path(self, name: str) -> str:
        return str(self.folder / name)


def make_certificates(folder: Path) -> Certificates:
    """The API server's, the aggregation layer's, and the key that signs service accounts' tokens."""
    for authority in ("ca", "front-ca"):
        _openssl(
            folder,
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *(
                "-days",
                "2",
                "-keyout",
                f"{authority}.key",
                "-out",
                f"{authority}.crt",
                "-subj",
                f"/CN={authority}",
            ),
        )
    _signed(folder, "api", "ca", "/CN=kube-apiserver", NAMES)
    _signed(folder, "front", "front-ca", "/CN=front-proxy-client", "extendedKeyUsage=clientAuth")
    _openssl(folder, "genrsa", "-out", "sa.key", "2048")
    _openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    return Certificates(folder)


def _signed(folder: Path, name: str, authority: str, subject: str, extension: str) -> None:
    (folder / f"{name}.ext").write_text(extension)
    _openssl(
        folder,
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject),
    )
    _openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"),
        *("-CAcreateserial", "-days", "2", "-out", f"{name}.crt", "-extfile", f"{name}.ext"),
    )


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)
