"""The containers as data: what Compose makes of its files, and what the Dockerfiles say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unit.project.documents import ROOT

__all__ = ["FORMS", "SERVICE", "TRAINER", "Dockerfile", "compose"]

FORMS = {
    "gpu": ("docker-compose.yml",),
    "cpu": ("docker-compose.yml", "docker-compose.cpu.yml"),
    "tls": ("docker-compose.yml", "docker-compose.tls.yml"),
    "cpu-tls": ("docker-compose.yml", "docker-compose.cpu.yml", "docker-compose.tls.yml"),
}
_COMMENT = re.compile(r"^[ \t]*#.*\n", re.MULTILINE)


def compose(form: str, **variables: str) -> dict[str, Any]:
    """What Compose makes of a form's files: everything merged, interpolated and in full."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tool = shutil.which("docker-compose", path=path)
    assert tool is not None, "no docker-compose: run `make install`"
    files = [word for file in FORMS[form] for word in ("-f", file)]
    done = subprocess.run(
        [tool, *files, "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": path, "HOME": "/nonexistent", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    composed: dict[str, Any] = json.loads(done.stdout)
    return composed


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """One Dockerfile."""

    name: str

    @property
    def instructions(self) -> list[tuple[str, str]]:
        """Each instruction and what follows it, on one line."""
        text = (ROOT / "docker" / self.name).read_text("utf-8")
        # As Docker reads it: a comment is no part of the instruction that goes on around it.
        lines = _COMMENT.sub("", text).replace("\\\n", " ").splitlines()
        words = [line.split(None, 1) for line in lines if line]
        return [(name, rest) for name, rest in words]

    @property
    def stages(self) -> list[list[tuple[str, str]]]:
        """The instructions of each stage, from its FROM."""
        stages: list[list[tuple[str, str]]] = []
        for instruction in self.instructions:
            if instruction[0] == "FROM":
                stages.append([])
            if stages:
                stages[-1].append(instruction)
        return stages

    def final(self, name: str) -> str:
        """What the last instruction of a kind in the last stage says."""
        return [rest for kind, rest in self.stages[-1] if kind == name][-1]

    @property
    def command(self) -> list[str]:
        """What its containers run, if not told otherwise."""
        words: list[str] = json.loads(self.final("CMD"))
        return words


SERVICE, TRAINER = Dockerfile("service.Dockerfile"), Dockerfile("trainer.Dockerfile")
