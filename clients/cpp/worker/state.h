// A state is what a worker sends to a newcomer: the length of a JSON skeleton (uint64,
// little-endian), the skeleton, and safetensors; docs/protocol-data.md, section 18. A client reads
// the model's tensors and keeps the rest unchanged. When it sends the state, it puts in its own
// weights.
#pragma once
#include <string>
#include <vector>

#include "worker/digests.h"

namespace andon {

// Copies the weights out of a state. If it throws std::runtime_error, it copied none.
void install(const std::string& state, const std::vector<Tensor>& tensors);

// Writes the current weights into a received state; the rest of it is unchanged.
void patch(std::string& state, const std::vector<Tensor>& tensors);

// The state of a line that this worker bootstraps; `optimizers` is the skeleton's JSON.
std::string bootstrap_state(const std::vector<Tensor>& tensors, const std::string& optimizers);

}  // namespace andon
