// One worker's place on an Andon line; it speaks docs/protocol.md.
//
// Theory of operation. One loop owns everything here and takes events from an inbox; the streams
// only put events there. A session is one Train stream: it is never resumed, the worker joins again
// on a new one. The head moves by records and transfers alone (rule 7).

import { randomBytes } from 'node:crypto';
import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';

import { layoutDigest, toBytes, weightsDigest } from './digests.js';
import { Exchange, Round } from './exchange.js';
import { Order } from './order.js';
import { found, install, patch } from './state.js';
import { Arrived, give } from './transfer.js';
import { connect, Inbox, listen, status, v1 } from './wire.js';

/** The line does not take this worker: trying again is no use. */
export class Refused extends Error {}

/** No coordinator answered for as long as is worth waiting, or it sent this worker away. */
export class Lost extends Error {}

/** This stream is of no use any more: join again. */
class Again extends Error {}

const FIRST_PATIENCE_MS = 300_000;
const FIRST_WAIT_MS = 50;
const LONGEST_WAIT_MS = 2000;
const LEAVE_PATIENCE_MS = 5000;

const REFUSALS = new Set([
  status.FAILED_PRECONDITION, status.INVALID_ARGUMENT, status.UNAUTHENTICATED, status.PERMISSION_DENIED,
  status.NOT_FOUND, status.UNIMPLEMENTED,
]);
const FAULTS = {
  BLOCK_FAULT_KIND_NON_FINITE: 'NON_FINITE_GRADIENT',
  BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: 'NON_FINITE_AVERAGE',
  BLOCK_FAULT_KIND_ENCODING_OVERFLOW: 'ENCODING_OVERFLOW',
};

const same = (one, other) =>
  one?.term === other?.term && one?.round === other?.round;
const log = (text) => console.error(`node: ${text}`);

/** A worker. `config` says which line and what the worker brings; `model` has
 *
 * - `parameters`: `{name, shape, data}` in the order of the state dict, with Float32Arrays;
 * - `gradient(samples)`: `{gradients, lossSum}`, means over the samples, one Float32Array a block;
 * - `apply(averages)`: moves the weights by a committed step's averages.
 */
export class Worker {
  step = 0;
  loss = null;
  #head = null;
  #cursor = null;
  #round = null;
  #halt = null;
  #state = null;
  #welcome = null;
  #greatest = '0';
  #incarnation = randomBytes(8).readBigUInt64LE().toString();
  #arrived = new Arrived();

  constructor(config, model) {
    this.config = config;
    this.model = model;
  }

  /** SHA-256 of the weights. */
  get digest() {
    return weightsDigest(this.model.parameters.map(
      ({ name, shape, data }) => ({ name, dtype: 'float32', shape, bytes: toBytes(data) }),
    ));
  }

  /** Trains until the run is over; throws Refused or Lost. */
  async run() {
    let [wait, began] = [FIRST_WAIT_MS, Date.now()];
    for (;;) {
      const before = this.#welcome;
      try {
        await this.#session();
        return;
      } catch (error) {
        if (!(error instanceof Again)) throw error;
        if (before !== this.#welcome) {
          [wait, began] = [FIRST_WAIT_MS, Date.now()];
          log(`${error.message}: joining again`);
        }
        const patience = this.#welcome ? 1000 * this.#welcome.liveness.reconnectS : FIRST_PATIENCE_MS;
        if (Date.now() - began > patience) {
          throw new Lost(`nobody answered at ${this.config.address} for ${patience} ms (${error.message})`);
        }
      }
      await sleep(wait * (0.5 + Math.random()));
      wait = Math.min(1.5 * wait, LONGEST_WAIT_MS);
    }
  }

