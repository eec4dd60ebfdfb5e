"""What a support bundle is made of, from the service, the pool and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from meshfusion.tools.mfctl import support_machine
from meshfusion.tools.mfctl.support_bundle import Part

if TYPE_CHECKING:
    from meshfusion.dpu.api.service_client import GrpcServiceAdmin
    from meshfusion.dpu.api.types import PoolStatus

T = TypeVar("T")

SERVICE_STATE: Final = "service/state.json"
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Subject:
    """Of what: each is None where it is not known. ``address``: where the service is, or should be."""

    config_path: Path | None
    address: str | None
    pool: Path | None
    log: Path | None
    pool_name: str = ""  # by which the service at the address knows the pool, where it has several


def parts_of(subject: Subject) -> Iterator[Part]:
    """The service first: what it is at is gone soonest."""
    address, pool = subject.address, subject.pool
    status = partial(_status, pool, address, subject.pool_name)
    if address is not None:
        yield Part(SERVICE_STATE, partial(_asked, address, _state))
        yield Part("service/stacks.txt", partial(_asked, address, lambda admin: admin.stacks(deadline_s=_ANSWER_S)))
        yield Part("service/process.txt", partial(_process, address))
    if address is not None or pool is not None:
        yield Part("pool/status.json", lambda: _plain_status(status()))
        yield Part("pool/holders.json", lambda: status().holders)
        yield Part("pool/index.json", lambda: _index_totals(status()))
    if pool is not None:
        yield Part("pool/drives.json", partial(_drives, pool))
    if subject.config_path is not None:
        yield Part("config.json", partial(_config, subject.config_path))
    if subject.log is not None:
        yield Part("service/log.txt", partial(support_machine.last_lines, subject.log))
    yield Part("machine/versions.json", support_machine.versions)
    yield Part("machine/kernel.json", support_machine.kernel)
    yield Part("machine/nvme.json", support_machine.nvme)
    yield Part("machine/rdma.json", support_machine.rdma)
    yield Part("doctor.json", partial(_doctor, pool, subject.config_path))


def _asked(address: str, ask: Callable[[GrpcServiceAdmin], T]) -> T:
    from meshfusion.tools.mfctl.service_source import service_admin

    with service_admin(address) as admin:
        return ask(admin)


def _state(admin: GrpcServiceAdmin) -> dict[str, Any]:
    from dataclasses import asdict

    state = admin.state(deadline_s=_ANSWER_S)
    return asdict(state) | {"phase": state.phase.value}


def _process(address: str) -> str:
    return support_machine.process(_asked(address, lambda admin: admin.state(deadline_s=_ANSWER_S).pid))


def _status(pool: Path | None, address: str | None, pool_name: str) -> PoolStatus:
    """As the service tells it; where it is away, as it lies on the medium."""
    from meshfusion.jbof.errors import ServiceUnavailableError
    from meshfusion.tools.mfctl.sources import pool_status, service_status

    try:
        if address is not None:
            return service_status(address, pool_name, _ANSWER_S)
    except ServiceUnavailableError:
        if pool is None:
            raise
    assert pool is not None, "made for a service or a pool"
    return pool_status(pool)


def _plain_status(status: PoolStatus) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(status) | {"counters": dict(status.counters)}


def _index_totals(status: PoolStatus) -> dict[str, Any]:
    counters = {name: value for name, value in status.counters if name.startswith("index_")}
    return {
        "chunk_count": status.committed_chunk_count,
        "payload_bytes": status.committed_payload_bytes,
        "epoch": status.epoch,
        "format_version": status.format_version,
        **counters,
    }


def _drives(pool: Path) -> list[dict[str, Any]]:
    from meshfusion.tools.mfctl.pool_drives_source import drives_of

    return drives_of(pool).rows()


def _config(path: Path) -> dict[str, Any]:
    """What it means, without secrets. One that is not valid is not shown: where its secrets are is not known then. Nor
    is what is wrong with it, which quotes values; but where."""
    from meshfusion.dpu.redaction import redacted
    from meshfusion.jbof.config_problems import ConfigProblemsError
    from meshfusion.jbof.errors import MeshFusionError
    from meshfusion.tools.mfctl.config_model import config_alone

    try:
        return redacted(config_alone(path))
    except ConfigProblemsError as error:
        places = [{"field": problem.field, "line": problem.line} for problem in error.problems]
        return {"not_shown": "it has problems", "problems": places}
    except MeshFusionError:
        return {"not_shown": "it cannot be read: mfctl config check says why"}


def _doctor(pool: Path | None, config_path: Path | None) -> list[dict[str, str]]:
    from meshfusion.tools.mfctl.doctor_machine import examine_here

    return [
        {"check": found.check, "state": found.state.value, "cause": found.cause, "remedy": found.remedy}
        for found in examine_here(pool, config_path=config_path)
    ]


def subject_of(config_path: Path | None, address: str | None, pool: Path | None, log: Path | None) -> Subject:
    """What is not named is taken from the configuration, as far as that can be read, and from the pool. Of several
    configured pools only the service is known, unless one is named."""
    from meshfusion.dpu.api.doors import nearest
    from meshfusion.dpu.owner_lock import served_as, served_at
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.jbof.errors import MeshFusionError
    from meshfusion.tools.mfctl.config_model import config_alone

    config = None
    if config_path is not None:
        try:
            config = config_alone(config_path)
        except MeshFusionError:
            config = None  # its part of the bundle says so
    if pool is None and config is not None and config.pool is not None:
        pool = config.pool.path
    if log is None and config is not None:
        log = config.log.file
    if address is None and pool is not None:
        address = served_at(PoolLayout(pool.absolute())) or None
    elif address is None and config is not None:
        places = (served_at(PoolLayout(served.pool.path)) for served in config.served)
        address = next(filter(None, places), None)
    if address is None and config is not None:
        address = str(nearest(config.addresses))  # where nobody may answer, which is to be told
    name = served_as(PoolLayout(pool.absolute())) if pool is not None and address is not None else ""
    return Subject(config_path, address, pool, log, name)
