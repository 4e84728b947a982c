"""Speed and memory, side by side: every number comes with its spread and the machine it was measured on."""
