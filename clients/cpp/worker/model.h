// What a worker trains: the part that a script brings.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "worker/digests.h"

namespace andon {

class Model {
 public:
  virtual ~Model() = default;
  // All parameters, in the order of the state dict. They are modified in place.
  virtual std::vector<Tensor> parameters() = 0;
  // The mean gradient over the samples, as one flat vector for each block. Adds the samples' losses
  // to `loss_sum`.
  virtual std::vector<std::vector<float>> gradient(const std::vector<std::uint64_t>& samples, double& loss_sum) = 0;
  // The bytes that `gradient` reads of one sample: workers compare their hashes.
  virtual std::string sample(std::uint64_t index) = 0;
  // Updates the weights with the averages of a committed step.
  virtual void apply(const std::vector<std::vector<float>>& averages) = 0;
};

}  // namespace andon
