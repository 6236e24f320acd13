"""The commands of `andon`: what each does, with examples, and where its settings and code are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from andon.host.settings import Verb

__all__ = ["OVERVIEW", "VERBS", "imported"]

_EXITS = """\
exit codes:
  0 complete   1 a script or the service failed   2 a flag makes no sense
  3 halted     4 refused by the line              5 lost the line   130 Ctrl-C   143 SIGTERM
  141 the reader of the output went away
"""

OVERVIEW = f"""\
example:
  andon run --workers 2 train.py      train on two workers of this host
  andon status --watch                what the line is doing, live
  andon resume                        answer a halt: try the step again
  andon history                       the runs that are kept here; then andon show RUN
  andon doctor                        what is missing on this host, and what to do about it

A flag overrides its environment variable (--metrics-port: ANDON_METRICS_PORT), which overrides
andon.toml.

{_EXITS}"""

_RUN = f"""\
example:
  andon run --workers 2 --steps 100 train.py --lr 3e-4
  andon run --workers 2 -m mypackage.train
  andon run --workers 2 --on-halt raise --report report.json train.py     in a script or in CI

two hosts (alpha serves the line, both bring two workers):
  alpha$ andon certs alpha beta       certificates; copy certs/beta to beta (docs/security.md)
  alpha$ andon run --workers 2 --expect 4 --bind 0.0.0.0 --tls certs/alpha train.py
  beta$  andon run --workers 2 --join alpha:7070 --tls certs/beta train.py

after a crash, also with another number of workers:
  andon run --workers 2 --checkpoint-every 100 train.py
  andon run --workers 3 --checkpoint-every 100 --resume 7f3a train.py

Everything after the script's name belongs to the script. Its output is in runs/<id>/worker-N.log.
SIGUSR1 to `andon run` asks for a checkpoint after the current step. After Ctrl-C, a run that writes
checkpoints writes one and ends; a second Ctrl-C ends it at once.

{_EXITS}"""

_SERVE = f"""\
example:
  andon serve --workers 2             then, for each worker:
  ANDON_ADDRESS=127.0.0.1:7070 python train.py

Serves the coordinator, the reducer, gRPC health and reflection on one port, and metrics for
Prometheus on another.

several hosts, each with a reducer for its part of the model (docs/reducers.md):
  alpha$ andon serve --workers 2 --reducers 2 --secret-file secret --bind 0.0.0.0 \\
           --tls certs/alpha
  beta$  andon serve --role reducer --coordinator alpha:7070 --secret-file secret \\
           --bind 0.0.0.0 --tls certs/beta

{_EXITS}"""

_STATUS = f"""\
example:
  andon status                        the run that is served from here
  andon status --run 7f3a             this one of several
  andon status --watch
  andon status --address alpha:7070 --format json

{_EXITS}"""

_TOP = f"""\
example:
  andon top                           until Ctrl-C; the worker that costs most comes first
  andon top --once                    the last step, as text
  andon top --once --format json

costs     of the others' time, what they wait for this worker because it is done last
late      in how many of the steps it was the last one
compute   of its own time, forward and backward;  data: it waits for samples
exchange  the part of the exchange that is not hidden behind computing
waits     it waits for other workers;  other: the optimizer, the commit, the script

{_EXITS}"""

_WHY = f"""\
example:
  andon why                           who held the others up, when, in what, and what to do
  andon why 1                         worker 1 alone
  andon why --run 7f3a --format json  also of a run that is over, from its journal

A worker that the others wait for much longer than usual is asked what it does. The lines with > are
your own code. The numbers are of its process and host in the moment that it was asked.

{_EXITS}"""

_HALT = f"""\
example:
  andon halt --reason "loss looks odd"
  andon halt --address alpha:7070

Stops the line before the commit of the current step. No weight moves, on no worker, until the halt
is answered with `andon resume`.

{_EXITS}"""

_RESUME = f"""\
example:
  andon resume                        try the step again
  andon resume --skip                 leave its samples out, and record them as skipped
  andon resume --drop 1               go on without worker 1
  andon resume --run 7f3a             if several runs are served from here

Your name and host go into the journal with the answer.

{_EXITS}"""

_DRAIN = f"""\
example:
  andon drain                         the run that is served from here
  andon drain --address alpha:7070

The current step is the last one: every worker's loop ends after it, the script goes on behind its
loop, and the run counts as complete. A line without a step to finish, because it waits for workers
or is halted, ends at once.

{_EXITS}"""

_HISTORY = f"""\
example:
  andon history                       the runs under runs/, newest first
  andon history --format json

Reads the journals and changes nothing. States: complete; drained; halted, and not answered;
running; stopped before the run was complete; unreadable.

