"""Update rules: what a step computes. Know no ranks."""
