// Checks the conformance vectors for the sample order, layout digests, weights' digests, checksums,
// the tree over grains and attestations.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>

#include <iostream>

#include "worker/checksums.h"
#include "worker/digests.h"
#include "worker/files.h"
#include "worker/order.h"
#include "worker/tree.h"
#include "worker/verification.h"

namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

int checked = 0, wrong = 0;

void expect(bool holds, const std::string& what) {
  ++checked;
  if (!holds) {
    ++wrong;
    std::cerr << "wrong: " << what << "\n";
  }
}

Struct vectors(const std::string& folder, const std::string& name) {
  Struct object;
  const std::string path = folder + "/" + name;
  if (!google::protobuf::util::JsonStringToMessage(andon::read_file(path), &object).ok())
    throw std::runtime_error("can't read " + path);
  return object;
}

const Value& at(const Struct& object, const char* name) { return object.fields().at(name); }

const std::string& text(const Struct& object, const char* name) { return at(object, name).string_value(); }

std::uint64_t number(const std::string& decimal) { return std::stoull(decimal); }

const auto& list(const Struct& object, const char* name) { return at(object, name).list_value().values(); }

std::string bytes(const std::string& hex) {
  std::string found;
  for (std::size_t i = 0; i < hex.size(); i += 2) found += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return found;
}

void check_order(const Struct& file) {
  for (const auto& each : list(file, "splitmix64")) {
    const Struct& one = each.struct_value();
    expect(andon::splitmix64(number(text(one, "state"))) == number(text(one, "output")), "splitmix64");
  }
  for (const auto& each : list(file, "orders")) {
    const Struct& one = each.struct_value();
    const andon::Order order(number(text(one, "seed")), number(text(one, "epoch")), number(text(one, "size")));
    const auto& samples = list(one, "samples");
    for (int i = 0; i < samples.size(); ++i) {
      const std::uint64_t position = number(list(one, "positions")[i].string_value());
      expect(order.at(position) == number(samples[i].string_value()), "order of " + text(one, "size"));
    }
  }
}

void check_layout(const Struct& file) {
  for (const auto& each : list(file, "layouts")) {
    const Struct& one = each.struct_value();
    andon::v1::Layout layout;
    std::uint64_t elements = 0;
    for (const auto& block_value : list(one, "blocks")) {
      const Struct& given = block_value.struct_value();
      auto* block = layout.add_blocks();
      auto kind = andon::v1::BLOCK_KIND_UNSPECIFIED;
      expect(andon::v1::BlockKind_Parse("BLOCK_KIND_" + text(given, "kind"), &kind), "a kind");
      block->set_kind(kind);
      block->set_name(text(given, "name"));
      for (const auto& part_value : list(given, "components")) {
        const Struct& part = part_value.struct_value();
        auto* component = block->add_components();
        component->set_name(text(part, "name"));
        for (const auto& size : list(part, "shape")) component->add_shape(static_cast<std::uint64_t>(size.number_value()));
        auto dtype = andon::v1::DTYPE_UNSPECIFIED;
        expect(andon::v1::Dtype_Parse("DTYPE_" + text(part, "dtype"), &dtype), "a dtype");
        component->set_dtype(dtype);
      }
      elements += andon::elements(*block);
    }
    expect(elements == at(one, "elements").number_value(), "elements of layout " + text(one, "name"));
    expect(andon::layout_digest(layout) == bytes(text(one, "digest")), "digest of layout " + text(one, "name"));
  }
}

void check_weights(const Struct& file) {
  for (const auto& each : list(file, "weights")) {
    const Struct& one = each.struct_value();
    std::string all;
    for (const auto& value : list(one, "tensors")) {
      const Struct& tensor = value.struct_value();
      std::vector<std::uint64_t> shape;
      for (const auto& size : list(tensor, "shape")) shape.push_back(static_cast<std::uint64_t>(size.number_value()));
      all += andon::weights_text(text(tensor, "name"), text(tensor, "dtype"), andon::decimals(shape), bytes(text(tensor, "bytes")));
    }
    expect(andon::sha256(all) == bytes(text(one, "sha256")), "digest of weights " + text(one, "name"));
  }
}

std::uint64_t whole(const Value& value) { return static_cast<std::uint64_t>(value.number_value()); }

andon::Node node(const Value& span) {
  return {whole(span.list_value().values(0)), whole(span.list_value().values(1))};
}

