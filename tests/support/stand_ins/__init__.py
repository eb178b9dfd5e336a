"""Stand-ins for a Mac's GPU, each a module with `run(launch)`, for MLXSERVE_METAL_STAND_IN."""
