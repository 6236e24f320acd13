// The data plane: streams to the reducers, and one round's averages.
#pragma once
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.grpc.pb.h"
#include "worker/channel.h"

namespace andon {

// What a stream brought to the worker's one loop.
struct Event {
  std::shared_ptr<v1::TrainResponse> control;
  std::shared_ptr<v1::ReduceResponse> answer;
  std::uint64_t exchange = 0;  // which one it came over
  grpc::Status status;         // how the stream ended, if neither of the above is there
};
using Inbox = Queue<Event>;

// A run of elements of one block, and the reducer that averages it.
struct Chunk {
  int block;
  std::uint64_t offset, count;
  std::string address;
};

// One try at a step.
struct Round {
  v1::ShardAssignment work;
  std::vector<Chunk> chunks;
  std::map<std::pair<std::uint32_t, std::uint64_t>, const Chunk*> waiting;
  std::set<std::string> reducers;
  std::vector<std::vector<float>> averages;
  std::uint64_t samples = 0;
  double loss_sum = 0, total = -1;
  std::size_t silent = 0;  // reducers that say that everybody abstained
  bool held = false;

  // Cuts the blocks into chunks; throws std::runtime_error if the map of reducers can't be.
  void cut(const v1::Layout& layout, std::uint64_t size,
           const google::protobuf::RepeatedPtrField<v1::ReducerShare>& shares);
  // Puts one average in its place; throws if it does not agree with the others (rule 15).
  void take(const v1::AveragedBlock& average);
  bool complete() const { return waiting.empty() || silent == reducers.size(); }
  double norm() const;  // of the averages, in float64
};

// The worker's streams to the reducers. A void round's are thrown away with it (rule 16).
class Exchange {
 public:
  Exchange(std::uint64_t number, std::string home, std::string folder, v1::OpenRound opening, std::shared_ptr<Inbox> inbox);
  ~Exchange();

  // Sends a round's gradients, chunk by chunk, or one Abstain to each reducer. Never waits.
  void send(const Round& round, const std::vector<std::vector<float>>& gradients);

  const std::uint64_t number;

 private:
  struct Stream;
  Stream& to(const std::string& address);

  const std::string home_, folder_;
  const v1::OpenRound opening_;
  const std::shared_ptr<Inbox> inbox_;
  std::map<std::string, std::unique_ptr<Stream>> streams_;
};

}  // namespace andon
