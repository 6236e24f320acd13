#include "worker/transfer.h"

#include <stdexcept>

#include "worker/channel.h"
#include "worker/digests.h"

namespace andon {
namespace {

constexpr std::size_t kPieceBytes = 1 << 20;

// Registers a call's context for cancellation, for as long as this object exists.
class Following {
 public:
  Following(Watch& watch, grpc::ClientContext& context) : watch_(watch) { watch_.follow(&context); }
  ~Following() { watch_.follow(nullptr); }

 private:
  Watch& watch_;
};

void require(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error("the other end of the transfer is gone: " + status.error_message());
}

}  // namespace

void give(v1::Reducer::Stub& reducer, v1::PutStateRequest first, const std::string& state, Watch& watch) {
  grpc::ClientContext context;
  const auto call = reducer.PutState(&context);
  const Following following(watch, context);
  first.set_size_bytes(state.size());
  first.set_sha256(sha256(state));
  v1::PutStateResponse answer;
  if (!call->Write(first) || !call->Read(&answer)) {
    require(call->Finish());
    throw std::runtime_error("the other end of the transfer requested nothing");
  }
  const bool fits = answer.offset() <= state.size();
  for (std::size_t at = answer.offset(); at < state.size(); at += kPieceBytes) {
    v1::PutStateRequest piece;
    piece.set_payload(state.substr(at, kPieceBytes));
    if (!call->Write(piece)) break;  // Finish reports the reason
  }
  call->WritesDone();
  if (!fits) context.TryCancel();
  require(call->Finish());
}

std::string Arrived::receive(v1::Reducer::Stub& reducer, v1::GetStateRequest request, Watch& watch) {
  grpc::ClientContext context;
  request.set_offset(data_.size());
  request.set_sha256(sha256_);
  const auto call = reducer.GetState(&context, request);
  const Following following(watch, context);
  v1::GetStateResponse piece;
  std::uint64_t size = 0;
  bool begun = false, fits = true;
  while (fits && call->Read(&piece)) {
    if (!begun) {
      begun = true;
      size = piece.size_bytes();
      if (piece.sha256() != sha256_ || piece.offset() != data_.size()) data_.clear();
      sha256_ = piece.sha256();
      fits = piece.offset() == data_.size();
    }
    data_ += piece.payload();
    fits = fits && data_.size() <= size;
  }
  if (!fits) context.TryCancel();
  const grpc::Status status = finish(*call, context);
  if (fits) require(status);
  std::string state, announced;
  state.swap(data_);
  announced.swap(sha256_);
  if (!fits || state.size() != size || sha256(state) != announced)
    throw std::runtime_error("the received state does not match the announced size or digest");
  return state;
}

}  // namespace andon
