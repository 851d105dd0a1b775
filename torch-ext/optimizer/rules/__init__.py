"""Update rules: the computation of a step, without ranks."""
