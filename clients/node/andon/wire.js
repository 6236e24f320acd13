// Channels and message types. The .proto files are read when the client starts.

import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PROTO = process.env.ANDON_PROTO_DIR ?? fileURLToPath(new URL('../../../proto', import.meta.url));
const files = ['andon/v1/coordinator.proto', 'andon/v1/reducer.proto'];
const options = { includeDirs: [PROTO], longs: String, enums: String, defaults: true, oneofs: true };

/** The services and messages of `andon.v1`; 64-bit numbers are decimal strings. */
export const v1 = grpc.loadPackageDefinition(loader.loadSync(files, options)).andon.v1;
export const { status } = grpc;

/** A stub on a separate connection, so that gradients never delay control messages.
 *
 * `folder` holds ca.crt, who is trusted, and perhaps tls.crt and tls.key, what this worker shows.
 */
export function connect(Service, address, folder) {
  let credentials = grpc.credentials.createInsecure();
  if (folder) {
    const read = (name) => {
      const file = path.join(folder, name);
      return existsSync(file) ? readFileSync(file) : null;
    };
    credentials = grpc.credentials.createSsl(read('ca.crt'), read('tls.key'), read('tls.crt'));
  }
  return new Service(address, credentials, {
    'grpc.use_local_subchannel_pool': 1,
    'grpc.enable_http_proxy': 0,
    'grpc.enable_retries': 0,
    'grpc.keepalive_time_ms': 60_000,
  });
}

/** The run's token, from ANDON_TOKEN_FILE or ANDON_TOKEN. A line may require one. */
export function token() {
  const file = process.env.ANDON_TOKEN_FILE;
  return Buffer.from(file ? readFileSync(file, 'utf8').trim() : process.env.ANDON_TOKEN ?? '');
}

/** A queue from the streams, which never wait for it, to the worker's event loop. */
export class Inbox {
  #events = [];
  #wake = null;

  put(event) {
    this.#events.push(event);
    this.#wake?.();
  }

  async take() {
    while (this.#events.length === 0) {
      await new Promise((resolve) => {
        this.#wake = resolve;
      });
    }
    return this.#events.shift();
  }
}

/** Passes on a stream's answers in order, then calls `end(error)` exactly once. */
export function listen(call, data, end) {
  let ended = false;
  const once = (error) => {
    if (!ended) end(error);
    ended = true;
  };
  call.on('data', data);
  call.on('error', once);
  call.on('end', () => once(new Error('the stream ended')));
}

/** Writes, and waits while the peer does not keep up; false if the stream is over. */
export async function write(call, message) {
  if (call.destroyed || call.writableEnded) return false;
  if (call.write(message)) return true;
  await new Promise((resolve) => {
    for (const name of ['drain', 'close', 'error', 'end']) call.once(name, resolve);
  });
  return !call.destroyed;
}
