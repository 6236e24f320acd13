// Both ends of a state transfer: docs/protocol.md, section 11.
#pragma once
#include <mutex>
#include <string>

#include "andon/v1/reducer.grpc.pb.h"

namespace andon {

// Ends a call when the control stream ends: a transfer must not outlive it.
class Watch {
 public:
  void follow(grpc::ClientContext* context) {
    const std::lock_guard lock(mutex_);
    context_ = context;
    if (over_ && context_ != nullptr) context_->TryCancel();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }

 private:
  std::mutex mutex_;
  grpc::ClientContext* context_ = nullptr;
  bool over_ = false;
};

// Sends what the other end lacks of `state`; throws std::runtime_error. `first` has the ticket.
void give(v1::Reducer::Stub& reducer, v1::PutStateRequest first, const std::string& state, Watch& watch);

// What has come of a state, over one transfer or several.
class Arrived {
 public:
  // The other end's state, whole and verified, or throws; what is cut off is kept for next time.
  std::string receive(v1::Reducer::Stub& reducer, v1::GetStateRequest request, Watch& watch);

 private:
  std::string data_, sha256_;
};

}  // namespace andon