{_EXITS}"""

_SHOW = f"""\
example:
  andon show                          the newest run under runs/
  andon show 7f3a                     its plan, steps, workers, scalars, halts and events
  andon show 7f3a 118                 step 118: who computed which samples, in which attempt
  andon show /backup/7f3a --format json

Reads the journal and changes nothing, also while the run goes on.

{_EXITS}"""

_AUDIT = """\
example:
  andon audit 7f3a                    all steps, with the command that `andon run` has kept
  andon audit 7f3a --steps 300:320    from the newest checkpoint before step 300 on
  andon audit 7f3a -- python train.py --lr 3e-4

Recomputes the steps of a run with the same bits (--same-bits) on this machine, with its script and
data, and compares weights and losses with those in its journal. The run is not changed. An audit
that was interrupted goes on where it was. What it needs, and what it proves: docs/guide/audit.md.

exit codes:
  0 all is equal   1 a step differs   2 a flag makes no sense   4 the run can't be audited
  130 Ctrl-C
"""

_EXPORT = f"""\
example:
  andon export 7f3a > steps.csv       pandas.read_csv("steps.csv", index_col="step")
  andon export 7f3a --format json --output run.json
  andon export 7f3a --format tensorboard
  tensorboard --logdir runs           then shows the exports of all runs

A row of the CSV is a step; after the columns of the step comes one for each name that the script
gave to line.log, with the mean over the workers. JSON has the values of each worker.

{_EXITS}"""

_REPORT = f"""\
example:
  andon report 7f3a --format html > report.html    one file, for a browser or a mail
  andon report 7f3a                   as Markdown; without a run the newest one
  andon report 7f3a 81c0              two runs beside each other
  andon report 7f3a --price 0.8 --format json

What was trained, how it went, every halt, loss, join and checkpoint, which samples count, where
time and cost went, and the commands to go on. `andon run` writes it to report.html in the run's
folder. Reads the journal and changes nothing.

{_EXITS}"""

_DOCTOR = f"""\
example:
  andon doctor                        this host: versions, devices, ports, folders, one step
  andon doctor --address alpha:7070   this host, and whether that line can be reached from it

Without an address it starts a service on free ports, and takes one step through its reducer. With
an address it asks the line for its health and status, and does not disturb it.
Exit code 0 if nothing failed, else 1; a warning is not a failure.

{_EXITS}"""

_HEALTH = f"""\
example:
  andon health --address 127.0.0.1:7070          in a container's health check
  andon health --service andon.v1.Coordinator    whether the line takes new workers

Exit code 0 if the answer is SERVING, else 1; 5 if there is no run to ask. The process is SERVING
until it shuts down, even while the line is halted: a restart would destroy the evidence.
andon.v1.Coordinator is NOT_SERVING once the line drains or is complete.

{_EXITS}"""

_CERTS = f"""\
example:
  andon certs alpha beta 10.0.0.7     then copy certs/beta to beta, certs/10.0.0.7 to 10.0.0.7
  andon certs gamma                   later: the CA stays, one more host
  andon certs --renew alpha beta      new certificates before the old ones expire

Makes a private CA in DIR/ca, and for each host a folder DIR/HOST for --tls, with tls.crt, tls.key
and ca.crt. Whoever has DIR/ca/ca.key can sign certificates: keep it on this host. Each certificate
is for its host, localhost and the loopback addresses, for servers and clients. Needs the library
cryptography (pip install 'andon[certs]').

{_EXITS}"""

_TOKEN = f"""\
example:
  (umask 077; andon token beta --token-file token > beta.token)
  andon token gamma --token-file token --days 30

Prints a token for the worker NAME, which joins with it as with the run's token, and stops nothing.
To withdraw it, add NAME to the service's --withdrawn-file. Whoever has the run's token can make
worker tokens: give each worker its own, and keep the run's where the line is served.

{_EXITS}"""

_TRACE = f"""\
example:
  andon run --workers 2 --trace trace.json train.py
  andon trace trace.json                          where each worker's time went
  andon trace alpha.json beta.json -o both.json   one trace of two hosts
  andon trace trace.json.parts -o trace.json      after the launcher was killed

A trace is in Chrome's trace event format: open it in https://ui.perfetto.dev or chrome://tracing.

