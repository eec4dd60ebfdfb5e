"""A pool on encrypted slices: made, opened, refused, given another key, erased. Files stand for devices; what dm-crypt
does with them is tried in a guest (tests/lab/test_encryption.py)."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from meshfusion.dpu import pool_create
from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import AddDriveRequest, RemoveDriveRequest
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.encryption.erasing import erase_key
from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import EncryptionNote, KeyPlace, KeyState, read_note, write_note
from meshfusion.dpu.encryption.rekeying import rekey
from meshfusion.dpu.encryption.slices import open_pools_slices, open_slices
from meshfusion.dpu.encryption.use_lock import UseLock
from meshfusion.dpu.pool import Pool, inspect_pool
from meshfusion.dpu.pool_create import add_drive, create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_remove import remove_drive
from meshfusion.jbof.errors import ConfigError, FormatError, PoolBusyError
from tests.dpu.encryption.file_luks import FileLuks, file_luks, key_file, key_place, slice_file
from tests.dpu.pool_cases import DEADLINE_S, SEGMENT_BYTES, SIZE_BYTES, Holder, make_pool


class Made(NamedTuple):
    layout: PoolLayout
    place: KeyPlace
    luks: FileLuks
    slices: tuple[Path, ...]

    @property
    def note(self) -> EncryptionNote:
        note = read_note(self.layout)
        assert note is not None
        return note

    def header(self, number: int = 0) -> Path:
        return self.note.header(self.note.slices[number])

    def open(self) -> Pool:
        return Pool.open(self.layout.directory, luks=self.luks)


def make(folder: Path, count: int = 1) -> Made:
    luks, place = file_luks(folder), key_place(folder)
    slices = tuple(slice_file(folder, f"slice{number}") for number in range(count))
    create(folder / "p", place, luks, slices)
    return Made(PoolLayout(folder / "p"), place, luks, slices)


def create(path: Path, place: KeyPlace | None, luks: FileLuks, slices: tuple[Path, ...]) -> None:
    create_pool_of_drives(
        path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=slices, encryption=place, luks=luks
    )


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    not_on_one_drive(monkeypatch)
    return make(tmp_path)


def not_on_one_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one folder lie on one drive, where tests run on one."""
    monkeypatch.setattr("meshfusion.dpu.encryption.making.devices_of_filesystem", lambda path: frozenset())


def test_it_is_made_closed_and_what_it_lies_on_is_noted(made: Made) -> None:
    assert made.luks.open_names == []
    (one,) = made.note.slices
    assert one.device == made.slices[0]
    assert made.header().exists()
    listed = read_drive_list(made.layout.directory)
    assert listed is not None
    assert listed.drives[0].path == made.luks.path_of(f"meshfusion-{one.uuid.hex}")


def test_it_saves_and_is_found_again_after_a_restart(made: Made) -> None:
    for expected in (0, 1):
        slices = open_slices(made.layout, made.luks, made.place)
        with made.open() as pool:
            holder = Holder(pool)
            assert len(pool.list_chunks(api.ListRequest(), deadline_s=DEADLINE_S).chunks) == expected
            if not expected:
                assert holder.put(1)
            holder.leave()
        slices.close()
        assert made.luks.open_names == []


def test_closed_it_is_told_what_to_do(made: Made) -> None:
    with pytest.raises(FormatError, match=r"is encrypted, and its drives, on .*slice0, are not open"):
        inspect_pool(made.layout.directory)


def test_a_mapping_that_a_killed_service_left_is_used(made: Made) -> None:
    open_slices(made.layout, made.luks, made.place)._use.release()  # as the kernel does
    assert len(made.luks.open_names) == 1
    slices = open_slices(made.layout, made.luks, made.place)
    slices.close()
    assert made.luks.open_names == []


def test_a_mapping_of_another_header_in_its_place_is_refused(made: Made) -> None:
    (one,) = made.note.slices
    with open_key(made.place.key_file) as key:
        made.luks.open(made.slices[0], made.header(), key, one.name)
    made.luks.uuids[one.name] = f"CRYPT-LUKS2-{'0' * 32}-{one.name}"
    with pytest.raises(FormatError, match="is open already, as 'CRYPT-LUKS2-0000"):
        open_slices(made.layout, made.luks, made.place)
    assert made.luks.open_names == [one.name]


def test_a_wrong_key_is_refused(made: Made, tmp_path: Path) -> None:
    wrong = replace(made.place, key_file=key_file(tmp_path, "wrong"))
    with pytest.raises(ConfigError, match="wrong does not open the header"):
        open_slices(made.layout, made.luks, wrong)
    assert made.luks.open_names == []
    assert made.note.place == made.place


