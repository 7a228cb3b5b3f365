// Runs what export.py packed, in a process without Python:
//
//   aoti_eval LIBRARY score OUT/score.pt2 TEXT                  perplexity of a text
//   aoti_eval LIBRARY train OUT/step.pt2 OUT/parameters.pt TEXT  losses of some steps of SGD
//
// LIBRARY is libxent_ops.so, which has the operators that packages for the CPU call: python -m xent_ops library-path.
// Packages for CUDA hold the kernels themselves; give none as LIBRARY.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

using torch::inductor::AOTIModelPackageLoader;

// As in export.py.
constexpr int64_t LENGTH = 64;
constexpr int64_t BATCH = 16;
constexpr int STEPS = 5;
constexpr double RATE = 0.01;
constexpr int64_t IGNORED = -100;

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Windows {
  at::Tensor ids;
  at::Tensor targets;

  Windows(const std::string& path, const at::Device& device) {
    const std::vector<char> text = read(path);
    const int64_t predicted = static_cast<int64_t>(text.size()) - 1;
    if (predicted < 1) {
      throw std::runtime_error(path + " is too short to score: it needs two bytes");
    }
    const int64_t number = (predicted + LENGTH - 1) / LENGTH;
    ids = torch::zeros({number * LENGTH}, torch::kLong);
    targets = torch::full({number * LENGTH}, IGNORED, torch::kLong);
    for (int64_t i = 0; i < predicted; ++i) {
      ids.data_ptr<int64_t>()[i] = static_cast<unsigned char>(text[i]);
      targets.data_ptr<int64_t>()[i] = static_cast<unsigned char>(text[i + 1]);
    }
    ids = ids.view({number, LENGTH}).to(device);
    targets = targets.view({number, LENGTH}).to(device);
  }
};

at::Device device_of(AOTIModelPackageLoader& package) {
  return at::Device(package.get_metadata().at("AOTI_DEVICE_KEY"));
}

void score(const std::string& package, const std::string& text) {
  AOTIModelPackageLoader model(package);
  const Windows windows(text, device_of(model));
  double total = 0.0;
  const auto ids = windows.ids.split(BATCH), targets = windows.targets.split(BATCH);
  for (size_t i = 0; i < ids.size(); ++i) {
    total += model.run({ids[i], targets[i]})[0].item<double>();
  }
  std::printf("perplexity %.6f\n", std::exp(total / windows.targets.ne(IGNORED).sum().item<double>()));
}

void train(const std::string& package, const std::string& start, const std::string& text) {
  AOTIModelPackageLoader step(package);
  const at::Device device = device_of(step);
  const at::IValue saved = torch::pickle_load(read(start));
  std::vector<at::Tensor> parameters;
  for (const at::IValue& parameter : saved.toListRef()) {
    parameters.push_back(parameter.toTensor().to(device));
  }
  const Windows windows(text, device);
  for (int i = 0; i < STEPS; ++i) {
    std::vector<at::Tensor> inputs{windows.ids.narrow(0, 0, BATCH), windows.targets.narrow(0, 0, BATCH)};
    inputs.insert(inputs.end(), parameters.begin(), parameters.end());
    const std::vector<at::Tensor> outputs = step.run(inputs);  // the loss, then a gradient for each parameter
    for (size_t p = 0; p < parameters.size(); ++p) {
      parameters[p] = parameters[p] - RATE * outputs[p + 1];
    }
    std::printf("loss %.6f\n", outputs[0].item<double>());
  }
}

int main(int count, char** values) {
  const std::vector<std::string> arguments(values + 1, values + count);
  try {
    const std::string command = arguments.size() > 1 ? arguments[1] : "";
    if (!(command == "score" && arguments.size() == 4) && !(command == "train" && arguments.size() == 5)) {
      throw std::runtime_error("usage: aoti_eval LIBRARY score PACKAGE TEXT | train PACKAGE PARAMETERS TEXT");
    }
    if (arguments[0] != "none" && !dlopen(arguments[0].c_str(), RTLD_NOW)) {
      throw std::runtime_error(dlerror());
    }
    const c10::InferenceMode guard;  // gradients are outputs of the package: autograd has nothing to do
    command == "score" ? score(arguments[2], arguments[3]) : train(arguments[2], arguments[3], arguments[4]);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    if (std::string(error.what()).find("xent::") != std::string::npos) {
      std::fprintf(stderr, "The package calls operators of xent_ops: give libxent_ops.so as LIBRARY "
                           "(python -m xent_ops library-path prints its path).\n");
    }
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
