// A state is what travels to a newcomer: the length of a JSON skeleton (uint64, little-endian), the
// skeleton, and safetensors; docs/protocol.md, section 18. A client takes the model's tensors out,
// keeps the rest as it came, and hands it on with its own weights in their place.
#pragma once
#include <string>
#include <vector>

#include "worker/digests.h"

namespace andon {

// Takes the weights out of a state: all of them, or none and throws std::runtime_error.
void install(const std::string& state, const std::vector<Tensor>& tensors);

// Puts the present weights into a state that came from elsewhere; the rest stays as it was.
void patch(std::string& state, const std::vector<Tensor>& tensors);

// The state of a line that this worker founds; `optimizers` is JSON, the skeleton's.
std::string found(const std::vector<Tensor>& tensors, const std::string& optimizers);

}  // namespace andon
