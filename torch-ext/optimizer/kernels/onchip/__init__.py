"""Iterations whose matrices stay in registers or shared memory."""
