#include "program.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

constexpr const char* NAME = "program";
constexpr size_t LINE = 64;

// Operations of MLX that give their input's memory another shape.
bool only_reshapes(const mx::array& a) {
  const std::string_view name = a.primitive().name();
  return name == "Reshape" || name == "Flatten" || name == "Unflatten" || name == "ExpandDims" ||
         name == "Squeeze";
}

}  // namespace

class Recorder {
 public:
  Recorder(const std::vector<mx::array>& inputs, const std::vector<mx::array>& before,
           const std::vector<mx::array>& outputs, const std::vector<mx::array>& after)
      : program_(std::make_shared<Program>()) {
    program_->inputs_ = inputs.size();
    for (const auto& a : inputs) add_input(a);
    for (const auto& a : before) add_input(a);
    for (const auto& a : outputs) visit(a);
    for (const auto& a : after) visit(a);
    for (const auto& a : outputs) add_output(a);
    place();
    for (size_t i = 0; i < after.size(); i++) {
      const Value& value = values_[value_of_[after[i].id()]];
      if (value.where != Program::Where::input || value.at != inputs.size() + i)
        refuse(NAME, "its state isn't written in place");
    }
  }

  std::shared_ptr<Program> program() { return program_; }

 private:
  struct Value {
    Program::Where where;
    size_t at, bytes;
    size_t last_use = 0;  // the step after which nobody needs it
    size_t uses = 0;
  };
  struct Node {
    std::shared_ptr<const Work> work;
    std::vector<int> starts_as;
    std::vector<size_t> in, out;  // values
  };

  void add_input(const mx::array& a) {
    program_->input_shapes_.push_back(a.shape());
    program_->input_types_.push_back(a.dtype());
    if (!value_of_.emplace(a.id(), values_.size()).second) refuse(NAME, "an input is given twice");
    values_.push_back({Program::Where::input, values_.size(), 0});
  }

  size_t visit(const mx::array& a) {
    if (const auto known = value_of_.find(a.id()); known != value_of_.end()) return known->second;
    if (!a.has_primitive()) return constant(a);
    if (only_reshapes(a)) return value_of_[a.id()] = visit(a.inputs()[0]);
    const auto* op = dynamic_cast<const Op*>(&a.primitive());
    if (!op) refuse(NAME, std::string("there is no native kernel for ") + a.primitive().name());
    Node node{op->work(), op->starts_as(), {}, {}};
    for (const auto& input : a.inputs()) node.in.push_back(visit(input));
    for (const size_t value : node.in) {
      values_[value].last_use = nodes_.size();
      values_[value].uses++;
    }
    for (const auto& output : a.outputs()) {
      value_of_[output.id()] = values_.size();
      node.out.push_back(values_.size());
      values_.push_back({Program::Where::memory, 0, output.nbytes()});
    }
    nodes_.push_back(std::move(node));
    return value_of_[a.id()];
  }

  size_t constant(const mx::array& a) {
    if (!a.is_available() || !a.flags().row_contiguous)
      refuse(NAME, "a constant of shape " + text(a.shape()) + " isn't evaluated, or is a view");
    values_.push_back({Program::Where::constant, program_->constants_.size(), 0});
    program_->constants_.push_back(a);
    return value_of_[a.id()] = values_.size() - 1;
  }

  void add_output(const mx::array& a) {
    Value& value = values_[value_of_[a.id()]];
    if (value.where != Program::Where::memory)
      refuse(NAME, "an output is an input or a constant, or is asked for twice");
    value.where = Program::Where::output;
    value.at = program_->outputs_.size();
    program_->outputs_.push_back({a.shape(), a.dtype(), -1});
  }

  // What is written in place must belong to the state, and nobody else may read what it was.
  void write_in_place(const Node& node, size_t output, int source) {
    const Value& from = values_[node.in[source]];
    Value& to = values_[node.out[output]];
    if (from.where != Program::Where::input || from.at < program_->inputs_ || from.uses != 1 ||
        to.where != Program::Where::memory)
      refuse(NAME, "something is written in place that isn't part of its state");
    to.where = Program::Where::input;
    to.at = from.at;
  }

