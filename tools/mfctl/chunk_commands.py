"""``mfctl chunk``: ls, show."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from meshfusion.dpu.api.types import IDENTITY_BYTES, KEY_BYTES, ChunkRecord, ListRequest
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_fields, print_json, print_table
from meshfusion.tools.mfctl.sources import ChunkReader, open_chunks, require_one_source, source_options

_PAGE_LIMIT = 500


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


PATH = click.Path(path_type=Path)


@click.group()
def chunk() -> None:
    """List and show chunks."""


@chunk.command()
@click.argument("path", type=PATH, required=False)
@source_options
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, metavar="COUNT", help="Most chunks to list."
)
@click.option("--after", "after_key", callback=_hex, metavar="KEYHEX", help="Start after this key.")
@click.option("--identity", callback=_hex, metavar="HEX", help="Only chunks of this identity.")
@format_option
def ls(
    path: Path | None,
    address: str | None,
    timeout_s: float,
    limit: int,
    after_key: bytes,
    identity: bytes,
    output_format: str,
) -> None:
    """List committed chunks in key order, from the pool in PATH or from a service."""
    require_one_source(path, address)
    with open_chunks(path, address) as source:
        chunks, next_after = _list(source, limit, after_key, identity, timeout_s)
    if output_format == "json":
        print_json({"chunks": [chunk_object(c) for c in chunks], "next_after_key": next_after.hex()})
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
    source: ChunkReader, limit: int, after_key: bytes, identity: bytes, timeout_s: float
) -> tuple[list[ChunkRecord], bytes]:
    """``(chunks, key to go on after)``, in as many calls as it takes."""
    chunks: list[ChunkRecord] = []
    while True:
        request = ListRequest(after_key, min(limit - len(chunks), _PAGE_LIMIT), identity)
        reply = source.list_chunks(request, deadline_s=timeout_s)
        chunks += reply.chunks
        after_key = reply.next_after_key
        if not after_key or len(chunks) >= limit:
            return chunks, after_key


@chunk.command()
@click.argument("key", callback=_hex, metavar="KEYHEX")
@click.argument("path", type=PATH, required=False)
@source_options
@format_option
def show(key: bytes, path: Path | None, address: str | None, timeout_s: float, output_format: str) -> None:
    """Show one chunk: where its shards lie and what proves them."""
    require_one_source(path, address)
    with open_chunks(path, address) as source:
        found = source.get_chunk(key, deadline_s=timeout_s)
    if found is None:
        raise MeshFusionError(f"there is no chunk {key.hex()}", next_step="`mfctl chunk ls` lists the keys.")
    if output_format == "json":
        print_json(chunk_object(found))
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
