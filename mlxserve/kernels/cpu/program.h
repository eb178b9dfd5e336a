// A graph of our operations, recorded once and run again as a single operation.
//
// MLX takes about 8 us to evaluate an operation and 10 us to build it from Python; a step of a
// small model has 300 of them and computes for 8 ms. A program knows their order and where each
// result lies, so that a step is one operation to MLX.
//
// What a step writes in place (the cache) is its state. To MLX, a program only reads it: a run
// makes no new arrays for it, and may be queued while the run before it is under way. That's sound
// where all that reads and writes the state is queued on one stream.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "op.h"

namespace mlxserve {

// Arrays that programs write in place.
struct State {
  std::vector<mx::array> arrays;
};

class Program : public std::enable_shared_from_this<Program> {
 public:
  // What computes `outputs` from `inputs`, both not yet evaluated, and makes `after` of `before`.
  // Anything else that it uses must be there already, and is taken to be the same for ever
  // (weights). Throws std::invalid_argument for a graph with operations that aren't ours, that
  // doesn't compute each of its outputs, or that doesn't write its state in place.
  static std::shared_ptr<Program> record(const std::vector<mx::array>& inputs,
                                         const std::vector<mx::array>& before,
                                         const std::vector<mx::array>& outputs,
                                         const std::vector<mx::array>& after);

  // The outputs for other inputs and another state of the same shapes and types.
  std::vector<mx::array> run(const std::vector<mx::array>& inputs, const State& state);

  // Whether another recording found the very same constants. If not, one of the two took for a
  // weight what belonged to a single step.
  bool agrees_with(const Program& other) const;

  size_t steps() const { return steps_.size(); }
  size_t memory_bytes() const { return memory_.size(); }

 private:
  friend class Recorder;

  enum class Where { input, output, constant, memory };
  struct Place {
    Where where;
    size_t at;  // index; in `memory`: bytes from its beginning
  };
  struct Step {
    std::shared_ptr<const Work> work;
    std::vector<Place> in, out;
  };

  void execute(const Inputs& in, const Outputs& out);

  // The inputs, then the state.
  size_t inputs_ = 0;
  std::vector<mx::Shape> input_shapes_;
  std::vector<mx::Dtype> input_types_;
  std::vector<OutputSpec> outputs_;
  std::vector<mx::array> constants_;
  std::vector<Step> steps_;
  std::vector<char> memory_;
  std::mutex running_;
};

}  // namespace mlxserve
