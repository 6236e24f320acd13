// One worker on an Andon line. It implements docs/protocol.md.
//
// Theory of operation. One loop owns all state here and takes events from its session's inbox; the
// streams only put events into it. Only records and transfers move the head (rule 7).

import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

import { answerError, messageError } from './checks.js';
import { toBytes, weightsDigest } from './digests.js';
import { Round } from './round.js';
import { Again, Lost, Refused, Session } from './session.js';
import { bootstrapState, install, patch } from './state.js';
import { Arrived, give } from './transfer.js';
import { CAPABILITY as SAME_BITS, TREE_VERSION } from './tree.js';

export { Lost, Refused };

const FIRST_PATIENCE_MS = 300_000;
const FIRST_WAIT_MS = 50;
const LONGEST_WAIT_MS = 2000;

const same = (one, other) => one?.term === other?.term && one?.round === other?.round;
const log = (text) => console.error(`node: ${text}`);

/** A worker. `config` says which line to join, and the worker's plan; `model` has
 *
 * - `parameters`: `{name, shape, data}` in the order of the state dict, with Float32Arrays;
 * - `gradient(samples)`: `{gradients, lossSum}`, means over the samples, one Float32Array a block;
 * - `sample(index)`: the bytes that it reads of one sample: workers compare their hashes;
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
  #session = null;
  #asked = null;
  #greatest = '0';
  #incarnation = randomBytes(8).readBigUInt64LE().toString();
  #arrived = new Arrived();

  constructor(config, model) {
    const { plan } = config;
    this.config = plan.grain ? { ...config, plan: { ...plan, tree: TREE_VERSION } } : config;
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
    let [wait, began, welcome] = [FIRST_WAIT_MS, Date.now(), null];
    for (;;) {
      const session = new Session(this.config, welcome);
      try {
        await this.#work(session);
        return;
      } catch (error) {
        if (!(error instanceof Again)) throw error;
        if (session.welcome !== welcome) {
          [wait, began, welcome] = [FIRST_WAIT_MS, Date.now(), session.welcome];
          log(`${error.message}: joining again`);
        }
        const patience = welcome ? 1000 * welcome.liveness.reconnectS : FIRST_PATIENCE_MS;
        if (Date.now() - began > patience) {
          throw new Lost(`nobody answered at ${this.config.address} for ${patience} ms (${error.message})`);
        }
      }
      await sleep(wait * (0.5 + Math.random()));
      wait = Math.min(1.5 * wait, LONGEST_WAIT_MS);
    }
  }

  /** Joins, then works until the run is over. */
  async #work(session) {
    this.#session = session;
    try {
      await session.join({
        incarnation: this.#incarnation, head: this.#head, cursor: this.#cursor, step: this.step,
        heldKey: this.#round?.held ? this.#round.work.key : null, halt: this.#halt, greatestTerm: this.#greatest,
      });
      this.#accept(session.welcome);
      for (;;) {
        const { control, from, answer, error } = await session.take();
        if (control) {
          if (await this.#obey(control)) return;
        } else if (from !== session.exchange) {
          continue; // from an exchange that was discarded
        } else if (error) {
          this.#lose(error.message);
        } else {
          const wrong = answerError(answer);
          if (wrong) this.#lose(wrong); // A round that can't be followed must not be committed.
          else if (this.#round && !this.#round.held) {
            if (answer.roundOpened) this.#measure(answer.roundOpened);
            else this.#hear(answer);
          }
        }
      }
    } finally {
      session.close();
    }
  }

  /** Takes over the join status: in sync, or waiting for a state or for the line. */
  #accept({ term, halt, joinStatus, head }) {
    this.#see(term);
    this.#asked = null;
    this.#halt = halt;
    const inSync = joinStatus === 'JOIN_STATUS_IN_SYNC';
    if (inSync && !same(head, this.#head)) {
      throw new Lost('the coordinator calls this worker in sync with a head that it does not have');
    }
    // The round is void, or its record was never written.
    if (this.#round && (inSync || !this.#round.held)) this.#round = null;
    if (inSync) this.#ask();
  }

  #see(term) {
    if (BigInt(term) > BigInt(this.#greatest)) this.#greatest = term;
  }

  /** Requests work, once for each head on a stream. */
  #ask() {
    if (!this.#head || this.#halt || (this.#asked && same(this.#asked, this.#head))) return;
    this.#asked = this.#head;
    this.#session.send({ requestWork: { head: this.#head } });
  }

  /** Abandons the current round. Its averages are ignored from now on. */
  #void(why) {
    if (!this.#round) return;
    log(`step ${this.#round.work.step} is tried again: ${why}`);
    if (!this.#round.held) this.#session.open();
    this.#round = null;
  }

  #isPresent(key) {
    return this.#round !== null && same(this.#round.work.key, key);
  }

  /** Handles a message from the coordinator; true once the run is over. */
  async #obey(message) {
    const wrong = messageError(message);
    if (wrong) throw new Again(`the coordinator sent what can't be: ${wrong}`);
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
    return false; // unknown messages are ignored
  }

  /** Computes the gradients of the assigned share and sends them. */
  #begin(work) {
    this.#void('a new round was assigned');
    if (!same(work.parent, this.#head)) throw new Again('assigned work for another head');
    const { blocks, plan } = this.config;
    const { policy, reducers } = this.#session.welcome;
    this.#see(work.key.term);
    const round = new Round(work, blocks, plan.grain);
    this.#round = round;
    try {
      round.map(policy.chunkElements, work.reducers.length ? work.reducers : reducers);
    } catch (error) {
      this.#fault({ kind: 'PROTOCOL', message: error.message });
      return;
    }
    const bad = round.compute(this.model, plan, policy.maxGradNorm);
    if (bad) this.#fault(bad);
    else this.#session.exchange.send(round); // the stream's reader reports errors
  }

  /** Reports a fault of the current round; the coordinator then voids the round. */
  #fault({ kind, ...where }) {
    this.#session.send({ fault: { key: this.#round.work.key, kind: `FAULT_KIND_${kind}`, ...where } });
  }

  /** Replaces the streams to the reducers. The current round can't complete on this worker. */
  #lose(message) {
    if (this.#round && !this.#round.held) this.#fault({ kind: 'DATA_STREAM_LOST', message });
    this.#session.open();
  }

  /** Reports a fault if the reducer can't take what this round sends. */
  #measure({ maxPayloadBytes: most, capabilities }) {
    const lacks = this.#session.exchange.needs.find((each) => !capabilities.includes(each));
    if (lacks) {
      const does = lacks === SAME_BITS ? "can't add gradients along the tree of grains" : 'makes no trimmed means';
      this.#fault({ kind: 'PROTOCOL', message: `a reducer lacks ${lacks}, so it ${does}: update it` });
    }
    const largest = 4 * Math.max(...this.#round.chunks.map((chunk) => chunk.count));
    if (most === 0 || most >= largest) return;
    const message = `a reducer takes payloads of ${most} bytes, and chunks have ${largest}`;
    this.#fault({ kind: 'PROTOCOL', message });
  }

  /** Handles a reducer's answer for the current round, and forwards its faults. */
  #hear(answer) {
    const { averagedBlock, blockFault, staleRound, roundAborted } = answer;
    const about = averagedBlock ?? blockFault ?? staleRound ?? roundAborted;
    if (!about || !this.#isPresent(about.key)) return;
    if (staleRound) this.#see(staleRound.greatest.term);
    let bad;
    try {
      bad = this.#round.hear(answer);
    } catch (error) {
      this.#lose(error.message);
      return;
    }
    if (bad) this.#fault(bad);
    else if (this.#round.complete) this.#goOn();
  }

  /** An exchange is over: makes the next one, or is ready. */
  #goOn() {
    let follows;
    try {
      follows = this.#round.next();
    } catch (error) {
      this.#fault({ kind: 'PROTOCOL', message: error.message });
      return;
    }
    if (follows) this.#session.exchange.send(this.#round);
    else this.#ready();
  }

  /** Reports that all averages have arrived. The weights have not moved yet. */
  #ready() {
    const { work, samples, totalWeight, norm, ownNorm, timings, nodeLosses, verification } = this.#round;
    const [weight, lossSum] = [this.#round.sum('weight'), this.#round.sum('lossSum')];
    const { digestEvery, gradientNorm, ownGradientNorm } = this.#session.welcome.policy;
    this.#round.held = true;
    const due = work.wantsDigest || (digestEvery > 0 && this.step % digestEvery === 0);
    this.#session.send({
      stepReady: {
        key: work.key, lossSum, samples, weight, totalWeight, worldSize: work.worldSize, timings, nodeLosses,
        ...(due ? { digest: { head: this.#head, sha256: this.digest } } : {}),
        ...(verification ? verification.report : {}),
        ...(gradientNorm ? { gradientNorm: norm } : {}),
        ...(ownGradientNorm && samples > 0 ? { ownGradientNorm: ownNorm } : {}),
      },
    });
  }

  /** Applies a record: only to its parent, and a STEP only if its averages are held (rule 7). */
  #commit({ record, loss, stopReason, overflow }) {
    const isStep = record.kind === 'RECORD_KIND_STEP';
    const isInitial = record.kind === 'RECORD_KIND_INITIAL';
    const mine = record.roster.length === 1 && record.roster[0] === this.#session.welcome.worker;
    const follows = isInitial ? !this.#head && mine : this.#head && same(record.parent, this.#head);
    const held = this.#isPresent(record.key) && this.#round.held;
    if (!follows || (isStep && !held)) {
      if (this.#head && same(record.key, this.#head)) return false;
      throw new Again("got a record that can't be applied here");
    }
    if (isStep) {
      if (this.#round.totalWeight > 0 && !overflow) this.model.apply(this.#round.averages);
      this.loss = loss;
      this.#round = null;
    }
    if (isInitial && !this.#state) this.#state = bootstrapState(this.model.parameters, this.config.optimizers);
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

  /** Sends or receives state while no round runs, then reports the result (rule 10). */
  async #move({ transferId, head, role, address, cursor, step }) {
    const { address: home, tls } = this.config;
    const session = this.#session;
    const ticket = { ...session.pass, transferId, head };
    const watch = (call) => {
      session.transfer = call;
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
    session.transfer = null;
    session.send({ stateReport: { transferId, head: this.#head, failure } });
    if (!failure) this.#ask();
  }

  /** Leaves the line, and reports the digest of the final weights. */
  async #leave(stop) {
    const reason = stop === 'drained' ? 'LEAVE_REASON_DRAINED' : 'LEAVE_REASON_COMPLETE';
    const digest = { head: this.#head, sha256: this.digest };
    await this.#session.leave({ reason, finalStep: this.step, digest });
    return true;
  }
}
