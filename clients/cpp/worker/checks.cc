#include "worker/checks.h"

#include <tuple>

namespace andon {
namespace {

constexpr std::uint64_t kMaxPayloadBytes = (4 << 20) - (64 << 10);

bool is_float32(v1::Encoding encoding) {
  return encoding == v1::ENCODING_FLOAT32 || encoding == v1::ENCODING_UNSPECIFIED;
}

bool is_named(const v1::Key& key) { return key.term() != 0; }

std::string wrong_work(const v1::ShardAssignment& work) {
  if (!is_named(work.key())) return "an assignment names no round";
  if (work.rank() >= work.world_size()) return "an assignment's rank is not below its world_size";
  for (const auto& run : work.positions())
    if (run.stop() < run.start()) return "a range ends before it starts";
  return {};
}

std::string wrong_record(const v1::Record& record) {
  const auto& key = record.key();
  const auto& parent = record.parent();
  if (!is_named(key)) return "a record has no key";
  if (!v1::RecordKind_IsValid(record.kind()) || record.kind() == v1::RECORD_KIND_UNSPECIFIED)
    return "a record's kind is unknown";
  if (std::tuple(parent.term(), parent.round()) >= std::tuple(key.term(), key.round()))
    return "a record does not come after its parent";
  return {};
}

}  // namespace

std::string unsupported_line(const v1::JoinAccepted& welcome) {
  const auto& policy = welcome.policy();
  if (!v1::JoinStatus_IsValid(welcome.join_status()) || welcome.join_status() == v1::JOIN_STATUS_UNSPECIFIED)
    return "JoinAccepted's join status is unknown";
  if (!is_float32(policy.encoding()) || !is_float32(policy.answer_encoding()))
    return "this client speaks FLOAT32: serve the line with --encoding float32";
  if (policy.topology() != v1::TOPOLOGY_STAR && policy.topology() != v1::TOPOLOGY_UNSPECIFIED)
    return "this client does not support rings: serve the line without --topology ring";
  if (policy.chunk_elements() == 0 || 4 * std::uint64_t{policy.chunk_elements()} > kMaxPayloadBytes)
    return "chunks of " + std::to_string(policy.chunk_elements()) + " elements do not fit into a message";
  return {};
}

std::string message_error(const v1::TrainResponse& message) {
  if (message.has_shard_assignment()) return wrong_work(message.shard_assignment());
  if (message.has_step_committed()) return wrong_record(message.step_committed().record());
  if (message.has_round_voided() && !is_named(message.round_voided().key())) return "RoundVoided names no round";
  if (message.has_halt() && (message.halt().evidence().id() == 0 || message.halt().evidence().reason() == 0))
    return "a halt has no evidence";
  if (message.has_state_transfer()) {
    const auto& asked = message.state_transfer();
    const bool known = asked.role() == v1::TRANSFER_ROLE_SEND || asked.role() == v1::TRANSFER_ROLE_RECEIVE;
    if (!known || !is_named(asked.head())) return "a transfer has an unknown role, or no head";
  }
  return {};
}

std::string answer_error(const v1::ReduceResponse& answer) {
  const v1::Key* key = nullptr;
  switch (answer.message_case()) {
    case v1::ReduceResponse::kRoundOpened: return {};
    case v1::ReduceResponse::kAveragedBlock: key = &answer.averaged_block().key(); break;
    case v1::ReduceResponse::kBlockFault: key = &answer.block_fault().key(); break;
    case v1::ReduceResponse::kStaleRound: key = &answer.stale_round().key(); break;
    case v1::ReduceResponse::kRoundAborted: key = &answer.round_aborted().key(); break;
    default: return "a reducer sent a message that this client does not know";
  }
  return is_named(*key) ? "" : "an answer of a reducer names no round";
}

}  // namespace andon
