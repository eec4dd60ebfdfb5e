"""Several pools in one configuration: whose each is, and that no two are at one place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from meshfusion.dpu import config_tenants
from meshfusion.dpu.config import ServedPool, ServiceConfig, examine_service_config, load_service_config
from meshfusion.dpu.config_example import example_service_config
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.yaml_document import read_yaml
from meshfusion.jbof.config_problems import ConfigProblemsError
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES

TWO = """listen: unix://$TMP/s
pools:
  red:
    tenants: [red]
    pool: {path: $TMP/red, create: true, size: 4GiB}
    medium: {drive_writes_per_day: 1.0}
  shared:
    tenants: [blue, green]
    pool: {path: $TMP/shared, create: true, size: 4GiB}
audit: {path: $TMP/audit.log}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(text.replace("$TMP", str(tmp_path)))
    return path


def load(tmp_path: Path, text: str) -> ServiceConfig:
    return load_service_config(write(tmp_path, text))


def problems_of(tmp_path: Path, text: str, *, closely: bool = False) -> list[str]:
    file = write(tmp_path, text)
    document = read_yaml(file)
    with pytest.raises(ConfigProblemsError) as caught:
        examine_service_config(file, document) if closely else load_service_config(file)
    return [str(p) for p in caught.value.problems]


def test_each_pool_has_its_tenants_and_its_medium(tmp_path: Path) -> None:
    red, shared = load(tmp_path, TWO).served
    assert (red.name, red.tenants, red.medium.drive_writes_per_day) == ("red", frozenset({"red"}), 1.0)
    assert (shared.name, shared.tenants, shared.medium.drive_writes_per_day) == (
        "shared",
        frozenset({"blue", "green"}),
        None,
    )
    assert [served.pool.path.name for served in (red, shared)] == ["red", "shared"]


