"""The Triton back end: which calls it can run, how they are cut and launched, and the kernels."""
