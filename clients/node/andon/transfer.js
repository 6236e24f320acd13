// Both ends of a state transfer: docs/protocol-data.md, section 11.

import { createHash } from 'node:crypto';

import { connect, v1, write } from './wire.js';

const PIECE_BYTES = 2 ** 20;
const sha256 = (bytes) => createHash('sha256').update(bytes).digest();

/** Sends the part of `state` that the other end lacks. `watch(call)` may cancel it. */
export async function give(address, folder, ticket, state, watch) {
  const client = connect(v1.Reducer, address, folder);
  try {
    const call = client.putState();
    watch(call);
    let started;
    const start = new Promise((resolve) => {
      started = resolve;
    });
    const end = new Promise((resolve, reject) => {
      call.on('end', resolve);
      call.on('error', reject);
      call.on('data', (answer) => started(Number(answer.offset)));
    });
    call.write({ ...ticket, sizeBytes: state.length, sha256: sha256(state) });
    const from = await Promise.race([start, end]);
    if (from === undefined) throw new Error('the other end of the transfer requested nothing');
    if (from > state.length) throw new Error(`the other end requested byte ${from} of a state of ${state.length} bytes`);
    for (let at = from; at < state.length; at += PIECE_BYTES) {
      if (!(await write(call, { payload: state.subarray(at, at + PIECE_BYTES) }))) break;
    }
    call.end();
    await end;
  } finally {
    client.close();
  }
}

/** The received part of a state, over one or several transfers. */
export class Arrived {
  pieces = [];
  length = 0;
  sha256 = Buffer.alloc(0);

  /** Returns the other end's state, complete and verified. A partial state is kept, and the next
   * transfer continues it. */
  async receive(address, folder, ticket, watch) {
    const client = connect(v1.Reducer, address, folder);
    try {
      const call = client.getState({ ...ticket, offset: this.length, sha256: this.sha256 });
      watch(call);
      let size = null;
      await new Promise((resolve, reject) => {
        call.on('data', (piece) => {
          if (size === null) {
            size = Number(piece.sizeBytes);
            const offset = Number(piece.offset);
            if (offset !== this.length || !piece.sha256.equals(this.sha256)) this.#clear(piece.sha256);
            if (offset !== this.length) call.destroy(new Error(`the state begins at byte ${offset}, which was not requested`));
          }
          this.pieces.push(piece.payload);
          this.length += piece.payload.length;
          if (this.length > size) call.destroy(new Error(`the state is longer than the announced ${size} bytes`));
        });
        call.on('end', resolve);
        call.on('error', reject);
      });
      const [state, announced] = [Buffer.concat(this.pieces), this.sha256];
      this.#clear(Buffer.alloc(0));
      if (size !== state.length || !sha256(state).equals(announced)) {
        throw new Error('the received state does not match the announced size or digest');
      }
      return state;
    } finally {
      client.close();
    }
  }

  #clear(digest) {
    this.pieces = [];
    this.length = 0;
    this.sha256 = digest;
  }
}