def test_a_wrong_key_is_refused_beside_an_open_mapping(made: Made, tmp_path: Path) -> None:
    open_slices(made.layout, made.luks, made.place)._use.release()
    with pytest.raises(ConfigError, match="does not open the header"):
        open_slices(made.layout, made.luks, replace(made.place, key_file=key_file(tmp_path, "wrong")))


def test_a_header_of_another_slice_is_refused(made: Made, tmp_path: Path) -> None:
    with open_key(made.place.key_file) as key:
        made.luks.format(made.slices[0], tmp_path / "header", key, uuid.uuid4())
    shutil.copy(tmp_path / "header", made.header())
    with pytest.raises(FormatError, match="is the header of another slice: its UUID is"):
        open_slices(made.layout, made.luks, made.place)
    assert made.luks.open_names == []


def test_of_several_drives_one_whose_header_is_lost_is_away_and_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    not_on_one_drive(monkeypatch)
    made = make(tmp_path, count=2)
    made.header(1).unlink()
    slices = open_slices(made.layout, made.luks, made.place)
    assert "is not opened: the header" in caplog.text
    assert [drive.number for drive in find_drives(made.layout).absent] == [1]
    remove_drive(made.layout.directory, 1, luks=made.luks)
    assert len(made.note.slices) == 1
    slices.close()
    open_slices(made.layout, made.luks, made.place).close()


def test_of_several_drives_all_have_to_take_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_on_one_drive(monkeypatch)
    made = make(tmp_path, count=2)
    other, identity = key_file(tmp_path, "other"), made.note.slices[1].uuid
    made.header(1).unlink()
    with open_key(other) as key:
        made.luks.format(made.slices[1], made.header(1), key, identity)
    with pytest.raises(ConfigError, match="does not open the header"):
        open_slices(made.layout, made.luks, made.place)
    assert made.luks.open_names == []


