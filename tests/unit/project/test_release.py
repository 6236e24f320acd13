"""What a release is built of: its versions agree, its files are those of the checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("proto/andon/__init__.py", "services/andon_server/board/static/board.css")
VERSION = "1.2.3"


def load(path: str) -> ModuleType:
    """A module that is no package's, by its file."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dist = load("release/dist.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout of a few files."""
    folder = tmp_path / "source"
    for name in (*SOURCES, "proto/andon/protocol/_fused.c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def wheel(folder: Path, *names: str, tag: str = "py3-none-any") -> Path:
    info = f"andon-{VERSION}.dist-info"
    path = folder / f"andon-{VERSION}-{tag}.whl"
    with ZipFile(path, "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.4\nVersion: {VERSION}\n\n")
        file.writestr(f"{info}/licenses/LICENSE", "")
        for name in names:
            file.writestr(name, "")
    return path


FILES = ("andon/__init__.py", "andon_server/board/static/board.css")
MODULE = "andon/protocol/_fused.abi3.so"


def test_andon_and_its_conformance_suite_are_released_with_one_version() -> None:
    assert dist.version().count(".") == 2


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_a_wheel_with_every_file_of_the_checkout_is_taken(source: Path, tmp_path: Path) -> None:
    pure = wheel(tmp_path, *FILES)
    compiled = wheel(tmp_path, *FILES, MODULE, tag="cp311-abi3-linux_x86_64")

    dist.inspect([pure, compiled], source, VERSION)


@pytest.mark.parametrize(
    ("names", "tag", "words"),
    [
        (FILES[:1], "py3-none-any", r"lacks \['andon_server/board/static/board.css'\]"),
        ((*FILES, "tests/test_x.py"), "py3-none-any", r"should not have \['tests/test_x.py'\]"),
        ((*FILES, MODULE), "py3-none-any", "should not have .*_fused"),
        (FILES, "cp311-abi3-linux_x86_64", "lacks .*_fused"),
    ],
    ids=["forgotten", "not a part", "compiled for all", "not compiled"],
)
def test_a_wheel_with_other_files_is_refused_by_their_names(
    source: Path, tmp_path: Path, names: tuple[str, ...], tag: str, words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        dist.inspect([wheel(tmp_path, *names, tag=tag)], source, VERSION)


def test_a_wheel_of_another_version_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is of version 1\.2\.3, and the sources of 1\.2\.4"):
        dist.inspect([wheel(tmp_path, *FILES)], source, "1.2.4")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds a C part that can't be compiled; returns what the build was told of the wheel."""
    pytest.importorskip("hatchling", reason="make install")
    hook = load("hatch_build.py").FusedBuildHook
    folder = tmp_path / "proto" / "andon" / "protocol"
    folder.mkdir(parents=True)
    (folder / "_fused.c").write_text("this is no C\n")
    (folder / "_fused.abi3.so").write_text("an older one")

    def run(choice: str) -> dict[str, Any]:
        monkeypatch.setenv("ANDON_C_PART", choice)
        told: dict[str, Any] = {"force_include": {}}
        made = hook(str(tmp_path), {}, None, None, str(tmp_path), "wheel", None)
        made.initialize("standard", told)
        assert not (folder / "_fused.abi3.so").exists()
        return told

    yield run
    sys.modules.pop("hatch_build", None)


def test_a_wheel_without_the_c_part_is_built_on_request(build: Any) -> None:
    assert build("off") == {"force_include": {}}


def test_a_c_part_that_fails_is_no_error_unless_it_is_required(
    build: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build("") == {"force_include": {}}
    with pytest.raises(Exception, match="_fused"):
        build("required")


def test_another_choice_for_the_c_part_is_refused(build: Any) -> None:
    with pytest.raises(
        ValueError, match="ANDON_C_PART is required or off, or is not set; not 'no'"
    ):
        build("no")
