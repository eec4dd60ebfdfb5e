"""The service's configuration file: what is accepted, and that every problem is told with its way out."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.config import (
    DrivesConfig,
    LeaseConfig,
    MediumConfig,
    PoolConfig,
    ServiceConfig,
    examine_service_config,
    load_service_config,
)
from meshfusion.dpu.config_example import example_service_config
from meshfusion.dpu.config_exports import ExportsConfig, SpdkConfig, parse_portal
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.export.desired import Address
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import add_drive, create_pool_of_drives
from meshfusion.dpu.pool_tending import Policy
from meshfusion.dpu.yaml_document import parse_yaml, read_yaml
from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.jbof.errors import ConfigError, FormatError
from meshfusion.jbof.sizes import format_size, parse_size_bytes
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, make_pool


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(text.replace("$TMP", str(tmp_path)))
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigProblemsError) as caught:
        load_service_config(path)
    return [str(p) for p in caught.value.problems]


def pool_of(config: ServiceConfig) -> PoolConfig:
    assert config.pool is not None
    return config.pool


def notes(path: Path) -> tuple[str, ...]:
    (served,) = load_service_config(path).served
    return served.notes


GOOD = """
listen: unix://$TMP/s
pool: {path: $TMP/pool, create: true, size: 4GiB}
"""


def test_a_short_file_gets_the_defaults(tmp_path: Path) -> None:
    config = load_service_config(write(tmp_path, GOOD))
    assert config.listen == (f"unix://{tmp_path}/s",)
    assert pool_of(config).path == tmp_path / "pool"
    assert pool_of(config).size == 4 * 2**30
    assert pool_of(config).segment_size is None
    assert config.leases.lease_ttl_s == 30.0
    assert (config.log.level, config.log.format) == ("info", "text")


def test_defaults_are_those_of_the_pool() -> None:
    medium = MediumConfig().model_dump()
    configured = {**LeaseConfig().model_dump(), **medium, "policy": Policy(medium["policy"])}
    assert configured == dataclasses.asdict(PoolOptions())
    assert DrivesConfig().model_dump().items() <= dataclasses.asdict(DriveOptions()).items()


def test_every_policy_can_be_configured(tmp_path: Path) -> None:
    for policy in Policy:
        config = load_service_config(write(tmp_path, GOOD + f"medium: {{policy: {policy.value}}}"))
        assert Policy(config.medium.policy) is policy


@pytest.mark.parametrize("value", ["0", "-1", "101", "yes"])
def test_drive_writes_per_day_is_a_number_of_the_capacity(tmp_path: Path, value: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD + f"medium: {{drive_writes_per_day: {value}}}"))
    assert "medium.drive_writes_per_day" in problem


def test_all_problems_are_told_at_once_with_line_value_and_fix(tmp_path: Path) -> None:
    problems = problems_of(
        write(
            tmp_path,
            """listen: 0.0.0.0:80
pool:
  path: pool
  siez: 4GiB
  create: "yes"
leases:
  lease_ttl_s: abc
  max_pinned_fraction: 1.5