def test_without_pools_there_is_one_for_the_default_tenant(tmp_path: Path) -> None:
    config = load(tmp_path, "listen: unix://$TMP/s\npool: {path: $TMP/p, create: true, size: 4GiB}\n")
    assert config.pool is not None
    assert config.served == (ServedPool("", frozenset({"default"}), config.pool, config.medium, None, None),)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("pools:", "pool: {path: $TMP/p, create: true, size: 4GiB}\npools:"),
            r"line 2: pool: stands beside pools; remove one of them",
        ),
        (
            ("pools:", "medium: {policy: everything}\npools:"),
            r"line 2: medium: stands beside pools; .*pools\.NAME\.med",
        ),
        (
            ("[blue, green]", "[blue, red]"),
            r"line 8: pools\.shared\.tenants = 'red': is a tenant of pools\.red already; ",
        ),
        (
            ("[blue, green]", "[blue, blue]"),
            r"line 8: pools\.shared\.tenants = 'blue': is a tenant of this pool already",
        ),
        (("[blue, green]", "[]"), r"line 8: pools\.shared\.tenants = \[\]: "),
        (("[blue, green]", "['a b']"), r"line 8: pools\.shared\.tenants\.0 = .*: is no name: 1 to 48 letters"),
        (("    tenants: [red]\n", ""), r"line 3: pools\.red\.tenants: is missing; add tenants: \[red\]"),
        (("  red:", "  'r/d':"), r"line 3: pools\.r/d: is no name: 1 to 48 letters"),
        (
            ("$TMP/shared", "$TMP/red"),
            r"line 9: pools\.shared\.pool\.path = '.*/red': is that of pools\.red; give each",
        ),
        (
            ("$TMP/shared", "$TMP/x/../red"),
            r"line 9: pools\.shared\.pool\.path = .*: is the same as .*/red of pools\.red",
        ),
        (
            ("size: 4GiB}\n    m", "siez: 4GiB}\n    m"),
            r"line 5: .*siez: unknown key; did you mean pools\.red\.pool\.size",
        ),
        (("1.0", "none"), r"line 6: pools\.red\.medium\.drive_writes_per_day = 'none': must be a number"),
        (("1.0", "0.0001"), r"line 6: pools\.red\.medium\.drive_writes_per_day = 0\.0001: a quarter of what drive 0"),
        (
            ("audit: {path: $TMP/audit.log}\n", ""),
            r"audit\.path: is missing: with pools, none of .*; add audit: \{path: /var",
        ),
        (("audit:", "audti:"), r"line 10: audti: unknown key; did you mean audit\?"),
        (("    m", "    bdevs: {0: x}\n    m"), r"line 6: pools\.red\.bdevs = .*: are for target: spdk"),
    ],
)
def test_what_cannot_be_is_told_with_field_value_and_fix(
    tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    (tmp_path / "x").mkdir()
    assert change[0] in TWO
    (problem,) = problems_of(tmp_path, TWO.replace(*change))
    assert re.match(expected, problem), problem


def test_one_of_pool_and_pools_there_must_be(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "listen: unix://$TMP/s\n")
    assert problem.startswith("pool: is missing; add pool: {path: /var/lib/meshfusion/pool}, or pools")
    (problem,) = problems_of(tmp_path, "listen: unix://$TMP/s\naudit: {path: $TMP/a}\npools: {}\n")
    assert problem.startswith("line 3: pools: has 0 pools; name 1 to ")
    (problem,) = problems_of(tmp_path, "listen: unix://$TMP/s\npools: 7\n")
    assert "must be a mapping" in problem


def test_problems_of_several_pools_are_told_at_once(tmp_path: Path) -> None:
    text = TWO.replace("[red]", "[blue]").replace("$TMP/red", "$TMP/none/red").replace("create: true, size", "size")
    problems = problems_of(tmp_path, text)
    assert len(problems) == 3, problems
    fields = ("pools.red.pool.path", "pools.shared.pool.path", "pools.shared.tenants")
    assert all(any(f"{field} = " in problem for problem in problems) for field in fields), problems
    assert "set pools.red.pool.create: true and pools.red.pool.size, or run: mfctl" in "".join(problems)


def on_files(tmp_path: Path, red: str, shared: str) -> str:
    for name in ("a", "b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, SIZE_BYTES)
    if not (tmp_path / "link").exists():
        (tmp_path / "link").symlink_to(tmp_path / "a")
        os.link(tmp_path / "a", tmp_path / "hard")
    sizes = f"size: {SIZE_BYTES}, segment_size: 1MiB"
    text = TWO.replace("path: $TMP/shared, create: true, size: 4GiB", f"path: $TMP/s2, create: true, {sizes}, {shared}")
    return text.replace("path: $TMP/red, create: true, size: 4GiB", f"path: $TMP/red, create: true, {sizes}, {red}")


@pytest.mark.parametrize("other", ["$TMP/a", "$TMP/link", "$TMP/hard", "[$TMP/b, $TMP/link]"])
def test_two_pools_on_one_file_are_refused_by_whatever_path(tmp_path: Path, other: str) -> None:
    text = on_files(tmp_path, "data_path: $TMP/a", f"data_path: {other}")
    (problem,) = problems_of(tmp_path, text)
    assert re.match(r"line 9: pools\.shared\.pool\.data_path = .*: is (that|the same as .*/a) of pools\.red;", problem)
    load(tmp_path, on_files(tmp_path, "data_path: $TMP/a", "data_path: $TMP/b"))


def test_a_pool_that_exists_has_its_drives(tmp_path: Path) -> None:
    """Wherever its configuration says nothing of them."""
    text = on_files(tmp_path, "data_path: $TMP/b", "")
    create_pool(tmp_path / "s2", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=tmp_path / "b")
    problems = problems_of(tmp_path, text, closely=True)
    assert any("pools.shared.pool.path = " in p and "is that of pools.red" in p for p in problems), problems


def test_a_pool_that_holds_what_is_anothers_is_told_before_it_is_served(tmp_path: Path) -> None:
    create_pool(tmp_path / "red", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    file = write(tmp_path, TWO.replace("4GiB", "257MiB"))
    examine_service_config(file, read_yaml(file))
    Pool.open(tmp_path / "red", tenants=frozenset({"blue"})).close()
    (problem,) = problems_of(tmp_path, TWO.replace("4GiB", "257MiB"), closely=True)
    assert re.match(r"line 5: pools\.red\.pool\.path = .*: tenants = red: the pool .*/red holds data of blue", problem)
    alone = f"listen: unix://$TMP/s\npool: {{path: {tmp_path}/red}}\n"
    (problem,) = problems_of(tmp_path, alone, closely=True)
    assert "tenants = default: the pool" in problem


def test_a_slice_of_a_drive_that_is_another_pools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on the whole drive is none on its partitions."""
    text = on_files(tmp_path, "data_path: $TMP/a", "data_path: $TMP/b")
    load(tmp_path, text)
    whole = (tmp_path / "a").stat()
    under = {tmp_path / "b": frozenset({(whole.st_dev, whole.st_ino)})}
    monkeypatch.setattr(config_tenants, "block_devices_under", lambda path: under.get(path, frozenset()))
    for first, second in (("a", "b"), ("b", "a")):
        swapped = on_files(tmp_path, f"data_path: $TMP/{first}", f"data_path: $TMP/{second}")
        (problem,) = problems_of(tmp_path, swapped)
        assert (
            f"pools.shared.pool.data_path = '{tmp_path}/{second}': overlaps {tmp_path}/{first} of pools.red" in problem
        )


SPDK = "exports: {target: spdk, portals: ['tcp://127.0.0.1:4420'], spdk: {socket: /s, memory: 8GiB%s}}\n"


def test_bdevs_are_named_for_each_pool(tmp_path: Path) -> None:
    red_bdevs = TWO.replace("    medium", "    bdevs: {0: lvs/red}\n    medium")
    red, shared = load(tmp_path, red_bdevs + SPDK % "").served
    assert [s.exports and s.exports.spdk and s.exports.spdk.named_bdevs for s in (red, shared)] == [{0: "lvs/red"}, {}]
    (problem,) = problems_of(tmp_path, TWO + SPDK % ", bdev: lvs/red")
    assert "exports.spdk.bdev = 'lvs/red': does not tell which pool's drives" in problem
    both = red_bdevs.replace("[blue, green]", "[blue, green]\n    bdevs: {0: lvs/red}")
    (problem,) = problems_of(tmp_path, both + SPDK % "")
    assert "pools.shared.bdevs = 'lvs/red': is a bdev of pools.red, too" in problem


def test_limits_are_kept_by_an_spdk_or_refused(tmp_path: Path) -> None:
    limited = TWO.replace("    medium", "    limits: {read_bytes_per_s: 2GiB}\n    medium")
    red, shared = load(tmp_path, limited + SPDK % "").served
    assert red.limits is not None
    assert (red.limits.read_bytes_per_s, red.limits.write_bytes_per_s) == (2 << 30, None)
    assert shared.limits is not None, "a limit that was there before is taken away"
    assert shared.limits.read_bytes_per_s is None
    nvmet = "exports: {target: nvmet, portals: ['tcp://127.0.0.1:4420']}\n"
    for exports in ("", nvmet):
        (problem,) = problems_of(tmp_path, limited + exports)
        assert re.match(r"line 6: pools\.red\.limits: need an SPDK: neither the kernel's target nor local", problem)
        load(tmp_path, limited.replace("2GiB", "null") + exports)
    for bad in ("0", "1MB", "1048577", "fast"):
        (problem,) = problems_of(tmp_path, limited.replace("2GiB", bad) + SPDK % "")
        assert problem.startswith("line 6: pools.red.limits.read_bytes_per_s = "), problem


def test_the_example_of_several_pools_is_one(tmp_path: Path) -> None:
    lines = example_service_config().splitlines()
    first = lines.index("# pools:")
    block = lines[first : lines.index("", first)]
    keys = [line.replace("# ", "", 1) for line in block if re.match(r" *# (pools|red|tenants|pool|medium):", line)]
    pool = f"{{path: {tmp_path}/red, create: true, size: 4GiB}}"
    text = "\n".join(keys).replace("pool: {}", f"pool: {pool}")
    config = load(tmp_path, f"listen: unix://{tmp_path}/s\naudit: {{path: {tmp_path}/a}}\n{text}\n")
    assert [(served.name, served.tenants) for served in config.served] == [("red", frozenset({"red"}))]
