"""Launch parameters of the kernels: what can be chosen, what tuning found best, and how serving looks it up."""
