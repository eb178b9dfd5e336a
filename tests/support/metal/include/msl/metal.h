// The part of Metal's standard library that kernels use, on a CPU. Address spaces are erased here;
// address_spaces.h checks them. Source: the Metal Shading Language Specification, version 3.2.
#pragma once
#include "msl/atomic.h"
#include "msl/entry.h"
#include "msl/integer.h"
#include "msl/math.h"
#include "msl/simdgroup.h"
#include "msl/simdgroup_matrix.h"
#include "msl/types.h"
#include "msl/vector.h"

using namespace metal;
// Names of MLX's own prelude.
using float16_t = half;
using bfloat16_t = bfloat;

#define device
#define thread
#define threadgroup
#define constant const
#define kernel
