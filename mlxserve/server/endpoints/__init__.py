"""One file per kind of endpoint: parse, prepare, format."""
