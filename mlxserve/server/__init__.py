"""The HTTP server: bytes in, a `Request` to the engine, bytes out. It holds no arrays."""
