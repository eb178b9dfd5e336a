#include "op.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlxserve {
namespace {

// An input as it lies in memory.
struct Strided {
  const char* data;
  mx::Shape shape;
  mx::Strides strides;
  size_t item_bytes;

  // Its elements in row-major order.
  std::vector<char> packed() const {
    size_t items = 1;
    for (const auto n : shape) items *= n;
    std::vector<char> out(items * item_bytes);
    std::vector<int64_t> index(shape.size());
    for (size_t i = 0; i < items; i++) {
      int64_t at = 0;
      for (size_t axis = 0; axis < shape.size(); axis++) at += index[axis] * strides[axis];
      std::memcpy(out.data() + i * item_bytes, data + at * item_bytes, item_bytes);
      for (size_t axis = shape.size(); axis-- > 0 && ++index[axis] == shape[axis];) index[axis] = 0;
    }
    return out;
  }
};

// Each output carries a copy of the inputs. MLX lets go of them after this evaluation; an input
// that is to become an output in place must have no other holder before.
void drop_other_copies(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto evaluated = [&inputs](const mx::array& a) { return &a.inputs() == &inputs; };
  if (std::none_of(outputs.begin(), outputs.end(), evaluated)) return;
  for (auto& a : outputs)
    if (!evaluated(a) && !a.is_tracer()) a.inputs().clear();
}

// An operation that is about to run: everything it needs, in one piece.
struct Call {
  std::shared_ptr<const Work> work;
  Inputs in;
  Outputs out;
  std::vector<std::pair<size_t, Strided>> strided;
  std::vector<std::pair<size_t, std::pair<size_t, size_t>>> copies;  // output, (input, bytes)

  void run() {
    std::vector<std::vector<char>> packed;
    for (const auto& [i, input] : strided) {
      packed.push_back(input.packed());
      in[i] = packed.back().data();
    }
    for (const auto& [i, from] : copies) std::memcpy(out[i], in[from.first], from.second);
    (*work)(in, out);
  }
};

}  // namespace

Op::Op(mx::Stream stream, const char* name, std::vector<int> starts_as, Work work)
    : mx::Primitive(stream),
      name_(name),
      starts_as_(std::move(starts_as)),
      work_(std::make_shared<const Work>(std::move(work))) {}

void Op::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto call = std::make_shared<Call>();
  call->work = work_;
  call->in.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto& a = inputs[i];
    call->in.push_back(a.data<char>());
    if (!a.flags().row_contiguous)
      call->strided.emplace_back(i, Strided{a.data<char>(), a.shape(), a.strides(), a.itemsize()});
  }
  drop_other_copies(inputs, outputs);
  call->out.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); i++) {
    auto& a = outputs[i];
    const int source = starts_as_[i];
    if (source >= 0 && inputs[source].is_donatable() && inputs[source].flags().row_contiguous) {
      a.copy_shared_buffer(inputs[source]);
    } else {
      a.set_data(mx::allocator::malloc(a.nbytes()));
      if (source >= 0) call->copies.push_back({i, {static_cast<size_t>(source), a.nbytes()}});
    }
    call->out.push_back(a.data<char>());
  }
  mx::cpu::get_command_encoder(stream()).dispatch([call] { call->run(); });
}

void Op::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(std::string(name_) + " runs on the CPU only");
}

std::vector<mx::array> lazy(const char* name, std::vector<mx::array> inputs,
                            const std::vector<OutputSpec>& outputs, Work work) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::vector<int> starts_as;
  for (const auto& o : outputs) {
    shapes.push_back(o.shape);
    dtypes.push_back(o.dtype);
    starts_as.push_back(o.starts_as);
  }
  auto op = std::make_shared<Op>(stream, name, std::move(starts_as), std::move(work));
  return mx::array::make_arrays(std::move(shapes), dtypes, op, std::move(inputs));
}

std::optional<Number> as_number(const mx::Dtype& dtype) {
  if (dtype == mx::float32) return Number::f32;
  if (dtype == mx::float16) return Number::f16;
  if (dtype == mx::bfloat16) return Number::bf16;
  return std::nullopt;
}

void refuse(const char* op, const std::string& what) {
  throw std::invalid_argument(std::string(op) + ": " + what);
}

std::string text(const mx::Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); i++) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

std::string text(const mx::Dtype& dtype) {
  if (dtype == mx::float32) return "float32";
  if (dtype == mx::float16) return "float16";
  if (dtype == mx::bfloat16) return "bfloat16";
  if (dtype == mx::int32) return "int32";
  if (dtype == mx::uint32) return "uint32";
  if (dtype == mx::uint8) return "uint8";
  return "of another type";
}

void require_dtype(const char* op, const char* argument, const mx::array& a, mx::Dtype dtype) {
  if (a.dtype() != dtype)
    refuse(op, std::string(argument) + " is " + text(a.dtype()) + ", expected " + text(dtype));
}

void require_shape(const char* op, const char* argument, const mx::array& a,
                   const mx::Shape& shape) {
  if (a.shape() != shape)
    refuse(op, std::string(argument) + " is " + text(a.shape()) + ", expected " + text(shape));
}

void require_ndim(const char* op, const char* argument, const mx::array& a, int ndim) {
  if (static_cast<int>(a.ndim()) != ndim)
    refuse(op, std::string(argument) + " has shape " + text(a.shape()) + ", expected " +
                   std::to_string(ndim) + " dimensions");
}

}  // namespace mlxserve
