"""QK-clip: scaling of the query and key weights of heads with large attention logits."""
