"""The part of the service's configuration that says what it tells of itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from meshfusion.dpu.api.address import TcpAddress, parse_address
from meshfusion.dpu.config_types import ConfigModel, Seconds
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import ConfigError, FieldValueError


def _address(value: str) -> str:
    try:
        parse_address(value)
    except ConfigError as e:
        raise FieldValueError(e.message, as_fix(e.next_step)) from e
    return value


class TelemetryConfig(ConfigModel):
    """What the service tells of itself, see docs/observability.md."""

    listen: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description="Where monitors ask over HTTP, for /metrics, /healthz, /readyz and /status.json, and people for "
        "the status page, /: host:port or unix:///path. Nothing is served without it.",
        examples=["127.0.0.1:9477"],
    )
    allow_public: bool = Field(
        default=False,
        description="listen may be an address that other machines reach. There is no authentication: whoever reaches "
        "it reads how the service is, though no keys and no prompts.",
    )
    probe: bool = Field(
        default=True,
        description="With listen: write a chunk of two blocks now and then, and read it back, as engines do.",
    )
    probe_interval_s: Seconds = Field(default=30.0, description="From one probe to the next.")
    probe_write_interval_s: Seconds = Field(default=600.0, description="From one that writes to the next that does.")
    slow_call_s: Seconds = Field(default=0.1, description="Calls that take longer are logged as slow.")

    @model_validator(mode="after")
    def _is_meant_to_be_public(self) -> TelemetryConfig:
        if self.listen is None or self.allow_public:
            return self
        address = parse_address(self.listen)
        if isinstance(address, TcpAddress) and not address.is_loopback:
            raise FieldValueError(
                f"{self.listen} can be reached from other machines, and there is no authentication",
                "use 127.0.0.1:PORT or unix:///path, or set telemetry.allow_public: true",
                field="listen",
            )
        return self