{_EXITS}"""

VERBS = {
    "run": Verb(
        summary="train a script on several workers of this host",
        epilog=_RUN,
        schema="andon_cli.config:RunSettings",
        read="andon_cli.config:run_config",
        run="andon_cli.commands.run:run",
        words="script.py [args ...]",
        shown=("Common flags",),
    ),
    "serve": Verb(
        summary="serve one line until Ctrl-C or SIGTERM",
        epilog=_SERVE,
        schema="andon_server.settings:ServeConfig",
        read="andon_cli.config:serve_config",
        run="andon_server.serve:serve",
        shown=("Common flags", "The service"),
    ),
    "status": Verb(
        summary="show what the line is doing",
        epilog=_STATUS,
        schema="andon_cli.questions:StatusConfig",
        run="andon_cli.commands.status:show_status",
    ),
    "top": Verb(
        summary="show who holds the line up, and where each worker's time goes",
        epilog=_TOP,
        schema="andon_cli.questions:TopConfig",
        run="andon_cli.commands.top:show_top",
    ),
    "why": Verb(
        summary="show who was slow and why",
        epilog=_WHY,
        schema="andon_cli.questions:WhySettings",
        read="andon_cli.questions:why_config",
        run="andon_cli.commands.why:show_why",
        words="[WORKER]",
        interleaved=True,
    ),
    "halt": Verb(
        summary="stop the line before its next commit",
        epilog=_HALT,
        schema="andon_cli.questions:HaltConfig",
        run="andon_cli.commands.operate:halt_line",
    ),
    "resume": Verb(
        summary="answer a halt, so that the line goes on",
        epilog=_RESUME,
        schema="andon_cli.questions:ResumeConfig",
        run="andon_cli.commands.operate:resume_line",
    ),
    "drain": Verb(
        summary="end the run after the current step",
        epilog=_DRAIN,
        schema="andon_cli.questions:DrainConfig",
        run="andon_cli.commands.operate:drain_line",
    ),
    "history": Verb(
        summary="list the runs that are kept under runs/",
        epilog=_HISTORY,
        schema="andon_cli.questions:HistoryConfig",
        run="andon_cli.commands.history:show_history",
    ),
    "show": Verb(
        summary="show a run, or one of its steps, as its journal has it",
        epilog=_SHOW,
        schema="andon_cli.questions:ShowSettings",
        read="andon_cli.questions:show_config",
        run="andon_cli.commands.show:show_run",
        words="[RUN [STEP]]",
        interleaved=True,
    ),
    "audit": Verb(
        summary="recompute a run's steps, and name the first that differs",
        epilog=_AUDIT,
        schema="andon_cli.auditing.config:AuditSettings",
        read="andon_cli.auditing.config:audit_config",
        run="andon_cli.commands.audit:audit_run",
        words="RUN [-- COMMAND ...]",
        interleaved=True,
    ),
    "export": Verb(
        summary="write a run's steps and scalars as CSV, as JSON or for TensorBoard",
        epilog=_EXPORT,
        schema="andon_cli.questions:ExportSettings",
        read="andon_cli.questions:export_config",
        run="andon_cli.commands.export:export_run",
        words="[RUN]",
        interleaved=True,
    ),
    "report": Verb(
        summary="tell a run on one page, for people who were not there",
        epilog=_REPORT,
        schema="andon_cli.questions:ReportSettings",
        read="andon_cli.questions:report_config",
        run="andon_cli.commands.report:report_run",
        words="[RUN [OTHER]]",
        interleaved=True,
    ),
    "trace": Verb(
        summary="show where the workers' time went, and merge traces",
        epilog=_TRACE,
        schema="andon_cli.questions:TraceSettings",
        read="andon_cli.questions:trace_config",
        run="andon_cli.commands.trace_times:show_trace",
        words="FILE ...",
        interleaved=True,
    ),
    "doctor": Verb(
        summary="check what a run needs, and say what is missing",
        epilog=_DOCTOR,
        schema="andon_cli.questions:DoctorConfig",
        run="andon_cli.commands.doctor.app:examine",
    ),
    "health": Verb(
        summary="ask whether a service is up, for health checks",
        epilog=_HEALTH,
        schema="andon_cli.questions:HealthConfig",
        run="andon_cli.commands.health:show_health",
    ),
    "certs": Verb(
        summary="make a private CA, and a certificate for each host",
        epilog=_CERTS,
        schema="andon_cli.questions:CertsSettings",
        read="andon_cli.questions:certs_config",
        run="andon_cli.commands.certs:make_certificates",
        words="HOST ...",
        interleaved=True,
    ),
    "token": Verb(
        summary="make a token for one worker, from the run's",
        epilog=_TOKEN,
        schema="andon_cli.questions:TokenSettings",
        read="andon_cli.questions:token_config",
        run="andon_cli.commands.worker_token:make_token",
        words="NAME",
        interleaved=True,
    ),
}


def imported(path: str) -> Any:
    """What `package.module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
