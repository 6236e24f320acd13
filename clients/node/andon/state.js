// A state is what a worker sends to a newcomer: the length of a JSON skeleton (uint64,
// little-endian), the skeleton, and safetensors; docs/protocol-data.md, section 18. A client reads
// the model's tensors and keeps the rest unchanged. When it sends the state, it puts in its own
// weights.

import { fromBytes, toBytes } from './digests.js';

const PREFIX = 'model.';

/** The tensors of a state, by name. Their bytes are views of the state's memory. */
function tensorsOf(state) {
  const header = past(state, 0);
  const data = past(state, header);
  const found = new Map();
  for (const [name, entry] of Object.entries(JSON.parse(state.subarray(header + 8, data)))) {
    if (name === '__metadata__') continue;
    const [begin, end] = entry.data_offsets.map((offset) => data + offset);
    if (!(data <= begin && begin <= end && end <= state.length)) {
      throw new Error(`the state's tensor ${name} lies outside it`);
    }
    found.set(name, { ...entry, bytes: state.subarray(begin, end) });
  }
  return found;
}

/** The end of the part whose length field is at byte `at`. */
function past(state, at) {
  const length = state.length < at + 8 ? Infinity : Number(state.readBigUInt64LE(at));
  if (length > state.length - at - 8) throw new Error('the state is cut short');
  return at + 8 + length;
}

/** The bytes of each parameter in a state. Validates all parameters first. */
function match(state, parameters) {
  const found = tensorsOf(state);
  return parameters.map(({ name, shape, data }) => {
    const there = found.get(PREFIX + name);
    if (there === undefined) throw new Error(`the state has no ${name}`);
    const fits = there.dtype === 'F32' && there.shape.join() === shape.join();
    if (!fits || there.bytes.length !== 4 * data.length) {
      throw new Error(`the state's ${name} is ${there.dtype} of [${there.shape}], not F32 of [${shape}]`);
    }
    return there.bytes;
  });
}

/** Copies the weights out of a state. If it throws, it copied none. */
export function install(state, parameters) {
  match(state, parameters).forEach((bytes, i) => fromBytes(parameters[i].data, bytes));
}

/** Writes the current weights into a received state; the rest of it is unchanged. */
export function patch(state, parameters) {
  match(state, parameters).forEach((bytes, i) => toBytes(parameters[i].data).copy(bytes));
}

/** The state of a line that this worker bootstraps; `optimizers` are the skeleton's. */
export function bootstrapState(parameters, optimizers) {
  const entries = {};
  const data = [];
  let at = 0;
  for (const { name, shape, data: numbers } of parameters) {
    const bytes = toBytes(numbers);
    entries[PREFIX + name] = { dtype: 'F32', shape, data_offsets: [at, at + bytes.length] };
    data.push(bytes);
    at += bytes.length;
  }
  const model = parameters.map(({ name }) => [name, { tensor: PREFIX + name }]);
  const skeleton = {
    dict: [['model', { dict: model }], ['optimizers', optimizers], ['registered', { dict: [] }]],
  };
  return Buffer.concat([part(skeleton), part(entries), ...data]);
}

/** A value as JSON, preceded by its length and padded with spaces, so that the next part is aligned. */
function part(value) {
  let text = JSON.stringify(value);
  while (Buffer.byteLength(text) % 8) text += ' ';
  const head = Buffer.alloc(8);
  head.writeBigUInt64LE(BigInt(Buffer.byteLength(text)));
  return Buffer.concat([head, Buffer.from(text)]);
}
