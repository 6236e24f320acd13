// Logistic regression without a framework; trains with examples/logistic.py and the other clients.
//
//   ANDON_ADDRESS=127.0.0.1:7070 ANDON_RUN_ID=demo build/logistic --steps 50
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "worker/worker.h"

namespace {

constexpr int kFeatures = 8, kGroups = 5, kBatch = 32, kSeed = 11;
constexpr float kRate = 0.1f;
// One optimizer with one group of two parameters, as examples/logistic.py has it.
constexpr char kOptimizers[] =
    R"([{"dict": [["state", {"dict": []}],
        ["param_groups", [{"dict": [["lr", 0.1], ["params", [0, 1]]]}]]]}])";

struct Sample {
  std::vector<float> features;
  int group;
  double label;
};

// The log-odds of a label: linear in the features, plus an offset for each group.
class Logistic : public andon::Model {
 public:
  explicit Logistic(std::vector<Sample> data) : data_(std::move(data)) {
    for (int i = 0; i < kFeatures; ++i) linear[i] = 0.01f * static_cast<float>(i + 1);
  }

  std::size_t samples() const { return data_.size(); }

  std::vector<andon::Tensor> parameters() override {
    return {{"linear.weight", {1, kFeatures}, &linear}, {"group.weight", {kGroups, 1}, &group}};
  }

  std::vector<std::vector<float>> gradient(const std::vector<std::uint64_t>& samples, double& loss_sum) override {
    std::vector<double> linear_sum(kFeatures), group_sum(kGroups);
    for (const auto index : samples) {
      const Sample& one = data_[index];
      double score = group[one.group];
      for (int i = 0; i < kFeatures; ++i) score += static_cast<double>(linear[i]) * one.features[i];
      loss_sum += std::max(score, 0.0) - score * one.label + std::log1p(std::exp(-std::abs(score)));
      const double fault = 1 / (1 + std::exp(-score)) - one.label;
      for (int i = 0; i < kFeatures; ++i) linear_sum[i] += fault * one.features[i];
      group_sum[one.group] += fault;
    }
    const auto mean = [count = static_cast<double>(samples.size())](const std::vector<double>& sums) {
      std::vector<float> means;
      for (const double sum : sums) means.push_back(static_cast<float>(sum / count));
      return means;
    };
    return {mean(group_sum), mean(linear_sum)};
  }

  std::string sample(std::uint64_t index) override {
    auto numbers = data_[index].features;
    numbers.push_back(static_cast<float>(data_[index].group));
    numbers.push_back(static_cast<float>(data_[index].label));
    return andon::to_bytes(numbers.data(), numbers.size());
  }

  void apply(const std::vector<std::vector<float>>& averages) override {
    std::vector<float>* weights[] = {&group, &linear};
    for (int block = 0; block < 2; ++block)
      for (std::size_t i = 0; i < weights[block]->size(); ++i) {
        const float step = kRate * averages[block][i];  // rounded: -ffp-contract=off
        (*weights[block])[i] = (*weights[block])[i] - step;
      }
  }

  std::vector<float> linear = std::vector<float>(kFeatures), group = std::vector<float>(kGroups);

 private:
  const std::vector<Sample> data_;
};

// In sending order: the reverse of the parameters'.
andon::v1::Layout layout() {
  andon::v1::Layout layout;
  const auto add = [&](andon::v1::BlockKind kind, const char* name, const char* parameter, int rows, int columns) {
    auto* block = layout.add_blocks();
    block->set_kind(kind);
    block->set_name(name);
    auto* component = block->add_components();
    component->set_name(parameter);
    component->add_shape(rows);
    component->add_shape(columns);
    component->set_dtype(andon::v1::DTYPE_FLOAT32);
  };
  add(andon::v1::BLOCK_KIND_EMBEDDING, "group", "group.weight", kGroups, 1);
  add(andon::v1::BLOCK_KIND_OTHER, "linear.weight", "linear.weight", 1, kFeatures);
  return layout;
}

std::vector<Sample> load(const std::string& path) {
  std::istringstream lines(andon::read_file(path));
  std::vector<Sample> data;
  for (std::string line; std::getline(lines, line);) {
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream numbers(line);
    Sample one;
    for (int number, i = 0; i < kFeatures && numbers >> number; ++i)
      one.features.push_back(static_cast<float>(number) / 16);
    numbers >> one.group >> one.label;
    data.push_back(one);
  }
  if (data.empty()) throw std::runtime_error("no samples in " + path + ": name them with --data FILE");
  return data;
}

std::string hex(const std::string& bytes) {
  std::ostringstream text;
  for (const unsigned char byte : bytes) text << std::hex << std::setw(2) << std::setfill('0') << int{byte};
  return text.str();
}

void train(int argc, char** argv) {
  std::string steps = "50", grain = andon::environment("ANDON_SAME_BITS") == "1" ? "3" : "0", path = "clients/data/samples.csv";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--steps") steps = argv[i + 1];
    if (std::string(argv[i]) == "--grain") grain = argv[i + 1];  // of so many samples; 0: none
    if (std::string(argv[i]) == "--data") path = argv[i + 1];
  }
  const std::string slot = andon::environment("RANK");
  Logistic model(load(path));
  andon::Config config;
  config.address = andon::environment("ANDON_ADDRESS");
  config.run_id = andon::environment("ANDON_RUN_ID");
  config.tls = andon::environment("ANDON_TLS_DIR");
  config.token = andon::token();
  if (!slot.empty()) config.slot = std::stoul(slot);
  if (config.address.empty())
    throw std::runtime_error("ANDON_ADDRESS is not set: start a line with `andon serve`, and name it there");
  config.layout = layout();
  config.plan.set_dataset_size(model.samples());
  config.plan.set_global_batch(kBatch);
  config.plan.set_seed(kSeed);
  config.plan.set_total_steps(std::stoull(steps));
  config.plan.set_grain(std::stoul(grain));
  config.optimizers = kOptimizers;
  andon::Worker worker(config, model);
  worker.run();
  const std::string weights = andon::to_bytes(model.linear.data(), kFeatures) + andon::to_bytes(model.group.data(), kGroups);
  std::printf("{\"step\": %llu, \"loss\": %.17g, \"digest\": \"%s\", \"weights\": \"%s\"}\n",
              static_cast<unsigned long long>(worker.step()), worker.loss(),
              hex(andon::weights_digest(model.parameters())).c_str(), hex(weights).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(argc, argv);
    return 0;
  } catch (const andon::Refused& error) {
    std::cerr << "cpp: the line refused this worker: " << error.what() << "\n";
    return 4;
  } catch (const andon::Lost& error) {
    std::cerr << "cpp: the line is lost: " << error.what() << "\n";
    return 5;
  } catch (const std::exception& error) {
    std::cerr << "cpp: " << error.what() << "\n";
    return 1;
  }
}
