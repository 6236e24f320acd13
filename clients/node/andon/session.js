// A session is one Train stream, and what lives as long: the streams to the reducers, a transfer.
//
// It is never resumed: the worker joins again on a new one. Streams only put events into its inbox.

import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';

import { unfit } from './checks.js';
import { layoutDigest } from './digests.js';
import { Exchange } from './exchange.js';
import { connect, Inbox, listen, status, v1 } from './wire.js';

/** The line does not take this worker: trying again is no use. */
export class Refused extends Error {}

/** No coordinator answered for as long as is worth waiting, or it sent this worker away. */
export class Lost extends Error {}

/** This stream is of no use any more: join again. */
export class Again extends Error {}

const LEAVE_PATIENCE_MS = 5000;

const REFUSALS = new Set([
  status.FAILED_PRECONDITION, status.INVALID_ARGUMENT, status.UNAUTHENTICATED, status.PERMISSION_DENIED,
  status.NOT_FOUND, status.UNIMPLEMENTED,
]);

/** One Train stream. `welcome` is the one before's until this one is taken; null if there was none. */
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

  /** Joins with a worker's `claims` (where it is on the line), and begins to send heartbeats; throws Refused or Again. */
  async join(claims) {
    const { runId, slot, token, blocks, plan } = this.config;
    const launchSlot = this.welcome?.worker ?? slot;
    this.send({
      join: {
        runId, nodeId: hostname(), backend: 'cpu', protocolVersion: 1,
        ...(launchSlot === undefined ? {} : { launchSlot }),
        devices: [{ kind: 'cpu', name: 'node' }],
        layout: { blocks, digest: layoutDigest(blocks) },
        plan, token, ...claims,
      },
    });
    const { joinAccepted } = (await this.take()).control;
    if (!joinAccepted) throw new Refused('the peer did not answer with JoinAccepted');
    this.welcome = joinAccepted;
    const why = unfit(joinAccepted);
    if (why) throw new Refused(why);
    this.open();
    let sequence = 0;
    this.#beat = setInterval(() => {
      sequence += 1;
      this.send({ heartbeat: { sequence } });
    }, 1000 * joinAccepted.liveness.heartbeatS);
  }

  /** What shows to reducers and to other workers that the line took this one. */
  get pass() {
    const { worker, sessionToken } = this.welcome;
    return { runId: this.config.runId, worker, sessionToken };
  }

  /** New streams to the reducers, opened when they are needed. */
  open() {
    this.exchange?.cancel();
    const { address, tls } = this.config;
    this.exchange = new Exchange(address, tls, this.pass, (from, answer, error) => {
      this.#inbox.put({ from, answer, error });
    });
  }

  send(message) {
    if (!this.#control.destroyed && !this.#control.writableEnded) this.#control.write(message);
  }

  /** What a stream brought. Once the coordinator is lost: Refused if trying again is no use, or Again. */
  async take() {
    const event = await this.#inbox.take();
    if (!event.lost) return event;
    const { code, details, message } = event.lost;
    // A dead process may stand in the way of one that was here before, for a while.
    const taken = code === status.ALREADY_EXISTS && !this.welcome;
    if (taken || REFUSALS.has(code)) throw new Refused(details);
    throw new Again(`the coordinator was lost (${message})`);
  }

  /** Says good-bye, and waits a while for the coordinator to end the stream. */
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
