#define KERNELS mlxserve::portable
#include "level.h"

const mlxserve::Kernels mlxserve::kernels_portable = mlxserve::portable::table("portable");
