// Both ends of a state transfer: docs/protocol-data.md, section 11.
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

// Sends the part of `state` that the other end lacks; throws std::runtime_error. `first` has the ticket.
void give(v1::Reducer::Stub& reducer, v1::PutStateRequest first, const std::string& state, Watch& watch);

// The received part of a state, over one or several transfers.
class Arrived {
 public:
  // Returns the other end's state, complete and verified, or throws. A partial state is kept, and the
  // next transfer continues it.
  std::string receive(v1::Reducer::Stub& reducer, v1::GetStateRequest request, Watch& watch);

 private:
  std::string data_, sha256_;
};

}  // namespace andon
