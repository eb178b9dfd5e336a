#define KERNELS mlxserve::avx512
#include "level.h"

const mlxserve::Kernels mlxserve::kernels_avx512 = mlxserve::avx512::table("avx512");
