"""Warm starts: workers that are forked from a template, and so have nothing to load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from andon_cli.launching.output import OutputLog
from andon_cli.launching.processes import Child, start_worker, stream_of
from andon_cli.launching.template import Template, TemplateGone

__all__ = ["Forked", "WarmStarts"]

_OWN = ("RANK", "LOCAL_RANK")
"""What no library reads while it is imported, beside ANDON_*."""


class WarmStarts:
    """A template of a launch's workers."""

    def __init__(self, template: Template, environment: Mapping[str, str] | None = None) -> None:
        """Takes over a template.

        Args:
            template: it has loaded what workers load.
            environment: what its libraries have read; a worker with another one is not forked.
                None: they have read what every worker has.
        """
        self._template = template
        self._environment = environment

    @classmethod
    def begin(cls, command: Sequence[str], environment: Mapping[str, str]) -> WarmStarts:
        """Starts a template.

        Args:
            command: of the workers.
            environment: that of one of them.

        Raises:
            TemplateGone: there is none for such a command, or on this platform.
            OSError: it could not be started.
        """
        script = command[1]
        if not script.endswith(".py"):
            raise TemplateGone("it runs scripts only")
        read = _read_by_libraries(environment)
        template = Template(
            ["andon_trainer.preloaded"],
            environment=read,
            script_folder=os.path.dirname(os.path.realpath(script)),
            room=sum(len(os.fsencode(each)) + 1 for each in command),
        )
        return cls(template, read)

    async def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: OutputLog,
        show: Callable[[str], None],
    ) -> Child:
        """Starts a worker as `start_worker` does, by the template if that can do it."""
        process = None
        reading, writing = os.pipe()
        try:
            if self._has_read(environment) and self._template.is_ready():
                process = Forked(*self._template.fork(command[1:], environment, writing, writing))
        except TemplateGone:
            pass
        finally:
            os.close(writing)
        if process is None:
            os.close(reading)
            return await start_worker(name, command, environment=environment, log=log, show=show)
        output, pipe = await stream_of(reading)
        return Child(name, process, output, show, log, pipe=pipe)

    def _has_read(self, environment: Mapping[str, str]) -> bool:
        return self._environment in (None, _read_by_libraries(environment))

    def end(self) -> None:
        """Ends the template. The workers go on."""
        self._template.close()


def _read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read while a template imports them."""
    return {
        name: text
        for name, text in environment.items()
        if name not in _OWN and not name.startswith("ANDON_")
    }


class Forked:
    """A child of this process that asyncio has not started."""

    def __init__(self, pid: int, watch: int) -> None:
        """Takes what `Template.fork` returns."""
        self.pid = pid
        self.returncode: int | None = None
        self._watch = watch
        """A pidfd."""
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch, self._take_status)

    def _take_status(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watch)
        os.close(self._watch)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: a signal's."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to it."""
        # A zombie at worst: the number is nobody else's before `_take_status`.
        os.kill(self.pid, number)