  // Gives every intermediate result room in one piece of memory, that of results which are done
  // with.
  void place() {
    std::multimap<size_t, size_t> free;  // bytes -> where
    size_t end = 0;
    for (size_t i = 0; i < nodes_.size(); i++) {
      Node& node = nodes_[i];
      for (size_t j = 0; j < node.out.size(); j++) {
        Value& value = values_[node.out[j]];
        if (node.starts_as[j] >= 0) write_in_place(node, j, node.starts_as[j]);
        if (value.where != Program::Where::memory) continue;
        const size_t bytes = (value.bytes + LINE - 1) / LINE * LINE;
        if (const auto room = free.find(bytes); room != free.end()) {
          value.at = room->second;
          free.erase(room);
        } else {
          value.at = end;
          end += bytes;
        }
        value.last_use = std::max(value.last_use, i);
      }
      Program::Step step{node.work, places(node.in), places(node.out)};
      program_->steps_.push_back(std::move(step));
      release(node.in, i, free);
      release(node.out, i, free);
    }
    program_->memory_.resize(end + LINE);
  }

  void release(const std::vector<size_t>& values, size_t now, std::multimap<size_t, size_t>& free) {
    for (const size_t v : values) {
      Value& value = values_[v];
      if (value.where != Program::Where::memory || value.last_use != now || value.bytes == 0)
        continue;
      free.emplace((value.bytes + LINE - 1) / LINE * LINE, value.at);
      value.bytes = 0;  // once, though a step may read it twice
    }
  }

  std::vector<Program::Place> places(const std::vector<size_t>& values) const {
    std::vector<Program::Place> out;
    for (const size_t v : values) out.push_back({values_[v].where, values_[v].at});
    return out;
  }

  std::shared_ptr<Program> program_;
  std::vector<Value> values_;
  std::vector<Node> nodes_;
  std::unordered_map<std::uintptr_t, size_t> value_of_;
};

std::shared_ptr<Program> Program::record(const std::vector<mx::array>& inputs,
                                         const std::vector<mx::array>& before,
                                         const std::vector<mx::array>& outputs,
                                         const std::vector<mx::array>& after) {
  if (before.size() != after.size()) refuse(NAME, "its state has another number of arrays after");
  return Recorder(inputs, before, outputs, after).program();
}

std::vector<mx::array> Program::run(const std::vector<mx::array>& inputs, const State& state) {
  if (inputs.size() != inputs_ || inputs_ + state.arrays.size() != input_shapes_.size())
    refuse(NAME, "takes another number of inputs");
  std::vector<mx::array> all = inputs;
  all.insert(all.end(), state.arrays.begin(), state.arrays.end());
  for (size_t i = 0; i < all.size(); i++) {
    require_shape(NAME, "an input", all[i], input_shapes_[i]);
    require_dtype(NAME, "an input", all[i], input_types_[i]);
  }
  return lazy(NAME, all, outputs_,
              [self = shared_from_this()](const Inputs& in, const Outputs& out) {
                self->execute(in, out);
              });
}

bool Program::agrees_with(const Program& other) const {
  return std::equal(constants_.begin(), constants_.end(), other.constants_.begin(),
                    other.constants_.end(),
                    [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); });
}

// On the stream's thread. One run after the other, also on several streams: they share the memory.
void Program::execute(const Inputs& in, const Outputs& out) {
  const std::lock_guard<std::mutex> lock(running_);
  const auto misalignment = reinterpret_cast<std::uintptr_t>(memory_.data()) % LINE;
  char* const memory = memory_.data() + (LINE - misalignment) % LINE;
  Inputs step_in;
  Outputs step_out;
  for (const Step& step : steps_) {
    step_in.clear();
    step_out.clear();
    for (const Place& p : step.in) {
      switch (p.where) {
        case Where::input: step_in.push_back(in[p.at]); break;
        case Where::output: step_in.push_back(out[p.at]); break;
        case Where::constant: step_in.push_back(constants_[p.at].data<char>()); break;
        case Where::memory: step_in.push_back(memory + p.at); break;
      }
    }
    for (const Place& p : step.out) {
      switch (p.where) {
        case Where::input: step_out.push_back(const_cast<void*>(in[p.at])); break;
        case Where::output: step_out.push_back(out[p.at]); break;
        default: step_out.push_back(memory + p.at);
      }
    }
    (*step.work)(step_in, step_out);
  }
}

void bind_program(nb::module_& m) {
  nb::class_<State>(m, "State").def(nb::init<std::vector<mx::array>>(), "arrays"_a);
  nb::class_<Program>(m, "Program")
      .def("run", &Program::run, "inputs"_a, "state"_a)
      .def("agrees_with", &Program::agrees_with, "other"_a)
      .def_prop_ro("steps", &Program::steps)
      .def_prop_ro("memory_bytes", &Program::memory_bytes);
  m.def("record", &Program::record, "inputs"_a, "before"_a, "outputs"_a, "after"_a);
}

}  // namespace mlxserve