void check_cover(const Struct& one) {
  andon::Owned owned;
  for (const auto& run : list(one, "runs"))
    for (auto grain = node(run).first; grain < node(run).stop; ++grain) owned[grain];
  const auto found = andon::cover({0, whole(at(one, "grains"))}, owned);
  const auto& expected = list(one, "nodes");
  bool same = static_cast<int>(found.size()) == expected.size();
  for (std::size_t i = 0; same && i < found.size(); ++i)
    same = found[i].first == node(expected[i]).first && found[i].stop == node(expected[i]).stop;
  expect(same, "cover of " + text(one, "name"));
}

void check_sums(const Struct& one) {
  const auto& grains = list(one, "grains");
  const auto leaf = [&](andon::Node node) -> std::optional<andon::Contribution> {
    if (node.stop - node.first > 1) return {};
    const Struct& grain = grains[node.first].struct_value();
    const std::string raw = bytes(text(grain, "gradient"));
    andon::Contribution leaf;
    leaf.weight = at(grain, "weight").number_value();
    leaf.gradients = {std::vector<float>(whole(at(one, "element_count")), -0.0f)};
    if (leaf.weight == 0) return leaf;
    andon::from_bytes(leaf.gradients[0].data(), raw.data(), raw.size() / 4);
    andon::scale(leaf, whole(at(one, "grain")), grains.size());
    return leaf;
  };
  for (const auto& rank : list(one, "ranks"))
    for (const auto& each : rank.list_value().values()) {
      const Struct& wanted = each.struct_value();
      const auto sum = andon::sum(node(at(wanted, "node")), leaf);
      const auto& numbers = sum.gradients[0];
      expect(sum.weight == at(wanted, "weight").number_value() &&
                 andon::to_bytes(numbers.data(), numbers.size()) == bytes(text(wanted, "payload")),
             "a node of " + text(one, "name"));
    }
  auto root = andon::sum({0, static_cast<std::uint64_t>(grains.size())}, leaf);
  andon::divide(root, root.weight, whole(at(one, "grain")), grains.size());
  const auto& mean = root.gradients[0];
  expect(andon::to_bytes(mean.data(), mean.size()) == bytes(text(at(one, "answer").struct_value(), "payload")),
         "the mean of " + text(one, "name"));
}

void check_tree(const Struct& file) {
  for (const auto& each : list(file, "covers")) check_cover(each.struct_value());
  for (const auto& each : list(file, "means")) check_sums(each.struct_value());
}

void check_attestations(const Struct& file) {
  for (const auto& each : list(file, "digests")) {
    const Struct& one = each.struct_value();
    std::string all;
    const auto& components = list(one, "components");
    for (int i = 0; i < components.size(); ++i) {
      const auto hash = andon::hash128(bytes(components[i].string_value()));  // an absent one has no bytes
      expect(hash == bytes(list(one, "hashes")[i].string_value()), "a component of " + text(one, "name"));
      all += hash;
    }
    expect(andon::hash128(all) == bytes(text(one, "digest")), "the digest of " + text(one, "name"));
  }
}

template <typename Message>
Message golden(const std::string& folder, const std::string& name) {
  Message message;
  if (!message.ParseFromString(andon::read_file(folder + "/messages/" + name + ".checksums.binpb")))
    throw std::runtime_error("can't parse " + name);
  return message;
}

void check_checksums(const std::string& folder) {
  for (const std::string name : {"ReduceRequest.block_gradient", "ReduceRequest.abstain", "ReduceRequest.block_gradient.node"}) {
    const auto given = golden<andon::v1::ReduceRequest>(folder, name);
    auto made = given;
    made.clear_header_crc32c();
    made.clear_crc32c();
    andon::seal(made);
    expect(google::protobuf::util::MessageDifferencer::Equals(made, given), "checksums of " + name);
  }
  auto answer = golden<andon::v1::ReduceResponse>(folder, "ReduceResponse.averaged_block");
  expect(andon::header_intact(answer) && andon::payload_intact(answer), "checksums of an average");
  (*answer.mutable_averaged_block()->mutable_payload())[0] ^= 1;
  expect(andon::header_intact(answer) && !andon::payload_intact(answer), "a changed payload is noticed");
  answer.mutable_averaged_block()->set_total_weight(1);
  expect(!andon::header_intact(answer), "a changed header is noticed");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "conformance";
  check_order(vectors(folder, "order.json"));
  check_layout(vectors(folder, "layout.json"));
  check_weights(vectors(folder, "weights.json"));
  check_tree(vectors(folder, "tree.json"));
  check_attestations(vectors(folder, "attestations.json"));
  check_checksums(folder);
  std::cout << checked << " vectors, " << wrong << " wrong\n";
  return wrong > 0;
}
