// The data plane: streams to the reducers.

import { CAPABILITY, checksumsOf, headerIntact, payloadIntact } from './checksums.js';
import { toBytes } from './digests.js';
import { connect, listen, v1, write } from './wire.js';

/** The worker's streams to the reducers. If a round is void, its streams are discarded (rule 16). */
export class Exchange {
  #calls = new Map();

  /** `opening` is OpenRound; `told(exchange, answer, error)` is called with each answer or error.
   * An answer is `corrupt` if it is an average that does not match its checksum. */
  constructor(home, folder, opening, told) {
    Object.assign(this, { home, folder, opening, told });
  }

  #to(address) {
    if (!this.#calls.has(address)) {
      const client = connect(v1.Reducer, address || this.home, this.folder);
      const call = client.reduce();
      let agreed = false; // the reducer's averages have checksums
      listen(call, (answer) => {
        agreed ||= answer.roundOpened?.capabilities.includes(CAPABILITY) ?? false;
        if (headerIntact(answer)) {
          this.told(this, { ...answer, corrupt: agreed && !payloadIntact(answer) }, null);
        } else {
          this.told(this, null, new Error('an average does not match its header_crc32c'));
        }
      }, (error) => {
        client.close();
        this.told(this, null, error);
      });
      call.write({ openRound: { ...this.opening, capabilities: [CAPABILITY] } });
      this.#calls.set(address, call);
    }
    return this.#calls.get(address);
  }

  /** Ends the streams, and ignores everything that they still deliver. */
  cancel() {
    this.told = () => {};
    for (const call of this.#calls.values()) call.cancel();
  }

  /** Sends a round's gradients, chunk by chunk, or one Abstain to each reducer. */
  async send(round, gradients) {
    const { key, rank, worldSize } = round.work;
    if (round.samples === 0) {
      const message = { abstain: { key, rank, worldSize } };
      const sealed = { ...message, ...checksumsOf(message) };
      await Promise.all([...round.reducers].map((each) => write(this.#to(each), sealed)));
      return;
    }
    for (const { block, offset, count, address } of round.chunks) {
      const blockGradient = {
        key, rank, worldSize, block, elementOffset: offset, elementCount: count,
        operation: 'OPERATION_WEIGHTED_MEAN', encoding: 'ENCODING_FLOAT32', weight: round.samples,
        payload: toBytes(gradients[block].subarray(offset, offset + count)),
      };
      const sealed = { blockGradient, ...checksumsOf({ blockGradient }) };
      if (!(await write(this.#to(address), sealed))) return;
    }
  }
}
