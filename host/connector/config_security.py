"""The part of the connector's configuration that says how it proves itself to the service, and the service to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.jbof.errors import FieldValueError


def _file(value: Any) -> Any:
    if not isinstance(value, str | Path) or "\0" in str(value) or not Path(value).is_absolute():
        raise ValueError("must be the absolute path of a file")
    return Path(value)


FilePath = Annotated[Path, BeforeValidator(_file)]


class ServiceTls(BaseModel):
    """TLS towards the service. New files are used from the next call on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ca: FilePath = Field(
        description="PEM file of the CA of the service's certificate", examples=["/etc/meshfusion/tls/ca.pem"]
    )
    certificate: FilePath | None = Field(
        default=None,
        description="PEM file of this engine's certificate, for a service with client_ca",
        examples=["/etc/meshfusion/tls/engine-1.pem"],
    )
    key: FilePath | None = Field(
        default=None,
        description="PEM file of its key; nobody but its owner may read it, or the group root",
        examples=["/etc/meshfusion/tls/engine-1.key"],
    )
    server_name: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None, description="what the service's certificate names, where that is not the host in service"
    )


def client_security(tls: ServiceTls | None, token_file: Path | None) -> ClientSecurity:
    if tls is None:
        return ClientSecurity(token_file=token_file, label=_label)
    return ClientSecurity(tls.ca, tls.certificate, tls.key, tls.server_name, token_file, label=_label)


def security_problem(security: ClientSecurity, address: TcpAddress | UnixAddress) -> FieldValueError | None:
    """What does not go together, with the key that is to blame."""
    found = security.problem(address)
    if found is None:
        return None
    # Without any TLS the whole part is what is missing; what else is wrong is inside it.
    is_whole = found.field == "ca"
    return FieldValueError(found.problem, found.fix, field="service_tls" if is_whole else _label(found.field))


def _label(field: str) -> str:
    return "service_token_file" if field == "token_file" else f"service_tls.{field}"
