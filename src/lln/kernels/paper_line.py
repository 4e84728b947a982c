"""Numbers of moment matching that kernels and every framework share. Nothing is imported for them."""

# Eq. (10): the line sigma_lln^2 = a s2 + b of the authors' released code.
PAPER_A, PAPER_B = 0.14855178144710912, -0.35487039130661086
# A constant input has no spread; this keeps alpha and beta finite.
SIGMA_FLOOR = 1e-6
