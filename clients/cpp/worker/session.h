// The control plane: one Train stream, from Join to its end. A stream is never resumed.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "andon/v1/coordinator.grpc.pb.h"
#include "worker/channel.h"
#include "worker/transfer.h"

namespace andon {

// This stream can't continue; the worker must join again.
struct Again : std::runtime_error {
  using runtime_error::runtime_error;
};

// Throws Again if a new stream may help after this status, else Refused.
[[noreturn]] void refuse(const grpc::Status& status, bool was_here);

// One thread reads the stream; another writes queued messages and heartbeats.
class Session {
 public:
  Session(const std::string& address, const std::string& tls, const v1::Join& join);
  ~Session();

  // Waits for the answer to Join, then starts to write; throws Refused or Again. `was_here` says
  // whether an earlier session of this worker was accepted.
  v1::JoinAccepted accepted(bool was_here);

  // The next message, for the caller to fill in; flush() queues it.
  v1::TrainRequest& send();
  void flush() { outgoing_.put(std::move(pending_)); }

  // Stops writing, then waits a limited time for the coordinator to end the stream.
  void close();

  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  Watch watch;

 private:
  void start_writing(double heartbeat_s);

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> call_;
  Queue<std::shared_ptr<v1::TrainRequest>> outgoing_;  // a null message ends the writing thread
  std::shared_ptr<v1::TrainRequest> pending_;
  std::thread reader_, writer_;
};

}  // namespace andon
