#include "worker/replica.h"

#include <stdexcept>

#include "worker/state.h"

namespace andon {

v1::WeightsDigest Replica::digest() const {
  v1::WeightsDigest digest;
  if (head_) *digest.mutable_head() = *head_;
  digest.set_sha256(weights_digest(model_.parameters()));
  return digest;
}

bool Replica::follows(const v1::Record& record, std::uint32_t worker) const {
  if (record.kind() != v1::RECORD_KIND_INITIAL) return same(head_, record.parent());
  return !head_ && record.roster_size() == 1 && record.roster(0) == worker;
}

void Replica::commit(const v1::StepCommitted& message, const Round* round) {
  const auto& record = message.record();
  const bool moves = record.kind() == v1::RECORD_KIND_STEP && !message.overflow() && round->total > 0;
  if (moves) model_.apply(round->averages);
  if (record.kind() == v1::RECORD_KIND_INITIAL && state_.empty()) state_ = bootstrap_state(model_.parameters(), optimizers_);
  stand(record.key(), record.cursor(), record.step());
}

void Replica::stand(const v1::Key& head, const v1::Cursor& cursor, std::uint64_t step) {
  head_ = head;
  cursor_ = cursor;
  step_ = step;
}

void Replica::give(v1::Reducer::Stub& reducer, const v1::PutStateRequest& first, Watch& watch) {
  if (!same(head_, first.head()))
    throw std::runtime_error("this worker is not at the head that the transfer names");
  patch(state_, model_.parameters());
  andon::give(reducer, first, state_, watch);
}

void Replica::receive(v1::Reducer::Stub& reducer, const v1::GetStateRequest& request,
                      const v1::StateTransfer& asked, Watch& watch) {
  std::string state = arrived_.receive(reducer, request, watch);
  install(state, model_.parameters());
  state_ = std::move(state);
  stand(asked.head(), asked.cursor(), asked.step());
}

}  // namespace andon
