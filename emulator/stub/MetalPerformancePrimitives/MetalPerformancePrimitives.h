// Metal itself stands in emulator/shim; the rewriter includes it in every kernel file.
