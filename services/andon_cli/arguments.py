"""The command line: its verbs and flags, and the help that teaches them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from andon import __version__
from andon_cli import epilogs
from andon_cli.security_flags import add_access_flags, add_certs
from andon_server.limits import add_limit_flags

__all__ = ["build_parser"]

if TYPE_CHECKING:
    _Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the `andon` command. Flags that are not given are None."""
    parser = argparse.ArgumentParser(
        prog="andon",
        description="Exchanges gradients between PyTorch workers over gRPC, and stops the line "
        "the moment a value is wrong.",
        epilog=epilogs.OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"andon {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_run(verbs)
    _add_serve(verbs)
    _add_status(verbs)
    _add_halt(verbs)
    _add_resume(verbs)
    _add_drain(verbs)
    _add_history(verbs)
    _add_doctor(verbs)
    _add_health(verbs)
    add_certs(verbs)
    return parser


def _add_verb(verbs: _Verbs, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_run(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "run", "train a script on several workers of this host", epilogs.RUN)
    verb.add_argument("--workers", metavar="N", help="workers to start here (default: 1)")
    verb.add_argument(
        "--steps", metavar="N", help="end after N steps (default: the script decides)"
    )
    verb.add_argument(
        "--on-halt",
        metavar="wait|raise",
        help="at a halt the workers wait (default), or raise LineHalted and end with exit code 3",
    )
    verb.add_argument(
        "--checkpoint-every",
        metavar="N",
        help="rank 0 writes a checkpoint every N steps (default: the script decides)",
    )
    verb.add_argument(
        "--keep-checkpoints", metavar="N", help="keep the newest N checkpoints (default: 3)"
    )
    verb.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run (an id under runs/, or a folder) from its newest checkpoint",
    )
    verb.add_argument(
        "--resume-step", metavar="N", help="with --resume: from the checkpoint of step N"
    )
    verb.add_argument(
        "--restarts",
        metavar="N",
        help="start workers that were killed or failed again, N times in all (default: 3)",
    )
    verb.add_argument("--seed", metavar="N", help="seed the order of the samples (default: 0)")
    verb.add_argument("--report", metavar="FILE", help="write what the run came to, as JSON")
    verb.add_argument(
        "--join", metavar="HOST:PORT", help="join the line served there, and serve none here"
    )
    verb.add_argument(
        "--expect",
        metavar="N",
        help="workers that the line waits for, if more join from elsewhere (default: --workers)",
    )
    _add_service_flags(verb, port="any free one; beyond loopback 7070", metrics="any free one")
    verb.add_argument("-m", dest="module", action="store_true", default=None,
                      help="the script is a module's name, as for `python -m`")  # fmt: skip
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py [args ...]",
                      help="the training script and its own arguments")  # fmt: skip


def _add_serve(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "serve", "serve one line until it is told to end", epilogs.SERVE)
    verb.add_argument("--workers", metavar="N", help="workers that the line waits for (default: 1)")
    verb.add_argument(
        "--max-steps", metavar="N", help="end the line after N steps (default: scripts decide)"
    )
    verb.add_argument(
        "--role",
        metavar="all|coordinator|reducer",
        help="what this process is: the coordinator with a reducer (default), or one of them alone",
    )
    verb.add_argument(
        "--coordinator", metavar="HOST:PORT", help="with --role reducer: where the line is served"
    )
    verb.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        help="with --role reducer: how workers reach it (default: found out)",
    )
    _add_service_flags(
        verb,
        port="7070, a reducer's 7071; 0 is any free one",
        metrics="9400, a reducer's 9401; 0 is any free one",
    )
    verb.add_argument(
        "--resume-from",
        metavar="TERM:ROUND",
        help="roll the run back to this record, the `head` in a checkpoint's state.json",
    )
    verb.add_argument("--until-complete", action="store_true", default=None,
                      help="end once the line is complete and its workers are gone")  # fmt: skip
    verb.add_argument("--announce", action="store_true", default=None,
                      help="print one line of JSON (address, metrics_url, run_id, journal, pid) "
                      "once it serves")  # fmt: skip
    verb.add_argument("--parent-pid", metavar="PID", help="end when this parent process is gone")


def _add_status(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "status", "show what the line is doing", epilogs.STATUS)
    _add_address(verb)
    verb.add_argument("--watch", action="store_true", default=None, help="follow it until Ctrl-C")
    _add_format(verb)


def _add_halt(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "halt", "stop the line before its next commit", epilogs.HALT)
    verb.add_argument("--reason", metavar="TEXT", help="why, for the others and for the journal")
    _add_address(verb)
    _add_format(verb)


