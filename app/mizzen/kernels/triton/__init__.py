"""Our own GPU kernels, in Triton. Imported only where Triton is; each is tested against a plain torch twin."""
