"""Builds the one compiled module, proto/andon/protocol/_fused.c, if there is a C compiler.

The module is optional. Without a compiler or Python's headers, Andon is installed without it and
averages with NumPy. `andon doctor` says whether it is there. The variable ANDON_C_PART decides
otherwise: `required` makes a failed build an error, `off` builds a wheel for every platform.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

_MODULE = "andon.protocol._fused"
_FOLDER = Path("proto/andon/protocol")
_VARIABLE = "ANDON_C_PART"
_CHOICES = ("", "required", "off")


class FusedBuildHook(BuildHookInterface[Any]):
    """Puts the module into the wheel, and beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the module. Called before each build of a wheel, editable or not.

        Raises:
            ValueError: ANDON_C_PART is something else than it may be.
            BaseError, CCompilerError: it is required, and could not be built.
        """
        choice = os.environ.get(_VARIABLE, "")
        if choice not in _CHOICES:
            raise ValueError(f"{_VARIABLE} is required or off, or is not set; not {choice!r}")
        folder = Path(self.root) / _FOLDER
        # An older module would be imported in place of one that could not be built.
        for stale in _built(folder):
            stale.unlink()
        if choice == "off":
            return
        with TemporaryDirectory() as scratch:
            # A failed build is a warning, not an error: the module is optional.
            try:
                module = _build(folder / "_fused.c", Path(scratch))
            except (BaseError, CCompilerError) as error:
                if choice == "required":
                    raise
                self.app.display_warning(
                    f"Andon will average with NumPy: its C module was not built ({error}). "
                    "To build it, install a C compiler and Python's headers."
                )
                return
            path = shutil.copy(module, folder)
        build_data["force_include"][str(path)] = f"andon/protocol/{Path(path).name}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


def _build(source: Path, scratch: Path) -> Path:
    """Compiles the module.

    Raises:
        BaseError, CCompilerError: there is no compiler, or it failed.
    """
    # The compiler must not fuse a product and a sum into one operation with a single rounding: the
    # mean is defined to the bit.
    unix = ["-O3", "-ffp-contract=off"]
    flags = unix if sysconfig.get_config_var("CC") else []
    module = Extension(_MODULE, [str(source)], py_limited_api=True, extra_compile_args=flags)
    command = build_ext(Distribution({"name": "andon", "ext_modules": [module]}))
    command.build_lib, command.build_temp = str(scratch / "lib"), str(scratch / "temp")
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(_MODULE))


def _built(folder: Path) -> list[Path]:
    return [path for path in folder.glob("_fused.*") if path.suffix in (".so", ".pyd")]
