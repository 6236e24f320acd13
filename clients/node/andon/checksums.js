// CRC-32C of what travels in bulk: docs/protocol-data.md, section 16.

import { crc32c } from '@node-rs/crc32';

import { v1 } from './wire.js';

export const CAPABILITY = 'crc32c.v1';

const numbers = (name) => Object.fromEntries(v1[name].type.value.map((each) => [each.name, each.number]));
const OPERATIONS = numbers('Operation');
const ENCODINGS = numbers('Encoding');

/** Little-endian, at full width; a field that is absent is 0. */
function packed(...fields) {
  const bytes = Buffer.alloc(fields.reduce((sum, [width]) => sum + (width === 'u32' ? 4 : 8), 0));
  let at = 0;
  for (const [width, value] of fields) {
    if (width === 'u32') at = bytes.writeUInt32LE(value ?? 0, at);
    else if (width === 'u64') at = bytes.writeBigUInt64LE(BigInt(value ?? 0), at);
    else at = bytes.writeDoubleLE(value ?? 0, at);
  }
  return bytes;
}

const u32 = (value) => ['u32', value];
const u64 = (value) => ['u64', value];
const key = ({ term, round }) => [u64(term), u64(round)];

const ofNode = (it) => (it ? [u32(it.first), u32(it.grains), u32(it.batchGrains), u32(it.grain)] : []);

const ofGradient = (it) => packed(
  u32(2), ...key(it.key), u32(it.group), u32(it.sequence), u32(OPERATIONS[it.operation]), u32(it.rank),
  u32(it.worldSize), u32(it.block), u64(it.elementOffset), u64(it.elementCount), ['f64', it.weight],
  u32(ENCODINGS[it.encoding]), u32(ENCODINGS[it.answerEncoding]), ...ofNode(it.node),
);

const ofAbstain = (it) => packed(
  u32(3), ...key(it.key), u32(it.group), u32(it.sequence), u32(it.rank), u32(it.worldSize),
);

const ofAverage = (it) => packed(
  u32(2), ...key(it.key), u32(it.group), u32(it.sequence), u32(OPERATIONS[it.operation]), u32(it.contributors),
  u32(it.worldSize), u32(it.block), u64(it.elementOffset), u64(it.elementCount), ['f64', it.totalWeight],
  u32(ENCODINGS[it.encoding]),
);

/** The checksums that belong beside a contribution: of its header, and with a payload of both. */
export function checksumsOf({ blockGradient, abstain }) {
  if (abstain) return { headerCrc32c: crc32c(ofAbstain(abstain)) };
  const headerCrc32c = crc32c(ofGradient(blockGradient));
  return { headerCrc32c, crc32c: crc32c(blockGradient.payload, headerCrc32c) };
}

/** Whether an answer is what was sent, as far as a checksum of its header says so. */
export function headerIntact({ averagedBlock, headerCrc32c, _headerCrc32c: told }) {
  return !averagedBlock || !told || headerCrc32c === crc32c(ofAverage(averagedBlock));
}

/** Whether an average has a checksum and matches it. One without numbers needs none. */
export function payloadIntact({ averagedBlock, crc32c: whole, _crc32c: told }) {
  if (!averagedBlock?.payload?.length) return true;
  return Boolean(told) && whole === crc32c(averagedBlock.payload, crc32c(ofAverage(averagedBlock)));
}
