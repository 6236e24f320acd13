// Channels, the token, and the inbox between the streams' threads and the worker's.
#pragma once
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
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

// A connection of its own, so that bulk never delays control. A folder holds ca.crt, who is
// trusted, and perhaps tls.crt and tls.key, what this worker shows; empty is plaintext.
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

inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The secret that a line may ask for: of ANDON_TOKEN_FILE, or ANDON_TOKEN.
inline std::string token() {
  const std::string file = environment("ANDON_TOKEN_FILE");
  if (file.empty()) return environment("ANDON_TOKEN");
  const std::string text = read_file(file);
  const char* spaces = " \t\r\n";
  const auto begin = text.find_first_not_of(spaces);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(spaces) + 1 - begin);
}

// A queue whose writers never wait: a worker must read while it writes (rule 16).
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

  // The next item, or false if none came in time.
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

// How a call ended, of which nothing more can be read. A message that is none ends the reading, and
// not the call: then it is cancelled here, or it would never end.
template <typename Call>
grpc::Status finish(Call& call, grpc::ClientContext& context) {
  auto ended = std::async(std::launch::async, [&call] { return call.Finish(); });
  if (ended.wait_for(std::chrono::seconds(1)) == std::future_status::timeout) context.TryCancel();
  return ended.get();
}

// What a stream brought to the worker's one loop.
struct Event {
  std::shared_ptr<v1::TrainResponse> control;
  std::shared_ptr<v1::ReduceResponse> answer;
  std::uint64_t exchange = 0;  // which one it came over
  grpc::Status status;         // how the stream ended, if neither of the above is there
};
using Inbox = Queue<Event>;

}  // namespace andon