log: {level: loud}
extra: 1
""",
        )
    )
    expected = [
        r"line 1: listen = '0\.0\.0\.0:80': is not a loopback address.*unix:///",
        r"line 3: pool\.path = 'pool': must be an absolute path.*write for example /var",
        r"line 4: pool\.siez: unknown key; did you mean pool\.size\?",
        r"line 5: pool\.create = 'yes': must be true or false; write for example true",
        r"line 7: leases\.lease_ttl_s = 'abc': must be a number; write for example 30\.0",
        r"line 8: leases\.max_pinned_fraction = 1\.5: must be at most 1; use more than 0 and at most 1, "
        r"for example 0\.5",
        r"line 9: log\.level = 'loud': must be 'debug', 'info', 'warning' or 'error'",
        r"line 10: extra: unknown key; remove it; known here: listen, pool, pools, tls, access, tokens_file, audit, "
        r"exports, medium, leases, drives, stop_grace_s, log",
    ]
    assert len(problems) == len(expected)
    for problem, pattern in zip(problems, expected, strict=True):
        assert re.match(pattern, problem), problem


def test_missing_keys_are_named(tmp_path: Path) -> None:
    assert problems_of(write(tmp_path, "pool: {}")) == [
        "listen: is missing; add listen: unix:///run/meshfusion/meshfusion.sock",
        "line 1: pool.path: is missing; add path: /var/lib/meshfusion/pool",
    ]


def test_missing_directories_are_told_along_with_other_problems(tmp_path: Path) -> None:
    problems = problems_of(
        write(tmp_path, "listen: unix://$TMP/run/s\npool: {path: $TMP/a/b, create: true}\nlog: {levle: info}\n")
    )
    assert problems == [
        f"line 1: listen = 'unix://{tmp_path}/run/s': the socket's directory {tmp_path}/run does not exist; "
        f"mkdir -p {tmp_path}/run",
        "line 2: pool.size: is needed to create the pool; add for example size: 4GiB",
        f"line 2: pool.path = '{tmp_path}/a/b': the directory {tmp_path}/a does not exist; mkdir -p {tmp_path}/a",
        "line 3: log.levle: unknown key; did you mean log.level?",
    ]


def test_a_missing_pool_without_create_names_both_ways_out(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, "listen: unix://$TMP/s\npool: {path: $TMP/pool}\n"))
    assert "pool.create: true" in problem
    assert f"mfctl pool create {tmp_path}/pool" in problem


def test_an_empty_directory_counts_as_no_pool(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (problem,) = problems_of(write(tmp_path, "listen: unix://$TMP/s\npool: {path: $TMP/pool, create: true}\n"))
    assert problem == "line 2: pool.size: is needed to create the pool; add for example size: 4GiB"
    (tmp_path / "pool" / "label").touch()
    load_service_config(tmp_path / "service.yaml")


def test_a_directory_not_writable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ro").mkdir()
    may = os.access
    # Root may write everywhere, so the answer of the kernel is played.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != f"{tmp_path}/ro" and may(path, mode))
    (problem,) = problems_of(write(tmp_path, GOOD.replace("$TMP/s", "$TMP/ro/s")))
    assert "is not writable" in problem


def test_a_data_path_must_exist(tmp_path: Path) -> None:
    text = GOOD.replace("size: 4GiB", "size: 4GiB, data_path: $TMP/no-such-device")
    (problem,) = problems_of(write(tmp_path, text))
    assert problem.startswith(f"line 3: pool.data_path = '{tmp_path}/no-such-device': does not exist")


def test_heartbeats_must_fit_into_the_ttls(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD + "leases: {heartbeat_s: 10, holder_silence_s: 15}\n"))
    assert problem == (
        "line 4: leases.holder_silence_s = 15: 15 is less than twice heartbeat_s = 10, and one late heartbeat would "
        "cost a holder its leases; use 20 to 86400, or lower heartbeat_s to at most 7.5"
    )
    (problem,) = problems_of(write(tmp_path, GOOD + "leases: {heartbeat_s: 50000, lease_ttl_s: 50000}\n"))
    assert problem.endswith("; lower heartbeat_s to at most 25000"), "no lease_ttl_s would be long enough"
    (problem,) = problems_of(write(tmp_path, GOOD + "leases: {heartbeat_s: 9}\n"))
    assert problem.startswith("line 4: leases.holder_silence_s: 15 is less than twice heartbeat_s = 9")


def test_limits_are_told_as_the_fix(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD + "leases: {lease_ttl_s: 0}\n"))
    assert problem == (
        "line 4: leases.lease_ttl_s = 0: must be more than 0; use more than 0 and at most 86400, for example 30.0"
    )


@pytest.mark.parametrize(
    ("create", "shown"), [("maybe", " = 'maybe': "), ("[true]", " = [True]: "), ("{}", " = {}: "), ("", ": is null: ")]
)
def test_an_unclear_create_is_one_problem_and_names_its_value(tmp_path: Path, create: str, shown: str) -> None:
    (problem,) = problems_of(
        write(tmp_path, f"listen: unix://$TMP/s\npool:\n  path: $TMP/pool\n  create: {create}\n  size: 4GiB\n")
    )
    assert problem == f"line 4: pool.create{shown}must be true or false; write for example true"


@pytest.mark.parametrize(
    ("right", "wrong", "suggested"),
    [
        ("listen:", "lissten:", "lissten: unknown key; did you mean listen?"),
        ("path:", "paht:", "pool.paht: unknown key; did you mean pool.path?"),
        ("create:", "creat:", "pool.creat: unknown key; did you mean pool.create?"),
        ("size:", "siez:", "pool.siez: unknown key; did you mean pool.size?"),
        ("pool:", "poool:", "poool: unknown key; did you mean pool?"),
    ],
)
def test_a_misspelt_key_is_one_problem(tmp_path: Path, right: str, wrong: str, suggested: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD.replace(right, wrong)))
    assert problem.endswith(suggested)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (
            "-4GiB",
            " = '-4GiB': is negative, a size is more than 0; write for example 4GiB, 512MiB or a number of bytes",
        ),
        ("0", " = 0: must be more than 0; write for example 4GiB, 512MiB or a number of bytes"),
        ("4G", " = '4G': has the unknown unit 'G'; use one of B, "),
        ("[4GiB]", " = ['4GiB']: is not a size; write for example 4GiB, 512MiB or a number of bytes"),
    ],
)
def test_a_bad_size_gets_its_hint_once(tmp_path: Path, size: str, problem: str) -> None:
    (found,) = problems_of(write(tmp_path, GOOD.replace("4GiB", size)))
    assert found.startswith(f"line 3: pool.size{problem}")
    assert found.count("; ") == 1


def test_a_bad_address_gets_its_hint_once(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD.replace("unix://$TMP/s", "nowhere")))
    assert problem == (
        "line 2: listen = 'nowhere': 'nowhere' is not an address of a chunk service; "
        "write unix:///absolute/path/to/socket or 127.0.0.1:PORT"
    )


def closely(path: Path) -> list[str]:
    with pytest.raises(ConfigProblemsError) as caught:
        examine_service_config(path, read_yaml(path))
    return [str(p) for p in caught.value.problems]


def test_a_pool_that_exists_is_opened_when_looked_at_closely(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    file = write(tmp_path, GOOD)
    examine_service_config(file, read_yaml(file))
    os.truncate(tmp_path / "pool" / "data", 4096)
    load_service_config(file)
    (problem,) = closely(file)
    assert "data is truncated: 4096 bytes" in problem
    assert f"rm -r {tmp_path}/pool, then mfctl pool create {tmp_path}/pool --size" in problem


def test_a_new_pool_needs_room_when_looked_at_closely(tmp_path: Path) -> None:
    (problem,) = closely(write(tmp_path, GOOD.replace("4GiB", "512TiB")))
    assert re.match(
        r"line 3: pool\.size = '512TiB': is more than the \d+MiB that are free on the filesystem of ", problem
    )
    (tmp_path / "disk").write_bytes(b"something")
    (problem,) = closely(write(tmp_path, GOOD.replace("4GiB", "4GiB, data_path: $TMP/disk")))
    assert f"pool.data_path = '{tmp_path}/disk'" in problem
    assert "the pool wants 4294967296" in problem


def test_sizes_without_effect_are_noted(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    make_pool(pool)
    size, other = f"{SIZE_BYTES + 4096}", GOOD.replace("4GiB", "4GiB, segment_size: 2MiB")
    assert notes(write(tmp_path, GOOD.replace("4GiB", size))) == ()
    assert notes(write(tmp_path, other)) == (
        f"pool.size = 4GiB has no effect: the pool {pool} exists already, with a size of {format_size(SIZE_BYTES)}",
        f"pool.segment_size = 2MiB has no effect: the pool {pool} exists already, with segments of 1MiB",
    )


def of_drives(tmp_path: Path, *names: str, size_bytes: int = SIZE_BYTES) -> str:
    """A configuration of a new pool on these files, blank."""
    for name in names:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size_bytes)
    listed = ", ".join(f"$TMP/{name}" for name in names)
    return GOOD.replace("4GiB", f"{SIZE_BYTES}, segment_size: 1MiB, data_path: [{listed}]")


def test_a_new_pool_of_several_drives(tmp_path: Path) -> None:
    config = load_service_config(write(tmp_path, of_drives(tmp_path, "a", "b")))
    assert pool_of(config).data_path == (tmp_path / "a", tmp_path / "b")
    one = GOOD.replace("size: 4GiB", "size: 4GiB, data_path: $TMP/a")
    assert pool_of(load_service_config(write(tmp_path, one))).data_path == (tmp_path / "a",)


@pytest.mark.parametrize(
    ("data_path", "problem"),
    [
        ("[]", r"pool\.data_path = \[\]: names nothing; name one path or more"),
        ("[$TMP/a, b]", r"pool\.data_path = .*'b': must be an absolute path"),
        ("[$TMP/a, $TMP/a]", r"pool\.data_path = .*: names .*/a twice; name each drive once"),
        ("[$TMP/a, 7]", r"pool\.data_path = .*'7': must be a path"),
        ("[$TMP/a, $TMP/none]", r"pool\.data_path = '.*/none': does not exist"),
    ],
)
def test_drives_that_cannot_be(tmp_path: Path, data_path: str, problem: str) -> None:
    text = re.sub(r"data_path: \[.*?\]", lambda _: f"data_path: {data_path}", of_drives(tmp_path, "a"))
    (found,) = problems_of(write(tmp_path, text))
    assert re.match(f"line 3: {problem}", found), found


def test_every_drive_of_a_new_pool_is_looked_at(tmp_path: Path) -> None:
    text = of_drives(tmp_path, "a", "b")
    examine_service_config(write(tmp_path, text), read_yaml(write(tmp_path, text)))
    os.truncate(tmp_path / "b", SIZE_BYTES // 2)
    (problem,) = closely(write(tmp_path, text))
    assert f"{tmp_path}/b has {SIZE_BYTES // 2} bytes, the pool wants {SIZE_BYTES}" in problem
    (tmp_path / "b").unlink()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (problem,) = closely(write(tmp_path, text))
    assert f"{tmp_path}/b is named twice" in problem


def test_drives_that_a_pool_does_not_have_are_noted(tmp_path: Path) -> None:
    of_drives(tmp_path, "a", "b")
    make_pool(tmp_path / "pool", tmp_path / "a")
    text = GOOD.replace("4GiB", f"{SIZE_BYTES}, data_path: [$TMP/a, $TMP/b]")
    (note,) = notes(write(tmp_path, text))
    assert note == (
        f"pool.data_path = {tmp_path}/b has no effect: the pool {tmp_path}/pool exists already, without it; to add it: "
        f"mfctl jbof add {tmp_path}/pool --size {format_size(SIZE_BYTES)} --data-path {tmp_path}/b"
    )
    add_drive(tmp_path / "pool", size_bytes=SIZE_BYTES, data_path=tmp_path / "b")
    assert notes(write(tmp_path, text)) == ()


TOO_LITTLE = "medium: {drive_writes_per_day: 0.1}\n"


def test_a_budget_below_a_segment_is_refused_before_a_pool_is_made(tmp_path: Path) -> None:
    """Six segments: a quarter of a day's bytes is a segment from 4 / 6 writes a day on."""
    text = of_drives(tmp_path, "a", "b") + TOO_LITTLE
    (problem,) = problems_of(write(tmp_path, text))
    assert problem.startswith("line 4: medium.drive_writes_per_day = 0.1: a quarter of what drive 0 may be written")
    assert "use 0.667 or more" in problem
    load_service_config(write(tmp_path, text.replace("0.1", "0.667")))


