// Validates messages before anything uses them: docs/protocol.md, section 3.
//
// gRPC and protobuf reject bytes that they can't parse; this file finds messages that parse but are
// invalid. Each function returns what is wrong, or null.

const JOIN_STATUSES = new Set([
  'JOIN_STATUS_IN_SYNC', 'JOIN_STATUS_BEHIND', 'JOIN_STATUS_RECORD_FOLLOWS', 'JOIN_STATUS_FRESH',
]);
const ROLES = new Set(['TRANSFER_ROLE_SEND', 'TRANSFER_ROLE_RECEIVE']);
const KINDS = new Set(['RECORD_KIND_INITIAL', 'RECORD_KIND_STEP', 'RECORD_KIND_MARK']);
const FLOAT32 = new Set(['ENCODING_FLOAT32', 'ENCODING_UNSPECIFIED']);
const STAR = new Set(['TOPOLOGY_STAR', 'TOPOLOGY_UNSPECIFIED']);
const MAX_PAYLOAD_BYTES = 4 * 2 ** 20 - 64 * 1024;

const named = (key) => Boolean(key) && key.term !== '0';
const before = (one, other) => (one.term === other.term
  ? BigInt(one.round) < BigInt(other.round) : BigInt(one.term) < BigInt(other.term));

/** Why this client does not support the line that it joined. */
export function unsupportedLine({ joinStatus, policy }) {
  if (!JOIN_STATUSES.has(joinStatus)) return `join status ${joinStatus} is unknown`;
  if (!FLOAT32.has(policy.encoding) || !FLOAT32.has(policy.answerEncoding)) {
    return 'this client speaks FLOAT32: serve the line with --encoding float32';
  }
  if (!STAR.has(policy.topology)) return 'this client knows no rings: serve the line without --topology ring';
  if (policy.chunkElements < 1 || 4 * policy.chunkElements > MAX_PAYLOAD_BYTES) {
    return `chunks of ${policy.chunkElements} elements do not fit into a message`;
  }
  return null;
}

/** What is wrong with a message from the coordinator, other than the answer to Join. */
export function messageError({ shardAssignment, stepCommitted, roundVoided, halt, stateTransfer }) {
  if (shardAssignment) {
    const { key, rank, worldSize, positions } = shardAssignment;
    if (!named(key)) return 'an assignment names no round';
    if (rank >= worldSize) return `an assignment has rank ${rank} in a world of ${worldSize}`;
    if (positions.some(({ start, stop }) => BigInt(stop) < BigInt(start))) return 'a range ends before it starts';
  }
  if (stepCommitted) {
    const { key, parent, kind } = stepCommitted.record ?? {};
    if (!named(key)) return 'a record has no key';
    if (!KINDS.has(kind)) return `record kind ${kind} is unknown`;
    if (named(parent) && !before(parent, key)) return 'a record does not come after its parent';
  }
  if (roundVoided && !named(roundVoided.key)) return 'RoundVoided names no round';
  if (halt && !(Number(halt.evidence?.id) && halt.evidence.reason !== 'HALT_REASON_UNSPECIFIED')) {
    return 'a halt has no evidence';
  }
  if (stateTransfer && !(ROLES.has(stateTransfer.role) && named(stateTransfer.head))) {
    return 'a transfer has no known role, or no head';
  }
  return null;
}

/** What is wrong with a reducer's answer: its kind is unknown, or it names no round. */
export function answerError({ roundOpened, averagedBlock, blockFault, staleRound, roundAborted }) {
  if (roundOpened) return null;
  const about = averagedBlock ?? blockFault ?? staleRound ?? roundAborted;
  if (!about) return 'a reducer said what this client does not know';
  return named(about.key) ? null : 'an answer of a reducer names no round';
}
