"""``mfctl chunk``: list, show."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import click

from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES, ChunkRecord, ListRequest
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_fields, print_table
from meshfusion.tools.mfctl.sources import ChunkReader, open_chunks, source_options

_PAGE_LIMIT = 500
MIN_PREFIX_DIGITS = 6


def _hex(ctx: click.Context, param: click.Parameter, value: str | None) -> bytes:
    """A key or an identity, written in hex; an option not given is empty."""
    assert KEY_BYTES == IDENTITY_BYTES
    if value is None:
        return b""
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise click.BadParameter(f"{value!r} is not {2 * KEY_BYTES} hexadecimal digits", ctx, param)
    return raw


def _hex_prefix(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """The beginning of a key or an identity, in lower case; an option not given is empty."""
    if value is None:
        return ""
    if not re.fullmatch(r"[0-9a-fA-F]+", value) or not MIN_PREFIX_DIGITS <= len(value) <= 2 * KEY_BYTES:
        wanted = f"{MIN_PREFIX_DIGITS} to {2 * KEY_BYTES} hexadecimal digits"
        raise click.BadParameter(f"{value!r} is not {wanted}; `mfctl chunk list` shows them", ctx, param)
    return value.lower()


PATH = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step


@click.group()
def chunk() -> None:
    """List and show chunks."""


@chunk.command("list")
@click.argument("path", type=PATH, required=False)
@source_options
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, metavar="COUNT", help="Most chunks to list."
)
@click.option("--after", "after_key", callback=_hex, metavar="KEYHEX", help="Start after this key.")
@click.option("--identity", callback=_hex_prefix, metavar="HEX", help="Only chunks whose identity begins so.")
@format_option
def list_command(
    path: Path | None,
    address: str | None,
    pool_name: str,
    timeout_s: float,
    limit: int,
    after_key: bytes,
    identity: str,
    output_format: str,
) -> None:
    """List committed chunks in key order, from the pool in PATH or from a service."""
    with open_chunks(path, address, pool_name) as source:
        chunks, next_after = _list(source, limit, after_key, identity, timeout_s)
    if output_format != "table":
        print_document({"chunks": [chunk_object(c) for c in chunks], "next_after_key": next_after.hex()}, output_format)
        return
    print_table(
        ["KEY", "IDENTITY", "TENANT", "GROUP", "POSITION", "TOKENS", "SHARDS", "BYTES"],
        [
            (
                *(c.key.hex(), c.identity.hex()[:12], c.tenant, c.group, c.position_tokens, c.token_count),
                *(len(c.shards), sum(s.payload_bytes for s in c.shards)),
            )
            for c in chunks
        ],
    )
    if next_after:
        click.echo(f"more chunks follow: --after {next_after.hex()}", err=True)


def _list(
    source: ChunkReader, limit: int, after_key: bytes, identity: str, timeout_s: float
) -> tuple[list[ChunkRecord], bytes]:
    """``(chunks, key to go on after)``, in as many calls as it takes. ``identity``: how it begins, in hex."""
    whole = bytes.fromhex(identity) if len(identity) == 2 * IDENTITY_BYTES else b""
    chunks: list[ChunkRecord] = []
    while True:
        wanted = _PAGE_LIMIT if identity and not whole else min(limit - len(chunks), _PAGE_LIMIT)
        reply = source.list_chunks(ListRequest(after_key, wanted, whole), deadline_s=timeout_s)
        chunks += [c for c in reply.chunks if c.identity.hex().startswith(identity)]
        after_key = reply.next_after_key
        if len(chunks) > limit:
            return chunks[:limit], chunks[limit - 1].key
        if not after_key or len(chunks) >= limit:
            return chunks, after_key


def _find(source: ChunkReader, key: str, timeout_s: float) -> ChunkRecord | None:
    """The chunk whose key begins with ``key``; None when there is none."""
    if len(key) == 2 * KEY_BYTES:
        return source.get_chunk(bytes.fromhex(key), deadline_s=timeout_s)
    first = int(key.ljust(2 * KEY_BYTES, "0"), 16)
    after_key = (first - 1).to_bytes(KEY_BYTES, "big") if first else b""
    reply = source.list_chunks(ListRequest(after_key, 2, b""), deadline_s=timeout_s)
    found = [c for c in reply.chunks if c.key.hex().startswith(key)]
    if len(found) > 1:
        raise MeshFusionError(
            f"several keys begin with {key}, among them {found[0].key.hex()} and {found[1].key.hex()}",
            next_step="Give more digits.",
        )
    return found[0] if found else None


@chunk.command()
@click.argument("key", callback=_hex_prefix, metavar="KEYHEX")
@click.argument("path", type=PATH, required=False)
@source_options
@format_option
def show(
    key: str, path: Path | None, address: str | None, pool_name: str, timeout_s: float, output_format: str
) -> None:
    """Show one chunk: where its shards lie and what proves them.

    Of its key, as many digits as tell it from the others are enough, but at least six.
    """
    with open_chunks(path, address, pool_name) as source:
        found = _find(source, key, timeout_s)
    if found is None:
        raise MeshFusionError(f"there is no chunk {key}", next_step="`mfctl chunk list` lists the keys.")
    if output_format != "table":
        print_document(chunk_object(found), output_format)
    else:
        _print_chunk(found)


def chunk_object(record: ChunkRecord) -> dict[str, Any]:
    """The JSON form: the fields of :class:`ChunkRecord`, bytes in hex."""
    return dataclasses.asdict(record)


def _print_chunk(c: ChunkRecord) -> None:
    print_fields(
        [
            ("key", c.key.hex()),
            ("identity", c.identity.hex()),
            ("tenant", c.tenant),
            ("group", c.group),
            ("tokens", f"{c.position_tokens} to {c.position_tokens + c.token_count}"),
            ("payload", format_bytes(sum(s.payload_bytes for s in c.shards))),
        ]
    )
    for s in c.shards:
        e = s.extent
        click.echo()
        print_fields(
            [
                ("shard of rank", s.rank),
                ("namespace", e.namespace),
                ("segment", f"{e.segment}, generation {e.generation}"),
                ("blocks", f"{e.lba} to {e.lba + e.lba_count} (payload from {e.lba + s.payload_lba_offset})"),
                ("units", f"{len(s.unit_digests)} of {s.unit_bytes} bytes, {s.unit_lba_count} blocks apart"),
                ("unit digests", " ".join(d.hex() for d in s.unit_digests)),
            ]
        )
    sys.stdout.flush()
