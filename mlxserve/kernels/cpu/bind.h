// One function per file of operations, which tells Python about them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "op.h"
#include "pool.h"

namespace mlxserve {

void bind_append(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_matmul(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_quantize(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_select(nanobind::module_& m);

}  // namespace mlxserve
