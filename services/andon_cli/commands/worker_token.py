"""`andon token`: makes a token for one worker, which can be withdrawn without the others'."""

from __future__ import annotations

import json
import time

from andon.host.access import Access
from andon.host.errors import ExitCode, UsageError
from andon.host.worker_tokens import make_worker_token
from andon_cli.questions import TokenConfig

__all__ = ["make_token"]

_DAY_S = 86_400


def make_token(config: TokenConfig) -> int:
    """Prints the token, and nothing else.

    Raises:
        UsageError: there is no token of the run, or the name can't be one.
    """
    settings = config.settings
    run_token = Access(token_file=settings.token_file).run_token
    if not run_token:
        raise UsageError(
            "a worker token is made from the run's token: pass --token-file with the line's file"
        )
    expires_s = 0 if settings.days is None else int(time.time()) + settings.days * _DAY_S
    try:
        token = make_worker_token(run_token, config.name, expires_s).decode("ascii")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if settings.format == "json":
        expires = expires_s or None
        token = json.dumps({"name": config.name, "token": token, "expires_unix_s": expires})
    print(token)
    return ExitCode.COMPLETE