def _add_resume(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "resume", "answer a halt, so that the line goes on", epilogs.RESUME)
    verb.add_argument("--skip", action="store_true", default=None,
                      help="leave the step's samples out, and record them as skipped")  # fmt: skip
    verb.add_argument("--drop", metavar="WORKER", help="go on without this worker")
    verb.add_argument(
        "--halt", metavar="ID", help="answer this halt and no newer one (default: the present one)"
    )
    _add_address(verb)
    _add_format(verb)


def _add_drain(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "drain", "end the run after the present step", epilogs.DRAIN)
    _add_address(verb)
    _add_format(verb)


def _add_history(verbs: _Verbs) -> None:
    _add_format(
        _add_verb(verbs, "history", "list the runs that are kept under runs/", epilogs.HISTORY)
    )


def _add_doctor(verbs: _Verbs) -> None:
    verb = _add_verb(
        verbs, "doctor", "try what a run needs, and say what is missing", epilogs.DOCTOR
    )
    verb.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a line to reach (default: ANDON_ADDRESS, else a service that it starts itself)",
    )
    add_access_flags(verb, insecure="allow tokens to be sent without encryption")
    _add_format(verb)


def _add_health(verbs: _Verbs) -> None:
    verb = _add_verb(verbs, "health", "say whether a service is SERVING", epilogs.HEALTH)
    _add_address(verb)
    verb.add_argument(
        "--service",
        metavar="NAME",
        help="a service by its full name, such as andon.v1.Coordinator (default: the process)",
    )
    verb.add_argument("--timeout", metavar="SECONDS", help="wait so long (default: 3)")
    _add_format(verb)


def _add_address(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the coordinator (default: ANDON_ADDRESS, else the run that is served from here)",
    )
    verb.add_argument(
        "--run",
        metavar="ID",
        help="the run under runs/, or its folder (default: the only one that is served)",
    )
    add_access_flags(verb, insecure="allow tokens to be sent without encryption")


def _add_format(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--format", metavar="table|json", help="how to show it (default: table)")


def _add_service_flags(verb: argparse.ArgumentParser, *, port: str, metrics: str) -> None:
    add_limit_flags(verb)
    verb.add_argument(
        "--min-workers",
        metavar="N",
        help="below N workers in sync the line waits for more (default: 1)",
    )
    verb.add_argument(
        "--max-workers",
        metavar="N",
        help="refuse more than N workers (default: as many as it waits for at first)",
    )
    verb.add_argument(
        "--reducers",
        metavar="N",
        help="reducers that the line waits for, its own included (default: 1)",
    )
    verb.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a secret that the line shares with reducers elsewhere (default: none may come)",
    )
    verb.add_argument("--bind", metavar="HOST", help="listen there (default: 127.0.0.1)")
    verb.add_argument("--port", metavar="PORT", help=f"the line's port (default: {port})")
    verb.add_argument(
        "--metrics-port", metavar="PORT", help=f"metrics for Prometheus (default: {metrics})"
    )
    add_access_flags(verb, insecure="allow a line beyond loopback without encryption")
    verb.add_argument("--run-id", metavar="ID", help="name the run (default: 4 random hex digits)")
    verb.add_argument("--run-dir", metavar="DIR", help="keep its files there (default: runs/ID)")
    verb.add_argument(
        "--encoding",
        metavar="float32|bfloat16|float16",
        help="how gradients travel; halves what is sent, at some loss of digits (default: float32)",
    )
    verb.add_argument(
        "--journal-sync",
        metavar="normal|full",
        help="full: committed steps survive power loss, not only a crash (default: normal)",
    )
    verb.add_argument(
        "--digest-every", metavar="N", help="compare weights every N steps; 0 never (default: 50)"
    )
    verb.add_argument(
        "--liveness", metavar="SECONDS", help="a worker silent for so long is lost (default: 3)"
    )
    verb.add_argument(
        "--forming-timeout",
        metavar="SECONDS",
        help="halt once the line has waited so long for workers (default: it waits on)",
    )
    verb.add_argument(
        "--straggler-timeout",
        metavar="SECONDS",
        help="go on without a worker that the others wait for so long (default: never)",
    )
    verb.add_argument(
        "--topology",
        metavar="star|ring",
        help="blocks go over the reducer (default), or around from worker to worker",
    )
    verb.add_argument(
        "--loss-spike",
        metavar="FACTOR",
        help="halt if a step's loss is FACTOR deviations above that of the last 64 (default: off)",
    )
    verb.add_argument(
        "--grad-norm-spike",
        metavar="FACTOR",
        help="halt if the averaged gradient's norm is, likewise (default: off)",
    )