  /** Joins, and works until the run is over. */
  async #session() {
    const client = connect(v1.Coordinator, this.config.address, this.config.tls);
    this.#inbox = new Inbox();
    this.#control = client.train();
    let beat;
    listen(this.#control, (control) => this.#inbox.put({ control }), (lost) => {
      this.#transfer?.cancel(); // a transfer must not outlive the stream
      this.#inbox.put({ lost });
    });
    try {
      this.#send({ join: this.#join() });
      const first = await this.#inbox.take();
      if (first.lost) throw this.#refusal(first.lost);
      if (!first.control.joinAccepted) throw new Refused('the peer did not answer with JoinAccepted');
      this.#accept(first.control.joinAccepted);
      let sequence = 0;
      beat = setInterval(() => {
        sequence += 1;
        this.#send({ heartbeat: { sequence } });
      }, 1000 * this.#welcome.liveness.heartbeatS);
      for (;;) {
        const { control, answer, error, lost } = await this.#inbox.take();
        if (lost) throw this.#refusal(lost);
        if (control) {
          if (await this.#obey(control)) return;
        } else if (error) {
          this.#lose(error.message);
        } else if (!answer.message) { // A round that can't be followed must not be committed.
          this.#lose('a reducer said what this client does not know');
        } else if (this.#round && !this.#round.held) {
          this.#hear(answer);
        }
      }
    } finally {
      clearInterval(beat);
      this.#exchange?.cancel();
      this.#control.cancel();
      client.close();
    }
  }

  #inbox;
  #control;
  #exchange;
  #transfer;
  #asked;

  #join() {
    const { runId, slot, token, blocks, plan } = this.config;
    const launchSlot = this.#welcome?.worker ?? slot;
    return {
      runId, nodeId: hostname(), incarnation: this.#incarnation, backend: 'cpu', protocolVersion: 1,
      ...(launchSlot === undefined ? {} : { launchSlot }),
      devices: [{ kind: 'cpu', name: 'node' }],
      layout: { blocks, digest: layoutDigest(blocks) },
      plan, head: this.#head, cursor: this.#cursor, step: this.step, greatestTerm: this.#greatest,
      heldKey: this.#round?.held ? this.#round.work.key : null, halt: this.#halt, token,
    };
  }

  #accept(welcome) {
    this.#welcome = welcome;
    const { encoding, answerEncoding } = welcome.policy;
    if (![encoding, answerEncoding].every((e) => ['ENCODING_FLOAT32', 'ENCODING_UNSPECIFIED'].includes(e))) {
      throw new Refused('this client speaks FLOAT32: serve the line with --encoding float32');
    }
    this.#see(welcome.term);
    this.#open();
    this.#asked = null;
    this.#halt = welcome.halt;
    const inSync = welcome.standing === 'STANDING_IN_SYNC';
    if (inSync && !same(welcome.head, this.#head)) {
      throw new Lost('the coordinator calls this worker in sync with a head that it does not have');
    }
    // Void, or its record was not written.
    if (this.#round && (inSync || !this.#round.held)) this.#round = null;
    if (inSync) this.#ask();
  }

  /** An end that trying again does not change, or one that it may. */
  #refusal(error) {
    // A dead process may stand in the way of one that was here before, for a while.
    const taken = error.code === status.ALREADY_EXISTS && !this.#welcome;
    if (taken || REFUSALS.has(error.code)) return new Refused(error.details);
    return new Again(`the coordinator was lost (${error.message})`);
  }

  #send(message) {
    if (!this.#control.destroyed && !this.#control.writableEnded) this.#control.write(message);
  }

  #see(term) {
    if (BigInt(term) > BigInt(this.#greatest)) this.#greatest = term;
  }

  /** New streams to the reducers, opened when they are needed. */
  #open() {
    this.#exchange?.cancel();
    const { address, tls, runId } = this.config;
    const { worker, sessionToken } = this.#welcome;
    const inbox = this.#inbox;
    this.#exchange = new Exchange(address, tls, { runId, worker, sessionToken }, (from, answer, error) => {
      if (from === this.#exchange) inbox.put({ answer, error });
    });
  }

  /** Asks for work, once a head and stream. */
  #ask() {
    if (!this.#head || this.#halt || (this.#asked && same(this.#asked, this.#head))) return;
    this.#asked = this.#head;
    this.#send({ requestWork: { head: this.#head } });
  }

  /** Gives the present round up: averages that are still to come are worth nothing. */
  #void(why) {
    if (!this.#round) return;
    log(`step ${this.#round.work.step} is tried again: ${why}`);
    if (!this.#round.held) this.#open();
    this.#round = null;
  }

  #isPresent(key) {
    return this.#round !== null && same(this.#round.work.key, key);
  }

  /** Does what the coordinator says; true once the run is over. */
  async #obey(message) {
    const { shardAssignment, stepCommitted, roundVoided, halt, resume, stateTransfer, shutdown } = message;
    if (shardAssignment) this.#begin(shardAssignment);
    if (stepCommitted) return this.#commit(stepCommitted);
    if (roundVoided) {
      if (this.#isPresent(roundVoided.key)) this.#void(roundVoided.message);
      this.#ask();
    }
    if (halt) {
      this.#halt = halt.evidence;
      this.#void('the line halted');
      log(`halted: ${halt.evidence.message}. No weight moved.`);
    }
    if (resume) {
      this.#halt = null;
      log('resumed');
      this.#ask();
    }
    if (stateTransfer) await this.#move(stateTransfer);
    if (shutdown) {
      if (!shutdown.stopReason) throw new Lost(shutdown.message);
      this.#void('the run is over');
      return this.#leave(shutdown.stopReason);
    }
    return false; // what is not known is ignored
  }

  /** Computes a share and sends it. */
  #begin(work) {
    this.#void('a new round was assigned');
    if (!same(work.parent, this.#head)) throw new Again('assigned work for another head');
    const { blocks, plan } = this.config;
    this.#see(work.key.term);
    const round = new Round(work, blocks);
    this.#round = round;
    try {
      const shares = work.reducers.length ? work.reducers : this.#welcome.reducers;
      round.map(blocks, this.#welcome.policy.chunkElements, shares);
    } catch (error) {
      this.#fault('PROTOCOL', { message: error.message });
      return;
    }
    const order = new Order(BigInt(plan.seed), BigInt(work.epoch), BigInt(plan.datasetSize));
    const samples = [];
    for (const { start, stop } of work.positions) {
      for (let p = BigInt(start); p < BigInt(stop); p += 1n) samples.push(Number(order.at(p)));
    }
    round.samples = samples.length;
    let gradients = null;
    if (samples.length > 0) {
      ({ gradients, lossSum: round.lossSum } = this.model.gradient(samples));
      const bad = defect(gradients, round.lossSum);
      if (bad) {
        this.#fault(bad.kind, { ...bad.where, rank: work.rank });
        return;
      }
    }
    this.#exchange.send(round, gradients); // an error shows where the stream is read
  }

  /** Tells the coordinator of the present round's defect; it voids the round. */
  #fault(kind, where) {
    this.#send({ fault: { key: this.#round.work.key, kind: `FAULT_KIND_${kind}`, ...where } });
  }

  /** Goes on with new streams to the reducers; the present round can't be finished. */
  #lose(message) {
    if (this.#round && !this.#round.held) this.#fault('DATA_STREAM_LOST', { message });
    this.#open();
  }

  /** Takes what a reducer says of the present round, and passes faults on. */
  #hear({ averagedBlock, blockFault, staleRound, roundAborted }) {
    const about = averagedBlock ?? blockFault ?? staleRound ?? roundAborted;
    if (!about || !this.#isPresent(about.key)) return;
    if (averagedBlock) {
      try {
        this.#round.take(averagedBlock);
      } catch (error) {
        this.#fault('PROTOCOL', { message: error.message });
        return;
      }
      if (this.#round.complete) this.#ready();
    } else if (blockFault) {
      const { block, element, value, message } = blockFault;
      const rank = blockFault._rank ? { rank: blockFault.rank } : {};
      this.#fault(FAULTS[blockFault.kind] ?? 'PROTOCOL', { ...rank, block, element, value, message });
    } else if (staleRound) {
      this.#see(staleRound.greatest.term);
      this.#fault('STALE_ROUND', { greatest: staleRound.greatest, message: 'the reducer saw a greater key' });
    } else {
      this.#fault('DATA_STREAM_LOST', { message: roundAborted.message });
    }
  }

  /** Says that all averages are here. The weights have not moved. */
  #ready() {
    const { work, samples, lossSum, total, norm } = this.#round;
    const { digestEvery, gradientNorm } = this.#welcome.policy;
    this.#round.held = true;
    const due = digestEvery > 0 && this.step % digestEvery === 0;
    this.#send({
      stepReady: {
        key: work.key, lossSum, samples, weight: samples, totalWeight: total, worldSize: work.worldSize,
        ...(due ? { digest: { head: this.#head, sha256: this.digest } } : {}),
        ...(gradientNorm ? { gradientNorm: norm } : {}),
      },
    });
  }

  /** Applies a record: a STEP only with its averages held, and only to its parent (rule 7). */
  #commit({ record, loss, stopReason }) {
    const isStep = record.kind === 'RECORD_KIND_STEP';
    const founds = record.kind === 'RECORD_KIND_FOUND';
    const follows = (founds && !this.#head) || (this.#head && same(record.parent, this.#head));
    const held = this.#isPresent(record.key) && this.#round.held;
    if (!follows || (isStep && !held)) {
      if (this.#head && same(record.key, this.#head)) return false;
      throw new Again("got a record that can't be applied here");
    }
    if (isStep) {
      if (this.#round.total > 0) this.model.apply(this.#round.averages);
      this.loss = loss;
      this.#round = null;
    }
    if (founds && !this.#state) this.#state = found(this.model.parameters, this.config.optimizers);
    this.#stand(record.key, record.cursor, record.step);
    if (stopReason) return this.#leave(stopReason);
    this.#ask();
    return false;
  }

  #stand(head, cursor, step) {
    this.#head = head;
    this.#cursor = cursor;
    this.step = Number(step);
  }

  /** Sends or receives state, while no round runs, and says how it ended (rule 10). */
  async #move({ transferId, head, role, address, cursor, step }) {
    const { runId, address: home, tls } = this.config;
    const { worker, sessionToken } = this.#welcome;
    const ticket = { runId, worker, sessionToken, transferId, head };
    const watch = (call) => {
      this.#transfer = call;
    };
    let failure = '';
    try {
      if (role === 'TRANSFER_ROLE_SEND') {
        if (!same(head, this.#head)) throw new Error('this worker is not at the head that the transfer names');
        patch(this.#state, this.model.parameters);
        await give(address || home, tls, ticket, this.#state, watch);
      } else {
        const state = await this.#arrived.receive(address || home, tls, ticket, watch);
        install(state, this.model.parameters);
        this.#state = state;
        this.#round = null;
        this.#stand(head, cursor, step);
      }
    } catch (error) {
      failure = error.message;
      log(`a state transfer failed: ${failure}`);
    }
    this.#transfer = null;
    this.#send({ stateReport: { transferId, head: this.#head, failure } });
    if (!failure) this.#ask();
  }

  /** Says good-bye, with the digest of the final weights. */
  async #leave(stop) {
    const reason = stop === 'drained' ? 'LEAVE_REASON_DRAINED' : 'LEAVE_REASON_COMPLETE';
    const digest = { head: this.#head, sha256: this.digest };
    this.#send({ leave: { reason, finalStep: this.step, digest } });
    this.#control.end();
    const over = new AbortController();
    const ended = (async () => {
      while (!(await this.#inbox.take()).lost);
    })();
    await Promise.race([ended, sleep(LEAVE_PATIENCE_MS, null, { signal: over.signal }).catch(() => {})]);
    over.abort();
    return true;
  }
}

/** What must not be sent: a loss or a gradient that is not finite. */
function defect(gradients, lossSum) {
  if (!Number.isFinite(lossSum)) {
    return { kind: 'NON_FINITE_LOSS', where: { value: `${lossSum}`, message: `the loss is ${lossSum}` } };
  }
  for (const [block, numbers] of gradients.entries()) {
    const element = numbers.findIndex((number) => !Number.isFinite(number));
    if (element >= 0) {
      const message = 'the gradient is not finite';
      return { kind: 'NON_FINITE_GRADIENT', where: { block, element, value: `${numbers[element]}`, message } };
    }
  }
  return null;
}
