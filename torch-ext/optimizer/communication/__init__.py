"""The only folder that issues collectives."""
