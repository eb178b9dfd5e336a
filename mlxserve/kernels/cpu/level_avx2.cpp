#define KERNELS mlxserve::avx2
#include "level.h"

const mlxserve::Kernels mlxserve::kernels_avx2 = mlxserve::avx2::table("avx2");
