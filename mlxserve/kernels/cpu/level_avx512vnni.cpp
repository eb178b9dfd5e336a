#define KERNELS mlxserve::avx512vnni
#include "level.h"

const mlxserve::Kernels mlxserve::kernels_avx512vnni = mlxserve::avx512vnni::table("avx512vnni");