def test_a_slice_in_the_place_of_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As devices are called otherwise after a restart. (dm-crypt makes noise of it; here it is the other's label.)"""
    not_on_one_drive(monkeypatch)
    made = make(tmp_path, count=2)
    made.slices[0].rename(tmp_path / "moved")
    made.slices[1].rename(made.slices[0])
    (tmp_path / "moved").rename(made.slices[1])
    with pytest.raises(FormatError, match="another slice's"):
        open_slices(made.layout, made.luks, made.place)
    assert made.luks.open_names == []


def test_what_does_not_decrypt_to_a_label_is_refused_and_not_told_to_be_overwritten(made: Made) -> None:
    made.slices[0].write_bytes(b"\x5a" * (8 << 20))
    with pytest.raises(FormatError, match=r"is not what the header .* encrypts") as raised:
        open_slices(made.layout, made.luks, made.place)
    assert "write nothing to it" in raised.value.next_step
    assert "dd" not in raised.value.next_step


def test_a_missing_header_is_named(made: Made) -> None:
    header = made.header()
    header.unlink()
    with pytest.raises(FormatError, match=rf"the header {header} of .* is missing"):
        open_slices(made.layout, made.luks, made.place)


def test_headers_and_key_may_move(made: Made, tmp_path: Path) -> None:
    place = KeyPlace(made.place.header_dir.rename(tmp_path / "h2"), made.place.key_file.rename(tmp_path / "k2"))
    open_slices(made.layout, made.luks, place).close()
    assert made.note.place == place
    open_slices(made.layout, made.luks).close()  # as commands do, by the note


def test_of_several_slices_one_may_be_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_on_one_drive(monkeypatch)
    made = make(tmp_path, count=2)
    made.slices[1].rename(tmp_path / "away")
    slices = open_slices(made.layout, made.luks, made.place)
    found = find_drives(made.layout)
    assert [drive.number for drive in found.here] == [0]
    assert [drive.number for drive in found.absent] == [1]
    slices.close()


# ---- configured and made -----------------------------------------------------------------------------------------


def test_a_pool_without_is_not_opened_as_encrypted(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    with pytest.raises(ConfigError, match="was made without: what it holds lies in the clear"):
        open_pools_slices(PoolLayout(tmp_path / "p"), KeyPlace(tmp_path, tmp_path / "k"), file_luks(tmp_path))


def test_an_encrypted_pool_is_not_opened_without(made: Made) -> None:
    with pytest.raises(ConfigError, match="has no encryption") as raised:
        open_pools_slices(made.layout, None, made.luks)
    assert f"header_dir: {made.place.header_dir}" in raised.value.next_step


def test_a_pool_that_neither_is_needs_nothing(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    assert open_pools_slices(PoolLayout(tmp_path / "p"), None, file_luks(tmp_path)) is None


def test_a_file_in_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be encrypted, only a block device"):
        create_pool_of_drives(
            tmp_path / "p",
            size_bytes=SIZE_BYTES,
            segment_bytes=SEGMENT_BYTES,
            data_paths=(None,),
            encryption=key_place(tmp_path),
            luks=file_luks(tmp_path),
        )
    assert not (tmp_path / "p").exists()


def test_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no block device"):
        create_pool_of_drives(
            tmp_path / "p",
            size_bytes=SIZE_BYTES,
            segment_bytes=SEGMENT_BYTES,
            data_paths=(slice_file(tmp_path),),
            encryption=key_place(tmp_path),
        )
    assert not (tmp_path / "p").exists()


def test_a_key_on_the_drive_that_it_protects_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "meshfusion.dpu.encryption.making"
    monkeypatch.setattr(f"{module}.devices_of_filesystem", lambda path: frozenset({"259:3", "259:0"}))
    monkeypatch.setattr(f"{module}.block_devices_under", lambda path: frozenset({"259:0"}))
    with pytest.raises(ConfigError, match="lies on the drive that it protects"):
        make(tmp_path)
    assert not (tmp_path / "p").exists()


def test_what_a_failed_creation_made_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_on_one_drive(monkeypatch)

    def fails(*args: object) -> None:
        raise FormatError("no", next_step="never")

    monkeypatch.setattr(pool_create, "write_new_label", fails)
    with pytest.raises(FormatError, match="no"):
        make(tmp_path, count=2)
    assert list((tmp_path / "headers").iterdir()) == []
    assert list((tmp_path / "mapper").iterdir()) == []
    assert not (tmp_path / "p").exists()


def test_what_a_killed_creation_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_on_one_drive(monkeypatch)
    luks, place, one = file_luks(tmp_path), key_place(tmp_path), slice_file(tmp_path)

    class Killed(BaseException):
        pass

    def dies(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:  # nothing is undone
        patch.setattr(pool_create, "create_index", dies)
        patch.setattr(pool_create, "undo_all", lambda layout, luks: None)
        patch.setattr("meshfusion.dpu.pool_place._remove_parts", lambda path: None)
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        (tmp_path / "p").mkdir()
        with pytest.raises(Killed):
            create(tmp_path / "p", place, luks, (one,))
    assert len(luks.open_names) == len(list(place.header_dir.iterdir())) == 1
    create(tmp_path / "p", place, luks, (one,))
    assert luks.open_names == []
    assert len(list(place.header_dir.iterdir())) == 1
    open_slices(PoolLayout(tmp_path / "p"), luks, place).close()


# ---- other drives ------------------------------------------------------------------------------------------------


def test_a_drive_that_is_added_is_encrypted_and_one_that_leaves_loses_its_key(made: Made, tmp_path: Path) -> None:
    slices = open_slices(made.layout, made.luks)
    label = add_drive(
        made.layout.directory, size_bytes=SIZE_BYTES, data_path=slice_file(tmp_path, "second"), luks=made.luks
    )
    assert label.drive_number == 1
    assert [one.device.name for one in made.note.slices] == ["slice0", "second"]
    header = made.header(1)
    assert header.exists()
    assert remove_drive(made.layout.directory, 1, luks=made.luks) == 0
    assert not header.exists()
    assert [one.device.name for one in made.note.slices] == ["slice0"]
    assert len(made.luks.open_names) == 1
    slices.close()
    assert made.luks.open_names == []


def test_the_same_while_it_is_served(made: Made, tmp_path: Path) -> None:
    slices = open_slices(made.layout, made.luks)
    with made.open() as pool:
        request = AddDriveRequest(SIZE_BYTES, str(slice_file(tmp_path, "second")))
        assert pool.drive_admin.add_drive(request, deadline_s=DEADLINE_S).number == 1
        assert len(made.luks.open_names) == 2
        pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
        assert len(made.luks.open_names) == len(made.note.slices) == 1
    slices.close()


def test_a_file_is_not_added(made: Made) -> None:
    slices = open_slices(made.layout, made.luks)
    with pytest.raises(ConfigError, match="cannot be encrypted"):
        add_drive(made.layout.directory, size_bytes=SIZE_BYTES, luks=made.luks)
    slices.close()


# ---- users beside each other -------------------------------------------------------------------------------------


def test_the_last_user_closes(made: Made) -> None:
    service = open_slices(made.layout, made.luks, made.place)
    command = open_slices(made.layout, made.luks)
    command.close()
    assert len(made.luks.open_names) == 1
    command = open_slices(made.layout, made.luks)
    service.close()
    assert len(made.luks.open_names) == 1
    command.close()
    assert made.luks.open_names == []


def test_one_that_a_target_has_open_stays_and_is_told(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    slices = open_slices(made.layout, made.luks, made.place)
    made.luks.busy.update(made.luks.open_names)
    slices.close()
    assert len(made.luks.open_names) == 1
    assert "stays open, since something else uses it" in caplog.text


def test_waiting_for_who_opens_or_closes_ends(made: Made) -> None:
    alone = UseLock.take(made.layout)
    assert alone.is_alone
    with pytest.raises(PoolBusyError, match="has been opening or closing"):
        UseLock.take(made.layout, patience_s=0.1)
    alone.share()
    beside = UseLock.take(made.layout, patience_s=0.1)
    assert not beside.is_alone
    assert not beside.try_alone()
    beside.release()
    assert alone.try_alone()
    alone.release()


# ---- another key -------------------------------------------------------------------------------------------------


def test_another_key(made: Made, tmp_path: Path) -> None:
    new = key_file(tmp_path, "new")
    slices = open_slices(made.layout, made.luks, made.place)
    assert rekey(made.layout, new, made.luks) == 1  # while it is served
    slices.close()
    with pytest.raises(ConfigError, match="does not open"):
        open_slices(made.layout, made.luks, made.place)
    open_slices(made.layout, made.luks, replace(made.place, key_file=new)).close()
    assert made.note.place.key_file == new


def test_an_interrupted_change_is_ended_by_doing_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_on_one_drive(monkeypatch)
    made, new = make(tmp_path, count=2), key_file(tmp_path, "new")
    calls = {"add_key": 0, "remove_key": 0}

    def dies_at(name: str, count: int) -> Callable[..., None]:
        real = getattr(FileLuks, name)

        def call(self: FileLuks, *args: object) -> None:
            calls[name] += 1
            if calls[name] == count:
                raise KeyboardInterrupt
            real(self, *args)

        return call

    for name in ("add_key", "remove_key"):
        with monkeypatch.context() as patch:
            patch.setattr(FileLuks, name, dies_at(name, 2))
            with pytest.raises(KeyboardInterrupt):
                rekey(made.layout, new, made.luks, old_key_file=made.place.key_file)
        open_slices(made.layout, made.luks).close()  # what is noted opens both at any time
    rekey(made.layout, new, made.luks, old_key_file=made.place.key_file)
    with open_key(made.place.key_file) as old:
        assert not any(made.luks.fits(made.header(number), old) for number in (0, 1))
    assert [made.luks.header_of(made.header(number)).slot_count for number in (0, 1)] == [1, 1]


@pytest.mark.parametrize("is_copy", [False, True])
def test_the_same_key_is_no_other(made: Made, tmp_path: Path, is_copy: bool) -> None:
    """Removing the old one would leave none."""
    same = Path(shutil.copy2(made.place.key_file, tmp_path / "copy")) if is_copy else made.place.key_file
    with pytest.raises(ConfigError, match="holds the key that the pool has already"):
        rekey(made.layout, same, made.luks)
    open_slices(made.layout, made.luks, made.place).close()


def test_a_key_that_opens_nothing_changes_nothing(made: Made, tmp_path: Path) -> None:
    before = made.header().read_bytes()
    with pytest.raises(ConfigError, match=r"neither .*wrong nor .*new opens the header"):
        rekey(made.layout, key_file(tmp_path, "new"), made.luks, old_key_file=key_file(tmp_path, "wrong"))
    assert made.header().read_bytes() == before
    assert made.note.place == made.place


def test_a_pool_without_has_no_key(tmp_path: Path) -> None:
    make_pool(tmp_path / "p")
    for call in (
        lambda: rekey(PoolLayout(tmp_path / "p"), key_file(tmp_path), file_luks(tmp_path)),
        lambda: erase_key(PoolLayout(tmp_path / "p"), file_luks(tmp_path / "p"), 1),
    ):
        with pytest.raises(FormatError, match="is not encrypted"):
            call()


# ---- erased ------------------------------------------------------------------------------------------------------


def test_after_its_key_was_erased_nothing_opens_it(made: Made, tmp_path: Path) -> None:
    header = made.header()
    erased = erase_key(made.layout, made.luks, 1_700_000_000)
    assert (erased.headers, erased.blank, erased.unproven) == ((header,), made.slices, ())
    assert not header.exists()
    assert made.luks.open_names == []
    for call in (
        lambda: open_slices(made.layout, made.luks, made.place),
        lambda: open_pools_slices(made.layout, None, made.luks),
        lambda: inspect_pool(made.layout.directory),
        lambda: made.open(),
        lambda: rekey(made.layout, key_file(tmp_path, "new"), made.luks),
    ):
        with pytest.raises(FormatError, match=r"the key of the pool .* was erased: nothing"):
            call()
    with pytest.raises(FormatError, match="was erased already"):
        erase_key(made.layout, made.luks, 1)
    create(tmp_path / "q", None, made.luks, made.slices)  # another pool has its slice


def test_a_header_is_overwritten_before_it_is_removed(made: Made, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.hardlink_to(made.header())
    before = link.read_bytes()
    erase_key(made.layout, made.luks, 1)
    after = link.read_bytes()
    assert len(after) == len(before)
    assert b"LUKS" not in after[:8]
    unchanged = sum(a == b for a, b in zip(before[:65536], after[:65536], strict=True))
    assert unchanged < 65536 / 256 * 2  # of random bytes every 256th is as it was


def test_nothing_is_erased_while_it_is_served(made: Made) -> None:
    slices = open_slices(made.layout, made.luks, made.place)
    with made.open() as pool:
        pool.announce_service("unix:///run/x.sock")
        with pytest.raises(PoolBusyError, match=r"unix:///run/x\.sock"):
            erase_key(made.layout, made.luks, 1)
    with pytest.raises(PoolBusyError, match="in use by a service or a command"):
        erase_key(made.layout, made.luks, 1)
    slices.close()
    assert made.note.state is KeyState.IN_USE
    assert made.header().exists()


def test_nothing_is_erased_while_a_target_has_it_open(made: Made) -> None:
    open_slices(made.layout, made.luks, made.place)._use.release()
    made.luks.busy.update(made.luks.open_names)
    with pytest.raises(PoolBusyError, match="could be read there with its key erased"):
        erase_key(made.layout, made.luks, 1)
    assert made.header().exists()


def test_an_erasure_that_was_interrupted_opens_nothing_and_is_ended(made: Made) -> None:
    write_note(made.layout, replace(made.note, state=KeyState.ERASING))
    with pytest.raises(FormatError, match="was being erased") as raised:
        open_slices(made.layout, made.luks, made.place)
    assert "mfctl pool erase-key" in raised.value.next_step
    erased = erase_key(made.layout, made.luks, 1)
    assert erased.unproven == made.slices
    assert made.note.state is KeyState.ERASED


def test_it_is_erased_without_its_key_and_a_slice_that_is_not_proven_is_left_alone(made: Made) -> None:
    made.place.key_file.unlink()
    before = made.slices[0].read_bytes()
    erased = erase_key(made.layout, made.luks, 1)
    assert (erased.blank, erased.unproven) == ((), made.slices)
    assert made.slices[0].read_bytes() == before


def test_a_damaged_header_is_destroyed_all_the_same(made: Made) -> None:
    made.header().write_bytes(b"x" * 4096)
    header = made.header()
    erase_key(made.layout, made.luks, 1)
    assert not header.exists()


# ---- the note ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"state": "lost"},
        {"header_dir": "relative"},
        {"slices": [{"uuid": "x", "device": "/dev/x"}]},
        {"slices": [{"uuid": "11111111-2222-3333-4444-555555555555", "device": "/dev/x"}] * 2},
        {"slices": 5},
    ],
)
def test_a_damaged_note_is_told(made: Made, change: dict[str, object]) -> None:
    file = made.layout.directory / "encryption"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FormatError, match=r"encryption is damaged"):
        read_note(made.layout)


def test_no_key_is_in_the_directory(made: Made) -> None:
    open_slices(made.layout, made.luks, made.place).close()
    key = made.place.key_file.read_bytes()
    files = [file for file in made.layout.directory.rglob("*") if file.is_file()]
    assert files
    assert not any(key in file.read_bytes() or key.hex() in file.read_text(errors="replace") for file in files)


# ---- key files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.chmod(0o640), "has the mode 0640"),
        (lambda path: path.write_bytes(b"short"), "has 5 bytes"),
        (lambda path: path.write_bytes(bytes(5000)), "has 5000 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    ],
)
def test_a_key_file_that_cannot_be_one(tmp_path: Path, spoil: Callable[[Path], object], problem: str) -> None:
    path = key_file(tmp_path)
    spoil(path)
    with pytest.raises(ConfigError, match=problem), open_key(path):
        pass
