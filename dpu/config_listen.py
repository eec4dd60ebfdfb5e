"""Where the service listens, as its configuration has it: one address, or several that are apart."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator

from meshfusion.dpu.api.address import is_same_place, parse_address
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import ConfigError, FieldValueError

MAX_LISTEN_ADDRESSES: Final = 8


def _listen_addresses(value: object) -> tuple[str, ...]:
    """One, or a list of them."""
    several = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, str)]
    if not isinstance(value, str) and (not isinstance(value, list | tuple) or len(several) != len(value)):
        raise ValueError("must be an address, or a list of addresses")
    if not 1 <= len(several) <= MAX_LISTEN_ADDRESSES:
        raise FieldValueError(f"has {len(several)} addresses", f"name 1 to {MAX_LISTEN_ADDRESSES}")
    try:
        addresses = [parse_address(each) for each in several]
    except ConfigError as e:
        raise FieldValueError(e.message, as_fix(e.next_step)) from e
    for i, address in enumerate(addresses):
        same = next((other for other in addresses[:i] if is_same_place(address, other)), None)
        if same is not None:
            raise FieldValueError(
                f"names {same} and {address}, and only one of them can be listened on", "name each place once"
            )
    return tuple(several)


ListenAddresses = Annotated[tuple[str, ...], BeforeValidator(_listen_addresses)]
