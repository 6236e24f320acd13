"""Where a machine's end is told: a file, or a URL that is asked without a credential."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["notice_place"]


def notice_place(text: str) -> str:
    """What `--preemption-notice` and ANDON_PREEMPTION_NOTICE say; empty: nowhere.

    Raises:
        ValueError: it is a URL that can't be asked without a credential. The text continues the
            name of the setting.
    """
    if "://" not in text:
        return text
    try:
        place = urlsplit(text)
        _ = place.port
        valid = place.scheme in ("http", "https") and bool(place.hostname)
        valid = valid and place.username is None and not place.fragment and text.isprintable()
        valid = valid and " " not in text
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"must be a file, or an http or https URL without user and password, not {text!r}"
        )
    return text
