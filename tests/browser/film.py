"""A moving picture of a page: what a person at the screen sees, as an animated GIF."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from browser.conftest import palette_of

__all__ = ["Film"]

_FRAME_S = 0.125
_LAST_FRAME_S = 2.0
"""How long the film stands before it begins again."""
_POINTER = ((0, 0), (0, 17), (4, 13), (7, 20), (10, 19), (7, 12), (12, 12))
"""The outline of a mouse pointer, from its tip: no screenshot has one."""


@dataclass
class Film:
    """Shots of one page, each with the light that the page showed and the time it was taken."""

    page: Any
    shots: list[bytes] = field(default_factory=list)
    lights: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    pointers: list[tuple[float, float]] = field(default_factory=list)
    pointer: tuple[float, float] = (-100.0, -100.0)
    """Where the mouse is; at first it is outside the page."""

    def shoot(self) -> None:
        """Takes one shot."""
        self.lights.append(self.page.locator("body").get_attribute("data-light"))
        self.shots.append(self.page.screenshot())
        self.times_s.append(time.monotonic())
        self.pointers.append(self.pointer)

    def roll(self, until: Callable[[], bool]) -> None:
        """Takes shots until `until` holds, and one more of what it waited for."""
        over = False
        while not over:
            over = until()
            self.shoot()
            self.page.wait_for_timeout(1000 * _FRAME_S)

    def roll_for(self, seconds: float) -> None:
        """Takes shots for some time."""
        end = time.monotonic() + seconds
        self.roll(lambda: time.monotonic() >= end)

    def point_at(self, element: Any) -> None:
        """Moves the mouse to an element in view, from below, as a hand would."""
        box = element.bounding_box()
        x, y = box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.6
        for left in (180, 120, 70, 30, 8, 0):
            self.pointer = (x + left, y + left)
            self.page.mouse.move(*self.pointer)
            self.shoot()

    def sequence(self) -> list[str]:
        """The lights in the order in which the film shows them."""
        return [light for light, _shots in groupby(self.lights)]

    def save(self, path: Path) -> None:
        """Writes the film; each shot stands as long as it did on the screen."""
        from PIL import Image, ImageDraw

        frames = []
        for shot, (x, y) in zip(self.shots, self.pointers, strict=True):
            frame = Image.open(BytesIO(shot)).convert("RGB")
            outline = [(x + dx, y + dy) for dx, dy in _POINTER]
            ImageDraw.Draw(frame).polygon(outline, fill="#14181f", outline="#ffffff")
            frames.append(frame)
        # One palette for all: of a frame of each light, so that none of them changes its tone.
        kinds = dict(zip(self.lights, frames, strict=True))
        width, height = frames[0].size
        sheet = Image.new("RGB", (width, height * len(kinds)))
        for place, frame in enumerate(kinds.values()):
            sheet.paste(frame, (0, place * height))
        palette = palette_of(sheet)
        stands = [after - before for before, after in pairwise(self.times_s)]
        few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        few[0].save(
            path,
            save_all=True,
            append_images=few[1:],
            duration=[round(1000 * each) for each in [*stands, _LAST_FRAME_S]],
            loop=0,
            optimize=True,
        )
