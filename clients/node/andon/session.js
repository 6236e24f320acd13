// A session is one Train stream, with the streams to the reducers and the transfer that end with it.
//
// It is never resumed: the worker joins again on a new stream. Streams only put events into its inbox.

import { cpus, hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';

import { unsupportedLine } from './checks.js';
import { layoutDigest } from './digests.js';
import { Exchange, TRIMMED } from './exchange.js';
import { CAPABILITY as SAME_BITS } from './tree.js';
import { CAPABILITY as VERIFIES } from './verification.js';
import { connect, Inbox, listen, status, v1 } from './wire.js';

/** The line refuses this worker; a retry can't succeed. */
export class Refused extends Error {}

/** No coordinator answered within the time limit, or the coordinator dismissed this worker. */
export class Lost extends Error {}

/** This stream can't continue; the worker must join again. */
export class Again extends Error {}

const LEAVE_PATIENCE_MS = 5000;

/** What this client can do beyond the steps of every worker: docs/protocol.md, Capabilities. */
const CAPABILITIES = [
  'balance.v1', 'norms.v1', 'mean-buffers.v1', 'overflow.v1', SAME_BITS, VERIFIES, TRIMMED,
];

const REFUSALS = new Set([
  status.FAILED_PRECONDITION, status.INVALID_ARGUMENT, status.UNAUTHENTICATED, status.PERMISSION_DENIED,
  status.NOT_FOUND, status.UNIMPLEMENTED,
]);

/** What decides the bits of this worker's sums and products, in rising order of names:
 * docs/protocol-same-bits.md, section 36. */
function arithmetic() {
  return [
    { name: 'client', value: `andon-node, V8 ${process.versions.v8}` },
    { name: 'processor', value: cpus()[0]?.model.trim() ?? process.arch },
  ];
}

/** One Train stream. `welcome` is the previous session's JoinAccepted until this Join is accepted;
 * null if no Join was accepted yet. */
export class Session {
  exchange = null;
  transfer = null;
  #inbox = new Inbox();
  #client;
  #control;
  #beat;

  constructor(config, welcome) {
    Object.assign(this, { config, welcome });
    this.#client = connect(v1.Coordinator, config.address, config.tls);
    this.#control = this.#client.train();
    listen(this.#control, (control) => this.#inbox.put({ control }), (lost) => {
      this.transfer?.cancel(); // a transfer must not outlive the stream
      this.#inbox.put({ lost });
    });
  }

  /** Joins with the worker's `claims` (its head and held round), and starts to send heartbeats.
   * Throws Refused or Again. */
  async join(claims) {
    const { runId, slot, token, blocks, plan } = this.config;
    const launchSlot = this.welcome?.worker ?? slot;
    this.send({
      join: {
        runId, nodeId: hostname(), backend: 'cpu', protocolVersion: 1,
        ...(launchSlot === undefined ? {} : { launchSlot }),
        devices: [{ kind: 'cpu', name: 'node' }],
        capabilities: CAPABILITIES,
        layout: { blocks, digest: layoutDigest(blocks) },
        plan, token, ...claims,
        ...(plan.grain ? { arithmetic: arithmetic() } : {}),
      },
    });
    const { joinAccepted } = (await this.take()).control;
    if (!joinAccepted) throw new Refused('the coordinator did not answer Join with JoinAccepted');
    this.welcome = joinAccepted;
    const why = unsupportedLine(joinAccepted);
    if (why) throw new Refused(why);
    this.open();
    let sequence = 0;
    this.#beat = setInterval(() => {
      sequence += 1;
      this.send({ heartbeat: { sequence } });
    }, 1000 * joinAccepted.liveness.heartbeatS);
  }

  /** The run's id and the session token, which prove to reducers that this worker is on the line. */
  get pass() {
    const { worker, sessionToken } = this.welcome;
    return { runId: this.config.runId, worker, sessionToken };
  }

  /** Creates a new exchange. It opens its streams to the reducers when they are needed. */
  open() {
    this.exchange?.cancel();
    const { address, tls, plan } = this.config;
    const needs = plan.grain ? [SAME_BITS] : [];
    if (this.welcome.policy.mean === 'MEAN_KIND_TRIMMED') needs.push(TRIMMED);
    this.exchange = new Exchange(address, tls, this.pass, needs, (from, answer, error) => {
      this.#inbox.put({ from, answer, error });
    });
  }

  send(message) {
    if (!this.#control.destroyed && !this.#control.writableEnded) this.#control.write(message);
  }

  /** The next event. Once the coordinator is lost, throws Again if a new stream may help, else
   * Refused. */
  async take() {
    const event = await this.#inbox.take();
    if (!event.lost) return event;
    const { code, details, message } = event.lost;
    // After a reconnect, the coordinator may still hold the slot for this worker's dead stream.
    const taken = code === status.ALREADY_EXISTS && !this.welcome;
    if (taken || REFUSALS.has(code)) throw new Refused(details);
    throw new Again(`the coordinator was lost (${message})`);
  }

  /** Leaves the line, then waits a limited time for the coordinator to end the stream. */
  async leave(leave) {
    this.send({ leave });
    this.#control.end();
    const over = new AbortController();
    const ended = (async () => {
      while (!(await this.#inbox.take()).lost);
    })();
    await Promise.race([ended, sleep(LEAVE_PATIENCE_MS, null, { signal: over.signal }).catch(() => {})]);
    over.abort();
  }

  close() {
    clearInterval(this.#beat);
    this.exchange?.cancel();
    this.#control.cancel();
    this.#client.close();
  }
}
