// Channels, and the queue from the streams' threads to the worker's thread.
#pragma once
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"
#include "worker/files.h"

namespace andon {

// Opens a separate connection, so that gradients never delay control messages. The folder `tls`
// holds ca.crt, which verifies the peer, and optionally tls.crt and tls.key, which identify this
// worker. If the path is empty, the connection is plaintext.
inline std::shared_ptr<grpc::Channel> open_channel(const std::string& address,
                                                   const std::filesystem::path& folder) {
  auto credentials = grpc::InsecureChannelCredentials();
  if (!folder.empty()) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = read_file(folder / "ca.crt");
    options.pem_cert_chain = read_file(folder / "tls.crt");
    options.pem_private_key = read_file(folder / "tls.key");
    credentials = grpc::SslCredentials(options);
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// A queue whose writers never block, because a worker must read while it writes (rule 16).
template <typename Item>
class Queue {
 public:
  void put(Item item) {
    {
      const std::lock_guard lock(mutex_);
      items_.push_back(std::move(item));
    }
    ready_.notify_all();
  }

  Item take() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [this] { return !items_.empty(); });
    return pop();
  }

  // Takes the next item; false if none arrives before the timeout.
  template <typename Time>
  bool take_until(Item& item, Time deadline) {
    std::unique_lock lock(mutex_);
    if (!ready_.wait_until(lock, deadline, [this] { return !items_.empty(); })) return false;
    item = pop();
    return true;
  }

 private:
  Item pop() {
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Item> items_;
};

// Returns the status of a call after its last read. A message that can't be parsed ends the reads
// but not the call, so the call is cancelled here; Finish would block forever otherwise.
template <typename Call>
grpc::Status finish(Call& call, grpc::ClientContext& context) {
  auto ended = std::async(std::launch::async, [&call] { return call.Finish(); });
  if (ended.wait_for(std::chrono::seconds(1)) == std::future_status::timeout) context.TryCancel();
  return ended.get();
}

// One event from a stream, for the worker's event loop.
struct Event {
  std::shared_ptr<v1::TrainResponse> control;
  std::shared_ptr<v1::ReduceResponse> answer;
  std::uint64_t exchange = 0;  // the exchange that it arrived on
  grpc::Status status;         // how the stream ended, if both messages are absent
  bool corrupt = false;        // the answer is an average that does not match its checksum
};
using Inbox = Queue<Event>;

}  // namespace andon
