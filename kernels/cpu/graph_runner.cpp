// A lowered graph as an object: opened from a shared object, bound to weights, run without the interpreter lock.
//
// torch's own binding keeps the lock for the whole call, so a server's other threads stand still during a step.
// Methods of a custom class are called without it. Knows nothing about artifacts: the caller has verified the
// file and passes tensors of the right types, since a graph checks neither dtype nor shape of its inputs.

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

class CompiledGraph : public torch::CustomClassHolder {
 public:
  // `path` names a shared object; a file of the same stem ending in .json beside it lists its extern calls.
  explicit CompiledGraph(const std::string& path) : runner_(path, /*num_models=*/1) {}

  std::vector<std::string> constant_names() {
    std::vector<std::string> names;
    for (const auto& entry : runner_.getConstantNamesToOriginalFQNs()) {
      names.push_back(entry.first);
    }
    return names;
  }

  // Uses the tensors' memory as it is; the caller keeps them alive as long as this object.
  void bind(const c10::Dict<std::string, at::Tensor>& constants) {
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& entry : constants) {
      map.emplace(entry.key(), entry.value());
    }
    runner_.update_constant_buffer(
        map, /*use_inactive=*/false, /*validate_full_updates=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    return runner_.boxed_run(std::move(inputs));
  }

 private:
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
};

TORCH_LIBRARY_FRAGMENT(deepinfer, library) {
  library.class_<CompiledGraph>("CompiledGraph")
      .def(torch::init<const std::string&>())
      .def("constant_names", &CompiledGraph::constant_names)
      .def("bind", &CompiledGraph::bind)
      .def("run", &CompiledGraph::run);
}

}  // namespace
