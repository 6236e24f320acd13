#include "worker/state.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cstring>
#include <stdexcept>

namespace andon {
namespace {

// The end of the part whose length field is at byte `at`.
std::size_t past(const std::string& state, std::size_t at) {
  std::uint64_t length;
  if (state.size() < at + 8) throw std::runtime_error("the state is cut short");
  std::memcpy(&length, state.data() + at, 8);
  if (length > state.size() - at - 8) throw std::runtime_error("the state is cut short");
  return at + 8 + length;
}

using google::protobuf::Struct;
using google::protobuf::Value;
using google::protobuf::util::JsonStringToMessage;

const Value& field(const Struct& object, const std::string& name) {
  const auto found = object.fields().find(name);
  if (found == object.fields().end()) throw std::runtime_error("the state has no " + name);
  return found->second;
}

std::vector<std::uint64_t> numbers(const Value& list) {
  std::vector<std::uint64_t> found;
  for (const auto& value : list.list_value().values())
    found.push_back(static_cast<std::uint64_t>(value.number_value()));
  return found;
}

// The offset of each tensor's bytes in a state. Validates all tensors before it returns.
std::vector<std::size_t> places(const std::string& state, const std::vector<Tensor>& tensors) {
  const std::size_t header = past(state, 0), data = past(state, header);
  Struct entries;
  if (!JsonStringToMessage(state.substr(header + 8, data - header - 8), &entries).ok())
    throw std::runtime_error("the state has no safetensors header");
  std::vector<std::size_t> found;
  for (const auto& tensor : tensors) {
    const Struct& entry = field(entries, "model." + tensor.name).struct_value();
    const auto offsets = numbers(field(entry, "data_offsets"));
    if (field(entry, "dtype").string_value() != "F32" || numbers(field(entry, "shape")) != tensor.shape)
      throw std::runtime_error("the state's " + tensor.name + " has another type or shape");
    if (offsets.size() != 2 || offsets[1] < offsets[0] || offsets[1] > state.size() - data ||
        offsets[1] - offsets[0] != 4 * tensor.data->size())
      throw std::runtime_error("the state's " + tensor.name + " lies outside it");
    found.push_back(data + offsets[0]);
  }
  return found;
}

// JSON, preceded by its length and padded with spaces, so that the next part is aligned.
std::string part(std::string text) {
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

}  // namespace

void install(const std::string& state, const std::vector<Tensor>& tensors) {
  const auto at = places(state, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    from_bytes(tensors[i].data->data(), state.data() + at[i], tensors[i].data->size());
}

void patch(std::string& state, const std::vector<Tensor>& tensors) {
  const auto at = places(state, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string bytes = to_bytes(tensors[i].data->data(), tensors[i].data->size());
    state.replace(at[i], bytes.size(), bytes);
  }
}

std::string bootstrap_state(const std::vector<Tensor>& tensors, const std::string& optimizers) {
  std::string names, entries, data;
  for (const auto& tensor : tensors) {
    const std::string comma = names.empty() ? "" : ", ", name = "model." + tensor.name;
    const std::string begin = std::to_string(data.size());
    data += to_bytes(tensor.data->data(), tensor.data->size());
    names += comma + "[\"" + tensor.name + "\", {\"tensor\": \"" + name + "\"}]";
    entries += comma + "\"" + name + "\": {\"dtype\": \"F32\", \"shape\": [" +
               decimals(tensor.shape) + "], \"data_offsets\": [" + begin + ", " +
               std::to_string(data.size()) + "]}";
  }
  const std::string skeleton = "{\"dict\": [[\"model\", {\"dict\": [" + names +
                               "]}], [\"optimizers\", " + optimizers +
                               "], [\"registered\", {\"dict\": []}]]}";
  return part(skeleton) + part("{" + entries + "}") + data;
}

}  // namespace andon
