// Lazy MLX arrays made by a function of ours. An operation checks its arguments when the graph is
// built, on the caller's thread, and computes later, on the stream's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "panels.h"

namespace mlxserve {

namespace mx = mlx::core;

using Inputs = std::vector<const void*>;
using Outputs = std::vector<void*>;
using Work = std::function<void(const Inputs&, const Outputs&)>;

struct OutputSpec {
  mx::Shape shape;
  mx::Dtype dtype;
  // The input whose contents this output starts with, in the same memory if nobody else holds it;
  // -1 for memory of its own, uninitialised.
  int starts_as = -1;
};

class Op : public mx::Primitive {
 public:
  Op(mx::Stream stream, const char* name, std::vector<int> starts_as, Work work);

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return name_; }

  const std::shared_ptr<const Work>& work() const { return work_; }
  const std::vector<int>& starts_as() const { return starts_as_; }

 private:
  const char* name_;
  std::vector<int> starts_as_;
  std::shared_ptr<const Work> work_;
};

// Lazily work(inputs, outputs). Work sees inputs row-contiguous: others are copied first.
std::vector<mx::array> lazy(const char* name, std::vector<mx::array> inputs,
                            const std::vector<OutputSpec>& outputs, Work work);

// Which floating type it is, if any.
std::optional<Number> as_number(const mx::Dtype& dtype);

// Raises ValueError in Python, with the op's name in front.
[[noreturn]] void refuse(const char* op, const std::string& what);
std::string text(const mx::Shape& shape);
std::string text(const mx::Dtype& dtype);
void require_dtype(const char* op, const char* argument, const mx::array& a, mx::Dtype dtype);
void require_shape(const char* op, const char* argument, const mx::array& a,
                   const mx::Shape& shape);
void require_ndim(const char* op, const char* argument, const mx::array& a, int ndim);

}  // namespace mlxserve
