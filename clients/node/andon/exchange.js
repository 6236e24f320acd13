// The data plane: streams to the reducers.

import { toBytes } from './digests.js';
import { connect, listen, v1, write } from './wire.js';

/** The worker's streams to the reducers. If a round is void, its streams are discarded (rule 16). */
export class Exchange {
  #calls = new Map();

  /** `opening` is OpenRound; `told(exchange, answer, error)` is called with each answer or error. */
  constructor(home, folder, opening, told) {
    Object.assign(this, { home, folder, opening, told });
  }

  #to(address) {
    if (!this.#calls.has(address)) {
      const client = connect(v1.Reducer, address || this.home, this.folder);
      const call = client.reduce();
      listen(call, (answer) => this.told(this, answer, null), (error) => {
        client.close();
        this.told(this, null, error);
      });
      call.write({ openRound: this.opening });
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
      const abstain = { key, rank, worldSize };
      await Promise.all([...round.reducers].map((each) => write(this.#to(each), { abstain })));
      return;
    }
    for (const { block, offset, count, address } of round.chunks) {
      const blockGradient = {
        key, rank, worldSize, block, elementOffset: offset, elementCount: count,
        operation: 'OPERATION_WEIGHTED_MEAN', encoding: 'ENCODING_FLOAT32', weight: round.samples,
        payload: toBytes(gradients[block].subarray(offset, offset + count)),
      };
      if (!(await write(this.#to(address), { blockGradient }))) return;
    }
  }
}
