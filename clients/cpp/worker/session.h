// The control plane: one Train stream, from Join to its end. It is never resumed.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "andon/v1/coordinator.grpc.pb.h"
#include "worker/channel.h"
#include "worker/transfer.h"

namespace andon {

// The line does not take this worker: trying again is no use.
struct Refused : std::runtime_error {
  using runtime_error::runtime_error;
};

// This stream is of no use any more: join again.
struct Again : std::runtime_error {
  using runtime_error::runtime_error;
};

// Throws what the end of a control stream means: trying again changes it, or not.
[[noreturn]] void refuse(const grpc::Status& status, bool was_here);

// A thread reads the stream, and one writes what is queued, and heartbeats.
class Session {
 public:
  Session(const std::string& address, const std::string& tls, const v1::Join& join);
  ~Session();

  // Waits for the answer to Join, and begins to write; throws Refused or Again. `was_here` is a
  // worker that an earlier session was accepted for.
  v1::JoinAccepted accepted(bool was_here);

  // The next message, to be filled in; flush() queues it.
  v1::TrainRequest& send();
  void flush() { outgoing_.put(std::move(pending_)); }

  // Ends the writing, and waits a while for the coordinator to end the stream.
  void close();

  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  Watch watch;

 private:
  void start_writing(double heartbeat_s);

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Coordinator::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> call_;
  Queue<std::shared_ptr<v1::TrainRequest>> outgoing_;  // a null message ends the writing
  std::shared_ptr<v1::TrainRequest> pending_;
  std::thread reader_, writer_;
};

}  // namespace andon
