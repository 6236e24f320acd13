// The data plane: streams to the reducers.
#pragma once
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "andon/v1/reducer.grpc.pb.h"
#include "worker/channel.h"
#include "worker/round.h"

namespace andon {

// The capability of reducers that make trimmed means.
inline constexpr char kTrimmed[] = "trimmed.v1";

// The worker's streams to the reducers. If a round is void, its streams are discarded (rule 16).
class Exchange {
 public:
  Exchange(std::uint64_t number, std::string home, std::string folder, v1::OpenRound opening, std::shared_ptr<Inbox> inbox);
  ~Exchange();

  // Queues what a round contributes to its present exchange in chunks, or one Abstain for each reducer. Never blocks. If the
  // opening names capabilities, nothing leaves for a reducer that lacks one of them.
  void send(const Round& round);

  // Which of the opening's capabilities a reducer lacks; empty: none.
  std::string lacks(const v1::RoundOpened& opened) const;

  const std::uint64_t number;

 private:
  struct Stream;
  Stream& to(const std::string& address);

  const std::string home_, folder_;
  const v1::OpenRound opening_;
  const v1::Operation operation_;
  const std::shared_ptr<Inbox> inbox_;
  std::map<std::string, std::unique_ptr<Stream>> streams_;
};

}  // namespace andon
