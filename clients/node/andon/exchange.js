// The data plane: streams to the reducers.

import { CAPABILITY, checksumsOf, headerIntact, payloadIntact } from './checksums.js';
import { toBytes } from './digests.js';
import { connect, listen, v1, write } from './wire.js';

/** The capability of reducers that make trimmed means. */
export const TRIMMED = 'trimmed.v1';

/** The worker's streams to the reducers. If a round is void, its streams are discarded (rule 16). */
export class Exchange {
  #calls = new Map();

  /** `opening` is OpenRound; `needs` are capabilities without which nothing is sent to a reducer;
   * `told(exchange, answer, error)` is called with each answer or error.
   * An answer is `corrupt` if it is an average that does not match its checksum. */
  constructor(home, folder, opening, needs, told) {
    Object.assign(this, { home, folder, opening, needs, told });
    this.operation = needs.includes(TRIMMED) ? 'OPERATION_TRIMMED_MEAN' : 'OPERATION_WEIGHTED_MEAN';
  }

  #to(address) {
    if (!this.#calls.has(address)) {
      const client = connect(v1.Reducer, address || this.home, this.folder);
      const call = client.reduce();
      let agreed = false; // the reducer's averages have checksums
      let open;
      const opened = new Promise((resolve) => {
        open = resolve;
      });
      listen(call, (answer) => {
        const { capabilities } = answer.roundOpened ?? {};
        if (capabilities) {
          agreed = capabilities.includes(CAPABILITY);
          open(this.needs.every((each) => capabilities.includes(each)));
        }
        if (headerIntact(answer)) {
          this.told(this, { ...answer, corrupt: agreed && !payloadIntact(answer) }, null);
        } else {
          this.told(this, null, new Error('an average does not match its header_crc32c'));
        }
      }, (error) => {
        open(false);
        client.close();
        this.told(this, null, error);
      });
      call.write({ openRound: { ...this.opening, capabilities: [CAPABILITY, ...this.needs] } });
      this.#calls.set(address, { call, opened });
    }
    return this.#calls.get(address);
  }

  /** Ends the streams, and ignores everything that they still deliver. */
  cancel() {
    this.told = () => {};
    for (const { call } of this.#calls.values()) call.cancel();
  }

  async #write(address, message) {
    const { call, opened } = this.#to(address);
    if (this.needs.length > 0 && !(await opened)) return false;
    return write(call, { ...message, ...checksumsOf(message) });
  }

  /** Sends what a round contributes to its present exchange, chunk by chunk, or one Abstain to each
   * reducer. */
  async send(round) {
    const { sequence, outgoing, work: { key, rank, worldSize } } = round;
    if (outgoing.length === 0) {
      const message = { abstain: { key, sequence, rank, worldSize } };
      await Promise.all([...round.reducers].map((each) => this.#write(each, message)));
      return;
    }
    for (const { block, offset, count, address } of round.chunks) {
      for (const { node, weight, gradients } of outgoing) {
        const blockGradient = {
          key, sequence, rank, worldSize, block, elementOffset: offset, elementCount: count,
          operation: this.operation, encoding: 'ENCODING_FLOAT32', weight, node,
          payload: toBytes(gradients[block].subarray(offset, offset + count)),
        };
        if (!(await this.#write(address, { blockGradient }))) return;
      }
    }
  }
}