def test_of_a_pool_that_exists_the_check_tells_the_budget_in_the_words_of_the_service(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    file = write(tmp_path, GOOD + TOO_LITTLE)
    with pytest.raises(ConfigError) as refused:
        Pool.open(tmp_path / "pool", PoolOptions(drive_writes_per_day=0.1))
    (problem,) = closely(file)
    assert problem == f"line 4: {refused.value.message}; {refused.value.next_step}"


def test_a_drive_that_is_away_is_a_warning_in_the_words_of_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_pool_of_drives(
        tmp_path / "pool", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, None]
    )
    file = write(tmp_path, GOOD)
    assert examine_service_config(file, read_yaml(file))[1] == ()
    (tmp_path / "pool" / "data.1").unlink()
    caplog.clear()
    (warning,) = examine_service_config(file, read_yaml(file))[1]
    assert warning.startswith(f"drive 1 is away, and what it holds is not found: {tmp_path}/pool/data.1 is missing")
    Pool.open(tmp_path / "pool").close()
    assert warning in caplog.messages


def test_an_index_that_the_service_would_refuse_is_a_problem(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    make_pool(pool)
    shutil.copytree(pool / "index", tmp_path / "copy")
    Pool.open(pool).close()
    Pool.open(pool).close()
    shutil.rmtree(pool / "index")
    shutil.copytree(tmp_path / "copy", pool / "index")
    with pytest.raises(FormatError) as refused:
        Pool.open(pool)
    (problem,) = closely(write(tmp_path, GOOD))
    assert refused.value.message in problem
    assert "is an old copy" in problem


@pytest.mark.parametrize("section", ["medium", "leases", "drives", "log", "exports"])
@pytest.mark.parametrize("below", ["", "\n  # lease_ttl_s: 30.0", " {}"])
def test_a_section_with_nothing_below_it_has_the_defaults(tmp_path: Path, section: str, below: str) -> None:
    if section == "exports" and "{" in below:
        return  # a mapping that lacks what is required
    assert load_service_config(write(tmp_path, f"{GOOD}{section}:{below}\n")) == load_service_config(
        write(tmp_path, GOOD)
    )


def test_a_pool_with_nothing_below_it_lacks_its_path(tmp_path: Path) -> None:
    assert problems_of(write(tmp_path, "listen: unix://$TMP/s\npool:\n")) == [
        "line 2: pool.path: is missing; add path: /var/lib/meshfusion/pool"
    ]


def test_duplicate_keys_are_told(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD + "log: {level: info}\nlog: {level: debug}\n"))
    assert problem == "line 4: log: stands twice in the file; remove one of them"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("- a\n- b\n", "it is a list"),
        ("just words", "it is a str"),
        ("listen: x\npool: [1,\n", "line 3, column 1: not valid YAML"),
        ("listen: x\n\tpool: y\n", "line 2, column 1: not valid YAML"),
        ("a: !!python/object:os.system x", "line 1.*could not determine a constructor"),
        ("a: 2026-99-99", "not valid YAML"),
        ("{[1]: 2}", "line 1.*unhashable"),
        ("listen: x\npool: \0", r"line 2: not valid YAML: the character U\+0000"),
        ("\x1b[0m", r"line 1: not valid YAML: the character U\+001B"),
    ],
)
def test_what_is_no_mapping_or_no_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_service_config(write(tmp_path, text))
    assert caught.value.next_step


