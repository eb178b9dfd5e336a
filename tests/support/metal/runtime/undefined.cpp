// What clang's -fsanitize=undefined calls. The structures are those of its runtime library.
#include "state.h"

using namespace msl;

namespace {
struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Data {
  Location location;
  const Type* type;
};
}  // namespace

// Goes on after `ends == false`: the value is wrong, but the program is not lost.
#define HANDLER(name, kind, ends, ...)                                          \
  extern "C" void __ubsan_handle_##name(Data* data, uintptr_t a, uintptr_t b) { \
    (void)a, (void)b;                                                           \
    find(kind, data->location.file, data->location.line, 0, 0, __VA_ARGS__);    \
    if (ends && current) abort_fiber();                                         \
  }
HANDLER(out_of_bounds, "array-bounds", true, "index %lld is out of bounds of %s", (long long)a,
        data->type->name)
HANDLER(shift_out_of_bounds, "shift", false, "shift by %lld is out of range for %s", (long long)b,
        data->type->name)
HANDLER(divrem_overflow, "integer-division", true, "division by zero, or overflow, in %s",
        data->type->name)
HANDLER(add_overflow, "integer-overflow", false, "signed overflow in %s", data->type->name)
HANDLER(sub_overflow, "integer-overflow", false, "signed overflow in %s", data->type->name)
HANDLER(mul_overflow, "integer-overflow", false, "signed overflow in %s", data->type->name)
HANDLER(negate_overflow, "integer-overflow", false, "signed overflow in %s", data->type->name)
HANDLER(float_cast_overflow, "float-cast", false, "the float is outside of the integer type")
HANDLER(load_invalid_value, "invalid-value", false, "load of an invalid %s", data->type->name)
HANDLER(type_mismatch_v1, "misaligned", false, "misaligned or null access to %s", data->type->name)
