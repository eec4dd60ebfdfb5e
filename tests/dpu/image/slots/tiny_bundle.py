"""Signed bundles with an image that runs here: a stand-in for the service, or the service itself in some version."""

from __future__ import annotations

import base64
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from meshfusion.dpu.formats import IMAGE_LABEL, own_formats_text
from tests.dpu.image.slots.script import layer, sha256

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
STAND_IN = """#!{python} -S
# Answers as a service that is ready, as long as no other one has the pool.
import fcntl, http.server, json, os, signal, sys, threading, time
VERSION, READY_S, LIFE_S, CODE = {version!r}, {ready_s!r}, {life_s!r}, {code!r}
card = os.environ["CARD"]
with open(card + "/starts", "a") as starts:
    starts.write(VERSION + "\\n")
pool = open(card + "/pool.lock", "w")
try:
    fcntl.flock(pool, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open(card + "/two services", "w").close()
    sys.exit(3)
begun = time.monotonic()
if LIFE_S is not None:
    threading.Timer(LIFE_S, os._exit, (CODE,)).start()
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ready = READY_S is not None and time.monotonic() - begun >= READY_S
        body = {{"version": VERSION}}
        if self.path == "/readyz":
            status, written = ("ok", 0.1) if is_ready else ("unknown", None)
            reasons = [] if is_ready else ["the first probe has not ended yet"]
            body = {{"status": status, "reasons": reasons, "written_age_s": written}}
        data = json.dumps(body).encode()
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Answers)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("ready", flush=True)
server.serve_forever()
"""
REAL = """#!/bin/sh
root=$(dirname "$0")/../..
PYTHONPATH="$root/lib:$TREE" exec {python} -c \\
    'from meshfusion.tools.mfctl.main import service_main; service_main()' --config "$CARD/etc/meshfusion/service.yaml"
"""


def stand_in(
    version: str, *, ready_s: float | None = 0.0, life_s: float | None = None, code: int = 1
) -> dict[str, bytes | None]:
    """``life_s``: after which it ends with ``code``."""
    text = STAND_IN.format(python=sys.executable, version=version, ready_s=ready_s, life_s=life_s, code=code)
    return {"usr/": None, "usr/bin/": None, "usr/bin/meshfusion": text.encode()}


def real(version: str) -> dict[str, bytes | None]:
    """The service of this tree, which takes itself for another version."""
    facts = f"Metadata-Version: 2.1\nName: meshfusion\nVersion: {version}\n"
    return {
        "usr/": None,
        "usr/bin/": None,
        "usr/bin/meshfusion": REAL.format(python=sys.executable).encode(),
        "lib/": None,
        f"lib/meshfusion-{version}.dist-info/": None,
        f"lib/meshfusion-{version}.dist-info/METADATA": facts.encode(),
    }


@dataclass(frozen=True)
class Signer:
    key: Ed25519PrivateKey
    path: Path

    @classmethod
    def make(cls, folder: Path) -> Signer:
        key, path = Ed25519PrivateKey.generate(), folder / "key.pub.pem"
        path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return cls(key, path)


def make_bundle(
    folder: Path,
    signer: Signer,
    version: str,
    *layers: dict[str, bytes | None] | bytes,
    formats: dict[str, Any] | None = None,
    labels: bool = True,
    layer_type: str = LAYER_TYPE,
    **changes: Any,
) -> Path:
    """In ``folder``. ``layers``: lowest first. ``formats``: what its service reads and writes otherwise than this one;
    ``labels``: whether it tells. ``changes``: of the manifest."""
    blobs = folder / "oci/blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        (blobs / sha256(data)).write_bytes(data)
        return {"digest": f"sha256:{sha256(data)}", "size": len(data)}

    packed = [one if isinstance(one, bytes) else layer(one) for one in layers]
    told = json.dumps(json.loads(own_formats_text(version)) | (formats or {}))
    config = put(json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Labels": {IMAGE_LABEL: told} if labels else {}},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64 for _ in packed]},
    }).encode())  # fmt: skip
    image = put(json.dumps({
        "schemaVersion": 2,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **config},
        "layers": [{"mediaType": layer_type, **put(data)} for data in packed],
    }).encode())  # fmt: skip
    manifest_type = "application/vnd.oci.image.manifest.v1+json"
    index = {"schemaVersion": 2, "manifests": [{"mediaType": manifest_type, **image}]}
    (folder / "oci/index.json").write_text(json.dumps(index))
    (folder / "oci/oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    manifest = {
        "format": 2, "name": "meshfusion", "version": version, "architecture": platform.machine(),
        "images": [{"role": "service", "reference": f"localhost/meshfusion:{version}", "digest": image["digest"]}],
    } | changes  # fmt: skip
    raw = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(raw)
    (folder / "manifest.json.sig").write_bytes(base64.b64encode(signer.key.sign(raw)))
    return folder