def test_cyclic_aliases_do_not_hang(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_service_config(write(tmp_path, "pool: &p {path: *p}\n"))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_service_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_service_config(tmp_path)
    (tmp_path / "latin").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_service_config(tmp_path / "latin")


def test_the_example_is_complete_and_shows_the_defaults(tmp_path: Path) -> None:
    text = example_service_config()
    data = yaml.safe_load(text)
    left_out = {"exports", "pools", "tls", "access", "tokens_file", "audit"}
    assert set(data) == set(ServiceConfig.model_fields) - left_out
    assert "# exports:" in text
    assert "# pools:" in text
    assert "# data_path: " in text
    data["listen"] = f"unix://{tmp_path}/s"
    data["pool"]["path"] = f"{tmp_path}/pool"
    config = load_service_config(write(tmp_path, yaml.safe_dump(data)))
    assert config == load_service_config(write(tmp_path, GOOD))


EXPORTS = GOOD + "exports: {target: nvmet, portals: [%s]}\n"


def test_exports(tmp_path: Path) -> None:
    config = load_service_config(write(tmp_path, EXPORTS % "rdma://10.0.0.1, 'rdma://[fd00::0:1]:4421'"))
    assert config.exports is not None
    assert [parse_portal(portal) for portal in config.exports.portals] == [
        Address("rdma", "10.0.0.1", 4420),
        Address("rdma", "fd00::1", 4421),
    ]
    spdk = "exports: {target: spdk, portals: ['tcp://127.0.0.1:4420'], spdk: {socket: /s, memory: 8GiB}}\n"
    config = load_service_config(write(tmp_path, GOOD + spdk))
    assert config.exports is not None
    assert config.exports.spdk is not None
    assert config.exports.spdk.memory == 8 << 30


def test_the_example_of_exports_is_accepted(tmp_path: Path) -> None:
    text = example_service_config()
    start, end = text.index("# exports:"), text.index("# How long readers")
    known = "|".join({"exports", *ExportsConfig.model_fields, *SpdkConfig.model_fields})
    lines = [line.replace("# ", "", 1) for line in text[start:end].splitlines() if re.match(rf" *# ({known}):", line)]
    shown = yaml.safe_load("\n".join(lines))["exports"]
    assert set(shown) == set(ExportsConfig.model_fields)
    shown["target"] = "spdk"
    document = yaml.safe_dump({**yaml.safe_load(GOOD.replace("$TMP", str(tmp_path))), "exports": shown})
    assert load_service_config(write(tmp_path, document)).exports is not None


@pytest.mark.parametrize(
    ("exports", "problem"),
    [
        ("{target: nvmet}", r"line 4: exports\.portals: is missing; add portals: \[\"rdma://"),
        ("{target: nvmet, portals: []}", r"exports\.portals = \[\]: .*at least 1"),
        ("{target: nvmet, portals: ['10.0.0.1']}", "'10.0.0.1' is no portal; write for example rdma://10.0.0.1:4420"),
        ("{target: nvmet, portals: ['ib://10.0.0.1']}", "transport 'ib' is neither tcp nor rdma"),
        ("{target: nvmet, portals: ['rdma://storage']}", "'storage' is not an IP address"),
        ("{target: nvmet, portals: ['rdma://0.0.0.0']}", "hosts cannot connect to this address; name the address"),
        ("{target: nvmet, portals: ['rdma://10.0.0.1:70000']}", "service 70000 is not a port number"),
        ("{target: nvmet, portals: ['rdma://10.0.0.1', 'rdma://10.0.0.1']}", "must be different addresses"),
        ("{target: nvmet, portals: ['rdma://10.0.0.1', 'rdma://10.0.0.1:4420']}", "must be different addresses"),
        ("{target: nvmet, portals: ['rdma://10.0.0.1', 'tcp://10.0.0.2']}", "of one transport"),
        (
            "{target: spdk, portals: ['rdma://10.0.0.1'], spdk: {socket: /s, memory: 64MiB}}",
            r"exports\.spdk\.memory.*: 64 MiB are too little .*; give nvmf_tgt at least \d+ MiB",
        ),
        ("{target: lio, portals: ['rdma://10.0.0.1']}", r"exports\.target = 'lio': must be 'nvmet' or 'spdk'"),
        ("{target: spdk, portals: ['rdma://10.0.0.1']}", r"exports\.spdk: is needed with target: spdk; add socket"),
        (
            "{target: nvmet, portals: ['rdma://10.0.0.1'], spdk: {socket: /s, memory: 1GiB}}",
            r"exports\.spdk.*: is only for target: spdk; remove it",
        ),
        ("{target: nvmet, portals: ['rdma://10.0.0.1'], nqn_prefix: mine}", r"exports\.nqn_prefix = 'mine': "),
        (
            "{target: nvmet, portals: ['rdma://10.0.0.1'], authenticate: false, key_lifetime_s: 86400}",
            r"exports\.key_lifetime_s.*: is for hosts that have keys, .*; remove it, or set authenticate: true",
        ),
        ("{target: nvmet, portals: ['rdma://10.0.0.1'], key_lifetime_s: 59}", r"exports\.key_lifetime_s = 59: .* 60"),
        ("{target: nvmet, portals: ['rdma://10.0.0.1'], key_lifetime_s: .inf}", r"exports\.key_lifetime_s = inf"),
        (
            "{target: nvmet, portals: ['tcp://10.0.0.1'], tcp_tls: true}",
            r"exports\.tcp_tls.*: is not supported with target: nvmet\. .*Linux 6\.7 .*addr_tsas.*tlshd",
        ),
        (
            "{target: nvmet, portals: ['rdma://10.0.0.1'], tcp_tls: true}",
            r"exports\.tcp_tls.*: is for TCP, and NVMe/RDMA has no TLS; use tcp://",
        ),
        (
            "{target: spdk, portals: ['tcp://10.0.0.1'], authenticate: false, tcp_tls: true, "
            "spdk: {socket: /s, memory: 8GiB}}",
            r"exports\.tcp_tls.*: needs authenticate: .*; set authenticate: true",
        ),
        ("{target: nvmet, portals: ['rdma://10.0.0.1'], port: 1}", r"exports\.port: unknown key; did you mean"),
    ],
)
def test_exports_that_make_no_sense(tmp_path: Path, exports: str, problem: str) -> None:
    (told,) = problems_of(write(tmp_path, f"{GOOD}exports: {exports}\n"))
    assert re.search(problem, told), told


def test_a_key_lives_for_many_heartbeats(tmp_path: Path) -> None:
    exports = "exports: {target: nvmet, portals: ['rdma://10.0.0.1'], key_lifetime_s: 60}\n"
    load_service_config(write(tmp_path, f"{GOOD}{exports}leases: {{heartbeat_s: 6}}\n"))
    (problem,) = problems_of(write(tmp_path, f"{GOOD}{exports}leases: {{heartbeat_s: 6.5}}\n"))
    assert problem == (
        "line 4: exports.key_lifetime_s = 60: 60 is less than 10 times leases.heartbeat_s = 6.5, and with each "
        "heartbeat only an engine learns of its new key; use 65 to 86400, or lower leases.heartbeat_s to at most 6"
    )


def test_lines_point_into_nested_values() -> None:
    document = parse_yaml("a:\n  - x\n  - b: 1\n    c: 2\n", "f")
    assert document.lines == {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 1, "b"): 3, ("a", 1, "c"): 4}
    assert document.line_of(("a", 1, "missing")) == 3
    assert document.line_of(("z",)) is None


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("4GiB", 4 * 1024**3),
        ("4 GiB", 4 * 1024**3),
        ("1.5KiB", 1536),
        ("4GB", 4_000_000_000),
        ("17", 17),
        ("17B", 17),
        (4096, 4096),
        ("0.1GB", 100_000_000),
        ("2PiB", 2 * 1024**5),
        ("4gib", 4 * 1024**3),
    ],
)
def test_sizes(value: object, size_bytes: int) -> None:
    assert parse_size_bytes(value) == size_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4G", "unknown unit 'G'; use one of B, KiB"),
        ("4iB", "unknown unit"),
        ("0.1B", "whole number of bytes"),
        ("-4GiB", "is negative"),
        (-1, "is negative"),
        ("-x", "is not a size"),
        ("", "is not a size"),
        ("0GiB", "more than 0"),
        (0, "more than 0"),
        ("9999PiB", "less than 8 EiB"),
        (True, "is not a size"),
        (None, "is not a size"),
        (1.5, "is not a size"),
    ],
)
def test_what_is_no_size(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_size_bytes(value)


@given(st.integers(1, 2**40), st.sampled_from([("KiB", 1024), ("MB", 10**6), ("B", 1)]))
def test_whole_sizes_scale_by_their_unit(count: int, unit: tuple[str, int]) -> None:
    assert parse_size_bytes(f"{count}{unit[0]}") == count * unit[1]


def test_sizes_that_creation_would_refuse_are_told_along_with_the_rest(tmp_path: Path) -> None:
    problems = problems_of(
        write(tmp_path, "listen: unix://$TMP/s\npool: {path: p, create: true, size: 256MiB}\nlog: {level: loud}\n")
    )
    assert len(problems) == 3
    assert any("pool.size = '256MiB': pool size 256MiB is too small" in p and "at least 257MiB" in p for p in problems)
    (problem,) = problems_of(
        write(tmp_path, "listen: unix://$TMP/s\npool: {path: $TMP/p, create: true, size: 4GiB, segment_size: 5000}\n")
    )
    assert "pool.segment_size = 5000" in problem


def test_endless_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="not a regular file"):
            load_service_config(path)
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", (1 << 20) + 1)
    with pytest.raises(ConfigError, match="1048577 bytes"):
        load_service_config(tmp_path / "long")


def test_a_directory_made_ready_needs_no_writable_parent(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    assert pool_of(load_service_config(write(tmp_path, GOOD))).create
