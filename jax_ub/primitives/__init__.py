"""One FFI target a file: its contract, its lowering and its reference."""
